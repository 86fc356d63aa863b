"""When two actions are the same: a canonical form for each.

    edit     ("edit", path, content after it), or (path, replacements as written) where the file's content is not known
    shell    ("shell", tokens, sorted JSON of the other arguments)
    call     ("call", name, sorted JSON arguments without defaults, paths normalised)
    prose    ("prose",): any text without an action, in one bucket; the call that ends a trace, whatever it says, too

The order of several calls of one turn counts where one of them is a command or an edit; text beside a call does not. A
call or a command that stands in the text (written.py) is an action where the agent had no tools, and another one where
it is written in another way; elsewhere it is an example. A broken call written as text is itself.

Two different actions of one form would make an agreement that is none; two equal ones of different forms only cost a
pair. So whatever is not sure to be cosmetic counts.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

from composer_prime.traces.replay.actions.edits import EDIT_ARGUMENTS, Edit, Files, edit_of
from composer_prime.traces.replay.actions.shell import shell
from composer_prime.traces.replay.actions.text_actions import BROKEN, written
from composer_prime.traces.state import Message

Canonical = tuple[Any, ...]
RULES = 3
"""Counted up when forms change: votes by other rules are not continued (records.py)."""
PROSE = ("prose",)
_SHELLS = {"bash", "shell", "terminal", "execute_bash", "run", "run_command", "cmd_run", "local_shell", "execute"}
_COMMANDS = ("command", "cmd", "script")
_ENDS = {"finish", "submit"}
_LAST_WORDS = {"message", "outputs", "final_thought"}
_COSMETIC = {"summary", "security_risk", "explanation", "thought"}
"""Arguments that tell of an action and do not change it."""
_LABELS = _COSMETIC | {"description", "reason"}
"""The same beside a command or an edit; in other calls these may be what the call is about."""
_PATH = re.compile(r"(?i)(?:^|_)(?:path|file|filename|filepath|dir|directory|cwd)s?$|file_?(?:path|name)")


def canonical(action: Message, tools: list[dict[str, Any]], files: Files | None = None) -> Canonical | None:
    """The canonical form of an assistant message in a state with these tools and files; None for an empty one."""
    calls, files = action.get("tool_calls") or [], files or Files()
    if calls:
        return _turn([_call(call["function"], tools, files) for call in calls], "actions")
    text = (action.get("content") or "").strip()
    if not text:
        return None
    if tools:
        return ("broken", text) if BROKEN.search(text) else PROSE
    acts = written(text)
    if acts is None:
        return PROSE
    forms = [_form(name, arguments, [], files) for name, arguments in acts.calls]
    return _turn(forms, "xml" if acts.way == "xml" else "actions") if forms else ("broken", text)


def _turn(forms: list[Canonical], kind: str) -> Canonical:
    """All that a turn does."""
    if set(forms) == {PROSE}:
        return PROSE
    acts = any(form[0] in ("shell", "edit") for form in forms)
    return (kind, *(forms if acts else sorted(forms, key=repr)))


def _call(function: dict[str, Any], tools: list[dict[str, Any]], files: Files) -> Canonical:
    name, raw = function["name"], function["arguments"]
    try:
        arguments = json.loads(raw) if raw.strip() else {}
        _json(arguments).encode()  # half of a surrogate pair is no text
        form = _form(name, arguments, tools, files) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        form = None
    return form or ("broken", name, raw)


def _form(name: str, arguments: dict[str, Any], tools: list[dict[str, Any]], files: Files) -> Canonical:
    given = _defaults(name, tools)
    if name.lower() in _ENDS:
        return _end(name.lower(), _kept(arguments, given, _COSMETIC | _LAST_WORDS))
    key = next((key for key in _COMMANDS if isinstance(arguments.get(key), str)), None)
    if name.lower() in _SHELLS and key is not None:
        others = _kept(arguments, given, _LABELS | {key})
        several = len({offered for offered in _names(tools) if offered.lower() in _SHELLS}) > 1
        return ("shell", shell(arguments[key]), others, *([name] if several else []))
    edit = edit_of(name, arguments)
    if edit is not None:
        return (*_edit(edit, files), _kept(arguments, given, _LABELS | EDIT_ARGUMENTS))
    return ("call", name, _kept(arguments, given, _COSMETIC))


def _end(name: str, kept: str) -> Canonical:
    """The end of a trace: that the task is done is what ending says; that it is not, or an answer, is more."""
    done = ("{}", '{"task_completed": "true"}', '{"task_completed": true}')
    return PROSE if kept in done else ("call", name, kept)


def _edit(edit: Edit, files: Files) -> Canonical:
    path, after = posixpath.normpath(edit.path), files.after(edit)
    return ("edit", path, *edit.replacements) if after is None else ("edit", path, after.rstrip("\n"))


def _kept(arguments: dict[str, Any], defaults: dict[str, Any], without: set[str]) -> str:
    """Sorted JSON of the arguments that say something."""
    plain = {key: _plain(key, value) for key, value in arguments.items() if value is not None and key not in without}
    usual = {key: _json(_plain(key, value)) for key, value in defaults.items()}
    return _json({key: value for key, value in plain.items() if usual.get(key) != _json(value)})


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _PATH.search(key) and "://" not in value:
        return posixpath.normpath(value.strip()) if value.strip() else ""
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _names(tools: list[dict[str, Any]]) -> list[str]:
    return [str((tool.get("function") or {}).get("name")) for tool in tools]


def _defaults(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The default of every argument that the tool's schema gives one."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") != name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        known = properties.items() if isinstance(properties, dict) else ()
        return {key: schema["default"] for key, schema in known if isinstance(schema, dict) and "default" in schema}
    return {}
