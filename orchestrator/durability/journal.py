"""The journal: what a crash must not lose, in append-only segments.

    journal/000001.log    magic, then frames:  u32 length | u32 crc32 | msgpack of one entry

    Started    a group was dispatched: its plan
    Finished   a group is ready: its samples and rollouts       (before it can enter a batch)
    Dropped    a group was filtered, failed or is stale
    Formed     a batch has its groups                           (fsynced before a trainer sees it)

One writer thread does all file work, in the order of the calls. A written entry is with the operating system (it
survives kill -9); a Formed entry is on the disk (it survives a power cut, with everything before it).
A segment whose tail is torn is cut back to its last whole frame. Segments are deleted whole, once no checkpoint on disk
needs an entry of theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from composer_prime.errors import CheckpointError
from composer_prime.wire.types import Preference
from orchestrator.preferences.order import Cursor
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan

logger = logging.getLogger(__name__)

_MAGIC = b"composer-journal-1\n"
_FRAME = struct.Struct("<II")
_NAME = re.compile(r"(\d{6,})\.log$")
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
    """Without samples; its outcome says why."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    seq: int
    step: int
    groups: list[int]
    """Numbers of the batch's groups, in order."""
    dropped: list[int]
    """Groups dropped since the last batch: they are logged and counted with this one."""
    metrics: dict[str, float]
    preferences: list[Preference] = []
    """Channel 3's pairs of the batch."""
    pairs: Cursor | None = None
    """Where the pairs go on after this batch; None where none are mixed in."""


Entry = Started | Finished | Dropped | Formed


@dataclass(slots=True)
class _Segment:
    path: Path
    last_seq: int = 0
    groups: set[int] = field(default_factory=set)
    """Groups whose Finished entry is in it."""
    steps: set[int] = field(default_factory=set)
    """Batches whose Formed entry is in it."""

    def note(self, entry: Entry) -> None:
        self.last_seq = max(self.last_seq, entry.seq)
        if isinstance(entry, Finished | Dropped):
            self.groups.add(entry.group.plan.group)
        elif isinstance(entry, Formed):
            self.steps.add(entry.step)


class Journal:
    """Open it with `Journal.create` or `Journal.resume`; from then on this process alone writes it."""

    def __init__(self, folder: Path, segments: list[_Segment], segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._closed, self._segment_bytes = folder, segments, segment_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: BinaryIO | None = None
        self._current: _Segment | None = None
        numbers = [int(_NAME.search(segment.path.name)[1]) for segment in segments]
        self._next_number = max(numbers, default=0) + 1
        self.seq = max((segment.last_seq for segment in segments), default=0)
        """Sequence number of the newest entry; each new entry takes the next."""

    @classmethod
    def create(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """An empty journal; what lies in `folder` belongs to an earlier run and is removed."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in _segment_paths(folder):
            path.unlink()
        return cls(folder, [], segment_bytes)

    @classmethod
    def resume(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> tuple[Journal, list[Entry]]:
        """The journal and all its entries in order; a torn tail of the newest segment is cut off.

        Raises CheckpointError when an older segment is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        entries, segments = [], []
        paths = _segment_paths(folder)
        for path in paths:
            segment = _Segment(path)
            for entry in _read(path, newest=path == paths[-1]):
                segment.note(entry)
                entries.append(entry)
            segments.append(segment)
        return cls(folder, segments, segment_bytes), entries

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def append(self, entry: Entry) -> asyncio.Future[None]:
        """Queue `entry` (its seq from `next_seq`) for writing; entries are written in the order of these calls.

        The future ends once the entry is written. It raises CheckpointError when that fails (a full disk).
        """
        return asyncio.get_running_loop().run_in_executor(self._writer, self._append, entry)

    async def read(self) -> list[Entry]:
        """All entries on disk, in order. Raises CheckpointError when a segment is damaged."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._read_all)

    async def compact(self, *, oldest_seq: int, groups: set[int], steps: set[int]) -> int:
        """Delete segments without an entry newer than `oldest_seq`, one of `groups` or a batch of `steps`.

        Returns how many segments were deleted.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._compact, oldest_seq, groups, steps)

    async def close(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._rotate)
        except OSError as error:
            logger.error("the journal could not be closed cleanly: %s", error)
        self._writer.shutdown(wait=True)

    def _append(self, entry: Entry) -> None:
        payload = self._encoder.encode(entry)
        try:
            if self._file is None:
                self._open_segment()
            self._file.write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
            self._file.flush()
            if isinstance(entry, Formed):
                os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"the journal {self._current.path if self._current else self._folder} cannot be written: {error}; "
                "free some space and start again with --resume"
            ) from error
        self._current.note(entry)
        if self._file.tell() >= self._segment_bytes:
            self._rotate()

    def _read_all(self) -> list[Entry]:
        self._rotate()
        return [entry for segment in self._closed for entry in _read(segment.path, newest=False)]

    def _open_segment(self) -> None:
        self._current = _Segment(self._folder / f"{self._next_number:06d}.log")
        self._next_number += 1
        self._file = self._current.path.open("xb")
        self._file.write(_MAGIC)

    def _rotate(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._closed.append(self._current)
        self._file, self._current = None, None

    def _compact(self, oldest_seq: int, groups: set[int], steps: set[int]) -> int:
        self._rotate()
        kept, dropped = [], 0
        for segment in self._closed:
            if segment.last_seq > oldest_seq or segment.groups & groups or segment.steps & steps:
                kept.append(segment)
            else:
                segment.path.unlink(missing_ok=True)
                dropped += 1
        self._closed = kept
        return dropped


def _segment_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.search(path.name))


def _read(path: Path, *, newest: bool) -> Iterator[Entry]:
    """Entries of a segment; the newest one's torn tail is cut off in place."""
    raw = path.read_bytes()
    decoder = msgspec.msgpack.Decoder(Entry)
    at = len(_MAGIC) if raw.startswith(_MAGIC) else 0
    while at and at < len(raw):
        entry, end = _frame(raw, at, decoder)
        if entry is None:
            break
        yield entry
        at = end
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


def _frame(raw: bytes, at: int, decoder: msgspec.msgpack.Decoder) -> tuple[Entry | None, int]:
    if at + _FRAME.size > len(raw):
        return None, at
    length, crc = _FRAME.unpack_from(raw, at)
    end = at + _FRAME.size + length
    payload = raw[at + _FRAME.size : end]
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None, at
    try:
        return decoder.decode(payload), end
    except msgspec.DecodeError:
        return None, at
