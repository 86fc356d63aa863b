"""The tools' schemas, as OpenAI function definitions."""

from __future__ import annotations

from typing import Any


def _tool(description: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {"description": description, "parameters": parameters}


def _argument(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


def _strings(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


_PATH = _argument("string", "Path below the work folder.")

_TOOLS = {
    "bash": _tool(
        "Run a command in bash. The directory and exported variables are kept for the next call; processes are not.",
        {"command": _argument("string", "The command.")},
        {"timeout_s": _argument("number", "Seconds after which the command is ended.")},
    ),
    "view": _tool(
        "Show a text file with line numbers, or list the files of a folder.",
        {"path": _argument("string", "File or folder; '.' for the work folder.")},
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
        "Write a file, also over an old one.",
        {"path": _PATH, "text": _argument("string", "The whole content.")},
    ),
    "run_tests": _tool(
        "Run tests with pytest and show what fails.",
        {},
        {"tests": _strings("Files or node ids; all tests of the task where it is left out.")},
    ),
}

TOOL_NAMES = tuple(_TOOLS)
SCHEMAS = {name: {"type": "function", "function": {"name": name, **tool}} for name, tool in _TOOLS.items()}
"""By name."""
