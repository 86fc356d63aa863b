"""The file of states: the messages of a trace once, and for each state which of them it shows. zstd-compressed lines.

    {"trace": id}          a trace begins or goes on; the table of messages is empty
    {"tools": [...]}       the tools of the states that follow
    {"message": {...}}     the next message of the table
    {"step": 3, "context": [[0, 7]], "student_action": ...}    a state: its context is messages 0 to 6

A state repeats the context of the one before, so whole states take the square of a session's length. Files of whole
states, one a line and not compressed, are read too (`composer ingest --plain` writes them).

Before a command appends to such a file or replaces it, `check_own` looks whether it holds something else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

from composer_prime.errors import ConfigError
from composer_prime.traces.state import SCHEMA_VERSION, SURROGATE, Message, TraceState, storable_arguments

MAGIC = zstandard.FRAME_HEADER
"""The first bytes of a compressed file."""
TRACE, TOOLS, MESSAGE = b'{"trace":', b'{"tools":', b'{"message":'
COMPACT_VERSION = 2
_TABLE_CHARS = 8_000_000
"""A table that holds more bytes starts over: a session of many weeks must not fill the memory."""
_MOST_BYTES = 1 << 26
"""Of a first line that is read."""
_SHOWN_BYTES = 60
_SURROGATE_BYTES = re.compile(SURROGATE.pattern.encode())
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
    """Yield the trace of each state of a file, without its context; None for a line that is no state.

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


# -- whole states --------------------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _RequiredMessage(msgspec.Struct):
    """What every message must have; without it the line is not a state."""

    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None


def read_states(path: Path, on_bad: Callable[[ConfigError], None] | None = None) -> Iterator[TraceState]:
    """Yield every state of a file of states. They share the messages of their trace: do not change them.

    Raises ConfigError, which names the line, for one that is not a state or has another schema. With `on_bad`
    such a line is given to it and left out. A file that cannot be read is an error in any case.
    """
    decoder, table = _StateDecoder(), StateTable()
    try:
        for number, raw in enumerate(state_file_lines(path), 1):
            try:
                state = decoder.decode(raw, table, f"{path}:{number}")
            except ConfigError as error:
                if on_bad is None:
                    raise
                on_bad(error)
                continue
            if state is not None:
                yield state
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None


class _StateDecoder:
    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(TraceState)
        self._compact = msgspec.json.Decoder(StateLine)

    def decode(self, raw: bytes, table: StateTable, where: str) -> TraceState | None:
        """Return the state of a line; None for a line of the table. Raises ConfigError."""
        try:
            taken = table.takes(raw)
            if isinstance(taken, dict):
                msgspec.convert(taken, _RequiredMessage)
                _make_storable([taken], raw)
            if taken is not False:
                return None
            state = self._with_table(raw, table) if raw.startswith(b'{"step":') else self._whole.decode(raw)
            known = [state.student_action] if raw.startswith(b'{"step":') else [*state.messages, state.student_action]
            msgspec.convert(known, list[_RequiredMessage])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError) as error:
            if not raw.startswith(b'{"step":'):  # it may be a line of the table
                table.forget()
            raise ConfigError(f"{where} is not a state ({error}): make the file again with `composer ingest`") from None
        if state.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"{where} has schema_version {state.schema_version}, this release reads {SCHEMA_VERSION}: "
                "make the file again with `composer ingest`"
            )
        _make_storable(known, raw)
        return state

    def _with_table(self, raw: bytes, table: StateTable) -> TraceState:
        line = self._compact.decode(raw)
        if table.trace is None:
            raise LookupError("no trace begins before it, or a line between is damaged")
        return TraceState(
            trace_id=table.trace,
            state_id=f"{table.trace}/{line.step:04d}",
            step=line.step,
            messages=table.messages(line.context),
            student_action=line.student_action,
            source_model=line.source_model,
            source_family=line.source_family,
            tools=table.tools,
            error=line.error,
            entropy=line.entropy,
            format=line.format,
        )


def _make_storable(messages: list[Message], raw: bytes) -> None:
    """Replace the half characters in the arguments of calls. `raw`: the line that the messages are from."""
    if _SURROGATE_BYTES.search(raw):
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = storable_arguments(call["function"]["arguments"])


# -- whose file it is ----------------------------------------------------------------------------------------------


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Raise ConfigError where the first line of `path` shows that it does not hold `what`, or cannot be read.

    A file that does not exist or is blank passes. A compressed file is looked into.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            line = b"\n"
            while line and not line.strip():
                line = file.readline(_MOST_BYTES)
        if line.startswith(MAGIC):
            line = next(state_file_lines(path), b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another file") from None
    except ConfigError:
        raise ConfigError(
            f"{path} is compressed and damaged, so it is not known whether it holds {what}: remove it, or name another "
            "file"
        ) from None
    if line and not is_own(line):
        shown = line[:_SHOWN_BYTES].decode("utf-8", "replace").rstrip()
        raise ConfigError(
            f"{path} does not hold {what}, for it begins with {shown!r}. It was left as it is: name another file, or "
            "move this one elsewhere"
        )


def lines_of(kind: Any, *, beginning: bytes = b"") -> Callable[[bytes], bool]:
    """Return a check for `check_own`: whether a line is JSON of that `kind`.

    A line that a crash cut short passes by the `beginning` of whole lines.
    """
    decoder = msgspec.json.Decoder(kind)

    def is_own(line: bytes) -> bool:
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            torn = not line.endswith(b"\n") and bool(beginning)
            return torn and (line.startswith(beginning) or beginning.startswith(line))
        return True

    return is_own


def same_file(one: Path, other: Path) -> bool:
    """Return whether both paths name one file, by whatever spelling or link."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()
