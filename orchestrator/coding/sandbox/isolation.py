"""What isolates a box: bwrap's arguments, and the system calls that its programs may not make.

As root this process gives bwrap an unprivileged user id first: the host's root would still own the host's files.
The filter denies calls with a history of kernel flaws, that look into other processes, or that would leave the limits.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.plan.sandboxes import INSTALL, OTHERWISE
from orchestrator.coding.sandbox.box import WORK, environment, inside_path
from orchestrator.coding.sandbox.python_image import PREFIX

_ISOLATION = (
    *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"),
    *("--clearenv", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
)
BOX_UID = 60_999
"""User id of sandboxes when this process is root, outside the ranges of Debian and systemd."""
_MIB = 1 << 20
_SHARED_MEMORY_BYTES = 16 * _MIB
_FOLDERS_OUTSIDE_USR = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_HIDDEN_FOLDERS = ("/usr/local", "/usr/lib/python3/dist-packages", "/usr/src", "/usr/share/doc", "/usr/games")
_INIT = "/opt/box_init.py"
NPM_FOLDER = "/opt/npm"

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# (x86_64, aarch64); -1 where the architecture lacks the call.
NUMBERS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "vhangup": (153, 58),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "nfsservctl": (180, 42),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "ustat": (136, -1),
    "sysfs": (139, -1), "_sysctl": (156, -1),
}  # fmt: skip
# These have substitutes, which programs choose when the call does not exist.
MISSING: dict[str, tuple[int, int]] = {
    "clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
}  # fmt: skip
CLONE, _SOCKET, _SOCKETPAIR, _IOCTL, _PERSONALITY = (56, 220), (41, 198), (53, 199), (16, 29), (135, 92)
_SETSOCKOPT = (54, 208)
# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. The latter two reach the box's own loopback only."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX put characters into a terminal's input."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def _bwrap_arguments(runtime: RuntimeConfig, image: Path) -> list[str]:
    disk_bytes = str(int(runtime.limits.disk_mb * _MIB))
    arguments = [*_ISOLATION, "--ro-bind", "/usr", "/usr"]
    for name in _FOLDERS_OUTSIDE_USR:
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in _HIDDEN_FOLDERS:
        if os.path.isdir(path):
            arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    arguments += ["--ro-bind", f"{image}/etc", "/etc", "--ro-bind", f"{image}/box_init.py", _INIT]
    # Debian's awk, which and others are links through this folder.
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for folder in (WORK, "/tmp"):
        arguments += ["--size", disk_bytes, "--tmpfs", folder]
    # Behind /tmp, where an interpreter may be installed.
    arguments += ["--ro-bind", f"{image}/python", PREFIX, "--ro-bind", f"{image}/npm", NPM_FOLDER]
    arguments += ["--symlink", f"{NPM_FOLDER}/node_modules", "/node_modules"]  # Where code in the work folder looks.
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def box_environment(python_path: Sequence[str] = ()) -> dict[str, str]:
    folders = [inside_path(folder) for folder in python_path]
    path = f"{PREFIX}/bin:{NPM_FOLDER}/node_modules/.bin:/usr/bin:/bin"
    return {**environment(path, "/tmp", folders), "USER": "agent"}


def launch(runtime: RuntimeConfig, image: Path, control: socket.socket) -> subprocess.Popen[bytes]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            f"orchestrator.source.runtime.type 'bubblewrap' needs the program bwrap: {INSTALL}, {OTHERWISE}"
        )
    denials = seccomp_filter(platform.machine())
    filter_fd, write_fd = os.pipe()
    os.write(write_fd, denials)  # Far less than a pipe holds.
    os.close(write_fd)
    setpriv = shutil.which("setpriv") or "setpriv"
    rootless = [setpriv, f"--reuid={BOX_UID}", f"--regid={BOX_UID}", "--clear-groups", "--inh-caps=-all"]
    arguments = [] if os.geteuid() else rootless
    arguments += [program, *_bwrap_arguments(runtime, image), "--seccomp", str(filter_fd)]
    for name, value in box_environment().items():
        arguments += ["--setenv", name, value]
    arguments += [f"{PREFIX}/bin/python", _INIT, str(control.fileno())]
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[control.fileno(), filter_fd],
            env={},
            cwd="/",
        )
    finally:
        os.close(filter_fd)


def seccomp_filter(machine: str) -> bytes:
    """Return the filter as a classic BPF program for `bwrap --seccomp`. Raises SandboxError where there is none."""
    if machine not in _AUDIT_ARCH:
        raise SandboxError(f"bubblewrap sandboxes run on {' and '.join(_AUDIT_ARCH)}, not on {machine}; {OTHERWISE}")
    column = list(_AUDIT_ARCH).index(machine)
    lines = [_line(_LOAD, _ARCHITECTURE), _line(_EQUAL, _AUDIT_ARCH[machine], 1, 0), _line(_RETURN, _KILL)]
    lines.append(_line(_LOAD, _NUMBER))
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    for table, code in ((NUMBERS, errno.EPERM), (MISSING, errno.ENOSYS)):
        for numbers in table.values():
            if numbers[column] >= 0:
                lines += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, _ERRNO | code)]
    lines += _argument_rule(CLONE[column], 0, [_line(_HAS_BITS, _NEW_NAMESPACES, 0, 1)], errno.EPERM)
    families = [_line(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
    lines += _argument_rule(_SOCKET[column], 0, families, errno.EAFNOSUPPORT)
    lines += _argument_rule(_SOCKETPAIR[column], 0, [_line(_EQUAL, 1, 1, 0)], errno.EAFNOSUPPORT)
    # SO_SNDBUF (7) and SO_RCVBUF (8) of SOL_SOCKET (1) seem to work: buffers keep the size that memory counts.
    buffers = [_line(_EQUAL, 1, 0, 4), _line(_LOAD, _ARGUMENT_0 + 16), _line(_EQUAL, 7, 1, 0), _line(_EQUAL, 8, 0, 1)]
    lines += _argument_rule(_SETSOCKOPT[column], 1, buffers, 0)
    terminal = [_line(_EQUAL, _TERMINAL_INPUT[0], 1, 0), _line(_EQUAL, _TERMINAL_INPUT[1], 0, 1)]
    lines += _argument_rule(_IOCTL[column], 1, terminal, errno.EPERM)
    plain = [_line(_EQUAL, 0, 2, 0), _line(_EQUAL, 0xFFFFFFFF, 1, 0)]
    lines += _argument_rule(_PERSONALITY[column], 0, plain, errno.EPERM)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument_rule(number: int, argument: int, tests: list[bytes], code: int) -> list[bytes]:
    """Return lines that look at the low half of one argument of one call; `tests` jump to the denial or behind it."""
    body = [_line(_LOAD, _ARGUMENT_0 + 8 * argument), *tests, _line(_RETURN, _ERRNO | code)]
    return [_line(_EQUAL, number, 0, len(body)), *body, _line(_LOAD, _NUMBER)]
