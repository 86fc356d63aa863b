"""Large trees as folders of this machine that boxes clone: made once, shared by all processes, the oldest removed.

    CACHE/trees/NAME-BYTES          a whole tree, its files owned by the user that boxes have
    CACHE/trees/.new-NAME-BYTES     one that is being made; then it is renamed
    CACHE/trees/.old-NAME-BYTES     one that is being removed

The name says the content, and when this machine started: after a crash a file may lack what was written. Who makes or
removes a folder holds its lock alone (flock), and each box that clones it holds a shared one.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_prime.plan.sandboxes import BOX_UID
from orchestrator.sandbox.box import read_tree, regular_files
from orchestrator.sandbox.python_image import image_cache

logger = logging.getLogger(__name__)

LEAST_FILES, LEAST_BYTES = 400, 12 << 20
"""A tree with less of both is copied in the time that a clone takes (benchmarks/sandbox.py)."""
MOST_BYTES = 4 << 30
"""Of all prepared trees. As much again stays free on their disk."""
_PROGRAM = Path(__file__).with_name("clone.py")
_TIMEOUT_S = 600.0
_WAIT_S = 0.02
_given_up = False


class PreparedTree:
    """A folder of prepared trees, and a lock of it until `close`."""

    def __init__(self, folder: Path, lock: int) -> None:
        """Raises BlockingIOError where another process makes or removes it."""
        self.folder, self._fd = folder, -1
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
                    pass_fds=[namespace.fileno()], timeout=_TIMEOUT_S, check=False,
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


async def prepare(tree: Path | None, files: Mapping[str, bytes]) -> PreparedTree | None:
    """Return `tree`, or else `files`, as a folder to clone, made on first use; None for what is to be copied."""
    if _given_up or (tree is None and _is_small([len(content) for content in files.values()])):
        return None
    try:
        name = await asyncio.to_thread(_name, tree, files)
        async with asyncio.timeout(_TIMEOUT_S):
            while name:
                with contextlib.suppress(BlockingIOError):
                    return await asyncio.to_thread(_take, name, tree, files)
                await asyncio.sleep(_WAIT_S)  # Another one makes it, which takes as long as a copy.
    except (OSError, TimeoutError) as error:
        give_up(f"one could not be prepared below {trees_folder()}: {str(error) or 'it stays locked'}")
    return None


def trees_folder() -> Path:
    return image_cache().with_name("trees")


def _is_small(sizes: Sequence[int]) -> bool:
    return len(sizes) < LEAST_FILES and sum(sizes) < LEAST_BYTES


def _name(tree: Path | None, files: Mapping[str, bytes]) -> str:
    """Return the name of a tree's folder; "" for one that is small, or has files elsewhere than in the work folder."""
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    sizes = []
    if tree is not None:
        digest.update(os.fsencode(tree.absolute()))
        for path, status in regular_files(tree):
            sizes.append(status.st_size)
            # What git compares, too, to find files that changed.
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            digest.update(f"{path!r} {identity}\n".encode())
    elif all(map(_is_plain, files)):
        for path, content in sorted(files.items()):
            sizes.append(len(content))
            digest.update(f"{path!r} {len(content)}\n".encode())
            digest.update(content)
    on_disk = sum(-(-size // 4096) * 4096 for size in sizes)
    return "" if _is_small(sizes) else f"{digest.hexdigest()[:32]}-{on_disk}"


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
        _make(new, files if tree is None else read_tree(tree))
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    prepared.folder = folder
    prepared.lock(fcntl.LOCK_SH)
    _remove_oldest(folder.parent)
    return prepared


def _make(folder: Path, content: Mapping[str, bytes]) -> None:
    for left in folder.iterdir():  # Its first maker was killed.
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if shutil.disk_usage(folder).free < MOST_BYTES:
        raise OSError(errno.ENOSPC, f"less than {MOST_BYTES >> 30} GiB are free")
    owner = (BOX_UID, BOX_UID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for path, data in content.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            file.write(data)
    for place, _, names in os.walk(folder):
        for name in (".", *names):  # Both ids: the kernel copies no file on write whose group the box lacks.
            os.chown(os.path.join(place, name), *owner)


def _remove_oldest(trees: Path) -> None:
    """Remove what others left half-made or half-removed, and of the rest what was used longest ago."""
    total = 0
    with contextlib.suppress(OSError):  # Another process removes the same.
        for folder in sorted(trees.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True):
            size = folder.name.rpartition("-")[2]
            total += int(size) if size.isdigit() else 0
            if total > MOST_BYTES or folder.name.startswith("."):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder unless it is in use."""
    with contextlib.suppress(OSError):
        prepared = PreparedTree(folder, fcntl.LOCK_EX)
        if not folder.name.startswith("."):  # Nobody takes half of it.
            folder = folder.rename(folder.with_name(f".old-{folder.name}"))
        shutil.rmtree(folder, ignore_errors=True)
        prepared.close()
