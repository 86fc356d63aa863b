"""Which reader reads a file: the first whose `matches` says so, by the file's content, never by its name alone.

ingest(path) -> Iterator[TraceState]         tally: what was taken, skipped, masked, and why
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.formats import chat_messages as messages
from composer_prime.traces.ingest.formats import claude_code, mini_swe_agent, openhands, rollouts, swe_agent
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.ingest.messages import TraceBuilder
from composer_prime.traces.ingest.observed_tools import ObservedTools
from composer_prime.traces.ingest.reading import Bad, FileStart, Limits, lines, take_sample
from composer_prime.traces.ingest.tally import Recent, Tally
from composer_prime.traces.ingest.turns import Origin, StateMaker
from composer_prime.traces.state import TraceState

NO_TRACE = "not a known trace format"


class Format(Protocol):
    """What a format's module has."""

    NAME: str
    VERSION: int
    """Of the format, as this reader was written for it; it stands in every state."""

    @staticmethod
    def matches(sample: FileStart) -> bool: ...

    @staticmethod
    def read(file: TraceFile) -> Iterator[TraceState]: ...


FORMATS: tuple[Format, ...] = (claude_code, openhands, swe_agent, rollouts, mini_swe_agent, messages)  # pyright: ignore


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
        own = _observed(self, read)
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


def ingest(
    path: Path,
    tally: Tally | None = None,
    options: Options | None = None,
    *,
    fingerprints: Recent | None = None,
    trace_ids: Recent | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TraceState]:
    """The states of one file (or of one OpenHands conversation folder), in its order, in bounded memory.

    The file is read twice, first for the tools that it uses, and only as far as it went when that began. `tally` is
    filled as states are drawn and is balanced at the end. `fingerprints` and `trace_ids` may be shared between files.
    `progress` is called with bytes read, in the first pass with 0. Raises OSError when the file cannot be read and
    ConfigError for an unknown `options.format`; whatever the content is, it is counted, never raised.
    """
    options, tally = options or Options(), Tally() if tally is None else tally
    named = _named(options.format) if options.format else None
    size = path.stat().st_size
    found, whole = _detected(path, options.limits)
    reader = named or found
    tally.format = f"{reader.NAME}/{reader.VERSION}" if reader else None
    file = TraceFile(
        path=path,
        whole=whole,
        options=options,
        tally=tally,
        format=tally.format or "",
        fingerprints=fingerprints or Recent(),
        trace_ids=trace_ids or Recent(),
        progress=progress,
        size=size,
    )
    if reader is None:
        file.unknown()
    else:
        file.observed = _observed(file, reader.read)
        file.tools = file.observed.schemas()
        yield from reader.read(file)


def _observed(file: TraceFile, read: Callable[[TraceFile], Iterator[TraceState]]) -> ObservedTools:
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


def _detected(path: Path, limits: Limits) -> tuple[Format | None, Any]:
    """(the format that knows the file, its value where it is one document); of lines no sample is kept."""
    sample = take_sample(path, limits)
    return next((reader for reader in FORMATS if reader.matches(sample)), None), sample.document


def _named(name: str) -> Format:
    for reader in FORMATS:
        if name == reader.NAME:
            return reader
    names = ", ".join(reader.NAME for reader in FORMATS)
    raise ConfigError(f"there is no trace format {name!r}: choose one of {names}, or leave it out to have it found")
