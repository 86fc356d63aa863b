"""The file of states: the messages of a trace once, and for each state which of them it shows. zstd-compressed lines.

    {"trace": id}          a trace begins or continues; the table of messages is empty
    {"tools": [...]}       the tools of the states that follow
    {"message": {...}}     the next message of the table
    {"step": 3, "context": [[0, 7]], "student_action": ...}    a state: its context is messages 0 to 6

A state repeats the context of the one before, so whole states take the square of a session's length. Files of whole
states, one a line and not compressed, are read too (`composer ingest --plain` writes them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import zstandard

from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from composer_prime.traces.state import Message, TraceState

MAGIC = zstandard.FRAME_HEADER
"""The first bytes of a compressed file."""
TRACE, TOOLS, MESSAGE = b'{"trace":', b'{"tools":', b'{"message":'
COMPACT_VERSION = 2
_TABLE_CHARS = 8_000_000
"""A larger table is restarted: a session of several weeks must not fill the memory."""
_LEVEL, _WINDOW_LOG = 3, 24
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 30
"""Bytes of a decompressed line. A damaged or hostile file must not fill the memory."""


class StateLine(msgspec.Struct, frozen=True, kw_only=True):
    """A state without what the lines before it hold."""

    step: int
    context: list[tuple[int, int]]
    """(first, end) of runs of messages in the table."""
    student_action: dict[str, Any]
    source_model: str | None
    source_family: str
    error: str | None
    entropy: float | None
    format: str
    schema_version: int = COMPACT_VERSION


class StateLines:
    """The writer's side of the table."""

    def __init__(self) -> None:
        self._trace: str | None = None
        self._tools: bytes | None = None
        self._held: dict[int, tuple[int, Message]] = {}
        """id() of a message -> (its place in the table, the message, which keeps the id its own)."""
        self._places: dict[bytes, int] = {}
        self._bytes = 0

    def lines(self, state: TraceState) -> list[bytes]:
        """Return the lines that hold a state. The last of them is the state's own."""
        lines: list[bytes] = []
        if state.trace_id != self._trace or self._bytes > _TABLE_CHARS:
            self._trace, self._tools, self._bytes = state.trace_id, None, 0
            self._held.clear()
            self._places.clear()
            lines.append(_line({"trace": state.trace_id}))
        tools = _line({"tools": state.tools})
        if tools != self._tools:
            self._tools = tools
            lines.append(tools)
        places = [self._place(message, lines) for message in state.messages]
        own = StateLine(
            step=state.step,
            context=_runs(places),
            student_action=state.student_action,
            source_model=state.source_model,
            source_family=state.source_family,
            error=state.error,
            entropy=state.entropy,
            format=state.format,
        )
        return [*lines, _line(own)]

    def _place(self, message: Message, lines: list[bytes]) -> int:
        """Return a message's place in the table, into which it is put where it is new."""
        held = self._held.get(id(message))
        if held is not None:
            return held[0]
        line = _line({"message": message})
        key = hashlib.blake2b(line, digest_size=16).digest()
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places)
            self._held[id(message)] = (place, message)
            self._bytes += len(line)
            lines.append(line)
        return place


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Return places as (first, end) of runs of adjacent ones."""
    ends = [index + 1 for index, (place, after) in enumerate(pairwise(places)) if after != place + 1]
    bounds = [0, *ends, len(places)]
    return [(places[first], places[end - 1] + 1) for first, end in pairwise(bounds) if end > first]


class _Trace(msgspec.Struct):
    trace: str


class _Tools(msgspec.Struct):
    tools: list[dict[str, Any]]


class _Message(msgspec.Struct):
    message: dict[str, Any]


class StateTable:
    """The reader's side of the table. States share their messages: nobody may change them."""

    def __init__(self) -> None:
        self.trace: str | None = None
        self.tools: list[dict[str, Any]] = []
        self._messages: list[Message] = []

    def takes(self, raw: bytes) -> Message | bool:
        """Return whether a line is of the table, as True or the message that it adds. Raises msgspec.DecodeError.

        After a line that is damaged the caller calls `forget`.
        """
        if raw.startswith(TRACE):
            self.trace, self._messages = msgspec.json.decode(raw, type=_Trace).trace, []
        elif raw.startswith(TOOLS):
            self.tools = msgspec.json.decode(raw, type=_Tools).tools
        elif raw.startswith(MESSAGE):
            self._messages.append(msgspec.json.decode(raw, type=_Message).message)
            return self._messages[-1]
        else:
            return False
        return True

    def forget(self) -> None:
        """Make the table unusable until the next trace begins: without one of its lines it shows wrong contexts."""
        self.trace = None

    def messages(self, context: list[tuple[int, int]]) -> list[Message]:
        """Return the messages of a context. Raises LookupError where the table lacks one."""
        shown: list[Message] = []
        for first, end in context:
            if not 0 <= first <= end <= len(self._messages):
                raise LookupError(f"messages {first} to {end} of the {len(self._messages)} in the table")
            shown += self._messages[first:end]
        return shown


def compressed(file: BinaryIO) -> zstandard.ZstdCompressionWriter:
    """Return a writer that compresses into `file`. Closing it ends the frame and leaves `file` open."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True, write_checksum=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file, closefd=False)


def is_compressed(path: Path) -> bool:
    """Check the first bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def state_file_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of states, decompressed where it is compressed.

    Raises OSError, and ConfigError where a compressed file is damaged or ends in the middle.
    """
    if not is_compressed(path):
        with path.open("rb") as file:
            yield from file
        return
    rest, number = b"", 1
    try:
        for piece in _decompressed(path):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line + b"\n"
                number += 1
            if len(rest) > _LONGEST_LINE:
                raise zstandard.ZstdError(f"a line is longer than {_LONGEST_LINE >> 20} MiB")
    except zstandard.ZstdError as error:
        raise ConfigError(f"{path}:{number} is damaged ({error}): make the file again with `composer ingest`") from None
    if rest:
        yield rest


def _decompressed(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces. Raises ZstdError where it is damaged or ends in the middle of a frame."""
    reader = None
    with path.open("rb") as file:
        while raw := file.read(_READ_BYTES):
            while raw:
                reader = reader or zstandard.ZstdDecompressor().decompressobj()
                if piece := reader.decompress(raw):
                    yield piece
                raw = reader.unused_data if reader.eof else b""
                reader = None if reader.eof else reader
    if reader is not None:
        raise zstandard.ZstdError("it ends in the middle")


def trace_of_each(path: Path) -> Iterator[str | None]:
    """Yield the trace of each state of a file, without its context; None for any other line.

    Raises as `state_file_lines` does.
    """
    trace: str | None = None
    for line in state_file_lines(path):
        try:
            if line.startswith(TRACE):
                trace = msgspec.json.decode(line, type=_Trace).trace
            elif not line.startswith((TOOLS, MESSAGE)):
                yield trace if line.startswith(b'{"step":') else msgspec.json.decode(line, type=_Named).trace_id
        except (msgspec.DecodeError, UnicodeDecodeError):
            trace = None
            yield None


class _Named(msgspec.Struct):
    trace_id: str
