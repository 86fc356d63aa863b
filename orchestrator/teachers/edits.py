"""Edits of files, as the common tools write them, and what a file holds after one.

Two edits are the same when they leave the same content behind, however much context each of them quotes. The content
before is known where the agent itself wrote the file earlier in the trace.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any

from composer_prime.traces import Message

_WRITES = {"write", "create", "write_file", "create_file", "filewrite"}
_REPLACES = {"edit", "str_replace", "replace", "multiedit", "edit_file", "str_replace_based_edit_tool"}
_EDITORS = {"str_replace_editor", "file_editor", "str_replace_based_edit_tool", "edit_anthropic"}
_PATHS = ("file_path", "path", "filename", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacements in one file; `content` instead where it is written whole."""

    path: str
    replacements: tuple[tuple[str, str], ...] = ()
    content: str | None = None

    def changed_lines(self) -> tuple[Any, ...]:
        """The lines that go and those that come, without what both share at their ends; the content of a whole file."""
        if self.content is not None:
            return ("whole", *_lines(self.content))
        return tuple(_difference(_lines(old), _lines(new)) for old, new in self.replacements)


class Files:
    """The files that an agent wrote whole earlier in its trace, as they are now."""

    def __init__(self, messages: list[Message] = ()) -> None:  # pyright: ignore[reportArgumentType]
        self._content: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or []:
                edit = edit_of(call["function"]["name"], _arguments(call["function"]["arguments"]))
                if edit is not None:
                    self._apply(edit)

    def after(self, edit: Edit) -> str | None:
        """The file's content after `edit`; None where what it holds now is not known, or the edit does not fit it."""
        if edit.content is not None:
            return "\n".join(_lines(edit.content))
        text = self._content.get(posixpath.normpath(edit.path))
        for old, new in edit.replacements:
            if text is None or not old or text.count(old) != 1:
                return None
            text = text.replace(old, new)
        return None if text is None else "\n".join(_lines(text))

    def _apply(self, edit: Edit) -> None:
        path = posixpath.normpath(edit.path)
        after = edit.content if edit.content is not None else self.after(edit)
        if after is None:
            self._content.pop(path, None)
        else:
            self._content[path] = after


def edit_of(name: str, arguments: dict[str, Any]) -> Edit | None:
    """The edit that a call makes; None where it makes none."""
    path = next((arguments[key] for key in _PATHS if isinstance(arguments.get(key), str)), None)
    if path is None:
        return None
    tool = name.lower()
    command = arguments.get("command") if tool in _EDITORS else None
    if tool in _WRITES or command == "create":
        content = next(
            (arguments[key] for key in ("content", "file_text") if isinstance(arguments.get(key), str)), None
        )
        return None if content is None else Edit(path=path, content=content)
    if tool in _REPLACES or command == "str_replace":
        listed = arguments.get("edits")
        pairs = [_replacement(each) for each in (listed if isinstance(listed, list) else [arguments])]
        if pairs and all(pair is not None for pair in pairs):
            return Edit(path=path, replacements=tuple(pair for pair in pairs if pair is not None))
    return None


def _replacement(arguments: Any) -> tuple[str, str] | None:
    if not isinstance(arguments, dict):
        return None
    for old, new in (("old_string", "new_string"), ("old_str", "new_str"), ("search", "replace")):
        if isinstance(arguments.get(old), str) and isinstance(arguments.get(new), str):
            return arguments[old], arguments[new]
    return None


def _difference(old: list[str], new: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return tuple(old[start : len(old) - end]), tuple(new[start : len(new) - end])


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks, and without empty ones at the end."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _arguments(written: str) -> dict[str, Any]:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
