"""Turns of an agent, and the states made of them.

    parts, results, errors ──> Turn ──> StateMaker.finish(turn, what came before) ──> TraceState, the turn as context

What every format shares is here, so that a reader only says which record means what. Messages are masked once, as they
enter, and shared between the states of a trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.llm.families import family_of
from composer_prime.llm.thinking import split_thinking
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.observed_tools import MAX_TOOLS, ObservedTools, OfferedTools
from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.tally import Recent, Tally
from composer_prime.traces.state import Message, TraceState

NO_RESULT = "[no result was recorded]"
ERROR_CHARS = 500
GATHERING = "the tools of the file are still being gathered"


@dataclass(slots=True, kw_only=True)
class Call:
    """A tool call. `arguments` is what the JSON text said, or the text itself where it was no JSON object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


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
