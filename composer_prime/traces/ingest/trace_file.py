"""A file of agent sessions as a format's reader sees it: its records, its traces, the makers of their states."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.messages import TraceBuilder
from composer_prime.traces.ingest.reading import Bad, Limits, lines
from composer_prime.traces.ingest.tally import Recent, Tally
from composer_prime.traces.ingest.turns import ObservedTools, Origin, StateMaker
from composer_prime.traces.state import TraceState

NO_TRACE = "not a known trace format"


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
    fingerprints: Recent = field(default_factory=Recent)
    trace_ids: Recent = field(default_factory=Recent)
    progress: Callable[[int], None] | None = None
    tools: ObservedTools | list[dict[str, Any]] = field(default_factory=list)
    """The tools that the file calls, or the collector that gathers them in the first pass."""
    observed: ObservedTools | None = None
    """The tools of the whole file, once the first pass is done."""
    size: int = sys.maxsize
    """Bytes of a file of lines that are read. What is appended meanwhile is left for another ingestion."""

    def records(self) -> Iterator[Any]:
        """Yield the values of a file of lines. `Bad` lines are skipped and counted here.

        A reader must `del` a value before it draws the next: two large values are never held together.
        """
        if self.path.is_dir():
            self.tally.skip(NO_TRACE)
            return
        for value in lines(self.path, self.options.limits, self.progress, self.size):
            if isinstance(value, Bad):
                self.tally.skip(value.reason)
            else:
                yield value
            del value

    def document(self) -> Any:
        """Return `whole` and report it as read."""
        if self.progress is not None:
            self.progress(self.path.stat().st_size)
        return self.whole

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
            value = self.document()
            self.tally.skip(value.reason if isinstance(value, Bad) else NO_TRACE)
            return
        for _ in self.records():
            self.tally.skip(NO_TRACE)

    def builder(self, trace_id: object, model: object = None) -> TraceBuilder:
        """Return a builder for a trace whose records are in the order in which the agent saw them."""
        return TraceBuilder(self.maker(trace_id, model))

    def maker(self, trace_id: object, model: object = None) -> StateMaker:
        """Return the maker of a trace's states. A trace id that is taken gets a number."""
        trace_name = (
            str(trace_id)[:200] if isinstance(trace_id, str | int) and str(trace_id).strip() else self.path.stem
        )
        masker = Masker(self.tally.masked, self.options.mask)
        # The name of a file need not be UTF-8.
        trace_name = masker.text(trace_name.encode("utf-8", "replace").decode("utf-8"))
        name, number = trace_name, 1
        while not self.trace_ids.add(hashlib.blake2b(name.encode(), digest_size=8).digest()):
            number += 1
            name = f"{trace_name}~{number}"
        origin = Origin(
            trace_id=name,
            format=self.format,
            model=model if isinstance(model, str) and model else None,
            assumed_model=self.options.model,
            family=self.options.family,
        )
        return StateMaker(origin, self.tally, masker, self.options.limits, self.fingerprints, self.tools)


def observed_tools(file: TraceFile, read: Callable[[TraceFile], Iterator[TraceState]]) -> ObservedTools:
    """Gather the tools that the turns call. No context is held, nothing is masked or counted."""
    tools = ObservedTools(Masker(Counter(), file.options.mask).text)
    progress = file.progress
    first = replace(
        file,
        tally=Tally(),
        options=replace(file.options, mask=False),
        fingerprints=Recent(),
        trace_ids=Recent(),
        progress=None if progress is None else lambda _: progress(0),
        tools=tools,
        observed=None,
    )
    for _ in read(first):
        pass
    return tools
