"""A file of agent sessions as a format's reader sees it: its records, their account, and the states made of its turns.

    records, results, errors ─> Turn ─> StateMaker.finish(turn, what came before) ─> TraceFile.drain(), context

What the formats share is here and in agent_turns.py. A reader only decides what each record means. Messages are masked
once, on entry, and the states of a trace share them.

Records (a line, an event, a message of a document) are taken or skipped, turns of the assistant give states or are
passed over, each by reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_prime.model_families import family_of
from composer_prime.traces.ingest.agent_turns import (
    MAX_TOOLS,
    Call,
    ObservedTools,
    OfferedTools,
    Turn,
    digest_of,
    size_of,
)
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.reading import Bad, Limits, lines
from composer_prime.traces.states import Message, TraceState

NO_TRACE = "not a known trace format"
NO_RESULT = "[no result was recorded]"
COPY = "copy of an earlier state"
GATHERING = "the tools of the file are still being gathered"
ERROR_CHARS = 500


@dataclass(slots=True)
class Tally:
    """Counts of one file, or the sum over several files."""

    taken: int = 0
    """Records that a reader used."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that no state is made of, by reason."""
    states: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    """Turns that became no state, by reason."""
    masked: Counter[str] = field(default_factory=Counter)
    """Secrets by kind. Each occurrence in a distinct message counts once."""
    format: str | None = None
    """The reader that read the file; None when no reader matched."""

    @property
    def seen(self) -> int:
        return self.taken + self.skipped.total()

    @property
    def turns(self) -> int:
        return self.states + self.passed_over.total()

    def skip(self, reason: str) -> None:
        """Count a record that no state is made of."""
        self.skipped[reason] += 1

    def add(self, other: Tally) -> None:
        """Add the counts of another file."""
        self.taken += other.taken
        self.states += other.states
        self.skipped += other.skipped
        self.passed_over += other.passed_over
        self.masked += other.masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to ingest."""

    mask: bool = True
    model: str | None = None
    """The model that made the traces, for traces that do not name it."""
    family: str | None = None
    """The model's family. It overrides what the traces say."""
    format: str | None = None
    """A format's name; None detects it."""
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True, kw_only=True)
class TraceFile:
    """What a format's reader needs to read a file."""

    path: Path
    whole: Any
    """The value of a file that is one JSON document, or `Bad`; None for a file of lines or a folder."""
    options: Options
    tally: Tally
    format: str
    fingerprints: set[bytes] = field(default_factory=set)
    """States seen so far. A copied state is passed over."""
    trace_ids: set[str] = field(default_factory=set)
    tools: ObservedTools | list[dict[str, Any]] = field(default_factory=list)
    """The tools that the file calls. In the first pass, the collector that gathers them; then no state is made."""
    observed: ObservedTools | None = None
    """The tools of the whole file, once the first pass is done."""
    size: int = sys.maxsize
    """Bytes of a file of lines that are read. What is appended meanwhile is left for another ingestion."""
    ready: list[TraceState] = field(default_factory=list)

    def drain(self) -> list[TraceState]:
        """Return the states that were made since. A reader yields them after each record."""
        states = self.ready.copy()
        self.ready.clear()
        return states

    def records(self) -> Iterator[Any]:
        """Yield the values of a file of lines. `Bad` lines are skipped and counted here.

        A reader must `del` a value before it draws the next: two large values are never held together.
        """
        if self.path.is_dir():
            self.tally.skip(NO_TRACE)
            return
        for value in lines(self.path, self.options.limits, self.size):
            if isinstance(value, Bad):
                self.tally.skip(value.reason)
            else:
                yield value
            del value

    def trace(self, read: Callable[[TraceFile], Iterator[TraceState]]) -> Iterator[TraceState]:
        """Yield the states of one trace of a file that may hold several agents.

        When the file calls more tools than one agent has, the trace is offered only the tools that it calls itself.
        When the trace acts in its text only, it is offered none.
        """
        observed = self.observed
        if observed is None or not self.tools or not (observed.too_many or observed.in_text):
            return read(self)
        own = observed_tools(self, read)
        return read(replace(self, tools=own.schemas())) if observed.too_many or own.only_in_text else read(self)

    def unknown(self) -> None:
        """Skip every record: the file does not belong to the reader."""
        if self.path.is_dir() or self.whole is not None:
            self.tally.skip(self.whole.reason if isinstance(self.whole, Bad) else NO_TRACE)
            return
        for _ in self.records():
            self.tally.skip(NO_TRACE)


