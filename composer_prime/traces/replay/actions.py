"""When two actions are the same: a canonical form for each.

    shell    ("shell", tool, tokens, sorted JSON of the other arguments)
    call     ("call", name, sorted JSON arguments, paths normalized)
    prose    ("prose",): any text without an action, and the call that ends a trace, whatever it says

Text beside a call does not count. A call or a command in the text is an action where the agent had no tools; elsewhere
it is an example. Written in another way it is another action. A broken call written as text is itself.

Two different actions of one form would make a false agreement. Two equal actions of different forms only cost a pair.
So every difference counts that may be more than cosmetic: the order of calls, an argument at its default.

Agents that have no tools write their actions in a prescribed way:

    xml    <function=NAME><parameter=KEY>value</parameter></function>   SWE-smith, OpenHands without function calling
    fence  a command in a fenced block                                  mini-swe-agent, SWE-agent
"""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass
from typing import Any, Literal

from composer_prime.traces.states import Message

Canonical = tuple[Any, ...]
RULES = 7
"""Raise it when forms change: a votes file compared by other rules is not continued (records.py)."""
PROSE = ("prose",)
_SHELLS = {"bash", "shell", "terminal", "execute_bash", "run", "run_command", "cmd_run", "local_shell", "execute"}
_COMMANDS = ("command", "cmd", "script")
_ENDS = {"finish", "submit"}
_LAST_WORDS = {"message", "outputs", "final_thought"}
_COSMETIC = {"summary", "security_risk", "explanation", "thought"}
"""Arguments that describe an action and do not change it."""
_BESIDE_COMMANDS = _COSMETIC | {
    "description", "reason", "timeout", "timeout_ms", "timeout_s", "timeout_sec", "timeout_seconds",
}  # fmt: skip
"""The same beside a command. In other calls a description may be what the call is about."""
_PATH = re.compile(r"(?i)(?:^|_)(?:path|file|filename|filepath|dir|directory|cwd)s?$|file_?(?:path|name)")

BROKEN = re.compile(r"<tool_call>|<function=")
"""What only a call begins with."""
_FENCE = re.compile(r"```(?:mswea_bash_command|bash|sh|shell)\s*\n(.*?)```", re.DOTALL)
_BARE_FENCE = re.compile(r"```\s*\n(.*?)```\s*$", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,200})>")
_PLAIN = r"[\w@%+:,./-]"
"""Characters of a command for which it makes no difference whether they are quoted."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t](?:[ \t]|\\\n)*)"
    r"|(?P<operator>(?<![^ \t])2>&1(?=[\s;|]|\Z)|&&|\|\||>>|[;|>\n])"
    rf"|(?P<word>(?:{_PLAIN}+|=|'[^']*'|\"[^\"\\$`]*\")+)"
)
_PIECE = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)")
_RESERVED = re.compile(r"if|then|elif|else|fi|for|select|in|while|until|do|done|case|esac|function|time|coproc")
"""No longer reserved when quoted."""


def canonical(action: Message, tools: list[dict[str, Any]]) -> Canonical | None:
    """Return the canonical form of an assistant message in a state; None for an empty one."""
    calls = action.get("tool_calls") or []
    if calls:
        return _turn([_call(call["function"]) for call in calls], "actions")
    text = (action.get("content") or "").strip()
    if not text:
        return None
    if tools:
        return ("broken", text) if BROKEN.search(text) else PROSE
    acts = actions_in_text(text)
    if acts is None:
        return PROSE
    forms = [_form(name, arguments) for name, arguments in acts.calls]
    return _turn(forms, "xml" if acts.way == "xml" else "actions") if forms else ("broken", text)


def _turn(forms: list[Canonical], kind: str) -> Canonical:
    return PROSE if set(forms) == {PROSE} else (kind, *forms)


def _call(function: dict[str, Any]) -> Canonical:
    name, raw = function["name"], function["arguments"]
    try:
        arguments = json.loads(raw) if raw.strip() else {}
        _json(arguments).encode()  # half of a surrogate pair is not valid text
        form = _form(name, arguments) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        form = None
    return form or ("broken", name, raw)


def _form(name: str, arguments: dict[str, Any]) -> Canonical:
    tool = name.lower()
    if tool in _ENDS:
        kept = _kept(arguments, _COSMETIC | _LAST_WORDS)
        # Prose, unless it says more than that the task is done.
        done = ("{}", '{"task_completed": "true"}', '{"task_completed": true}')
        return PROSE if kept in done else ("call", tool, kept)
    key = next((key for key in _COMMANDS if isinstance(arguments.get(key), str)), None)
    if tool in _SHELLS and key is not None:
        off = {other for other, value in arguments.items() if value in (False, "false")}
        return ("shell", tool, shell(arguments[key]), _kept(arguments, _BESIDE_COMMANDS | off | {key}))
    return ("call", name, _kept(arguments, _COSMETIC))


def _kept(arguments: dict[str, Any], without: set[str]) -> str:
    return _json(
        {key: _plain(key, value) for key, value in arguments.items() if value is not None and key not in without}
    )


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _PATH.search(key) and "://" not in value:
        return posixpath.normpath(value.strip()) if value.strip() else ""
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def shell(command: str) -> tuple[str | tuple[str, str], ...]:
    """Return the tokens of a command: those of equal tokens do the same. Spaces and the kind of quotes do not count.

    A command with more than words and operators in it (an expansion, a pattern, a here-document, a comment) is one
    token, as written: how a shell would read it takes a shell.
    """
    tokens: list[str] = []
    at, touching = 0, False
    while at < len(command):
        match = _TOKEN.match(command, at)
        if match is None or (touching and match["word"]):
            return (("unread", command),)
        at, touching = match.end(), match["word"] is not None
        if touching and match[0].isdigit() and command.startswith(">", at):  # a descriptor
            return (("unread", command),)
        if touching:
            tokens.append(_word(match[0]))
        elif match["operator"]:
            tokens.append(match[0])
    # Empty lines do not count.
    kept = [token for token, before in zip(tokens, ["\n", *tokens], strict=False) if not token == before == "\n"]
    return tuple(kept[:-1] if kept[-1:] == ["\n"] else kept)


def _word(written: str) -> str:
    """Return a word, quoted in one way; as written where it may be an assignment or a reserved word."""
    pieces = _PIECE.findall(written)
    value = "".join(first or second or bare for first, second, bare in pieces)
    if not written.startswith("-") and any("=" in bare for _, _, bare in pieces):
        return written
    if value != written and _RESERVED.fullmatch(value):
        return written
    return value if re.fullmatch(f"{_PLAIN}+", value) else "'" + value.replace("'", "'\\''") + "'"


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
