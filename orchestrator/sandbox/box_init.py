"""The first process inside a bubblewrap box. It starts commands, writes files, and ends what commands leave.

It needs the standard library only, and starts as `python -I -S box_init.py CONTROL_FD`. The host sends requests over
the control socket, each with the descriptors of its standard streams, so output does not pass through here.

    request  = uint32 length, JSON, payload of `payload` bytes
    reply    = uint32 length, JSON

It is PID 1 of its namespace: no process inside can signal it, and its end is the end of all of them. It is not
dumpable, so no process inside can read its memory or its descriptors. Nevertheless its replies are hints: code in the
box has the same user id.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

PR_SET_DUMPABLE = 4
MAX_FDS = 3


class Init:
    def __init__(self, control):
        self.control = control
        self.limits = {}
        self.command = None
        """(pid, pidfd) of the command that runs."""
        self.keep_others = False

    def serve(self):
        while True:
            waiting = [self.control] + ([self.command[1]] if self.command else [])
            ready, _, _ = select.select(waiting, [], [], 1.0)
            self.reap()
            if self.control in ready:
                self.handle()

    def handle(self):
        request, fds = self.receive()
        operation = request["op"]
        if operation == "run":
            self.start(request, fds)
        elif operation == "write":
            self.reply(write_files(request, self.read_exactly))
        elif operation == "limits":
            self.limits = request["limits"]
            # More than commands have, so that a command that uses up its own cannot stop the next one.
            resource.setrlimit(resource.RLIMIT_NPROC, (self.limits["processes"] + 8,) * 2)
            self.reply({})
        elif operation == "kill":
            kill_others()

    def start(self, request, fds):
        self.keep_others = request["keep_others"]
        try:
            pid = os.fork()
        except OSError as error:
            pid = None
            self.reply({"error": f"fork: {error.strerror}"})
        if pid == 0:
            run_child(request, fds, self.limits)
        for fd in fds:
            os.close(fd)
        if pid:
            self.command = (pid, os.pidfd_open(pid))

    def reap(self):
        """Collect ended processes; when the command is one of them, end what it left and report."""
        status = usage = None
        for pid, status_of_one, usage_of_one in ended_processes(os.WNOHANG):
            if self.command and pid == self.command[0]:
                status, usage = status_of_one, usage_of_one
        if usage is None:
            return
        os.close(self.command[1])
        self.command = None
        if not self.keep_others:
            kill_others()
            for _ in ended_processes(0):
                pass
        self.reply({"status": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime})

    def receive(self):
        data, fds, _, _ = socket.recv_fds(self.control, 4, MAX_FDS)
        if not data:
            os._exit(0)
        data += self.read_exactly(4 - len(data)) if len(data) < 4 else b""
        return json.loads(self.read_exactly(struct.unpack(">I", data)[0])), fds

    def read_exactly(self, count):
        content = bytearray()
        while len(content) < count:
            piece = self.control.recv(min(count - len(content), 1 << 20))
            if not piece:
                os._exit(0)
            content += piece
        return bytes(content)

    def reply(self, message):
        data = json.dumps(message).encode()
        self.control.sendall(struct.pack(">I", len(data)) + data)


def run_child(request, fds, limits):
    """Become the command. Never returns."""
    try:
        os.setsid()
        stdin = fds.pop(0) if request["stdin"] else os.open("/dev/null", os.O_RDONLY)
        for target, fd in enumerate([stdin, *fds]):
            os.dup2(fd, target)
        os.closerange(3, 1024)
        set_limits(limits)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        name = request["cwd"] if error.filename == request["cwd"] else request["argv"][0]
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
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def write_files(request, read_exactly):
    """Write the payload. A link in the way is replaced, not followed. Every byte is read, also after an error."""
    problem = None
    for path, size in request["files"]:
        content = read_exactly(size)
        try:
            if problem is None:
                write_file(path, content)
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    return {"error": problem} if problem else {}


def write_file(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        os.unlink(path)
    with open(path, "wb") as file:
        file.write(content)


def kill_others():
    """End every other process of the namespace. One call reaches all of them, so a fork bomb cannot outrun it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def ended_processes(options):
    """Yield (pid, status, usage) of ended processes; with options 0, wait until none is left."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, options)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.set_inheritable(control.fileno(), False)
    Init(control).serve()


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("box_init runs as the first process of a pid namespace only: it ends all others")
    main()
