"""Turn one file of recorded agent sessions into states. Read this file first.

    file -> reading.py -> formats/ -> messages.py or record_tree.py -> trace_file.py -> TraceState
            bounded JSON  a reader    |  contexts, open turns          |  masking/ masks every text on entry
                          a format    `-> Tally: every record is taken, or skipped with a reason

A file's format is found by its content, never by its name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.formats import (
    chat_messages,
    claude_code,
    mini_swe_agent,
    openhands,
    rollouts,
    swe_agent,
)
from composer_prime.traces.ingest.reading import FileStart, take_sample
from composer_prime.traces.ingest.trace_file import Options, Recent, Tally, TraceFile, observed_tools
from composer_prime.traces.state import TraceState


class Format(Protocol):
    """What a format's module defines."""

    NAME: str
    VERSION: int
    """Version of the format that the reader is written for. Every state records it."""

    @staticmethod
    def matches(sample: FileStart) -> bool: ...

    @staticmethod
    def read(file: TraceFile) -> Iterator[TraceState]: ...


FORMATS: tuple[Format, ...] = (claude_code, openhands, swe_agent, rollouts, mini_swe_agent, chat_messages)  # pyright: ignore


def ingest(
    path: Path,
    tally: Tally | None = None,
    options: Options | None = None,
    *,
    fingerprints: Recent | None = None,
    trace_ids: Recent | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TraceState]:
    """Yield the states of one file, or of one OpenHands conversation folder, in its order and in bounded memory.

    The file is read twice, first to gather the tools that it uses. Bytes appended after the start are not read. `tally`
    is filled as states are drawn and balances at the end. `fingerprints` and `trace_ids` may be shared between files.
    `progress` is called with the bytes read, with 0 in the first pass. Raises OSError when the file cannot be read and
    ConfigError for an unknown `options.format`. Bad content is counted and never raises.
    """
    options, tally = options or Options(), Tally() if tally is None else tally
    named_reader = _named(options.format) if options.format else None
    size = path.stat().st_size
    sample = take_sample(path, options.limits)
    reader = named_reader or next((reader for reader in FORMATS if reader.matches(sample)), None)
    whole = sample.document
    del sample  # no lines are kept
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
        file.observed = observed_tools(file, reader.read)
        file.tools = file.observed.schemas()
        yield from reader.read(file)


def _named(name: str) -> Format:
    for reader in FORMATS:
        if name == reader.NAME:
            return reader
    names = ", ".join(reader.NAME for reader in FORMATS)
    raise ConfigError(f"there is no trace format {name!r}: choose one of {names}, or leave it out to detect it")
