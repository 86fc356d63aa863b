# ruff: noqa: E501
"""Scripts that try to leave a box. Each prints ESCAPED where it succeeds. `@NAME@` is replaced by the test.

@SECRET@ is a file of the host, @PORT@ a port of the host's loopback, @ABSTRACT@ the name of an abstract socket, and
@nr:NAME@ the number of a system call.
"""

from __future__ import annotations

PREAMBLE = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
def escaped_if(true): print("ESCAPED") if true else None
def tries(function, *arguments):
    try: return function(*arguments)
    except (OSError, ValueError) as error: print(type(error).__name__, error)
def readable(path):
    try: return open(path, "rb").read(100) or True
    except OSError: return False
"""

READ = {
    "a file of the host": "escaped_if(readable('@SECRET@'))",
    "a file through /proc/PID/root": """
for pid in os.listdir('/proc'):
    escaped_if(pid.isdigit() and readable('/proc/%s/root@SECRET@' % pid))
escaped_if(readable('/proc/self/root@SECRET@') or readable('/proc/self/cwd/../../..@SECRET@'))""",
    "environment of host processes": """
for pid in os.listdir('/proc'):
    with_secret = b'COMPOSER_TEST_SECRET' in (readable('/proc/%s/environ' % pid) or b'')if pid.isdigit() else False
    escaped_if(with_secret)
escaped_if('COMPOSER_TEST_SECRET' in os.environ)""",
    "processes of the host": "escaped_if(len([p for p in os.listdir('/proc') if p.isdigit()]) > 4)",
    "password hashes": "escaped_if(readable('/etc/shadow'))",
    "installed packages of the host": """
import importlib.util
escaped_if(importlib.util.find_spec('pydantic') or importlib.util.find_spec('orchestrator'))""",
    "the host's disk by device": "escaped_if(any(readable('/dev/' + n) for n in ('sda', 'vda', 'nvme0n1', 'mem', 'kmsg', 'fuse')))",
    "kernel settings and devices in /sys": "escaped_if(os.path.isdir('/sys/class') or os.path.isdir('/sys/fs/cgroup'))",
    "the kernel's log": "buffer = ctypes.create_string_buffer(4096); escaped_if(libc.klogctl(3, buffer, 4096) > 0)",
    "kernel memory": "escaped_if(readable('/proc/kcore'))",
    "descriptors of the first process": """
for name in tries(os.listdir, '/proc/1/fd') or []:
    escaped_if(True)""",
    "memory of the first process": "escaped_if(readable('/proc/1/mem') or readable('/proc/1/maps'))",
    "root of the first process": "tries(os.listdir, '/proc/1/root') is None or escaped_if(True)",
    "inherited descriptors": "escaped_if({int(n) for n in os.listdir('/proc/self/fd')} - {0, 1, 2, 3})",
}

WRITE = {
    "programs": "escaped_if(tries(open, '/usr/bin/escaped', 'w'))",
    "the interpreter": "escaped_if(tries(open, os.path.join(sys.prefix, 'lib', 'escaped.pth'), 'w'))",
    "site-packages": "import pytest; escaped_if(tries(open, pytest.__file__, 'a'))",
    "accounts": "escaped_if(tries(open, '/etc/passwd', 'a'))",
    "the root folder": "escaped_if(tries(open, '/escaped', 'w') )",
    "devices' folder": "escaped_if(tries(open, '/dev/escaped', 'w'))",
    "the first process's program": "escaped_if(tries(open, '/opt/box_init.py', 'a'))",
    "kernel settings": """
for name in ('kernel/core_pattern', 'kernel/hostname', 'vm/drop_caches', 'kernel/modprobe'):
    file = tries(open, '/proc/sys/' + name, 'w')
    if file:
        file.write('x'); escaped_if(tries(file.close) is None and 'core' in name)
escaped_if(tries(open, '/proc/sysrq-trigger', 'w'))""",
    "memory of the first process": "escaped_if(tries(open, '/proc/1/mem', 'r+b'))",
    "read-only memory of itself, then files": """
