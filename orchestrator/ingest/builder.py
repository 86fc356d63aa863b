"""Messages in, states out: pairs calls with results, merges split turns, keeps the context of a trace.

    context() ──────────────┐
    assistant(), again ... ─┴─> open turn ──> tool_result() ... ──> next assistant/context/close ──> TraceState
                                                                     (the error that followed is known by then)

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

from composer_prime.families import family_of
from composer_prime.traces import Message, TraceState
from orchestrator.ingest.masking import Masker
from orchestrator.ingest.observed_tools import MAX_TOOLS, ObservedTools, OfferedTools
from orchestrator.ingest.reading import Limits
from orchestrator.ingest.recent import Recent
from orchestrator.ingest.tally import Tally
from orchestrator.ingest.thinking import split_thinking

NO_RESULT = "[no result was recorded]"
ERROR_CHARS = 500
MAX_MARKS = 50_000
"""Records of one trace whose place is remembered, for branches."""


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
class _Turn:
    key: str | None
    model: str | None
    several_models: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    marks: list[str] = field(default_factory=list)
    entropy: float | None = None


class TraceBuilder:
    """One trace. Methods that may end a turn return its state, None where there is none or it is passed over."""

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
        self.origin, self.tally = origin, tally
        self._masker, self._limits = masker, limits
        self._fingerprints = fingerprints
        self._prefixes: list[bytes] = []
        self._gathering = tools if isinstance(tools, ObservedTools) else None
        self.tools = OfferedTools([] if isinstance(tools, ObservedTools) else tools, masker.value)
        self.messages: list[Message] = []
        self._marks: list[set[str]] = []
        self._positions: dict[str, int] = {}
        self._chars, self._overflow = 0, False
        self._turn: _Turn | None = None
        self._step = 0

    def context(self, role: str, text: str, *, mark: str | None = None, error: str | None = None) -> TraceState | None:
        """A system or user message. `error` is what it tells of the turn before (formats without tool results)."""
        if error is not None:
            self.error(error)
        state = self.close()
        self._append({"role": role, "content": self._masked(text)}, {mark} if mark else set())
        return state

    def assistant(
        self,
        text: str = "",
        calls: Collection[Call] = (),
        reasoning: str = "",
        *,
        key: str | None = None,
        mark: str | None = None,
        model: str | None = None,
        entropy: float | None = None,
    ) -> TraceState | None:
        """A turn, or more of the open turn when `key` is its key (one turn written as several records).

        `model` made it and, unless another is named, those that follow; None where the record does not say.
        """
        state = None
        if self._turn is None or key is None or key != self._turn.key:
            state = self.close()
            self._turn = _Turn(key, model or self.origin.model, entropy=entropy)
        self.origin.model = model or self.origin.model
        turn, (visible, thought) = self._turn, split_thinking(text)
        turn.text += [visible] if visible.strip() else []
        turn.reasoning += [part for part in (reasoning, thought) if part.strip()]
        known = {call.call_id for call in turn.calls}
        turn.calls += [call for call in calls if call.call_id not in known]
        turn.marks += [mark] if mark else []
        return state

    def tool_result(self, call_id: str, text: str, *, error: str | None = None, mark: str | None = None) -> bool:
        """The result of a call of the open turn; False when it made no such call. Of two results the first stays."""
        turn = self._turn
        if turn is None or call_id in turn.results or all(call.call_id != call_id for call in turn.calls):
            return False
        turn.results[call_id] = text
        turn.marks += [mark] if mark else []
        if error is not None:
            self.error(error)
        return True

    def names_model(self, model: str) -> None:
        """A record beside the turns names the model that acts now; when it changes, the open turn is nobody's."""
        turn, self.origin.model = self._turn, model
        if turn is not None:
            turn.several_models = turn.several_models or turn.model not in (None, model)
            turn.model = turn.model or model

    def unanswered(self) -> str | None:
        """The first call of the open turn that has no result yet."""
        calls = self._turn.calls if self._turn else []
        results = self._turn.results if self._turn else {}
        return next((call.call_id for call in calls if call.call_id not in results), None)

    def error(self, text: str) -> None:
        """The open turn led to an error; the first one is kept."""
        if self._turn is not None and self._turn.error is None:
            self._turn.error = text

    def mark(self, mark: str) -> None:
        """Remember where in the conversation a record without a message stands."""
        if self._turn is not None:
            self._turn.marks.append(mark)
        else:
            self._place(mark)

    def holds(self, mark: str) -> bool:
        return mark in self._positions or (self._turn is not None and mark in self._turn.marks)

    def rewind(self, mark: str) -> TraceState | None:
        """Go back to just behind the record `mark`: what came after it belongs to a branch that was left."""
        if self._turn is not None and mark in self._turn.marks:
            return None
        state = self.close()
        self._truncate(self._positions.get(mark, len(self.messages)))
        return state

    def restart(self) -> TraceState | None:
        """Forget the context: it was compacted, and its summary follows."""
        state = self.close()
        self._clear()
        self._positions.clear()
        return state

    def forget(self, marks: Collection[str], summary: str, mark: str | None = None) -> TraceState | None:
        """Drop the messages of these records and put `summary` after the leading prompt; it is the record `mark`."""
        state = self.close()
        gone = set(marks)
        kept = [(m, k) for m, k in zip(self.messages, self._marks, strict=True) if not k or not k <= gone]
        first = next((index for index, (m, _) in enumerate(kept) if m["role"] not in ("system", "user")), len(kept))
        message = {"role": "user", "content": self._masked(summary)}
        kept = kept[:first] + ([(message, {mark} if mark else set())] if summary else []) + kept[first:]
        self._clear()
        for message, message_marks in _paired(kept):
            self._append(message, message_marks)
        return state

    def close(self) -> TraceState | None:
        """End the open turn: emit its state, then make it context."""
        turn, self._turn = self._turn, None
        if turn is None:
            return None
        if self._gathering is not None:
            self._gathering.saw(turn.calls)
            return None
        action = self._action(turn)
        state = self._emit(turn, action)
        shown = {name: value for name, value in action.items() if name != "reasoning_content"}
        if shown.get("content") or shown.get("tool_calls"):
            marks = set(turn.marks)
            self._append(shown, marks)
            for call in turn.calls:
                text = self._masked(turn.results.get(call.call_id, NO_RESULT))
                self._append({"role": "tool", "tool_call_id": call.call_id, "content": text}, marks)
        for mark in turn.marks:
            self._place(mark)
        return state

    def _action(self, turn: _Turn) -> Message:
        action: Message = {"role": "assistant", "content": self._masked("\n\n".join(turn.text)) or None}
        if turn.calls:
            action["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.reasoning:
            action["reasoning_content"] = self._masker.text("\n\n".join(turn.reasoning))
        return action

    def _masked(self, text: str) -> str:
        """A text that is longer than any context is never shown (_append, _passed_over): its masking can be spared."""
        return text if len(text) > self._limits.context_chars else self._masker.text(text)

    def _call(self, call: Call) -> dict[str, Any]:
        masked = self._masker.value(call.arguments)
        text = masked if isinstance(masked, str) else json.dumps(masked, ensure_ascii=False)
        return {
            "id": call.call_id,
            "type": "function",
            "function": {"name": self._masker.text(call.name), "arguments": text},
        }

    def _emit(self, turn: _Turn, action: Message) -> TraceState | None:
        step, self._step = self._step, self._step + 1
        reason = self._passed_over(action)
        if reason is not None:
            self.tally.pass_over(reason)
            return None
        self.tally.state()
        model = None if turn.several_models else turn.model or self.origin.assumed_model
        return TraceState(
            trace_id=self.origin.trace_id,
            state_id=f"{self.origin.trace_id}/{step:04d}",
            step=step,
            messages=list(self.messages),
            student_action=action,
            source_model=model and self._masker.text(model),
            source_family=self.origin.family or family_of(model),
            tools=self.tools.schemas(),
            error=None if turn.error is None else self._masker.text(turn.error[: 4 * ERROR_CHARS])[:ERROR_CHARS],
            entropy=turn.entropy,
            format=self.origin.format,
        )

    def _passed_over(self, action: Message) -> str | None:
        if self._overflow:
            return f"context over {self._limits.context_chars:,} characters"
        if _size(action) > self._limits.context_chars:
            return f"action over {self._limits.context_chars:,} characters"
        if not action.get("content") and not action.get("tool_calls"):
            return "no visible action (thinking only, or empty)"
        if not self.messages:
            return "nothing before it"
        if any(self.tools.lacks(call["function"]["name"]) for call in action.get("tool_calls") or []):
            return f"its tool is not among the first {MAX_TOOLS} of the file"
        if not self._fingerprints.add(_digest(self._prefixes[-1], action)):
            return "copy of an earlier state"
        return None

    def _append(self, message: Message, marks: set[str]) -> None:
        self._chars += _size(message)
        if self._chars > self._limits.context_chars:
            # Nothing that follows can be shown with its context: hold no more of it until a restart.
            self._overflow = True
            self.messages, self._marks, self._prefixes = [], [], []
            return
        self.messages.append(message)
        self._marks.append(marks)
        self._prefixes.append(_digest(self._prefixes[-1] if self._prefixes else b"", message))
        for mark in marks:
            self._place(mark)

    def _place(self, mark: str) -> None:
        """The record `mark` stands behind the messages there are now. The oldest marks are forgotten first."""
        self._positions[mark] = len(self.messages)
        if len(self._positions) > MAX_MARKS:
            del self._positions[next(iter(self._positions))]

    def _truncate(self, length: int) -> None:
        if self._overflow:  # the messages are gone, and with them what positions meant
            return
        del self.messages[length:], self._marks[length:], self._prefixes[length:]
        self._chars = sum(map(_size, self.messages))

    def _clear(self) -> None:
        self.messages, self._marks, self._prefixes = [], [], []
        self._chars, self._overflow = 0, False


def _paired(kept: list[tuple[Message, set[str]]]) -> list[tuple[Message, set[str]]]:
    """Without results whose call is gone; a call whose result is gone gets a stand-in."""
    out: list[tuple[Message, set[str]]] = []
    results = {message["tool_call_id"]: message for message, _ in kept if message["role"] == "tool"}
    for message, marks in kept:
        if message["role"] == "tool":
            continue
        out.append((message, marks))
        for call in message.get("tool_calls") or []:
            stand_in = {"role": "tool", "tool_call_id": call["id"], "content": NO_RESULT}
            out.append((results.get(call["id"], stand_in), marks))
    return out


def _size(message: Message) -> int:
    calls = message.get("tool_calls") or []
    return len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)


def _digest(before: bytes, message: Message) -> bytes:
    """8 bytes for a conversation; without call ids, which differ between copies of a session."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = msgspec.json.encode([message["role"], message.get("content"), calls])
    return hashlib.blake2b(before + content, digest_size=8).digest()
