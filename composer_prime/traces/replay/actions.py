"""When two actions are the same: a canonical form for each.

    edit     ("edit", path, content after it), or (path, replacements as written) where the file's content is not known
    shell    ("shell", tokens, sorted JSON of the other arguments)
    call     ("call", name, sorted JSON arguments without defaults, paths normalized)
    prose    ("prose",): any text without an action, and the call that ends a trace, whatever it says

The order of several calls of one turn counts where one of them is a command or an edit. Text beside a call does not
count. A call or a command in the text is an action where the agent had no tools; elsewhere it is an
example. Written in another way it is another action. A broken call written as text is itself.

Two edits are the same when they leave the same content behind, however much context each of them quotes. The content
before is known where the agent itself wrote the file earlier in the trace. Elsewhere an edit is all that it says: equal
lines may stand in several places, and only what an edit quotes tells which of them it changes.

Two different actions of one form would make a false agreement. Two equal actions of different forms only cost a pair.
So every difference counts that may be more than cosmetic.

Agents that have no tools write their actions in a prescribed way:

    xml    <function=NAME><parameter=KEY>value</parameter></function>   SWE-smith, OpenHands without function calling
    fence  a command in a fenced block                                  mini-swe-agent, SWE-agent
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from composer_prime.traces.replay.shell import shell
from composer_prime.traces.states import Message

Canonical = tuple[Any, ...]
RULES = 6
"""Raise it when forms change: a votes file compared by other rules is not continued (records.py)."""
PROSE = ("prose",)
_SHELLS = {"bash", "shell", "terminal", "execute_bash", "run", "run_command", "cmd_run", "local_shell", "execute"}
_COMMANDS = ("command", "cmd", "script")
_ENDS = {"finish", "submit"}
_LAST_WORDS = {"message", "outputs", "final_thought"}
_COSMETIC = {"summary", "security_risk", "explanation", "thought"}
"""Arguments that describe an action and do not change it."""
_LABELS = _COSMETIC | {"description", "reason"}
"""The same beside a command or an edit. In other calls these may be what the call is about."""
_LIMITS = {"timeout", "timeout_ms", "timeout_s", "timeout_sec", "timeout_seconds"}
"""Arguments of a command that limit how long it runs."""
_OFF = {"is_input", "reset", "run_in_background", "background", "is_background"}
"""Arguments of a command that are false by default."""
_KNOWN_DEFAULTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Read": {"offset": (0, 1), "limit": (2000,)},
    "Grep": {"output_mode": ("files_with_matches",), "path": (".",)},
    "Glob": {"path": (".",)},
}
"""Of Claude Code's tools, whose sessions list no schemas."""
_PATH = re.compile(r"(?i)(?:^|_)(?:path|file|filename|filepath|dir|directory|cwd)s?$|file_?(?:path|name)")
_WRITES = {"write", "create", "write_file", "create_file", "filewrite"}
_REPLACES = {"edit", "str_replace", "replace", "multiedit", "edit_file", "str_replace_based_edit_tool"}
_EDITORS = {"str_replace_editor", "file_editor", "str_replace_based_edit_tool", "edit_anthropic"}
_PATHS = ("file_path", "path", "filename", "file")
_CONTENTS = ("content", "file_text")
_SIDES = (("old_string", "new_string"), ("old_str", "new_str"), ("search", "replace"))
EDIT_ARGUMENTS = {"command", "edits", "replace_all", *_PATHS, *_CONTENTS, *(side for pair in _SIDES for side in pair)}
"""What an `Edit` is made of."""

BROKEN = re.compile(r"<tool_call>|<function=")
"""What only a call begins with."""
_FENCE = re.compile(r"```(?:mswea_bash_command|bash|sh|shell)\s*\n(.*?)```", re.DOTALL)
_BARE_FENCE = re.compile(r"```\s*\n(.*?)```\s*$", re.DOTALL)
_OPENING = re.compile(r"<function=|```(?:mswea_bash_command|bash|sh|shell)[ \t\r]*\n")
_LINE_END, _BLANK = re.compile(r"[ \t\r]*\n"), re.compile(r"\s*\Z")
_FUNCTION = re.compile(r"<function=([^<>\s]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,200})>")


def canonical(action: Message, tools: list[dict[str, Any]], files: Files | None = None) -> Canonical | None:
    """Return the canonical form of an assistant message in a state; None for an empty one."""
    calls, files = action.get("tool_calls") or [], files or Files()
    if calls:
        return _turn([_call(call["function"], tools, files) for call in calls], "actions")
    text = (action.get("content") or "").strip()
    if not text:
        return None
    if tools:
        return ("broken", text) if BROKEN.search(text) else PROSE
    acts = actions_in_text(text)
    if acts is None:
        return PROSE
    forms = [_form(name, arguments, [], files) for name, arguments in acts.calls]
    return _turn(forms, "xml" if acts.way == "xml" else "actions") if forms else ("broken", text)


def _turn(forms: list[Canonical], kind: str) -> Canonical:
    if set(forms) == {PROSE}:
        return PROSE
    acts = any(form[0] in ("shell", "edit") for form in forms)
    return (kind, *(forms if acts else sorted(forms, key=repr)))


def _call(function: dict[str, Any], tools: list[dict[str, Any]], files: Files) -> Canonical:
    name, raw = function["name"], function["arguments"]
    try:
        arguments = json.loads(raw) if raw.strip() else {}
        _json(arguments).encode()  # half of a surrogate pair is not valid text
        form = _form(name, arguments, tools, files) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        form = None
    return form or ("broken", name, raw)


