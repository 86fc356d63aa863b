"""Turn one file of recorded agent sessions into states. Read this file first.

    file -> reading.py -> formats/ -> conversation.py -> trace_file.py -> TraceState
            bounded JSON  a reader    contexts, open turns  |  masking/ masks every text on entry
                          a format                          `-> Tally: every record is taken, or skipped with a reason

A file's format is found by its content, never by its name alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from composer_prime.traces.ingest.formats import (
    atif,
    chat_messages,
    claude_code,
    codex,
    openhands,
    own_rollouts,
    swe_agent,
)
from composer_prime.traces.ingest.reading import take_sample
from composer_prime.traces.ingest.trace_file import NO_TRACE, Options, Tally, TraceFile
from composer_prime.traces.states import TraceState, is_compressed

FORMATS = (
    claude_code,
    codex,
    openhands,
    swe_agent,
    atif,
    own_rollouts,
    chat_messages,
)
"""Each has its NAME, the VERSION of the format that it is written for, `matches(sample)` and `read(file)`."""


def ingest(
    path: Path,
    tally: Tally | None = None,
    options: Options | None = None,
    *,
    fingerprints: set[bytes] | None = None,
    trace_ids: set[str] | None = None,
) -> Iterator[TraceState]:
    """Yield the states of one file, or of one OpenHands conversation folder, in its order.

    The file is read twice, first to gather the tools that it uses. Bytes appended after the start are not read. `tally`
    is filled as states are drawn and balances at the end. `fingerprints` and `trace_ids` may be shared between files.
    Raises OSError when the file cannot be read. Bad content is counted and never raises.
    """
    options, tally = options or Options(), Tally() if tally is None else tally
    named = [reader for reader in FORMATS if options.format == reader.NAME]
    size = path.stat().st_size
    if path.is_file() and is_compressed(path):  # states, of which no states are made
        tally.skip(NO_TRACE)
        return
    sample = take_sample(path, options.limits)
    reader = next((reader for reader in named or FORMATS if named or reader.matches(sample)), None)
    whole = sample.document
    del sample  # no lines are kept
    tally.format = f"{reader.NAME}/{reader.VERSION}" if reader else None
    file = TraceFile(
        path=path,
        whole=whole,
        options=options,
        tally=tally,
        format=tally.format or "",
        fingerprints=set() if fingerprints is None else fingerprints,
        trace_ids=set() if trace_ids is None else trace_ids,
        size=size,
    )
    if reader is None:
        file.unknown()
    else:
        file.observe(reader.read)
        yield from reader.read(file)
