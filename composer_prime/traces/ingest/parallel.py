"""Ingest files, several at a time, and write their states in the order of the files.

    file ─> process ─> part: each state's line behind its fingerprint ─┐
    file ─> process ─> part                                            ├─> merge, in order ─> compressed file
    ...                                                                ┘   copies of earlier states are dropped,
                                                                           ids of traces become unique

One process does the same without a pool, so the number of processes changes nothing in the output.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.run.process import end_with_parent
from composer_prime.traces.ingest.ingest import ingest
from composer_prime.traces.ingest.trace_file import COPY, Options, Recent, Tally, unique_name
from composer_prime.traces.states import StateName, TraceState, compressed_lines, state_lines, write_state

_POOL_BYTES = 16 << 20
"""Files with fewer bytes are ingested here: a process takes a second to start."""
_KEY_CHARS = 16
Ingested = tuple[Path, Tally]


class _Noting(Recent):
    """Fingerprints of one file. Each accepted one is that of the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: deque[bytes] = deque()

    def add(self, key: bytes) -> bool:
        new = super().add(key)
        if new:
            self.accepted.append(key)
        return new


def processes_for(files: list[Path], sizes: list[int], asked: int | None) -> int:
    """Return how many processes ingest the files: as many as `asked`, or one a core where that is worth it."""
    if asked is None:
        asked = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        asked = asked if sum(sizes) >= _POOL_BYTES else 1
    return max(min(asked, len(files)), 1)


def write_states(
    files: list[Path], sizes: list[int], output: Path, how: Options, processes: int, advance: Callable[[int], None]
) -> Iterator[Ingested]:
    """Write the states of all files into `output`, compressed. Yield each file with its account, in order.

    `advance` is called with the bytes read. Raises OSError, and ConfigError where a process dies.
    """
    fingerprints, trace_ids = Recent(), Recent()
    with TemporaryDirectory(prefix=".ingest-", dir=output.parent) as folder, compressed_lines(output) as sink:
        parts = [Path(folder) / str(number) for number in range(len(files))]
        if processes == 1:
            tallies = (_ingested(path, part, how, advance) for path, part in zip(files, parts, strict=True))
        else:
            tallies = _in_pool(files, sizes, parts, how, processes, advance)
        for path, part, tally in zip(files, parts, tallies, strict=True):
            _merge(part, sink, tally, fingerprints, trace_ids)
            part.unlink()
            yield path, tally


def _in_pool(
    files: list[Path], sizes: list[int], parts: list[Path], how: Options, processes: int, advance: Callable[[int], None]
) -> Iterator[Tally]:
    """Yield the account of each file, in order. Raises ConfigError where a process dies."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)
    try:
        tallies = pool.map(_ingested, files, parts, [how] * len(files))
        for size, tally in zip(sizes, tallies, strict=True):
            advance(size)
            yield tally
    except BrokenProcessPool:
        raise ConfigError(
            f"one of the {processes} processes of the ingestion ended (is the memory used up?): repeat with "
            "--processes 1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepare a process of the pool. Ctrl-C ends it without a word; the parent tells the user."""
    end_with_parent(always=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ingested(path: Path, part: Path, how: Options, advance: Callable[[int], None] | None = None) -> Tally:
    """Write the lines of one file's states to `part`. Return its account."""
    tally, noting = Tally(), _Noting()
    with compressed_lines(part) as sink:
        for state in ingest(path, tally, how, fingerprints=noting, progress=advance):
            sink.write(noting.accepted.popleft().hex().encode() + write_state(state))
    return tally


def _merge(part: Path, sink: Any, tally: Tally, fingerprints: Recent, trace_ids: Recent) -> None:
    """Write a part to `sink`, without the states that an earlier file has."""
    names: dict[str, str] = {}
    decoder = msgspec.json.Decoder(StateName)
    for line in state_lines(part):
        key, own = bytes.fromhex(line[:_KEY_CHARS].decode()), line[_KEY_CHARS:]
        if not fingerprints.add(key):
            tally.states -= 1
            tally.turns -= 1
            tally.pass_over(COPY)
            continue
        name = decoder.decode(own).trace_id
        names[name] = names.get(name) or unique_name(name, trace_ids)
        sink.write(own if names[name] == name else _renamed(own, names[name]))


def _renamed(line: bytes, trace_id: str) -> bytes:
    state = msgspec.json.decode(line, type=TraceState)
    return write_state(msgspec.structs.replace(state, trace_id=trace_id, state_id=f"{trace_id}/{state.step:04d}"))