import mmap
path = '/usr/bin/env'
with open(path, 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    address = next(int(l.split('-')[0], 16) for l in open('/proc/self/maps') if path in l)
with open('/proc/self/mem', 'r+b', buffering=0) as memory:
    memory.seek(address); tries(memory.write, b'escaped')
escaped_if(open(path, 'rb').read(7) == b'escaped')""",
    "every descriptor": """
for fd in range(3, 2000):
    if tries(os.write, fd, b'\\0\\0\\0\\1{') is not None: escaped_if(True)""",
    "a hard link to a file of the system": "escaped_if(tries(os.link, '/usr/bin/env', '/work/env') is None and os.path.exists('/work/env'))",
}

NETWORK = {
    "the host's loopback": "s = socket.socket(); s.settimeout(5); escaped_if(s.connect_ex(('127.0.0.1', @PORT@)) == 0)",
    "an address outside": "s = socket.socket(); s.settimeout(5); escaped_if(s.connect_ex(('192.0.2.1', 80)) == 0)",
    "datagrams": "s = socket.socket(type=socket.SOCK_DGRAM); escaped_if(tries(s.sendto, b'x', ('192.0.2.1', 53)))",
    "names": "escaped_if(tries(socket.getaddrinfo, 'example.org', 443))",
    "IPv6": "s = socket.socket(socket.AF_INET6); s.settimeout(5); escaped_if(s.connect_ex(('2001:db8::1', 80)) == 0)",
    "raw sockets": "escaped_if(tries(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1))",
    "packet sockets": "escaped_if(tries(socket.socket, socket.AF_PACKET, socket.SOCK_RAW))",
    "netlink": "escaped_if(tries(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0))",
    "virtual machine sockets": "escaped_if(tries(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM))",
    "abstract sockets of the host": """
s = socket.socket(socket.AF_UNIX)
escaped_if(s.connect_ex('\\0@ABSTRACT@') == 0)""",
    "sockets of the host's services": """
for path in ('/run/docker.sock', '/var/run/docker.sock', '/run/dbus/system_bus_socket', '/run/systemd/private'):
    escaped_if(os.path.exists(path))""",
}

PROCESSES = {
    "kill the first process": "for n in (9, 15, 2, 1, 11, 19): tries(os.kill, 1, n)\nprint('alive')",
    "kill everything": "os.kill(-1, 9)",
    "stop the parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "trace the first process": "escaped_if(libc.ptrace(16, 1, 0, 0) == 0)",
    "trace a child": "escaped_if(libc.ptrace(0, 0, 0, 0) == 0)",
    "read another process's memory": """
pid = os.fork()
if not pid: time.sleep(20)
buffer = ctypes.create_string_buffer(8)
class Part(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
mine, other = Part(ctypes.addressof(buffer), 8), Part(ctypes.addressof(buffer), 8)
escaped_if(libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(other), 1, 0) > 0)
os.kill(pid, 9)""",
    "a daemon that outlives its command": """
if not os.fork():
    os.setsid()
    if not os.fork():
        for fd in (0, 1, 2): os.close(fd)
        while True: time.sleep(1)
    os._exit(0)
os.wait()""",
    "a daemon that holds the output": """
if not os.fork():
    os.setsid()
    time.sleep(600)""",
    "a child that ignores signals": """
if not os.fork():
    for n in range(1, 32): tries(signal.signal, n, signal.SIG_IGN) if n not in (9, 17, 19) else None
    time.sleep(600)""",
    "many orphans": """
for _ in range(200):
    pid = os.fork()
    if not pid:
        os.fork(); os._exit(0)
    os.waitpid(pid, 0)""",
}

PRIVILEGES = {
    "become root": "escaped_if(tries(os.setuid, 0) is None and os.getuid() == 0)",
    "setuid copy": """
import shutil
shutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o4755); tries(os.chown, 'id', 0, 0)
escaped_if(b'uid=0' in subprocess.run(['./id'], capture_output=True).stdout)""",
    "setuid programs": """
escaped_if(b'uid=0' in subprocess.run('echo | su -c id root; sudo -n id; pkexec id', shell=True, capture_output=True).stdout)""",
    "capabilities": "escaped_if(any(int(l.split()[1], 16) for l in open('/proc/self/status') if l.startswith('Cap')))",
    "new privileges": "escaped_if('NoNewPrivs:\\t1' not in open('/proc/self/status').read())",
    "device nodes": "escaped_if(tries(os.mknod, 'sda', 0o60600, os.makedev(8, 0)) is None and os.path.exists('sda'))",
    "mount": "escaped_if(libc.mount(b'none', b'/work', b'tmpfs', 0, None) == 0)",
    "mount again writable": "escaped_if(libc.mount(None, b'/usr', None, 32 | 4096, None) == 0)",
    "unmount": "escaped_if(libc.umount2(b'/usr', 2) == 0)",
    "new namespaces": "escaped_if(libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0)",
    "new namespaces by clone": "escaped_if(call(@nr:clone@, 0x10000000 | 17, 0, 0, 0, 0) >= 0)",
    "another program's namespaces": "escaped_if(subprocess.run(['unshare', '-Ur', 'true']).returncode == 0)",
    "join the first process's namespace": "fd = tries(os.open, '/proc/1/ns/mnt', 0); escaped_if(fd and libc.setns(fd, 0) == 0)",
    "chroot": "escaped_if(tries(os.chroot, '/work') is None and not os.path.exists('/usr'))",
    "files by handle": """
handle = ctypes.create_string_buffer(bytes([128, 0, 0, 0, 1, 0, 0, 0]) + bytes(120))
escaped_if(call(@nr:open_by_handle_at@, 3, handle, 0) >= 0)""",
    "every denied system call": """
import errno
for name, number in @TABLE@.items():
    if call(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name, ctypes.get_errno()); escaped_if(True)""",
    "the clock": "escaped_if(tries(time.clock_settime, time.CLOCK_REALTIME, 1.0) is None and time.time() < 9)",
    "the host's name": "escaped_if(tries(socket.sethostname, 'escaped') is None and 'escaped' in socket.gethostname())",
    "terminal input": """
