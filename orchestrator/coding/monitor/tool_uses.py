"""One tool call of the agent, whatever its harness calls the tool and its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_OUTPUT = 200_000
_EDITS = ("view", "create", "str_replace", "insert", "undo_edit")


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
        found = next((self.arguments[key] for key in ("command", "cmd", "script", "bash") if key in self.arguments), "")
        if isinstance(found, list):
            return " ".join(map(str, found))
        return found if isinstance(found, str) and found not in _EDITS else ""

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
