"""A file being read, as a format's reader sees it."""

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
    """The model that made the traces, where they do not say."""
    family: str | None = None
    """Its family, whatever the traces say."""
    format: str | None = None
    """A format's name; None finds it."""
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True, kw_only=True)
class TraceFile:
    """A file being read: what a format's reader needs."""

    path: Path
    whole: Any
    """The value of a file that is one JSON document, or `Bad`; None when it is a file of lines, or a folder."""
    options: Options
    tally: Tally
    format: str
    fingerprints: Recent = field(default_factory=Recent)
    trace_ids: Recent = field(default_factory=Recent)
    progress: Callable[[int], None] | None = None
    tools: ObservedTools | list[dict[str, Any]] = field(default_factory=list)
    """What the file's turns call, or where it is still to be gathered."""
    observed: ObservedTools | None = None
    """Of the whole file, once that is gathered."""
    size: int = sys.maxsize
    """Bytes of a file of lines that are read: what is written while it is read is left for another time."""

    def records(self) -> Iterator[Any]:
        """The values of a file of lines; a `Bad` one is skipped and counted here.

        A reader lets go of one (del) before it draws the next, so that two large ones are never held together.
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
        """`whole`, about to be read."""
        if self.progress is not None:
            self.progress(self.path.stat().st_size)
        return self.whole

    def trace(self, read: Callable[[TraceFile], Iterator[TraceState]]) -> Iterator[TraceState]:
        """The states of a trace that may be of another agent than the others of its file. Where these call more tools
        than one agent has, it is offered its own; where it acts in its text alone, none."""
        found = self.observed
        if found is None or not self.tools or not (found.too_many or found.in_text):
            return read(self)
        own = observed_tools(self, read)
        return read(replace(self, tools=own.schemas())) if found.too_many or own.only_in_text else read(self)

    def unknown(self) -> None:
        """Every record is skipped: the file is none of the reader's."""
        if self.path.is_dir() or self.whole is not None:
            value = self.document()
            self.tally.skip(value.reason if isinstance(value, Bad) else NO_TRACE)
            return
        for _ in self.records():
            self.tally.skip(NO_TRACE)

    def builder(self, trace_id: object, model: object = None) -> TraceBuilder:
        """A builder for a trace whose records stand in order."""
        return TraceBuilder(self.maker(trace_id, model))

    def maker(self, trace_id: object, model: object = None) -> StateMaker:
        """What makes the states of a trace; an id that another trace has already gets a number."""
        wanted = str(trace_id)[:200] if isinstance(trace_id, str | int) and str(trace_id).strip() else self.path.stem
        masker = Masker(self.tally.masked, self.options.mask)
        # The name of a file need not be UTF-8.
        wanted = masker.text(wanted.encode("utf-8", "replace").decode("utf-8"))
        name, number = wanted, 1
        while not self.trace_ids.add(hashlib.blake2b(name.encode(), digest_size=8).digest()):
            number += 1
            name = f"{wanted}~{number}"
        origin = Origin(
            trace_id=name,
            format=self.format,
            model=model if isinstance(model, str) and model else None,
            assumed_model=self.options.model,
            family=self.options.family,
        )
        return StateMaker(origin, self.tally, masker, self.options.limits, self.fingerprints, self.tools)


def observed_tools(file: TraceFile, read: Callable[[TraceFile], Iterator[TraceState]]) -> ObservedTools:
    """The tools called by the turns that `read` finds; no context is held, and nothing is masked or counted."""
    tools = ObservedTools(Masker(Counter(), file.options.mask).text)
    told = file.progress
    first = replace(
        file,
        tally=Tally(),
        options=replace(file.options, mask=False),
        fingerprints=Recent(),
        trace_ids=Recent(),
        progress=None if told is None else lambda _: told(0),
        tools=tools,
        observed=None,
    )
    for _ in read(first):
        pass
    return tools