def _form(name: str, arguments: dict[str, Any], tools: list[dict[str, Any]], files: Files) -> Canonical:
    defaults = _defaults(name, tools)
    if name.lower() in _ENDS:
        kept = _kept(arguments, defaults, _COSMETIC | _LAST_WORDS)
        # Prose, unless it says more than that the task is done.
        done = ("{}", '{"task_completed": "true"}', '{"task_completed": true}')
        return PROSE if kept in done else ("call", name.lower(), kept)
    key = next((key for key in _COMMANDS if isinstance(arguments.get(key), str)), None)
    if name.lower() in _SHELLS and key is not None:
        off = {name for name in _OFF if arguments.get(name) in (False, "false")}
        others = _kept(arguments, defaults, _LABELS | _LIMITS | off | {key})
        offered = {str((tool.get("function") or {}).get("name")) for tool in tools}
        several = sum(other.lower() in _SHELLS for other in offered) > 1
        return ("shell", shell(arguments[key]), others, *([name] if several else []))
    edit = edit_of(name, arguments)
    if edit is not None:
        path, after = posixpath.normpath(edit.path), files.after(edit)
        effect = edit.replacements if after is None else (after.rstrip("\n"),)
        return ("edit", path, *effect, _kept(arguments, defaults, _LABELS | EDIT_ARGUMENTS))
    known = _KNOWN_DEFAULTS.get(name, {})
    usual = {key for key, values in known.items() if key not in defaults and _plain(key, arguments.get(key)) in values}
    return ("call", name, _kept(arguments, defaults, _COSMETIC | usual))


def _kept(arguments: dict[str, Any], defaults: dict[str, Any], without: set[str]) -> str:
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


def _defaults(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") != name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas = properties.items() if isinstance(properties, dict) else ()
        return {key: schema["default"] for key, schema in schemas if isinstance(schema, dict) and "default" in schema}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacements in one file; `content` instead where it is written whole."""

    path: str
    replacements: tuple[tuple[str, str, bool], ...] = ()
    """(old, new, everywhere instead of at the only place)."""
    content: str | None = None


class Files:
    """The files that an agent wrote whole earlier in its trace, as they are now."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._content: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or []:
                name, arguments = call["function"]["name"], _json_object(call["function"]["arguments"])
                edit = edit_of(name, arguments)
                if edit is not None:
                    self._apply(edit)
                elif name.lower() in _EDITORS and arguments.get("command") != "view":  # insert, undo_edit
                    self._content.pop(posixpath.normpath(str(arguments.get("path"))), None)

    def after(self, edit: Edit) -> str | None:
        """Return the file's content after `edit`; None where its content is not known, or the edit does not fit it."""
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
    """Return the edit that a call makes; None where it makes none."""
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


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextActions:
    """The actions in a text."""

    way: Literal["xml", "fence", "broken"]
    calls: list[tuple[str, dict[str, str]]]
    """(name, arguments), a command as a call of bash; empty where it is broken."""


def actions_in_text(text: str) -> TextActions | None:
    """Return the actions; None where the text has none. A block before a function is an example, one in it a value."""
    if "<function=" in _FENCE.sub("\n", text):
        calls = _functions(text)
        return TextActions(way="broken", calls=[]) if calls is None else TextActions(way="xml", calls=calls)
    fenced = _FENCE.findall(text) or _BARE_FENCE.findall(text)
    if fenced:
        return TextActions(way="fence", calls=[("bash", {"command": command}) for command in fenced])
    return TextActions(way="broken", calls=[]) if BROKEN.search(text) else None


def may_act(text: str) -> bool:
    """Return whether a text has what an action begins with, so that `actions_in_text` may find one. Linear time."""
    end = text.rfind("```")
    start = text.rfind("```", 0, max(end, 0))
    # A block without a language at the end. No part of it is copied: the text may be large.
    bare = start >= 0 and _LINE_END.match(text, start + 3) and _BLANK.match(text, end + 3)
    return bool(bare and text.count("```", 0, start) % 2 == 0) or _OPENING.search(text) is not None


def way_of(messages: list[Message]) -> str | None:
    """Return how an agent last wrote an action in its text: xml or fence; None where it never did."""
    for message in reversed(messages):
        acts = actions_in_text(message.get("content") or "") if message["role"] == "assistant" else None
        if acts is not None and acts.way != "broken":
            return acts.way
    return None


def _functions(text: str) -> list[tuple[str, dict[str, str]]] | None:
    """Return every function with its arguments; None where one is not whole."""
    _, *opened = _FUNCTION.split(text)
    calls = []
    for name, rest in zip(opened[::2], opened[1::2], strict=True):
        body, end, after = rest.partition("</function>")
        arguments = _arguments(body)
        if not end or arguments is None or "</function>" in after or "<function=" in rest:
            return None
        calls.append((name, arguments))
    return calls or None


def _arguments(body: str) -> dict[str, str] | None:
    before, *opened = _PARAMETER.split(body)
    arguments = {}
    for name, rest in zip(opened[::2], opened[1::2], strict=True):
        value, end, after = rest.partition("</parameter>")
        if not end or after.strip():
            return None
        # A line break at either end belongs to the tags.
        arguments[name] = value.removeprefix("\n").removesuffix("\n")
    return None if before.strip() else arguments
