"""Read one file of agent sessions: find its format by its content, never by its name alone, and yield its states.

ingest(path) -> Iterator[TraceState]         Tally: what was taken, skipped and masked, and why
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.formats import (
    chat_messages,
    claude_code,
    mini_swe_agent,
    openhands,
    rollouts,
    swe_agent,
)
from composer_prime.traces.ingest.reading import FileStart, Limits, take_sample
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
    detected_reader, whole = _detect(path, options.limits)
    reader = named_reader or detected_reader
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


def _detect(path: Path, limits: Limits) -> tuple[Format | None, Any]:
    """Return (the first format that matches, the value of a file that is one document). No lines are kept."""
    sample = take_sample(path, limits)
    return next((reader for reader in FORMATS if reader.matches(sample)), None), sample.document


def _named(name: str) -> Format:
    for reader in FORMATS:
        if name == reader.NAME:
            return reader
    names = ", ".join(reader.NAME for reader in FORMATS)
    raise ConfigError(f"there is no trace format {name!r}: choose one of {names}, or leave it out to detect it")