import fcntl
main, other = os.openpty()
escaped_if(tries(fcntl.ioctl, other, 0x5412, b'x') is not None)""",
    "another terminal": "escaped_if(tries(open, '/dev/tty', 'w') or tries(open, '/dev/console', 'w'))",
    "a higher limit": """
import resource
tries(resource.setrlimit, resource.RLIMIT_NPROC, (10000, 10000)); tries(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))
escaped_if(resource.getrlimit(resource.RLIMIT_NPROC)[1] > 1000 or resource.getrlimit(resource.RLIMIT_AS)[1] < 0)""",
    "a higher priority": "escaped_if(tries(os.nice, -5) is not None)",
    "protect itself from the out-of-memory killer": """
def protect(): open('/proc/self/oom_score_adj', 'w').write('-1000')
tries(protect); escaped_if(int(open('/proc/self/oom_score_adj').read()) < 0)""",
    "32-bit system calls": """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))
pid = os.fork()
if not pid:
    if os.uname().machine != 'x86_64': os._exit(0)
    os._exit(7 if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() > 0 else 0)
escaped_if(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7)""",
}


BOMBS = {
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", {"cpu_s", "wall_s"}),
    "fork bomb of the shell": ("subprocess.run(['bash', '-c', ':(){ :|:& };:; wait; sleep 3'])", {"", "cpu_s", "wall_s"}),
    "thread bomb": (
        "while True:\n    try: threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n    except RuntimeError as error: print(error); break",
        {""},
    ),
    "memory of one process": ("pieces = []\nwhile True: pieces.append(bytearray(1 << 24))", {"", "memory_gb"}),
    "memory of many processes": (
        "for _ in range(9): os.fork() if _ < 4 else None\npiece = bytearray(b'x') * (120 << 20)\ntime.sleep(25)",
        {"memory_gb"},
    ),
    "memory without a process": (
        """
for _ in range(100):
    fd = call(@nr:memfd_create@, b'x', 0)
    if fd < 0: break
    os.write(fd, bytes(4 << 20))
else: escaped_if(True)
escaped_if(call(@nr:shmget@, 0, 1 << 28, 0o1600) >= 0)""",
        {""},
    ),
    "shared memory files": ("with open('/dev/shm/x', 'wb') as f:\n    for _ in range(40): f.write(bytes(1 << 20))\nescaped_if(True)", {"", "file_mb"}),
    "an endless file": ("with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))", {"", "file_mb"}),
    "an endless file of the shell": ("subprocess.run('cat /dev/zero > x', shell=True); escaped_if(os.path.getsize('x') > 9 << 20)", {""}),
    "many large files": (
        "for i in range(100):\n    with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(7 << 20))\nescaped_if(True)", {""}
    ),
    "a sparse file": ("f = open('x', 'wb')\nos.ftruncate(f.fileno(), 1 << 40)\nescaped_if(True)", {"", "file_mb"}),
    "many small files": ("i = 0\nwhile True:\n    open(f'{i}', 'w').close(); i += 1", {"files"}),
    "many folders in /tmp": ("i = 0\nwhile True:\n    os.mkdir(f'/tmp/{i}'); i += 1", {"files"}),
    "empty files in /dev/shm": ("i = 0\nwhile True:\n    open(f'/dev/shm/{i}', 'w').close(); i += 1", {"files"}),
    "buffers of sockets": (
        """
for _ in range(2): os.fork()
held = []
while True:
    try: pair = socket.socketpair()
    except OSError: time.sleep(25)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    escaped_if(pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 1 << 18)
    pair[0].setblocking(False)
    try:
        while True: pair[0].send(bytes(1 << 16))
    except BlockingIOError: held.append(pair)""",
        {"memory_gb"},
    ),
    "deep folders": ("for _ in range(1500):\n    os.mkdir('d'); os.chdir('d')", {""}),
    "endless output": ("while True: os.write(1, b'x' * 65536)", {"output_mb"}),
    "endless errors": ("while True: os.write(2, b'x' * 65536)", {"output_mb"}),
    "no end": ("time.sleep(10000)", {"wall_s"}),
    "one busy process": ("while True: pass", {"cpu_s", "wall_s"}),
    "busy processes one after another": ("while True:\n    pid = os.fork()\n    if not pid:\n        end = time.process_time() + 1\n        while time.process_time() < end: pass\n        os._exit(0)\n    os.waitpid(pid, 0)", {"cpu_s", "wall_s"}),
    "a core dump": ("import resource\ntries(resource.setrlimit, resource.RLIMIT_CORE, (1 << 30, 1 << 30))\nos.abort()", {""}),
    "pipes full of data": ("import fcntl\nfds = []\nwhile True:\n    try: r, w = os.pipe()\n    except OSError: break\n    os.set_blocking(w, False); tries(fcntl.fcntl, w, 1031, 1 << 20) if len(fds) < 50 else None\n    try:\n        while True: os.write(w, bytes(65536))\n    except BlockingIOError: pass\n    fds.append(r)", {""}),
}  # fmt: skip
