"""What a crash must not lose: the journal, the orchestrator's part of a checkpoint, and the way back from both.

    journal/000001.log    magic, then frames:  u32 length | u32 crc32 | msgpack of one entry

    Started    a group was dispatched: its plan
    Finished   a group is ready: its samples and rollouts       (before it can enter a batch)
    Dropped    a group was filtered, failed or is stale
    Formed     a batch has its groups                           (fsynced before a trainer sees it)

One writer thread does all file work, in the order of the calls. A written entry survives kill -9. A Formed entry is on
the disk: it survives a power cut, with everything before it.

The state (checkpoints/step_N/orchestrator/state.json) names the groups that counted at that moment; they themselves are
in the journal. It is taken in one step of the event loop with the journal's sequence number, so the two never disagree.
`resume` replays newer entries on it. A group is in one place: in flight, ready, in a formed batch, or dropped.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.errors import CheckpointError
from composer_prime.run.run_dir import RunDir, write_atomic, write_remedy
from composer_prime.wire.types import TermUnit
from orchestrator.batching.batches import Batch, Versions
from orchestrator.file_rows import PairCursor
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan
from orchestrator.tasks import Sources

logger = logging.getLogger(__name__)

FORMAT = 1
_MAGIC = b"composer-journal-1\n"
_FRAME = struct.Struct("<II")
_NAME = re.compile(r"\d{6,}\.log")
SEGMENT_BYTES = 64 << 20


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    seq: int
    plan: GroupPlan


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    seq: int
    group: FinishedGroup


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    seq: int
    group: FinishedGroup
    """Without samples; its outcome is the reason."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    seq: int
    step: int
    groups: list[int]
    dropped: list[int]
    """Since the last batch; logged and counted with this one."""
    metrics: dict[str, float]
    oldest_version: int = 0
    """Older tokens are context in this batch."""
    units: list[TermUnit] = []
    """Its preference pairs."""
    preferences: list[dict[str, Any]] = []
    """The same in a journal of an older run: the arguments of `pair_unit`."""
    pairs: PairCursor | None = None
    """Where the pairs continue after this batch."""


Entry = Started | Finished | Dropped | Formed


@dataclass(slots=True)
class _Segment:
    path: Path
    last_seq: int = 0
    groups: set[int] = field(default_factory=set)
    """Whose Finished entry is in it."""
    steps: set[int] = field(default_factory=set)
    """Whose Formed entry is in it."""

    def note(self, entry: Entry) -> None:
        self.last_seq = max(self.last_seq, entry.seq)
        if isinstance(entry, Finished | Dropped):
            self.groups.add(entry.group.plan.group)
        elif isinstance(entry, Formed):
            self.steps.add(entry.step)


class Journal:
    """Create a new one with `Journal.create`. Only this process may write it."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, *, min_seq: int = 0) -> None:
        """Cut off a torn tail of the newest segment. Raises CheckpointError when an older one is damaged.

        Entry numbers continue after the checkpoint's `min_seq`: compaction may have emptied the journal.
        """
        folder.mkdir(parents=True, exist_ok=True)
        segments = [_Segment(path) for path in _segment_paths(folder)]
        for segment in segments:
            for entry in _read(segment.path, newest=segment is segments[-1]):
                segment.note(entry)
        self.seq = max([segment.last_seq for segment in segments] + [min_seq])
        """Of the newest entry."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._closed = segments
        self._file: BinaryIO | None = None
        """None between segments."""
        self._current: _Segment | None = None
        self._next_number = max((int(segment.path.stem) for segment in segments), default=0) + 1
        self._encoder = msgspec.msgpack.Encoder()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def create(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Create an empty journal. Removes what an earlier run left in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in _segment_paths(folder):
            path.unlink()
        return cls(folder, segment_bytes)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries of closed segments, one in memory at a time. Raises CheckpointError."""
        for segment in self._closed:
            yield from _read(segment.path, newest=False)

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def append(self, entry: Entry) -> asyncio.Future[None]:
        """Queue `entry`, with its seq from `next_seq`. Entries are written in the order of these calls.

        The future is done once the entry is written. It raises CheckpointError when that fails (a full disk).
        """
        return asyncio.get_running_loop().run_in_executor(self._writer, self._append, entry)

    async def formed_batches(self, after: int, left_out: Set[str] = frozenset()) -> list[Batch]:
        """Return `formed_batches` of all entries."""

        def read() -> list[Batch]:
            self._rotate()
            return formed_batches(self, after, left_out)

        return await asyncio.get_running_loop().run_in_executor(self._writer, read)

    async def compact(self, *, oldest_seq: int, groups: set[int], steps: set[int]) -> None:
        """Keep segments with an entry newer than `oldest_seq`, one of `groups` or a batch of `steps`."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._compact, oldest_seq, groups, steps)

    async def close(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._rotate)
        except OSError as error:
            logger.error("the journal could not be closed cleanly: %s", error)
        self._writer.shutdown(wait=True)

    def _append(self, entry: Entry) -> None:
        payload = self._encoder.encode(entry)
        try:
            if self._file is None or self._current is None:
                self._current = _Segment(self._folder / f"{self._next_number:06d}.log")
                self._next_number += 1
                self._file = self._current.path.open("xb")
                self._file.write(_MAGIC)
            self._file.write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
            self._file.flush()
            if isinstance(entry, Formed):
                os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"the journal {self._current.path if self._current else self._folder} cannot be written: {error}; "
                f"{write_remedy(error)}, then start again with --resume"
            ) from error
        self._current.note(entry)
        if self._file.tell() >= self._segment_bytes:
            self._rotate()

    def _rotate(self) -> None:
        if self._file is None or self._current is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._closed.append(self._current)
        self._file, self._current = None, None

    def _compact(self, oldest_seq: int, groups: set[int], steps: set[int]) -> None:
        self._rotate()
        needed = []
        for segment in self._closed:
            if segment.last_seq > oldest_seq or segment.groups & groups or segment.steps & steps:
                needed.append(segment)
            else:
                segment.path.unlink(missing_ok=True)
        self._closed = needed


