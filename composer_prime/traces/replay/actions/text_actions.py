"""Actions that stand in the text of an answer: of agents that are offered no tools and are told how to write them.

xml    <function=NAME><parameter=KEY>value</parameter></function>   SWE-smith, OpenHands without function calling
fence  a command in a fenced block                                  mini-swe-agent, SWE-agent
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from composer_prime.traces.state import Message

BROKEN = re.compile(r"<tool_call>|<function=")
"""What only a call begins with."""
_FENCE = re.compile(r"```(?:mswea_bash_command|bash|sh|shell)\s*\n(.*?)```", re.DOTALL)
_BARE_FENCE = re.compile(r"```\s*\n(.*?)```\s*$", re.DOTALL)
_OPENING = re.compile(r"<function=|```(?:mswea_bash_command|bash|sh|shell)[ \t\r]*\n")
_LINE_END, _BLANK = re.compile(r"[ \t\r]*\n"), re.compile(r"\s*\Z")
_FUNCTION = re.compile(r"<function=([^<>\s]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,200})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a text does."""

    way: Literal["xml", "fence", "broken"]
    calls: list[tuple[str, dict[str, str]]]
    """(name, arguments), a command as a call of bash; none where it is broken."""


def written(text: str) -> Written | None:
    """The actions in a text; None where it only speaks. A block before a function is an example, one in it a value."""
    if "<function=" in _FENCE.sub("\n", text):
        calls = _functions(text)
        return Written(way="broken", calls=[]) if calls is None else Written(way="xml", calls=calls)
    fenced = _FENCE.findall(text) or _BARE_FENCE.findall(text)
    if fenced:
        return Written(way="fence", calls=[("bash", {"command": command}) for command in fenced])
    return Written(way="broken", calls=[]) if BROKEN.search(text) else None


def may_act(text: str) -> bool:
    """Whether a text has what an action begins with, in linear time whatever it holds: `written` may find one."""
    end = text.rfind("```")
    start = text.rfind("```", 0, max(end, 0))
    # A block without a language at the end, of which no part is copied: the text may be a large one.
    bare = start >= 0 and _LINE_END.match(text, start + 3) and _BLANK.match(text, end + 3)
    return bool(bare and text.count("```", 0, start) % 2 == 0) or _OPENING.search(text) is not None


def way_of(messages: list[Message]) -> str | None:
    """How the last of an agent's turns that acts in its text does so: xml or fence; None where none does."""
    for message in reversed(messages):
        acts = written(message.get("content") or "") if message["role"] == "assistant" else None
        if acts is not None and acts.way != "broken":
            return acts.way
    return None


def _functions(text: str) -> list[tuple[str, dict[str, str]]] | None:
    """Every function with its arguments; None where one is not whole."""
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
