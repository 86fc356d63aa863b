"""Large trees as folders of this machine that boxes clone: made once, shared by all processes, the oldest removed.

    CACHE/trees/BOOT-CONTENT-BYTES          a whole tree, its files owned by the user that boxes have
    CACHE/trees/.new-BOOT-CONTENT-BYTES     one that is being made; then it is renamed
    CACHE/trees/.old-BOOT-CONTENT-BYTES     one that is being removed

BOOT says when this machine started: after a crash a file may lack what was written. Who makes or removes a folder holds
its lock alone (flock), and each box that clones it holds a shared one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from composer_prime.plan.sandboxes import BOX_UID
from orchestrator.coding.sandbox.box import read_tree
from orchestrator.coding.sandbox.launch import START_TIMEOUT_S
from orchestrator.coding.sandbox.python_image import image_cache

logger = logging.getLogger(__name__)

LEAST_FILES, LEAST_BYTES = 400, 12 << 20
"""A tree with less of both is copied in the time that a clone takes (benchmarks/sandbox.py)."""
MOST_BYTES = 4 << 30
"""Of all prepared trees. As much again stays free on their disk."""
SETTLED_S = 1.0
"""Age of a file's last change from which on the next one gives it another time."""
_PROGRAM = Path(__file__).with_name("clone.py")
_TIMEOUT_S = 600.0
"""Of making a tree, or of waiting for another one that makes it."""
_WAIT_S = 0.02
_OF_CONTENT = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EACCES}
"""Errors of the caller's own files: `a` beside `a/b`, a name too long, a file that is gone or may not be read."""
_given_up = False


class UnfitTreeError(Exception):
    """The caller's files make no tree. The copy of them says why."""


