"""Conversations to imitate, as fine-tuning services and TRL write them: an object a line with `messages` and `tools`.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}

Assistant messages are imitated, but for those with `"weight": 0`. orchestrator/file_rows.py turns rows into tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from composer_prime.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    name: str
    """`FILE:LINE`."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def imitated(self) -> list[int]:
        """Indices of the messages to imitate."""
        said = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [index for index in said if self.messages[index].get("weight") != 0]


def read_rows(files: Sequence[Path], key: str, most: int | None = None) -> list[ConversationRow]:
    """Return all rows in order, or the first ones of each file. `key` names the setting. Raises ConfigError."""
    return [_row(f"{path}:{number}", text) for path in files for number, text in islice(_lines(path, key), most)]


def digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' contents, in order."""
    contents = hashlib.sha256()
    for path in files:
        contents.update(hashlib.sha256(path.expanduser().read_bytes()).digest())
    return contents.hexdigest()


def rollout_row(rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a line of a run's rollout log as a row, up to its last answer, if it is whole and without branches."""
    turns = rollout.get("turns") or []
    parents = [turn.get("parent") for turn in turns]
    if rollout.get("reward") is None or rollout.get("truncated") or parents != [None, *range(len(turns) - 1)]:
        return None
    messages = _messages(turns)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        return None
    tools = rollout.get("tools")
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _messages(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns as messages. Tools answer the calls before in order."""
    messages: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for index, turn in enumerate(turns):
        message = {"role": turn["role"], "content": turn.get("text") or ""}
        calls = [
            {"id": f"call_{index}_{number}", "type": "function", "function": call}
            for number, call in enumerate(turn.get("tool_calls") or [])
        ]
        if calls:
            message["tool_calls"] = calls
            unanswered = [call["id"] for call in calls]
        if turn.get("reasoning"):
            message["reasoning_content"] = turn["reasoning"]
        if turn["role"] == "tool" and unanswered:
            message["tool_call_id"] = unanswered.pop(0)
        messages.append(message)
    return messages


def _lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    """Yield (line from 1, text) of every line with text."""
    rows = 0
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    rows += 1
                    yield number, text
    except FileNotFoundError:
        raise ConfigError(f"{key} names {path}, but there is no such file: name JSON Lines of messages") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} names {path}, which cannot be read as text: {error}") from None
    if not rows:
        raise ConfigError(f"{key} names {path}, which is empty: write one JSON object a line, or leave the file out")


def _row(name: str, text: str) -> ConversationRow:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: no JSON: {error}; write one JSON object a line (JSON Lines)") from None
    messages = values.get("messages") if isinstance(values, dict) else None
    if not isinstance(messages, list) or not messages:
        found = f"keys {', '.join(values) or 'none'}" if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"{name}: {found}; a row is an object with `messages`, a list of one or more")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ConfigError(f"{name}: message {index} has role {role!r}; the roles are {', '.join(ROLES)}")
        _check_message(f"{name}: message {index}", message)
    tools = values.get("tools") or None
    if not (tools is None or _are_objects(tools)):
        raise ConfigError(f"{name}: tools is {str(tools)[:60]!r}; write a list of tool schemas, or leave it out")
    row = ConversationRow(name=name, messages=messages, tools=tools)
    if not row.imitated:
        raise ConfigError(
            f"{name}: no assistant message to imitate among {len(messages)} (weight 0 does not count): "
            "add the assistant's turn, or remove the row"
        )
    return row


def _check_message(where: str, message: dict[str, Any]) -> None:
    """Raise ConfigError for content or calls that templates would print otherwise."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not (content is None or isinstance(content, str) or _are_objects(content)):
        raise ConfigError(f"{where} has content {str(content)[:60]!r}; write a string, null or a list of parts")
    if calls is not None and not (isinstance(calls, list) and all(map(_names_function, calls))):
        raise ConfigError(
            f"{where} has tool_calls {str(calls)[:60]!r}; write a list of "
            '{"type": "function", "function": {"name": "...", "arguments": "..."}}'
        )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _names_function(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])
