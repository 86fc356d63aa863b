"""The agent's tools in a box: bash, view, edits.

    call(name, arguments) -> checked against the tool's schema -> _bash | _view | ... -> text, bounded

A failed call begins with one of `ERROR_STARTS`, so that hints find the turn. A test that fails is no failed call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from orchestrator.coding.sandbox.box import WORK, Box
from orchestrator.coding.task import check_path
from orchestrator.workers.call_schema import violation
from orchestrator.workers.pool import ToolCall

_CALL_ERRORS = ("Tool not found: ", "Invalid JSON", "Missing argument: ", "Unknown argument: ", "Wrong type for ")
ERROR_STARTS = ("Error: ", *_CALL_ERRORS)
MAX_VIEW_BYTES = 2**22
_CAPTURE_BYTES = 2**18
_SNIPPET_LINES = 3

_BASH = r"""
state=${TMPDIR:-/tmp}/.shell
trap 'status=$?; trap - EXIT; { printf "cd %q\n" "$PWD"; export -p; } >"$state" 2>/dev/null; exit $status' EXIT
[ -f "$state" ] && . "$state"
eval "$1"
"""
_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NO_COLOR": "1", "TERM": "dumb"}
# A repository's own options of pytest may name plugins that the box lacks.
_ENV["PYTEST_ADDOPTS"] = "-q --tb=short -p no:cacheprovider -o addopts="


def _tool(description: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {"description": description, "parameters": parameters}


def _argument(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


_PATH = _argument("string", "Path below the work folder.")

_TOOLS = {
    "bash": _tool(
        "Run a command in bash. The directory and exported variables are kept for the next call; processes are not.",
        {"command": _argument("string", "The command.")},
        {"timeout_s": _argument("number", "Seconds after which the command is ended.")},
    ),
    "view": _tool(
        "Show a text file with line numbers.",
        {"path": _PATH},
        {
            "start_line": _argument("integer", "First line to show, from 1."),
            "end_line": _argument("integer", "Last line to show."),
        },
    ),
    "str_replace": _tool(
        "Replace a text that occurs exactly once in a file.",
        {
            "path": _PATH,
            "old_str": _argument("string", "The text, exactly as it is in the file."),
            "new_str": _argument("string", "The text in its place."),
        },
    ),
    "create": _tool(
        "Write a file, also over an old one.", {"path": _PATH, "text": _argument("string", "The whole content.")}
    ),
}

TOOL_NAMES = tuple(_TOOLS)


class ToolFailure(Exception):
    """A call that cannot be answered. Its text goes to the model behind "Error: "."""


class CodeTools:
    """Runs one rollout's tool calls in its box."""

    def __init__(self, box: Box, *, names: Sequence[str] = TOOL_NAMES, output_chars: int, timeout_s: float) -> None:
        self._box = box
        self._output_chars = output_chars
        self._timeout_s = timeout_s
        self.schemas = [{"type": "function", "function": {"name": name, **_TOOLS[name]}} for name in names]

    async def call(self, name: str, arguments_json: str) -> str:
        broken_rule = violation(ToolCall(id="", name=name, arguments=arguments_json), self.schemas)
        if broken_rule is not None:
            return clip(broken_rule[1], self._output_chars)
        try:
            reply = await getattr(self, f"_{name}")(json.loads(arguments_json or "{}"))  # Of a name in `_TOOLS`.
        except ToolFailure as failure:
            reply = f"Error: {failure}"
        return clip(reply, self._output_chars)

    async def _bash(self, arguments: dict[str, Any]) -> str:
        argv = ["bash", "-c", _BASH, "bash", arguments["command"]]
        asked_s = arguments.get("timeout_s")
        limit_s = min(asked_s, self._timeout_s) if asked_s and asked_s > 0 else self._timeout_s
        try:
            finished = await self._box.run(argv, env=_ENV, timeout_s=limit_s, output_bytes=_CAPTURE_BYTES)
        except ValueError as error:  # A NUL in an argument.
            raise ToolFailure(str(error)) from error
        outputs = (content.decode(errors="replace").rstrip() for content in (finished.stdout, finished.stderr))
        text = "\n".join(filter(None, outputs))
        if finished.ended_by and finished.ended_by != "box":
            raise ToolFailure(f"ended by the limit {finished.ended_by} after {finished.wall_s:.1f} s\n{text}")
        if finished.exit_code in (126, 127):
            raise ToolFailure(f"exit code {finished.exit_code}\n{text}")
        return f"{text}\n[exit code {finished.exit_code}]" if finished.exit_code else text or "(no output)"

    async def _view(self, arguments: dict[str, Any]) -> str:
        path = _plain(arguments["path"])
        lines = (await self._read_text(path)).splitlines()
        first, last = arguments.get("start_line") or 1, arguments.get("end_line") or len(lines)
        if lines and not 1 <= first <= len(lines):
            raise ToolFailure(f"start_line is {first}, but {path} has {len(lines)} lines")
        return _numbered(lines, first, min(last, len(lines))) or f"({path} is empty)"

    async def _str_replace(self, arguments: dict[str, Any]) -> str:
        path, old, new = _plain(arguments["path"]), arguments["old_str"], arguments["new_str"]
        text = await self._read_text(path)
        if not old:
            raise ToolFailure("old_str is empty; use create for a new file")
        count = text.count(old)
        if count == 0:
            raise ToolFailure(f"old_str was not found in {path}; view the file and copy it exactly")
        if count > 1:
            raise ToolFailure(f"old_str occurs {count} times in {path}; give more of its context")
        place = text.index(old)
        edited = text[:place] + new + text[place + len(old) :]
        await self._edit(path, edited)
        lines, index = edited.splitlines(), text.count("\n", 0, place)
        last = index + max(1, len(new.splitlines())) + _SNIPPET_LINES
        shown = _numbered(lines, max(1, index + 1 - _SNIPPET_LINES), min(last, len(lines)))
        return f"Edited {path}:\n{shown}"

    async def _create(self, arguments: dict[str, Any]) -> str:
        path, text = _plain(arguments["path"]), arguments["text"]
        await self._edit(path, text)
        return f"Wrote {path}, {len(text.splitlines())} lines."

    async def _edit(self, path: str, text: str) -> None:
        try:
            await self._box.write_files({path: text.encode()})
        except (OSError, ValueError) as error:
            raise ToolFailure(f"{path} cannot be written: {error}") from error

    async def _read_text(self, path: str) -> str:
        try:
            content = await self._box.read_file(path, MAX_VIEW_BYTES)
        except FileNotFoundError:
            raise ToolFailure(f"no such file: {path}") from None
        except (OSError, ValueError) as error:
            raise ToolFailure(f"{path} cannot be read: {error}") from None
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolFailure(f"{path} is no UTF-8 text; look at it with bash") from None


def is_tool_error(text: str) -> bool:
    return text.startswith(ERROR_STARTS)


def clip(text: str, limit: int) -> str:
    """Return a text of about `limit` characters: its head and its tail."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[... {len(text) - limit:,} characters cut ...]\n{text[-tail:]}"


def _plain(path: str) -> str:
    inside = path.removeprefix(f"{WORK}/") if path.startswith(f"{WORK}/") else path
    try:
        os.fsencode(inside)
        return check_path(inside)
    except ValueError:  # Also where it cannot be written as UTF-8.
        raise ToolFailure(f"the path {path!r} names no file in the work folder {WORK}; `ls` lists them") from None


def _numbered(lines: Sequence[str], first: int, last: int) -> str:
    return "\n".join(f"{number:>6}\t{lines[number - 1]}" for number in range(first, last + 1))
