"""A box: one sandbox with a work folder, in which commands run. `open_box` opens the kind that a runtime table names.

    open_box(runtime) -> BubblewrapBox    isolated: no host files, no network, own processes, limits
                      -> SubprocessBox    limits only; it isolates nothing
                      -> RuntimeBox       one of verifiers' runtimes (docker, podman, modal, ...)

What code in a box does is data: a command that fails, floods, hangs or kills everything gives a `CommandResult`. Only
a box that cannot be opened, or has ended, raises SandboxError. Exit codes and output come from hostile code; a caller
that grades must not believe them.
"""

from __future__ import annotations

import os
import stat
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from composer_prime.config.sandbox import RuntimeConfig

NOTHING: Mapping[str, str] = types.MappingProxyType({})
NO_FILES: Mapping[str, bytes] = types.MappingProxyType({})
WORK = "/work"
"""The work folder, as paths inside a box name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended."""

    exit_code: int | None
    """128 + n after signal n, as in a shell; None when a limit ended the command."""
    stdout: bytes
    """The middle of what exceeds the limit is cut; a line in its place says how much."""
    stderr: bytes
    ended_by: str = ""
    """Name of the limit that ended the command (a field of SandboxLimits); `box` when the whole box ended."""
    wall_s: float


class CloneError(Exception):
    """A tree could not be cloned into a box, which is of no use then. Boxes that are opened later get copies."""


class Box(ABC):
    """One sandbox. Paths are relative to the work folder, or absolute inside the box. Commands run one at a time."""

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        cwd: str = ".",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
    ) -> CommandResult:
        """Run a command to its end, then end every process that it left.

        `timeout_s` replaces limits.wall_s, and `output_bytes` limits.output_kb. Raises SandboxError for a box that has
        ended.
        """

    @abstractmethod
    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files and the folders above them. Raises OSError for what does not fit or cannot be written."""

    async def fill(self, tree: Path | None, files: Mapping[str, bytes]) -> None:
        """Put a copy of `tree` into the work folder of a box that has run nothing, then `files`."""
        content = {**(read_tree(tree) if tree is not None else {}), **files}
        if content:
            await self.write_files(content)

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """Read one regular file without following a link.

        Raises FileNotFoundError if it does not exist, ValueError if it is larger than `max_bytes`.
        """

    @abstractmethod
    async def list_files(self) -> dict[str, int]:
        """Return the size in bytes of each regular file below the work folder. Links are not followed."""

    @abstractmethod
    async def close(self) -> None:
        """End every process of the box and remove its files. A second call does nothing."""

    async def __aenter__(self) -> Box:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def open_box(
    runtime: RuntimeConfig,
    *,
    tree: Path | None = None,
    files: Mapping[str, bytes] = NO_FILES,
    python_path: Sequence[str] = (),
) -> Box:
    """Open a box whose work folder holds a copy of `tree`, and `files`.

    `python_path`: folders below the work folder that become PYTHONPATH. Raises SandboxError with the remedy.
    """
    while True:
        box = await _start(runtime, tuple(python_path))
        try:
            await box.fill(tree, files)
            return box
        except CloneError:
            await box.close()
        except BaseException:
            await box.close()
            raise


async def _start(runtime: RuntimeConfig, python_path: tuple[str, ...]) -> Box:
    kind = "bubblewrap" if runtime.type == "auto" else runtime.type
    if kind == "bubblewrap":
        from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
        from orchestrator.coding.sandbox.pool import shared_pool

        if runtime.warm:
            return await shared_pool(runtime).take(python_path)
        return await BubblewrapBox.open(runtime, python_path)
    if kind == "subprocess":
        from orchestrator.coding.sandbox.subprocess_box import SubprocessBox

        return SubprocessBox(runtime, python_path)
    from orchestrator.coding.sandbox.runtime import RuntimeBox  # It imports verifiers, which takes seconds.

    return await RuntimeBox.open(runtime, python_path)


def read_tree(tree: Path) -> dict[str, bytes]:
    """Return the files of `statuses_of`, by POSIX path."""
    return {path: (tree / path).read_bytes() for path in statuses_of(tree)}


def statuses_of(tree: Path) -> dict[str, os.stat_result]:
    """Return the status of each regular file of a folder, by POSIX path. Links and caches of Python are left out."""
    statuses = {}
    for folder, subfolders, names in os.walk(tree):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        below = os.path.relpath(folder, tree)
        for name in sorted(names):
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode):
                statuses[name if below == "." else f"{below}/{name}"] = status
    return statuses


def inside_path(path: str) -> str:
    """Return a path inside a box as an absolute one. Raises ValueError for one with `..`, a NUL or a lone surrogate."""
    if "\0" in path or ".." in path.split("/"):
        raise ValueError(f"a path inside a sandbox has no '..' and no NUL, but got {path!r}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"a path inside a sandbox can be written as UTF-8, but got {path!r}") from None
    return str(PurePosixPath(WORK, path))