class PreparedTree:
    """A folder of prepared trees, and a lock of it until `close`."""

    def __init__(self, folder: Path, lock: int) -> None:
        """Raises BlockingIOError where another process makes or removes it."""
        self.folder = folder
        self._fd = -1
        try:
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BlockingIOError(f"{folder} was moved") from error
        self.lock(lock)

    def lock(self, lock: int) -> None:
        fcntl.flock(self._fd, lock | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), os.stat(self.folder)):
                return
        raise BlockingIOError(f"{self.folder} was moved")

    def clone(self, namespace: io.FileIO) -> str:
        """Lay the tree under the work folder of a box that has run nothing. Return why that failed, or "".

        `namespace`: the box's mount namespace. It is closed.
        """
        with namespace:
            words = [sys.executable, "-I", "-S", str(_PROGRAM), str(namespace.fileno()), str(self.folder)]
            try:
                done = subprocess.run(
                    words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env={},
                    pass_fds=[namespace.fileno()], timeout=START_TIMEOUT_S, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
        return (done.stderr.strip() or f"status {done.returncode}") if done.returncode else ""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Unlock a tree that was not locked as wanted, or whose taker was canceled."""
        self.close()


def give_up(problem: str) -> None:
    """Copy the trees of all further boxes of this process."""
    global _given_up
    if not _given_up:
        logger.warning("sandboxes get copies of large trees instead of clones: %s", problem)
    _given_up = True


async def prepare(
    tree: Path | None, statuses: Mapping[str, os.stat_result], files: Mapping[str, bytes]
) -> PreparedTree | None:
    """Return `tree`, or else `files`, as a folder to clone, made on first use; None for what is to be copied.

    `statuses`: those of the tree's files, by POSIX path.
    """
    sizes = [len(content) for content in files.values()] if tree is None else [s.st_size for s in statuses.values()]
    if _given_up or (len(sizes) < LEAST_FILES and sum(sizes) < LEAST_BYTES):
        return None
    if tree is None and not all(map(_is_plain, files)):
        return None
    if any(time.time() - status.st_ctime < SETTLED_S for status in statuses.values()):
        return None
    try:
        name = f"{await asyncio.to_thread(_digest, tree, statuses, files)}-{on_disk(sizes)}"
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                with contextlib.suppress(BlockingIOError):
                    return await asyncio.to_thread(_take, f"{_boot()}-{name}", tree, files)
                await asyncio.sleep(_WAIT_S)  # Another one makes it, which takes as long as a copy.
    except UnfitTreeError:
        return None
    except (OSError, TimeoutError) as error:
        give_up(f"one could not be prepared below {trees_folder()}: {str(error) or 'it stays locked'}")
    return None


def trees_folder() -> Path:
    return image_cache().with_name("trees")


def on_disk(sizes: Iterable[int]) -> int:
    """Return the bytes that files of these sizes take."""
    return sum(-(-size // 4096) * 4096 for size in sizes)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _digest(tree: Path | None, statuses: Mapping[str, os.stat_result], files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    if tree is not None:
        digest.update(os.fsencode(tree.absolute()))
        for path, status in statuses.items():
            # What git compares, too, to find files that changed.
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            digest.update(f"{path!r} {identity}\n".encode())
    else:
        for path, content in sorted(files.items()):
            digest.update(f"{path!r} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def _is_plain(path: str) -> bool:
    return "\0" not in path and not {"", ".", ".."} & set(path.split("/"))


def _take(name: str, tree: Path | None, files: Mapping[str, bytes]) -> PreparedTree:
    """Return the folder, made unless it exists. Raises BlockingIOError while another one is at it."""
    folder = trees_folder() / name
    if folder.is_dir():
        prepared = PreparedTree(folder, fcntl.LOCK_SH)
        os.utime(folder)
        return prepared
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = folder.with_name(f".new-{name}")
    with contextlib.suppress(FileExistsError):
        new.mkdir(mode=0o700)
    prepared = PreparedTree(new, fcntl.LOCK_EX)
    try:
        if folder.is_dir():
            raise BlockingIOError("another one has just made it")
        _make_room(folder.parent, _bytes_of(folder))
        _make(new, tree, files)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    prepared.folder = folder
    prepared.lock(fcntl.LOCK_SH)
    return prepared


def _make(folder: Path, tree: Path | None, files: Mapping[str, bytes]) -> None:
    for left in folder.iterdir():  # Its first maker was killed.
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        _write(folder, files if tree is None else read_tree(tree))
    except OSError as error:
        if error.errno in _OF_CONTENT:
            raise UnfitTreeError(str(error)) from error
        raise
    owner = (BOX_UID, BOX_UID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for place, _, names in os.walk(folder):
        for name in (".", *names):  # Both ids: the kernel copies no file on write whose group the box lacks.
            os.chown(os.path.join(place, name), *owner)


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    for path, data in content.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            file.write(data)


def _make_room(trees: Path, needed_bytes: int) -> None:
    """Remove trees of no use, then those used longest ago. Raises OSError where their disk is too full even so.

    Of no use are those of another boot, and what others left half-made or half-removed.
    """
    used: dict[Path, float] = {}
    for folder in trees.iterdir():
        if not folder.name.startswith(f"{_boot()}-"):
            _remove(folder)
            continue
        with contextlib.suppress(OSError):  # Another process removes the same.
            used[folder] = folder.stat().st_mtime
    total = needed_bytes + sum(map(_bytes_of, used))
    for folder in sorted(used, key=used.__getitem__):
        if total <= MOST_BYTES <= shutil.disk_usage(trees).free:
            return
        _remove(folder)
        total -= _bytes_of(folder)
    if shutil.disk_usage(trees).free < MOST_BYTES:
        raise OSError(errno.ENOSPC, f"less than {MOST_BYTES >> 30} GiB are free")


def _bytes_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _remove(folder: Path) -> None:
    """Remove a folder unless it is in use."""
    with contextlib.suppress(OSError):
        prepared = PreparedTree(folder, fcntl.LOCK_EX)
        if not folder.name.startswith("."):  # Nobody takes half of it.
            folder = folder.rename(folder.with_name(f".old-{folder.name}"))
        shutil.rmtree(folder, ignore_errors=True)
        prepared.close()
