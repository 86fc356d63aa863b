"""The first process inside a bubblewrap box. It starts commands, writes files, and ends what commands leave.

It starts as `python box_init.py CONTROL_FD` and needs the standard library only. The host sends requests over the
control socket, with the descriptors of a command's standard streams. Output does not pass through here.

    request  = uint32 length, JSON, payload
    reply    = uint32 length, JSON with the request's `id`

It is PID 1 of its namespace: no process inside can end it, and its end is the end of all of them. It is not dumpable,
so no process inside can read its memory. What it reports are hints; the host limits and reads the box by itself.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys

WORK = "/work"
PR_SET_DUMPABLE = 4
MAX_FDS = 3
MAX_OPEN_FILES = 1024
SPARE_PROCESSES = 8
libc = ctypes.CDLL(None)


class Init:
    def __init__(self, control):
        self.control = control
        self.limits = {}
        self.commands = {}

    def serve(self):
        while True:
            # Not select.select, which knows descriptors below 1024 only.
            waiting = select.poll()
            for fd in (self.control.fileno(), *(pidfd for _, pidfd in self.commands.values())):
                waiting.register(fd, select.POLLIN)
            ready = {fd for fd, _ in waiting.poll(1000)}
            self.reap()
            if self.control.fileno() in ready:
                self.handle()

    def handle(self):
        request, fds = self.receive()
        operation = request["op"]
        if operation == "run":
            self.start(request, fds)
        elif operation == "write":
            self.reply(request, write_files(request, self.read_exactly))
        elif operation == "limits":
            self.limits = request["limits"]
            # More than commands have, so that a command that uses up its own cannot stop the next one.
            most = self.limits["processes"] + SPARE_PROCESSES
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            self.reply(request, {})
        elif operation == "listen":
            self.listen(request)
        elif operation == "kill":
            self.kill(request.get("command"))

    def kill(self, number):
        """End the session of one command, or every other process for None."""
        if number is None:
            kill_others()
        for pid, (request, _) in self.commands.items():
            if request["command"] == number:
                kill_session(pid)

    def start(self, request, fds):
        try:
            pid = os.fork()
        except OSError as error:
            pid = None
            self.reply(request, {"error": f"fork: {error.strerror}"})
        if pid == 0:
            become_command(request, fds, {**self.limits, "cpu_s": request["cpu_s"]})
        for fd in fds:
            os.close(fd)
        if pid:
            self.commands[pid] = (request, os.pidfd_open(pid))

    def reap(self):
        """Collect ended processes. Report commands, and end what the last one left."""
        for pid, status in list(ended_processes(os.WNOHANG)):
            if pid not in self.commands:
                continue
            request, pidfd = self.commands.pop(pid)
            os.close(pidfd)
            if not request["keep_others"] and not self.commands:
                kill_others()
                for _ in ended_processes(0):
                    pass
            self.reply(request, {"status": os.waitstatus_to_exitcode(status)})

    def listen(self, request):
        try:
            with socket.create_server(("127.0.0.1", request["port"]), backlog=64) as server:
                self.reply(request, {}, [server.fileno()])
        except OSError as error:
            self.reply(request, {"error": str(error)})

    def receive(self):
        data, fds, _, _ = socket.recv_fds(self.control, 4, MAX_FDS)
        if not data:
            os._exit(0)
        data += self.read_exactly(4 - len(data))
        return json.loads(self.read_exactly(struct.unpack(">I", data)[0])), fds

    def read_exactly(self, count):
        content = bytearray()
        while len(content) < count:
            piece = self.control.recv(min(count - len(content), 1 << 20))
            if not piece:
                os._exit(0)
            content += piece
        return bytes(content)

    def reply(self, request, message, fds=()):
        data = json.dumps({"id": request["id"], **message}).encode()
        data = struct.pack(">I", len(data)) + data
        sent = socket.send_fds(self.control, [data], fds) if fds else 0
        self.control.sendall(data[sent:])


def become_command(request, fds, limits):
    try:
        os.setsid()
        stdin = fds.pop(0) if request["stdin"] else os.open("/dev/null", os.O_RDONLY)
        for target, fd in enumerate([stdin, *fds]):
            os.dup2(fd, target)
        # The control socket has the number that it had outside, which may be a large one.
        os.closerange(3, max(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        os.chdir(WORK)
        set_limits(limits)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        name = WORK if error.filename == WORK else request["argv"][0]
        os.write(2, f"{name}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode(errors="backslashreplace"))
        os._exit(126)


def set_limits(limits):
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    # When the machine is out of memory, a command goes before its box does.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def write_files(request, read_exactly):
    problem = None
    for path, size in request["files"]:
        content = read_exactly(size)
        try:
            if problem is None:
                write_file(path, content)
        except (OSError, ValueError) as error:
            problem = f"{path}: {getattr(error, 'strerror', None) or error}"
    return {"error": problem} if problem else {}


def write_file(path, content):
    """Write a file beside its place, then rename it: one that does not fit leaves the old content."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    new_path = os.path.join(folder, f".{os.urandom(8).hex()}.new")
    try:
        with open(new_path, "xb") as file:
            file.write(content)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
        os.replace(new_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new_path)
        raise


def kill_others():
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def kill_session(leader):
    """End the processes of a session, and what they fork meanwhile."""
    for _ in range(100):
        members = [int(name) for name in os.listdir("/proc") if name.isdigit() and runs_in_session(name, leader)]
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return


def runs_in_session(pid, leader):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
        return state != b"Z" and int(session) == leader
    return False


def ended_processes(options):
    while True:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # The kernel keeps signals from a first process that handles none, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(control.fileno(), False)
    sys.path[:] = sys.path[1:]  # The folder of this script.
    gc.freeze()
    Init(control).serve()


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("box_init runs as the first process of a pid namespace only: it ends all others")
    main()
