"""Actions in the text of an answer, of agents that have no tools and write their actions in a prescribed way.

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