def _segment_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _read(path: Path, *, newest: bool) -> Iterator[Entry]:
    """Cut off the newest segment's torn tail."""
    raw = path.read_bytes()
    decoder = msgspec.msgpack.Decoder(Entry)
    at = len(_MAGIC) if raw.startswith(_MAGIC) else 0
    while at and (frame := _frame(raw, at, decoder)) is not None:
        entry, at = frame
        yield entry
    if at == len(raw) and at:
        return
    if not newest:
        raise CheckpointError(
            f"{path} is damaged at byte {at} of {len(raw)}: the run's journal cannot be trusted; restore the file, "
            "or start a new run from the model in the newest checkpoint"
        )
    logger.warning("%s: cut off a torn tail of %d bytes", path, len(raw) - at)
    with path.open("r+b") as file:
        file.truncate(at)
        if at == 0:
            file.write(_MAGIC)


def _frame(raw: bytes, at: int, decoder: msgspec.msgpack.Decoder) -> tuple[Entry, int] | None:
    """Return the entry at `at`, and where the next begins; None without a whole one."""
    if at + _FRAME.size > len(raw):
        return None
    length, crc = _FRAME.unpack_from(raw, at)
    end = at + _FRAME.size + length
    payload = raw[at + _FRAME.size : end]
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None
    try:
        return decoder.decode(payload), end
    except msgspec.DecodeError:
        return None


# -- the state of a checkpoint ---------------------------------------------------------------------------------------


class GroupProgress(msgspec.Struct, kw_only=True):
    """Groups and batches under way."""

    next_group: int
    in_flight: list[GroupPlan]
    ready: list[int]
    """In the buffer."""
    dropped: list[int]
    """Since the last batch was formed."""
    batches: dict[int, list[int]]
    """Formed and not trained, with their groups."""
    pairs: PairCursor | None = None
    """Where they continue."""

    def note(self, entry: Entry, sources: Sources) -> None:
        """Take in what happened next, and bring the curricula of `sources` up to date."""
        match entry:
            case Started(plan=plan):
                sources.curricula[plan.source].next_task()
                self.in_flight.append(plan)
                self.next_group = plan.group + 1
            case Finished(group=group):
                self._end(group, sources)
                self.ready.append(group.plan.group)
            case Dropped(group=group):
                if group.plan.group in self.ready:  # It ended earlier and became stale.
                    self.ready.remove(group.plan.group)
                else:
                    self._end(group, sources)
                self.dropped.append(group.plan.group)
            case Formed():
                self.batches[entry.step] = entry.groups
                self.pairs = entry.pairs or self.pairs
                self.ready = [number for number in self.ready if number not in entry.groups]
                self.dropped = [number for number in self.dropped if number not in entry.dropped]

    def _end(self, group: FinishedGroup, sources: Sources) -> None:
        sources.observe(group)
        self.in_flight = [plan for plan in self.in_flight if plan.group != group.plan.group]


class OrchestratorState(GroupProgress, kw_only=True):
    """What the configuration does not tell of step `step`."""

    run_id: str
    step: int
    journal_seq: int
    """Later entries happened after the checkpoint."""
    curricula: dict[str, Any]
    """By source."""
    counters: dict[str, int]
    demonstrations: str = ""
    """Digest of SFT's files."""
    versions: Versions
    format: int = FORMAT


def state_path(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoint(step) / "orchestrator" / "state.json"


def save_state(run_dir: RunDir, state: OrchestratorState) -> None:
    """Write the state atomically. Raises CheckpointError, for example when the disk is full."""
    path = state_path(run_dir, state.step)
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; {write_remedy(error)}") from error


def load_state(run_dir: RunDir, step: int, run_id: str) -> OrchestratorState:
    """Read the state. Raises CheckpointError: missing, unreadable, of another run."""
    path = state_path(run_dir, step)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=OrchestratorState)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {run_dir.checkpoint(step)} has a COMPLETE marker but no orchestrator state: "
            "remove that folder to resume from the checkpoint before it"
        ) from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not an orchestrator state: {error}") from None
    if state.run_id != run_id:
        raise CheckpointError(f"{path} belongs to run {state.run_id!r}, this is run {run_id!r}")
    if state.format != FORMAT:
        raise CheckpointError(f"{path} has format {state.format}, not {FORMAT}: use the release that wrote it")
    return state


