"""When two actions are the same: a canonical form for each.

    edit     ("edit", path, content after it), or (path, lines out, lines in) where the file's content is not known
    shell    ("shell", tokens)
    call     ("call", name, sorted JSON arguments without defaults, paths normalised)
    prose    ("prose",): any text without an action, in one bucket

Several calls of one turn are a set. Text beside a call does not count. A command in a fenced block is a shell action, a
broken call written as text is itself.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from typing import Any

from composer_prime.traces import Message
from orchestrator.teachers.edits import Edit, Files, edit_of

Canonical = tuple[Any, ...]
_SHELLS = {"bash", "shell", "terminal", "execute_bash", "run", "run_command", "cmd_run", "local_shell", "execute"}
_COMMANDS = ("command", "cmd", "script")
_COSMETIC = {"description", "summary", "security_risk", "explanation", "thought", "reason", "is_input"}
"""Arguments that tell of an action and do not change it."""
_PATH = re.compile(r"(?i)(?:^|_)(?:path|file|filename|filepath|dir|directory|cwd)s?$|file_?(?:path|name)")
_FENCE = re.compile(r"```(?:mswea_bash_command|bash|sh|shell)\s*\n(.*?)```", re.DOTALL)
_BARE_FENCE = re.compile(r"```\s*\n(.*?)```\s*$", re.DOTALL)
_BROKEN = re.compile(r"<tool_call>|<function=")


def canonical(action: Message, tools: list[dict[str, Any]], files: Files | None = None) -> Canonical | None:
    """The canonical form of an assistant message; None for an empty one."""
    calls = action.get("tool_calls") or []
    if calls:
        defaults = _defaults(tools)
        forms = [_call(call["function"], defaults, files or Files()) for call in calls]
        return ("actions", *sorted(set(forms), key=repr))
    text = (action.get("content") or "").strip()
    if not text:
        return None
    fenced = _FENCE.findall(text) or _BARE_FENCE.findall(text)
    if fenced:
        return ("actions", shell("\n".join(fenced)))
    if _BROKEN.search(text):
        return ("broken", " ".join(text.split()))
    return ("prose",)


def shell(command: str) -> Canonical:
    """("shell", tokens): quoting and spacing do not count, operators are tokens of their own."""
    try:
        lexer = shlex.shlex(command.strip(), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        return ("shell", *lexer)
    except ValueError:  # an open quote
        return ("shell", *command.split())


def _call(function: dict[str, Any], defaults: dict[str, dict[str, Any]], files: Files) -> Canonical:
    name, written = function["name"], function["arguments"]
    try:
        arguments = json.loads(written) if written.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return ("broken", name, " ".join(written.split()))
    command = next((arguments[key] for key in _COMMANDS if isinstance(arguments.get(key), str)), None)
    if name.lower() in _SHELLS and command is not None:
        return shell(command)
    edit = edit_of(name, arguments)
    if edit is not None:
        return _edit(edit, files)
    given = defaults.get(name, {})
    kept = {
        key: _plain(key, value)
        for key, value in arguments.items()
        if value is not None and key not in _COSMETIC and not (key in given and given[key] == value)
    }
    return ("call", name, json.dumps(kept, sort_keys=True, ensure_ascii=False))


def _edit(edit: Edit, files: Files) -> Canonical:
    path = posixpath.normpath(edit.path)
    after = files.after(edit)
    return ("edit", path, after) if after is not None else ("edit", path, *edit.changed_lines())


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _PATH.search(key):
        return posixpath.normpath(value.strip()) if value.strip() else ""
    if isinstance(value, str):
        return value.strip()
    return value


def _defaults(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The default of every argument that a tool's schema gives one, by tool."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        known = properties.items() if isinstance(properties, dict) else ()
        defaults = {
            name: schema["default"] for name, schema in known if isinstance(schema, dict) and "default" in schema
        }
        found[str(function.get("name"))] = defaults
    return found
