"""Ingest files, several at a time, and write their states in the order of the files.

    file ─> process ─> part: its lines, each state's behind its fingerprint ─┐
    file ─> process ─> part                                                  ├─> merge, in order ─> compressed file
    ...                                                                      ┘   copies of earlier states are dropped,
                                                                                 ids of traces become unique

One process does the same without a pool, so the number of processes changes nothing in the output.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.run.process import end_with_parent
from composer_prime.traces.ingest.ingest import ingest
from composer_prime.traces.ingest.trace_file import COPY, Options, Recent, Tally, unique_name
from composer_prime.traces.states_file import TRACE, StateLines, compressed

_POOL_BYTES = 16 << 20
"""Files with fewer bytes are ingested here: a process takes a second to start."""
_KEY_CHARS = 16
_stop: Any = None
"""In a process of the pool: the event that ends its work."""


class _Stopped(Exception):
    """The ingestion was interrupted. Raised within a process of the pool."""


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
) -> Iterator[tuple[Path, Tally]]:
    """Write the states of all files into `output`, compressed. Yield each file with its account, in order.

    `advance` is called with the bytes read. Raises OSError, and ConfigError where a process dies.
    """
    fingerprints, trace_ids = Recent(), Recent()
    with (
        TemporaryDirectory(prefix=".ingest-", dir=output.parent) as folder,
        output.open("wb") as file,
        _accounts(files, sizes, Path(folder), how, processes, advance) as accounts,
    ):
        with compressed(file) as sink:
            for path, part, tally in accounts:
                _merge(part, sink, tally, fingerprints, trace_ids)
                part.unlink()
                yield path, tally
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _accounts(
    files: list[Path], sizes: list[int], folder: Path, how: Options, processes: int, advance: Callable[[int], None]
) -> Iterator[Iterable[tuple[Path, Path, Tally]]]:
    """Yield the (file, its part, its account) of each file, in order. Raises ConfigError where a process dies."""
    parts = [folder / str(number) for number in range(len(files))]
    if processes == 1:
        yield ((path, part, _ingested(path, part, how, advance)) for path, part in zip(files, parts, strict=True))
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(stop,))
    place = files[0]

    def accounts() -> Iterator[tuple[Path, Path, Tally]]:
        nonlocal place
        for number, place in enumerate(files):
            tally = futures.pop(number).result()
            advance(sizes[number])
            yield place, parts[number], tally

    try:
        # The largest begin first, so that no process is left alone with one at the end.
        order = sorted(range(len(files)), key=lambda number: -sizes[number])
        futures = {number: pool.submit(_in_pool, files[number], parts[number], how) for number in order}
        yield accounts()
    except BrokenProcessPool:
        raise ConfigError(
            f"a process of the ingestion ended at {place} or later (is the memory used up?): repeat with --processes 1"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _begin(stop: Any) -> None:
    """Prepare a process of the pool. Ctrl-C ends it without a word; the parent tells the user."""
    global _stop
    _stop = stop
    end_with_parent(always=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _in_pool(path: Path, part: Path, how: Options) -> Tally:
    return _ingested(path, part, how, _check_stop)


def _check_stop(_: int) -> None:
    if _stop.is_set():
        raise _Stopped


def _ingested(path: Path, part: Path, how: Options, advance: Callable[[int], None]) -> Tally:
    """Write the lines of one file's states to `part`. Return its account."""
    tally, noting, table = Tally(), _Noting(), StateLines()
    with part.open("wb") as file:
        for state in ingest(path, tally, how, fingerprints=noting, progress=advance):
            *lines, own = table.lines(state)
            file.writelines(lines)
            file.write(noting.accepted.popleft().hex().encode() + own)
    return tally


def _merge(part: Path, sink: Any, tally: Tally, fingerprints: Recent, trace_ids: Recent) -> None:
    """Write a part to `sink`, without the states that an earlier file has."""
    names: dict[str, str] = {}
    lines: BinaryIO
    with part.open("rb") as lines:
        for line in lines:
            if line.startswith(TRACE):
                name = msgspec.json.decode(line)["trace"]
                names[name] = names.get(name) or unique_name(name, trace_ids)
                sink.write(msgspec.json.encode({"trace": names[name]}) + b"\n")
            elif line.startswith(b"{"):
                sink.write(line)
            elif fingerprints.add(bytes.fromhex(line[:_KEY_CHARS].decode())):
                sink.write(line[_KEY_CHARS:])
            else:
                tally.states -= 1
                tally.turns -= 1
                tally.pass_over(COPY)
