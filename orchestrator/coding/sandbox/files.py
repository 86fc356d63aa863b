"""Read files of a box from the host without following a link.

Code in a box may put anything in the place of a file: a link to the host, a FIFO, a sparse file, a thousand folders.
Each component of a path is opened by itself, with O_NOFOLLOW, relative to the folder before it.
"""

from __future__ import annotations

import os
import stat

MAX_DEPTH = 64
"""Folders below one another that are listed."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a FIFO for reading would wait for its writer without O_NONBLOCK.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_regular(root_fd: int, path: str, max_bytes: int) -> bytes:
    """Return a regular file below the folder `root_fd`.

    Raises FileNotFoundError for anything else (a missing file, a folder, a link, a FIFO), ValueError when it is larger.
    """
    if "\0" in path or ".." in path.split("/"):
        raise ValueError(f"a path inside a sandbox has no '..' and no NUL, but got {path!r}")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    folder_fd = os.dup(root_fd)
    try:
        for part in parts[:-1]:
            inner_fd = os.open(part, _FOLDER, dir_fd=folder_fd)
            os.close(folder_fd)
            folder_fd = inner_fd
        file_fd = os.open(parts[-1] if parts else ".", _FILE, dir_fd=folder_fd)
    except OSError as error:
        raise FileNotFoundError(f"the sandbox has no regular file {path!r}: {error.strerror}") from error
    finally:
        os.close(folder_fd)
    status = os.fstat(file_fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(file_fd)
        raise FileNotFoundError(f"the sandbox has no regular file {path!r}: it is something else")
    with os.fdopen(file_fd, "rb") as file:
        # A file that grows meanwhile is larger than its size was.
        content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
        if status.st_size > max_bytes or len(content) > max_bytes:
            raise ValueError(f"the sandbox's file {path!r} has more than {max_bytes} bytes")
        return content


def list_regular(root_fd: int, max_files: int) -> dict[str, int]:
    """Return the sizes of at most `max_files` regular files below `root_fd`, by POSIX path, in order of their names."""
    sizes: dict[str, int] = {}
    _list_folder(root_fd, "", sizes, max_files, MAX_DEPTH)
    return sizes


def _list_folder(folder_fd: int, prefix: str, sizes: dict[str, int], max_files: int, depth: int) -> None:
    with os.scandir(folder_fd) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if len(sizes) >= max_files:
            return
        try:
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                sizes[prefix + name] = status.st_size
            elif stat.S_ISDIR(status.st_mode) and depth > 0:
                inner_fd = os.open(name, _FOLDER, dir_fd=folder_fd)
                try:
                    _list_folder(inner_fd, f"{prefix}{name}/", sizes, max_files, depth - 1)
                finally:
                    os.close(inner_fd)
        except OSError:
            continue  # It was removed meanwhile, or may not be read.
