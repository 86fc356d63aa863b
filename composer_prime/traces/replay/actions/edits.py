"""Edits of files, as the common tools write them, and what a file holds after one.

Two edits are the same when they leave the same content behind, however much context each of them quotes. The content
before is known where the agent itself wrote the file earlier in the trace; elsewhere an edit is what it says.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any

from composer_prime.traces.state import Message

_WRITES = {"write", "create", "write_file", "create_file", "filewrite"}
_REPLACES = {"edit", "str_replace", "replace", "multiedit", "edit_file", "str_replace_based_edit_tool"}
_EDITORS = {"str_replace_editor", "file_editor", "str_replace_based_edit_tool", "edit_anthropic"}
_PATHS = ("file_path", "path", "filename", "file")
_CONTENTS = ("content", "file_text")
_SIDES = (("old_string", "new_string"), ("old_str", "new_str"), ("search", "replace"))
EDIT_ARGUMENTS = {"command", "edits", "replace_all", *_PATHS, *_CONTENTS, *(side for pair in _SIDES for side in pair)}
"""What an `Edit` is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacements in one file; `content` instead where it is written whole."""

    path: str
    replacements: tuple[tuple[str, str, bool], ...] = ()
    """(old, new, everywhere instead of at the only place)."""
    content: str | None = None


class Files:
    """The files that an agent wrote whole earlier in its trace, as they are now."""

    def __init__(self, messages: list[Message] = ()) -> None:  # pyright: ignore[reportArgumentType]
        self._content: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or []:
                name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
                edit = edit_of(name, arguments)
                if edit is not None:
                    self._apply(edit)
                elif name.lower() in _EDITORS and arguments.get("command") != "view":  # insert, undo_edit
                    self._content.pop(posixpath.normpath(str(arguments.get("path"))), None)

    def after(self, edit: Edit) -> str | None:
        """The file's content after `edit`; None where what it holds now is not known, or the edit does not fit it."""
        if edit.content is not None:
            return edit.content
        text = self._content.get(posixpath.normpath(edit.path))
        for old, new, everywhere in edit.replacements:
            if text is None or not old or old not in text or (text.count(old) > 1 and not everywhere):
                return None
            text = text.replace(old, new)
        return text

    def _apply(self, edit: Edit) -> None:
        path = posixpath.normpath(edit.path)
        after = self.after(edit)
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
        content = next((arguments[key] for key in _CONTENTS if isinstance(arguments.get(key), str)), None)
        return None if content is None else Edit(path=path, content=content)
    if tool in _REPLACES or command == "str_replace":
        listed = arguments.get("edits")
        pairs = [_replacement(each) for each in (listed if isinstance(listed, list) else [arguments])]
        if pairs and all(pair is not None for pair in pairs):
            return Edit(path=path, replacements=tuple(pair for pair in pairs if pair is not None))
    return None


def _replacement(arguments: Any) -> tuple[str, str, bool] | None:
    if not isinstance(arguments, dict):
        return None
    for old, new in _SIDES:
        if isinstance(arguments.get(old), str) and isinstance(arguments.get(new), str):
            return arguments[old], arguments[new], str(arguments.get("replace_all")).lower() == "true"
    return None


def _arguments(written: str) -> dict[str, Any]:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