def unique_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a number where another trace has it, and add it to those that are taken."""
    numbered, number = name, 1
    while numbered in taken:
        number += 1
        numbered = f"{name}~{number}"
    taken.add(numbered)
    return numbered


def observed_tools(file: TraceFile, read: Callable[[TraceFile], Iterator[TraceState]]) -> ObservedTools:
    """Gather the tools that the turns call. No context is held, nothing is masked or counted."""
    tools = ObservedTools(Masker(Counter(), file.options.mask).text)
    first = replace(
        file,
        tally=Tally(),
        options=replace(file.options, mask=False),
        fingerprints=set(),
        trace_ids=set(),
        tools=tools,
        observed=None,
    )
    for _ in read(first):
        pass
    return tools


class StateMaker:
    """The states of one trace."""

    def __init__(self, file: TraceFile, trace_id: object, model: object = None) -> None:
        """The trace has the file's name where it has no `trace_id`. `model` is the one that the trace names."""
        self._file = file
        self.limits = file.options.limits
        self._masker = Masker(file.tally.masked, file.options.mask)
        named = isinstance(trace_id, str | int) and str(trace_id).strip()
        name = str(trace_id)[:200] if named else file.path.stem
        # The name of a file need not be UTF-8.
        masked = self._masker.text(name.encode("utf-8", "replace").decode("utf-8"))
        self._trace_id = unique_name(masked, file.trace_ids)
        self.model = model if isinstance(model, str) and model else None
        """The model that the trace named last."""
        called = None if isinstance(file.tools, ObservedTools) else file.tools
        self.unshown = GATHERING if called is None else None
        """Why no context is held; None when it is."""
        self.tools = OfferedTools(called or [], self._masker.value)
        self._steps = 0

    def turn(self, key: str | None, model: str | None, entropy: float | None = None) -> Turn:
        """Start the next turn. `model` made it and those that follow, until another model is named."""
        self.model = model or self.model
        self._steps += 1
        return Turn(key, self.model, self._steps - 1, entropy=entropy)

    def message(self, role: str, text: str) -> Message:
        return {"role": role, "content": self._masked(text)}

    def result(self, call_id: str, text: str) -> Message:
        return {"role": "tool", "tool_call_id": call_id, "content": self._masked(text)}

    def finish(self, turn: Turn, messages: list[Message], digest: bytes, missing: str | None) -> list[Message]:
        """Make the turn's state, unless it is passed over. Return the messages that later contexts show of it.

        `messages`: the context of the turn, which the state keeps, and its `digest`. `missing`: why it cannot be shown.
        """
        if isinstance(self._file.tools, ObservedTools):
            self._file.tools.add(turn)
            return []
        action = self._action(turn)
        reason = missing or turn.aside or self._passed_over(action, messages, digest)
        if reason is not None:
            self._file.tally.passed_over[reason] += 1
        else:
            self._file.tally.states += 1
            self._file.ready.append(self._state(turn, action, messages))
        shown = {name: value for name, value in action.items() if name != "reasoning_content"}
        if not shown.get("content") and not shown.get("tool_calls"):
            return []
        results = [self.result(call.call_id, turn.results.get(call.call_id, NO_RESULT)) for call in turn.calls]
        return [shown, *results]

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

    def _passed_over(self, action: Message, messages: list[Message], digest: bytes) -> str | None:
        if size_of(action) > self.limits.context_chars:
            return f"action over {self.limits.context_chars:,} characters"
        if not action.get("content") and not action.get("tool_calls"):
            return "no visible action (thinking only, or empty)"
        if not messages:
            return "nothing before it"
        if any(self.tools.lacks(call["function"]["name"]) for call in action.get("tool_calls") or []):
            return f"its tool is not among the first {MAX_TOOLS} of the file"
        fingerprint, seen = digest_of(digest, action), self._file.fingerprints
        if fingerprint in seen:
            return COPY
        seen.add(fingerprint)
        return None

    def _state(self, turn: Turn, action: Message, messages: list[Message]) -> TraceState:
        options = self._file.options
        model = None if turn.several_models else turn.model or options.model
        return TraceState(
            trace_id=self._trace_id,
            state_id=f"{self._trace_id}/{turn.step:04d}",
            step=turn.step,
            messages=messages,
            student_action=action,
            source_model=model and self._masker.text(model),
            source_family=options.family or family_of(model),
            tools=self.tools.schemas,
            error=None if turn.error is None else self._masker.text(turn.error[: 4 * ERROR_CHARS])[:ERROR_CHARS],
            entropy=turn.entropy,
            format=self._file.format,
        )
