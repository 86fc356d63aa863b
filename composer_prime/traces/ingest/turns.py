"""The turns of an agent, the tools that they call, and the states made of them.

    parts, results, errors ─> Turn ─> StateMaker.finish(turn, what came before) ─> TraceState, the turn as context

Everything that the formats share is here. A reader only decides what each record means. Messages are masked once, on
entry, and the states of a trace share them.

Many formats do not list the tools that the agent had. A teacher can only choose among the tools that it is offered, and
the offer must not reveal what the student chose. So every state of a file offers all tools that the whole file calls
(`ObservedTools`), gathered in a first pass over the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.llm.families import family_of
from composer_prime.llm.reply import split_thinking
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.tally import Recent, Tally
from composer_prime.traces.replay.actions.text_actions import may_act
from composer_prime.traces.state import Message, TraceState

NO_RESULT = "[no result was recorded]"
ERROR_CHARS = 500
GATHERING = "the tools of the file are still being gathered"
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
    """A tool call. `arguments` is the decoded JSON object, or the text itself when it is no JSON object."""

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

    def add(self, text: str, calls: Collection[Call], reasoning: str) -> None:
        """Add a part of the answer. Its text may contain thinking, which is split off."""
        visible, thought = split_thinking(text)
        self.text += [visible] if visible.strip() else []
        self.reasoning += [part for part in (reasoning, thought) if part.strip()]
        call_ids = {call.call_id for call in self.calls}
        self.calls += [call for call in calls if call.call_id not in call_ids]

    def answer(self, call_id: str, text: str, error: str | None) -> bool:
        """Store the result of a call. Return False when the turn made no such call or has its result already."""
        if call_id in self.results or all(call.call_id != call_id for call in self.calls):
            return False
        self.results[call_id] = text
        if error is not None:
            self.fail(error)
        return True

    def fail(self, error: str) -> None:
        """Record the error that the turn led to. The first one is kept."""
        self.error = error if self.error is None else self.error

    def unanswered(self) -> str | None:
        """Return the id of the first call that has no result yet."""
        return next((call.call_id for call in self.calls if call.call_id not in self.results), None)


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
                    types[argument] = _type_of(value)

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
        self._mask, self._schemas = mask, observed
        self._observed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in observed}
        self._listed = False

    def use_listed(self, tools: object) -> bool:
        """Offer the tools that the format lists. Return False, and change nothing, when `tools` is no such list."""
        functions = [tool for tool in tools if _is_function(tool)] if isinstance(tools, list) else []
        if not functions:
            return False
        self._schemas = [self._with_arguments(tool) for tool in self._mask(functions)]
        self._listed = True
        return True

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools. All states share this list object."""
        return self._schemas

    def lacks(self, name: str) -> bool:
        """Check whether a called tool is not described, because MAX_TOOLS others were called before it."""
        return not self._listed and name not in self._observed

    def _with_arguments(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            return tool
        observed = self._observed.get(function["name"]) or _schema(function["name"], {})["function"]["parameters"]
        return {**tool, "function": {**function, "parameters": observed}}


@dataclass(slots=True, kw_only=True)
class Origin:
    """What all states of a trace share."""

    trace_id: str
    format: str
    model: str | None = None
    """The model that the trace named last."""
    assumed_model: str | None = None
    """The model that the user named, for traces that name none."""
    family: str | None = None
    """The family that the user named. It overrides the family of `model`."""


@dataclass(frozen=True, slots=True)
class Before:
    """The context of a turn."""

    messages: list[Message]
    """The state keeps this list. Nobody may change it."""
    digest: bytes
    missing: str | None = None
    """Why the context cannot be shown; then there are no messages."""


class StateMaker:
    """The states of one trace."""

    def __init__(
        self,
        origin: Origin,
        tally: Tally,
        masker: Masker,
        limits: Limits,
        fingerprints: Recent,
        tools: ObservedTools | list[dict[str, Any]],
    ) -> None:
        """`fingerprints`: states seen so far, shared between traces. A copied state is passed over.

        `tools`: the tools that the file calls. When they are still to be gathered (`ObservedTools`), calls are noted
        there and no state is made.
        """
        self.origin, self.limits = origin, limits
        self._tally, self._masker, self._fingerprints = tally, masker, fingerprints
        self._gathering = tools if isinstance(tools, ObservedTools) else None
        self.unshown = None if self._gathering is None else GATHERING
        """Why no context is held; None when it is."""
        self.tools = OfferedTools([] if isinstance(tools, ObservedTools) else tools, masker.value)
        self._steps = 0

    def turn(self, key: str | None, model: str | None, entropy: float | None = None) -> Turn:
        """Start the next turn. `model` made it and those that follow, until another model is named."""
        self.origin.model = model or self.origin.model
        self._steps += 1
        return Turn(key, self.origin.model, self._steps - 1, entropy=entropy)

    def message(self, role: str, text: str) -> Message:
        return {"role": role, "content": self._masked(text)}

    def result(self, call_id: str, text: str) -> Message:
        return {"role": "tool", "tool_call_id": call_id, "content": self._masked(text)}

    def finish(self, turn: Turn, before: Before) -> tuple[TraceState | None, list[Message]]:
        """Return (the turn's state or None when it is passed over, the messages that later contexts show of it)."""
        if self._gathering is not None:
            self._gathering.add(turn)
            return None, []
        action = self._action(turn)
        state = self._state(turn, action, before)
        shown = {name: value for name, value in action.items() if name != "reasoning_content"}
        if not shown.get("content") and not shown.get("tool_calls"):
            return state, []
        results = [self.result(call.call_id, turn.results.get(call.call_id, NO_RESULT)) for call in turn.calls]
        return state, [shown, *results]

    def _action(self, turn: Turn) -> Message:
        action: Message = {"role": "assistant", "content": self._masked("\n\n".join(turn.text)) or None}
        if turn.calls:
            action["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.reasoning:
            action["reasoning_content"] = self._masker.text("\n\n".join(turn.reasoning))
        return action

    def _masked(self, text: str) -> str:
        """Mask a text. A text longer than any context is never shown and needs no masking."""
        return text if len(text) > self.limits.context_chars else self._masker.text(text)

    def _call(self, call: Call) -> dict[str, Any]:
        masked = self._masker.value(call.arguments)
        text = masked if isinstance(masked, str) else json.dumps(masked, ensure_ascii=False)
        return {
            "id": call.call_id,
            "type": "function",
            "function": {"name": self._masker.text(call.name), "arguments": text},
        }

    def _state(self, turn: Turn, action: Message, before: Before) -> TraceState | None:
        reason = self._passed_over(action, before)
        if reason is not None:
            self._tally.pass_over(reason)
            return None
        self._tally.state()
        model = None if turn.several_models else turn.model or self.origin.assumed_model
        return TraceState(
            trace_id=self.origin.trace_id,
            state_id=f"{self.origin.trace_id}/{turn.step:04d}",
            step=turn.step,
            messages=before.messages,
            student_action=action,
            source_model=model and self._masker.text(model),
            source_family=self.origin.family or family_of(model),
            tools=self.tools.schemas(),
            error=None if turn.error is None else self._masker.text(turn.error[: 4 * ERROR_CHARS])[:ERROR_CHARS],
            entropy=turn.entropy,
            format=self.origin.format,
        )

    def _passed_over(self, action: Message, before: Before) -> str | None:
        if before.missing is not None:
            return before.missing
        if size_of(action) > self.limits.context_chars:
            return f"action over {self.limits.context_chars:,} characters"
        if not action.get("content") and not action.get("tool_calls"):
            return "no visible action (thinking only, or empty)"
        if not before.messages:
            return "nothing before it"
        if any(self.tools.lacks(call["function"]["name"]) for call in action.get("tool_calls") or []):
            return f"its tool is not among the first {MAX_TOOLS} of the file"
        if not self._fingerprints.add(digest_of(before.digest, action)):
            return "copy of an earlier state"
        return None


def too_long(limits: Limits) -> str:
    """Return the reason that nothing after an overflow can be shown."""
    return f"context over {limits.context_chars:,} characters"


def size_of(message: Message) -> int:
    """Count the characters of a message."""
    calls = message.get("tool_calls") or []
    return len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)


def digest_of(before: bytes, message: Message) -> bytes:
    """Return 8 bytes for a conversation. Call ids are left out: they differ between copies of a session."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = msgspec.json.encode([message["role"], message.get("content"), calls])
    return hashlib.blake2b(before + content, digest_size=8).digest()


def _schema(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {argument: {"type": kind} if kind else {} for argument, kind in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
