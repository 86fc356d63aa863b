"""During a rollout: every tool call, and what the host sees of guarded files.

    tool call ──> Watch.record ──> commands.py: findings of its command, code or path
    work folder ──inotify──> Watch: lures opened; tests changed, even when they are put back

The kernel reports every file that any process opens in a bind-mounted folder. A recursive search opens lures as well,
so an event alone proves nothing. Where inotify does not work (another machine, no more watches), only the tool calls
are seen.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.coding.monitor.before import Seal, is_test_file

logger = logging.getLogger(__name__)

_MOST_OUTPUT = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One call of a tool by the agent."""

    turn: int
    name: str
    arguments: Mapping[str, Any]
    output: str = ""

    @property
    def command(self) -> str:
        """The shell command; "" for other tools."""
        for key in ("command", "cmd", "script", "bash"):
            if isinstance(value := self.arguments.get(key), str):
                is_edit = value in ("view", "create", "str_replace", "insert", "undo_edit")
                return "" if is_edit else value
            if isinstance(value, list):
                return " ".join(map(str, value))
        return ""

    @property
    def paths(self) -> list[str]:
        keys = ("path", "file", "file_path", "filename", "paths", "files", "directory")
        values = [value for key in keys if (value := self.arguments.get(key)) is not None]
        return [str(each) for value in values for each in (value if isinstance(value, list) else [value])]

    @property
    def writes(self) -> bool:
        """Tell whether the tool writes its path."""
        words = f"{self.name} {self.arguments.get('command', '')}".lower()
        return any(word in words for word in ("replace", "create", "write", "edit", "insert", "patch"))

    @property
    def searches(self) -> bool:
        return any(word in self.name.lower() for word in ("search", "grep", "find", "list", "glob"))


def tool_use(turn: int, name: str, arguments: str | Mapping[str, Any], output: str = "") -> ToolUse:
    """Return a tool call from what the model wrote. Arguments that are not a JSON object are kept as text."""
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else {"command": arguments}
    return ToolUse(turn=turn, name=name, arguments=arguments, output=output[:_MOST_OUTPUT])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvent:
    """Something that the host saw."""

    path: str
    """Relative to the work folder."""
    what: str
    """opened | changed | deleted"""


def host_folder(box: object) -> Path | None:
    """Return a box's work folder as this machine sees it, through /proc; None for a box without own namespaces."""
    pid = getattr(box, "init_pid", None)
    return Path(f"/proc/{pid}/root/work") if isinstance(pid, int) else None


class Watch:
    """What is recorded of one rollout while it plays."""

    def __init__(self, seal: Seal) -> None:
        self.uses: list[ToolUse] = []
        self._seal = seal
        self._watcher: _Watcher | None = None
        self._events: list[FileEvent] = []
        self._handles: list[int] = []

    def attach(self, folder: Path | None) -> None:
        """Watch lures and tests in the work folder, once it is filled and before the agent begins.

        `folder`: the work folder as this machine sees it; None where it does not, and then tool calls are all.
        """
        self._watcher = _Watcher.shared() if folder is not None else None
        if self._watcher is not None and folder is not None:
            changing = [path for path in self._seal.hashes if is_test_file(path)]
            self._handles = self._watcher.add(folder, [*self._seal.lures], changing, self._events)

    def record(self, name: str, arguments: str | Mapping[str, Any], output: str = "") -> None:
        """Note one tool call and what it returned."""
        self.uses.append(tool_use(len(self.uses), name, arguments, output))

    def events(self) -> list[FileEvent]:
        """Return what the host saw so far, equal events once."""
        if self._watcher is not None:
            self._watcher.drain()
        return list(dict.fromkeys(self._events))

    def close(self) -> None:
        """Stop watching files, before others read them. What was recorded stays."""
        if self._watcher is not None:
            self._watcher.drain()
            self._watcher.remove(self._handles, self._events)
            self._handles = []


class _Watcher:
    """The process's one inotify instance: a user may have only about a hundred, but very many watches."""

    _shared: _Watcher | None = None
    _tried = False

    def __init__(self) -> None:
        import inotify_simple

        self._flags = inotify_simple.flags
        self._inotify = inotify_simple.INotify()
        self._listeners: dict[int, list[tuple[str, list[FileEvent]]]] = {}

    @classmethod
    def shared(cls) -> _Watcher | None:
        """Return the process's watcher; None where inotify does not work, which is logged once."""
        if not cls._tried:
            cls._tried = True
            try:
                cls._shared = cls()
            except (ImportError, OSError) as error:
                logger.warning(
                    "the monitor sees no file events: %s; tool calls are still watched (uv sync --extra coding)", error
                )
        return cls._shared

    def add(self, folder: Path, opened: Iterable[str], changed: Iterable[str], events: list[FileEvent]) -> list[int]:
        """Watch files below a folder. Return the handles for `remove`."""
        flags, handles = self._flags, []
        for paths, mask in ((opened, flags.OPEN), (changed, flags.MODIFY | flags.DELETE_SELF | flags.MOVE_SELF)):
            for path in paths:
                try:
                    handle = self._inotify.add_watch(folder / path, mask)
                except OSError:
                    continue  # The file is not there, or the limit of watches is reached.
                self._listeners.setdefault(handle, []).append((path, events))
                handles.append(handle)
        return handles

    def drain(self) -> None:
        """Add each event to the lists that watch its file."""
        flags = self._flags
        for event in self._inotify.read(timeout=0):
            for path, events in self._listeners.get(event.wd, []):
                if event.mask & flags.IGNORED:
                    continue
                what = "opened" if event.mask & flags.OPEN else "changed" if event.mask & flags.MODIFY else "deleted"
                events.append(FileEvent(path=path, what=what))

    def remove(self, handles: Iterable[int], events: list[FileEvent]) -> None:
        """Stop handing events to this list. Hard links of one file share a handle, so other lists may keep theirs."""
        for handle in handles:
            others = [each for each in self._listeners.get(handle, []) if each[1] is not events]
            if others:
                self._listeners[handle] = others
                continue
            self._listeners.pop(handle, None)
            with contextlib.suppress(OSError):  # The file is gone, and its watch with it.
                self._inotify.rm_watch(handle)
