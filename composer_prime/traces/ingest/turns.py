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
from composer_prime.llm.thinking import split_thinking
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.tally import Recent, Tally
from composer_prime.traces.replay.actions.text_actions import may_act
from composer_prime.traces.state import Message, TraceState

NO_RESULT = "[no result was recorded]"
ERROR_CHARS = 500
GATHERING = "the tools of the file are still being gathered"
MAX_TOOLS, MAX_ARGUMENTS = 128, 64
"""What one agent may have; the rest of a hostile file is not described."""
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
    """A tool call. `arguments` is what the JSON text said, or the text itself where it was no JSON object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(slots=True)
class Turn:
    """One answer of the model, perhaps not whole yet, and what its calls led to."""

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
        """A part of the answer; thinking may stand in its text too."""
        visible, thought = split_thinking(text)
        self.text += [visible] if visible.strip() else []
        self.reasoning += [part for part in (reasoning, thought) if part.strip()]
        known = {call.call_id for call in self.calls}
        self.calls += [call for call in calls if call.call_id not in known]

    def answer(self, call_id: str, text: str, error: str | None) -> bool:
        """The result of a call; False when it was not made. Of two results the first stays."""
        if call_id in self.results or all(call.call_id != call_id for call in self.calls):
            return False
        self.results[call_id] = text
        if error is not None:
            self.fail(error)
        return True

    def fail(self, error: str) -> None:
        """It led to an error; the first one is kept."""
        self.error = error if self.error is None else self.error

    def unanswered(self) -> str | None:
        """The first call that has no result yet."""
        return next((call.call_id for call in self.calls if call.call_id not in self.results), None)


class ObservedTools:
    """What the turns of a file call, as function tools in the form of OpenAI's chat completions."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        """`mask` takes secrets out of a name: files write them into tools as well."""
        self._mask = mask
        self._arguments: dict[str, dict[str, str]] = {}
        self.too_many = False
        """Whether more are called than are described."""
        self.in_text = False
        """Whether a turn seems to act in its text."""

    @property
    def only_in_text(self) -> bool:
        """Whether nothing is called and turns act in their text: such an agent is offered no tools."""
        return self.in_text and not self._arguments

    def saw(self, turn: Turn) -> None:
        if not turn.calls and not self.in_text:
            self.in_text = any(map(may_act, turn.text))
        for call in turn.calls:
            if call.name not in self._arguments and len(self._arguments) >= MAX_TOOLS:
                self.too_many = True
                continue
            known = self._arguments.setdefault(call.name, {})
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            for argument, value in arguments.items():
                if argument not in known and len(known) < MAX_ARGUMENTS:
                    known[argument] = _type_of(value)

    def schemas(self) -> list[dict[str, Any]]:
        """In the order of their names, which says nothing of when they were called."""
        masked: dict[str, dict[str, str]] = {}
        for name, arguments in self._arguments.items():
            masked.setdefault(self._mask(name), {}).update({self._mask(key): kind for key, kind in arguments.items()})
        return [_schema(name, masked[name]) for name in sorted(masked)]


class OfferedTools:
    """The tools of one trace's states."""

    def __init__(self, observed: list[dict[str, Any]], mask: Callable[[Any], Any]) -> None:
        """`observed` in the file; `mask` takes secrets out of a JSON value."""
        self._mask, self._schemas = mask, observed
        self._observed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in observed}
        self._listed = False

    def given(self, tools: object) -> bool:
        """The format lists the tools itself; False, and nothing changes, when `tools` is no such list."""
        found = [tool for tool in tools if _is_function(tool)] if isinstance(tools, list) else []
        if not found:
            return False
        self._schemas, self._listed = [self._with_arguments(tool) for tool in self._mask(found)], True
        return True

    def schemas(self) -> list[dict[str, Any]]:
        """The same list object for all states: they share it."""
        return self._schemas

    def lacks(self, name: str) -> bool:
        """Whether a tool that was called is beyond those that were described: MAX_TOOLS others were called before."""
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
    """As the trace says; the last one that it named."""
    assumed_model: str | None = None
    """As the user says: holds where the trace names none."""
    family: str | None = None
    """Overrides the family of `model`: the user said so."""


@dataclass(frozen=True, slots=True)
class Before:
    """The context of a turn."""

    messages: list[Message]
    """For the state to keep, and for nobody to change."""
    digest: bytes
    missing: str | None = None
    """Why it cannot be shown; then there are no messages."""


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
        """`fingerprints` of states seen already, shared between traces: a copied state is passed over. `tools` are what
        the file calls, or are still to be gathered: then calls are noted there, and no state is made."""
        self.origin, self.limits = origin, limits
        self._tally, self._masker, self._fingerprints = tally, masker, fingerprints
        self._gathering = tools if isinstance(tools, ObservedTools) else None
        self.unshown = None if self._gathering is None else GATHERING
        """Why no context is held, where none is needed."""
        self.tools = OfferedTools([] if isinstance(tools, ObservedTools) else tools, masker.value)
        self._steps = 0

    def turn(self, key: str | None, model: str | None, entropy: float | None = None) -> Turn:
        """The next one. `model` made it and, unless another is named, those that follow."""
        self.origin.model = model or self.origin.model
        self._steps += 1
        return Turn(key, self.origin.model, self._steps - 1, entropy=entropy)

    def message(self, role: str, text: str) -> Message:
        return {"role": role, "content": self._masked(text)}

    def result(self, call_id: str, text: str) -> Message:
        return {"role": "tool", "tool_call_id": call_id, "content": self._masked(text)}

    def finish(self, turn: Turn, before: Before) -> tuple[TraceState | None, list[Message]]:
        """(its state, None where it is passed over; what later contexts hold of it)."""
        if self._gathering is not None:
            self._gathering.saw(turn)
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
        """A text that is longer than any context is never shown: its masking can be spared."""
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
    """Why nothing that follows an overflow can be shown."""
    return f"context over {limits.context_chars:,} characters"


def size_of(message: Message) -> int:
    """Its characters."""
    calls = message.get("tool_calls") or []
    return len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)


def digest_of(before: bytes, message: Message) -> bytes:
    """8 bytes for a conversation; without call ids, which differ between copies of a session."""
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
