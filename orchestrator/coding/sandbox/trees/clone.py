"""Lay a prepared tree under the work folder of a box, copy-on-write: `python -I -S clone.py MOUNT_NAMESPACE_FD TREE`.

It is a program of its own, because the kernel lets only a process without threads enter a user namespace. It needs the
standard library only, and it runs before any code of the agent does.

    the box's user namespace      a mount of TREE alone, in a mount namespace that ends with this process
    the box's mount namespace     that mount -> /work/lower;  overlay (lower, upper, work) -> /work;  lower is detached

Then nothing in the box has a name for TREE, and the folders `upper` and `work` lie below the overlay, out of reach.
What the box writes is in its own work folder's memory, below its limits.
"""

import ctypes
import errno
import fcntl
import os
import sys

NS_GET_USERNS = 0xB701
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
OPEN_TREE, MOVE_MOUNT = 428, 429
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD = 1, 4, -100
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
WORK = "/work"
LAYERS = b"lowerdir=lower,upperdir=upper,workdir=work,userxattr"
"""Relative names, as a box may read them."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def clone(namespace_fd, tree):
    os.chdir(tree)
    # The owner of the mounts is not the namespace of the box's processes: bwrap nests two.
    call("setns", fcntl.ioctl(namespace_fd, NS_GET_USERNS), CLONE_NEWUSER)
    call("unshare", CLONE_NEWNS)
    tree_fd = call("syscall", OPEN_TREE, AT_FDCWD, b".", OPEN_TREE_CLONE | os.O_CLOEXEC)
    call("setns", namespace_fd, CLONE_NEWNS)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir(WORK)
    for folder in ("lower", "upper", "work"):
        os.mkdir(folder, 0o755)
    try:
        os.setxattr("upper", "user.overlay", b"")
        os.removexattr("upper", "user.overlay")
    except OSError as error:
        # An overlay marks folders that were made again by them, and is half broken without.
        raise OSError(errno.EOPNOTSUPP, "files in memory have no user attributes before Linux 6.6") from error
    call("syscall", MOVE_MOUNT, tree_fd, b"", AT_FDCWD, b"lower", MOVE_MOUNT_F_EMPTY_PATH)
    call("mount", b"overlay", WORK.encode(), b"overlay", MS_NOSUID | MS_NODEV, LAYERS)
    # The overlay has a read-only mount of its own of each layer.
    call("umount2", b"lower", MNT_DETACH)
    os.rmdir("lower")


if __name__ == "__main__":
    try:
        clone(int(sys.argv[1]), sys.argv[2])
    except OSError as error:
        # No traceback: what it would read or import here is the box's.
        os.write(2, str(error).encode())
        os._exit(1)
