"""The turns of an agent, and the tools that they call.

Many formats do not list the tools that the agent had. A teacher can only choose among the tools that it is offered, and
the offer must not reveal what the student chose. So every state of a file offers all tools that the whole file calls
(`ObservedTools`), gathered in a first pass over the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.llm.reply import split_thinking
from composer_prime.traces.ingest.reading import Limits, at, objects
from composer_prime.traces.replay.actions import may_act
from composer_prime.traces.states import Message

MAX_TOOLS, MAX_ARGUMENTS = 128, 64
"""Tools of one agent, and arguments of one tool, that are described. A hostile file may call more."""
_TYPES: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]


@dataclass(slots=True, kw_only=True)
class Call:
    """A tool call. `arguments` is the decoded JSON object, or the text itself when it is not a JSON object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(slots=True)
class Turn:
    """One answer of the model, possibly still incomplete, with the results of its calls."""

    key: str | None
    model: str | None
    step: int
    several_models: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    entropy: float | None = None
    aside: str | None = None
    """Why the turn is context only and gives no state."""

    def add(self, text: str, calls: Collection[Call], reasoning: str) -> None:
        """Add a part of the answer. Its text may contain thinking, which is split off."""
        visible, thought = split_thinking(text)
        self.text += [visible] if visible.strip() else []
        self.reasoning += [part for part in (reasoning, thought) if part.strip()]
        call_ids = {call.call_id for call in self.calls}
        self.calls += [call for call in calls if call.call_id not in call_ids]

    def answer(self, call_id: str | None, text: str, error: str | None) -> bool:
        """Store the result of a call; None stands for the first one without a result.

        Return False when the turn made no such call or has its result already.
        """
        if call_id is None:
            call_id = next((call.call_id for call in self.calls if call.call_id not in self.results), None)
        if call_id is None or call_id in self.results or all(call.call_id != call_id for call in self.calls):
            return False
        self.results[call_id] = text
        if error is not None:
            self.fail(error)
        return True

    def fail(self, error: str) -> None:
        """Record the error that the turn led to, unless it has one."""
        self.error = error if self.error is None else self.error


class ObservedTools:
    """The tools that the turns of a file call, as function tools of OpenAI's chat completions."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        """`mask` removes secrets from a name: some files hold secrets in tool names too."""
        self._mask = mask
        self._arguments: dict[str, dict[str, str]] = {}
        self.too_many = False
        """Whether the file calls more tools than are described."""
        self.in_text = False
        """Whether some turn seems to act in its text."""

    @property
    def only_in_text(self) -> bool:
        """Check whether the agent calls no tool and acts in its text. Such an agent is offered no tools."""
        return self.in_text and not self._arguments

    def add(self, turn: Turn) -> None:
        """Note the calls of a turn, with the names and types of their arguments."""
        if not turn.calls and not self.in_text:
            self.in_text = any(map(may_act, turn.text))
        for call in turn.calls:
            if call.name not in self._arguments and len(self._arguments) >= MAX_TOOLS:
                self.too_many = True
                continue
            types = self._arguments.setdefault(call.name, {})
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            for argument, value in arguments.items():
                if argument not in types and len(types) < MAX_ARGUMENTS:
                    types[argument] = next((name for kind, name in _TYPES if isinstance(value, kind)), "")

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools sorted by name. The order must not reveal when they were called."""
        masked: dict[str, dict[str, str]] = {}
        for name, arguments in self._arguments.items():
            masked.setdefault(self._mask(name), {}).update({self._mask(key): kind for key, kind in arguments.items()})
        return [_schema(name, masked[name]) for name in sorted(masked)]


class OfferedTools:
    """The tools that the states of one trace offer."""

    def __init__(self, observed: list[dict[str, Any]], mask: Callable[[Any], Any]) -> None:
        """`observed`: the tools that the file calls. `mask` removes secrets from a JSON value."""
        self._mask = mask
        self.schemas = observed
        """All states share this list."""
        self._observed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in observed}
        self._listed = False

    def use_listed(self, tools: object) -> None:
        """Offer the tools that the format lists, if `tools` is such a list."""
        functions = [tool for tool in objects(tools) if isinstance(at(tool, "function", "name"), str)]
        if functions:
            self.schemas = [self._with_arguments(tool) for tool in self._mask(functions)]
            self._listed = True

    def lacks(self, name: str) -> bool:
        """Check whether a called tool is not described, because MAX_TOOLS others were called before it."""
        return not self._listed and name not in self._observed

    def _with_arguments(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            return tool
        observed = self._observed.get(function["name"]) or _schema(function["name"], {})["function"]["parameters"]
        return {**tool, "function": {**function, "parameters": observed}}


def too_long(limits: Limits) -> str:
    """Return the reason that nothing after an overflow can be shown."""
    return f"context over {limits.context_chars:,} characters"


def size_of(message: Message) -> int:
    """Count the characters of a message."""
    size, calls = len(message.get("content") or ""), message.get("tool_calls")
    return size + sum(len(call["function"]["arguments"]) for call in calls) if calls else size


def digest_of(before: bytes, message: Message) -> bytes:
    """Return 8 bytes for a conversation. Call ids are left out: they differ between copies of a session."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = msgspec.json.encode([message["role"], message.get("content"), calls])
    return hashlib.blake2b(before + content, digest_size=8).digest()


def _schema(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {argument: {"type": kind} if kind else {} for argument, kind in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