# -- the way back ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ResumedRun:
    """What was in progress when the run broke off."""

    next_group: int
    in_flight: list[GroupPlan]
    """To dispatch again."""
    ready: list[FinishedGroup] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    """Formed after the checkpoint."""
    dropped: list[FinishedGroup] = field(default_factory=list)
    """Since the last formed batch."""
    pairs: PairCursor | None = None


def resume(
    state: OrchestratorState, entries: Iterable[Entry], sources: Sources, left_out: Set[str] = frozenset()
) -> ResumedRun:
    """Replay `entries`, which are read twice, on `state` and the curricula of `sources`.

    `left_out`: samples and pairs (`pair ID`) that no batch serves again. Raises CheckpointError when the journal lacks
    a group that the checkpoint or a batch names.
    """
    sources.load_state(state.curricula)
    progress = copy.deepcopy(state)
    for entry in entries:
        if entry.seq > state.journal_seq:
            progress.note(entry, sources)
    named = {*progress.ready, *progress.dropped}.union(*progress.batches.values())
    finished, dropped, formed = _kept(entries, named, progress.batches.keys())
    _check_complete(progress, finished)
    return ResumedRun(
        next_group=progress.next_group,
        in_flight=sorted(progress.in_flight, key=lambda plan: plan.group),
        ready=[finished[number] for number in sorted(progress.ready)],
        batches=_batches(progress.batches, finished, formed, left_out),
        dropped=[dropped[number] for number in progress.dropped if number in dropped],
        pairs=progress.pairs,
    )


def formed_batches(entries: Iterable[Entry], after: int, left_out: Set[str] = frozenset()) -> list[Batch]:
    """Return the batches of steps > `after` whose groups `entries` hold, by step. `entries` are read twice."""
    numbers = {entry.step: entry.groups for entry in entries if isinstance(entry, Formed) and entry.step > after}
    finished, _, formed = _kept(entries, set().union(*numbers.values()), numbers.keys())
    whole = {step: groups for step, groups in numbers.items() if finished.keys() >= set(groups)}
    return _batches(whole, finished, formed, left_out)


def _kept(
    entries: Iterable[Entry], groups: Set[int], steps: Set[int]
) -> tuple[dict[int, FinishedGroup], dict[int, FinishedGroup], dict[int, Formed]]:
    """Return finished and dropped ones of `groups` by number, and the batches of `steps`."""
    finished, dropped, formed = {}, {}, {}
    for entry in entries:
        if isinstance(entry, Formed) and entry.step in steps:
            formed[entry.step] = entry
        elif isinstance(entry, Finished | Dropped) and (number := entry.group.plan.group) in groups:
            (finished if isinstance(entry, Finished) else dropped)[number] = entry.group
    return finished, dropped, formed


def _batches(
    numbers: dict[int, list[int]], finished: dict[int, FinishedGroup], formed: dict[int, Formed], left_out: Set[str]
) -> list[Batch]:
    batches = []
    for step in sorted(numbers):
        entry = formed[step]
        groups = [finished[number].without_stale_tokens(entry.oldest_version) for number in numbers[step]]
        pairs = [*entry.units, *(pair_unit(**pair) for pair in entry.preferences)]
        batch = Batch(step=step, groups=groups, metrics=entry.metrics, preferences=pairs)
        batches.append(without_left_out(batch, left_out))
    return batches


def without_left_out(batch: Batch, left_out: Set[str]) -> Batch:
    """Return `batch` without samples and pairs (`pair ID`) of `left_out`."""
    if not left_out:
        return batch
    groups = []
    for group in batch.groups:
        kept = [sample for sample in group.samples if sample.sample_id not in left_out]
        groups.append(msgspec.structs.replace(group, samples=kept))
    pairs = [pair for pair in batch.preferences if pair.name not in left_out]
    return replace(batch, groups=groups, preferences=pairs)


def _check_complete(progress: OrchestratorState, finished: dict[int, FinishedGroup]) -> None:
    required = {*progress.ready, *(number for numbers in progress.batches.values() for number in numbers)}
    missing = sorted(required - finished.keys())
    if missing:
        raise CheckpointError(
            f"the journal lacks groups {missing[:8]} ({len(missing)} in all), which checkpoint {progress.step} or a "
            "batch after it names: restore the run directory's journal/ folder, or start a new run"
        )
    expected = list(range(progress.step + 1, progress.step + 1 + len(progress.batches)))
    if sorted(progress.batches) != expected:
        raise CheckpointError(
            f"the journal holds batches {sorted(progress.batches)} after checkpoint {progress.step}, "
            f"expected {expected}"
        )
