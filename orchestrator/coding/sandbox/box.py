"""A box: one sandbox with a work folder, in which commands run. `open_box` (opening.py) opens one.

What code in a box does is data: a command that fails, floods, hangs or kills everything gives a `CommandResult`. Only
a box that cannot be opened, or has ended, raises SandboxError. Exit codes and output come from hostile code; a caller
that grades must not believe them.
"""

from __future__ import annotations

import asyncio
import os
import stat
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError

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


class Box(ABC):
    """One sandbox. Paths are relative to the work folder, or absolute inside the box. Commands run one at a time."""

    @classmethod
    @abstractmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> Box:
        """Open a box with an empty work folder.

        `python_path`: folders below the work folder that become PYTHONPATH. Raises SandboxError with the remedy.
        """

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
        """Put a copy of `tree` into the work folder of a box that has run nothing, then `files`.

        Raises SandboxError for what does not fit.
        """
        content = {**(await asyncio.to_thread(read_tree, tree) if tree is not None else {}), **files}
        try:
            if content:
                await self.write_files(content)
        except OSError as error:
            size_mb = sum(map(len, content.values())) / 2**20
            raise SandboxError(
                f"the sandbox's files, {size_mb:.1f} MiB, could not be written: {error}; raise "
                "orchestrator.source.runtime.limits.disk_mb if they do not fit"
            ) from error

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


def read_tree(tree: Path) -> dict[str, bytes]:
    """Return the regular files of a folder, by POSIX path. Links and caches of Python are left out."""
    content = {}
    for folder, subfolders, names in os.walk(tree):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                content[path.relative_to(tree).as_posix()] = path.read_bytes()
    return content


def inside_path(path: str) -> str:
    """Return a path inside a box as an absolute one. Raises ValueError for one with `..`, a NUL or a lone surrogate."""
    if "\0" in path or ".." in path.split("/"):
        raise ValueError(f"a path inside a sandbox has no '..' and no NUL, but got {path!r}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"a path inside a sandbox can be written as UTF-8, but got {path!r}") from None
    return str(PurePosixPath(WORK, path))
