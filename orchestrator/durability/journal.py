"""The journal: what a crash must not lose, in append-only segments.

    journal/000001.log    magic, then frames:  u32 length | u32 crc32 | msgpack of one entry

    Started    a group was dispatched: its plan
    Finished   a group is ready: its samples and rollouts       (before it can enter a batch)
    Dropped    a group was filtered, failed or is stale
    Formed     a batch has its groups                           (fsynced before a trainer sees it)

One writer thread does all file work, in the order of the calls. A written entry is in the operating system's hands and
survives kill -9. A Formed entry is on the disk: it survives a power cut, with everything before it.

A segment whose tail is torn is cut back to its last whole frame. A segment is deleted once no checkpoint on disk needs
one of its entries.
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
from composer_prime.run.run_dir import write_remedy
from composer_prime.wire.types import Preference
from orchestrator.preferences import PairCursor
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
    """Without samples; its outcome is the reason."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    seq: int
    step: int
    groups: list[int]
    """Numbers of the batch's groups, in order."""
    dropped: list[int]
    """Groups dropped since the last batch; they are logged and counted with this one."""
    metrics: dict[str, float]
    oldest_version: int = 0
    """Tokens of older policy versions are context in this batch."""
    preferences: list[Preference] = []
    """The batch's pairs for replay-DPO."""
    pairs: PairCursor | None = None
    """Where the pairs continue after this batch; None where none are mixed in."""


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
    """Open it with `Journal.create` or `Journal.resume`; from then on only this process may write it."""

    def __init__(
        self, folder: Path, segments: list[_Segment], segment_bytes: int = SEGMENT_BYTES, min_seq: int = 0
    ) -> None:
        self.seq = max([segment.last_seq for segment in segments] + [min_seq])
        """Sequence number of the newest entry; each new entry takes the next."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._closed = segments
        self._file: BinaryIO | None = None
        """The segment being written; None between segments."""
        self._current: _Segment | None = None
        numbers = [int(match[1]) for segment in segments if (match := _NAME.search(segment.path.name))]
        self._next_number = max(numbers, default=0) + 1
        self._encoder = msgspec.msgpack.Encoder()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def create(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Create an empty journal. Removes what an earlier run left in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in _segment_paths(folder):
            path.unlink()
        return cls(folder, [], segment_bytes)

    @classmethod
    def resume(
        cls, folder: Path, segment_bytes: int = SEGMENT_BYTES, *, min_seq: int = 0
    ) -> tuple[Journal, list[Entry]]:
        """Return the journal and all its entries in order. Cuts off a torn tail of the newest segment.

        Entry numbers continue after the checkpoint's `min_seq`: compaction may have emptied the journal, and new
        entries must not count as old ones. Raises CheckpointError when an older segment is damaged.
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
        return cls(folder, segments, segment_bytes, min_seq), entries

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def append(self, entry: Entry) -> asyncio.Future[None]:
        """Queue `entry`, with its seq from `next_seq`. Entries are written in the order of these calls.

        The future is done once the entry is written. It raises CheckpointError when that fails (a full disk).
        """
        return asyncio.get_running_loop().run_in_executor(self._writer, self._append, entry)

    async def read(self) -> list[Entry]:
        """Return all entries on disk, in order. Raises CheckpointError when a segment is damaged."""
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

    def _read_all(self) -> list[Entry]:
        self._rotate()
        return [entry for segment in self._closed for entry in _read(segment.path, newest=False)]

    def _rotate(self) -> None:
        if self._file is None or self._current is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._closed.append(self._current)
        self._file, self._current = None, None

    def _compact(self, oldest_seq: int, groups: set[int], steps: set[int]) -> int:
        self._rotate()
        needed, deleted = [], 0
        for segment in self._closed:
            if segment.last_seq > oldest_seq or segment.groups & groups or segment.steps & steps:
                needed.append(segment)
            else:
                segment.path.unlink(missing_ok=True)
                deleted += 1
        self._closed = needed
        return deleted


def _segment_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.search(path.name))


def _read(path: Path, *, newest: bool) -> Iterator[Entry]:
    """Yield a segment's entries. Cuts off the newest segment's torn tail in place."""
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
