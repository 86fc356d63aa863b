"""A recorded decision of some agent: what it saw and what it did. A file of states has one a line, as JSON under zstd.

composer ingest (traces/ingest) -> states.zst -> composer replay (traces/replay) -> pairs.jsonl -> replay-DPO

A state repeats the context of the one before. Compression with a long window takes that out again. `zstd -dc` shows the
lines, and a file of plain lines is read too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

from composer_prime.config.teachers import SelectConfig
from composer_prime.errors import ConfigError
from composer_prime.llm.cache import Message
from composer_prime.llm.reply import storable_arguments

SCHEMA_VERSION = 1
_LEVEL, _WINDOW_LOG = 3, 27
"""A window of 128 MiB finds the context of the state before, however long it is."""
_LONGEST_LINE = 1 << 28
"""Bytes of a decompressed line. A damaged or hostile file must not fill the memory."""
_READ_BYTES = 1 << 13
"""Compressed bytes that are read at once: they may stand for thousands of times as many."""
_BEGINNING = b'{"trace'
"""Lines of states, of pairs and of votes begin with it."""
_AGAIN = "make the file again with `composer ingest`"


class TraceState(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn of a trace, with everything before it."""

    trace_id: str
    state_id: str
    """`<trace_id>/<turn number>`; unique within a file of states."""
    step: int
    """Number of the assistant turn within its trace, from 0."""
    messages: list[Message]
    """What the agent saw: system, user, assistant and tool messages, without thinking. Every call has a result."""
    student_action: Message
    """What it did: an assistant message with `content`, `tool_calls`, and its thinking as `reasoning_content`."""
    source_model: str | None
    source_family: str
    """As composer_prime/model_families.py names it; `unknown` where the trace does not tell."""
    tools: list[dict[str, Any]]
    """Function tools that the agent had; where the format does not list them, all that its file calls."""
    error: str | None = None
    """The first error that followed the action, cut to 500 characters; None where there was none, or none is known."""
    format: str
    """The format of the trace, with the version that the reader was written for: `claude_code/2`."""
    schema_version: int = SCHEMA_VERSION


class _RequiredFunction(msgspec.Struct):
    name: str
    arguments: str


class _RequiredCall(msgspec.Struct):
    function: _RequiredFunction


class _RequiredMessage(msgspec.Struct):
    """What every message must have; without it the line is not a state."""

    role: str
    content: str | None = None
    tool_calls: list[_RequiredCall] | None = None


def write_state(state: TraceState) -> bytes:
    """Return a state as one line."""
    return msgspec.json.encode(state) + b"\n"


@contextmanager
def compressed_lines(path: Path) -> Iterator[Any]:
    """Open a file whose lines are compressed as they are written. Raises OSError."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True, write_checksum=True
    )
    with (
        path.open("wb") as file,
        zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file, closefd=False) as sink,
    ):
        yield sink


def is_compressed(path: Path) -> bool:
    """Check the first bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(zstandard.FRAME_HEADER)) == zstandard.FRAME_HEADER


def state_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of states. Raises ConfigError where it cannot be read, is damaged or ends too early."""
    try:
        with path.open("rb") as file:
            yield from _decompressed_lines(file) if is_compressed(path) else file
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): {_AGAIN}") from None


def _decompressed_lines(file: BinaryIO) -> Iterator[bytes]:
    frame = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).decompressobj()
    parts: list[bytes] = []
    while raw := file.read(_READ_BYTES):
        first, *others = frame.decompress(raw).split(b"\n")
        parts.append(first)
        for part in others:
            yield b"".join(parts) + b"\n"
            parts = [part]
        if sum(map(len, parts)) > _LONGEST_LINE:
            raise zstandard.ZstdError(f"a line has more than {_LONGEST_LINE:,} bytes")
    if not frame.eof:
        raise zstandard.ZstdError("it ends in the middle")


def read_states(path: Path) -> Iterator[TraceState]:
    """Yield every state of a file of states.

    Raises ConfigError where it cannot be read, and for a line that is not a state or has another schema.
    """
    decoder = msgspec.json.Decoder(TraceState)
    for number, line in enumerate(state_lines(path), 1):
        yield _decoded(decoder, line, f"{path}:{number}")


def selected_states(path: Path, select: SelectConfig) -> Iterator[TraceState]:
    """Yield the states that `teachers.select` takes of a file, in its order. Raises as `read_states` does."""
    taken = None if select.states is None and select.per_trace is None else _taken(path, select)
    for state in read_states(path):
        if taken is None or (state.trace_id, state.state_id) in taken:
            yield state


def count_selected(path: Path, select: SelectConfig) -> int:
    """Return how many states of a file are taken. Raises ConfigError where the file cannot be read."""
    if select.states is None and select.per_trace is None:
        return sum(1 for _ in read_states(path))
    return len(_taken(path, select))


def _taken(path: Path, select: SelectConfig) -> set[tuple[str, str]]:
    """Return (trace, state) of the states that are taken: those that errors followed first, and traces by turns."""
    failed, others = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for state in read_states(path):
        (others if state.error is None else failed)[state.trace_id].append(state.state_id)
    traces = [
        [(trace, state) for state in (failed[trace] + others[trace])[: select.per_trace]]
        for trace in dict.fromkeys([*failed, *others])
    ]
    turns = (place for turn in zip_longest(*traces) for place in turn if place is not None)
    return set(islice(turns, select.states))


def _decoded(decoder: msgspec.json.Decoder[TraceState], line: bytes, where: str) -> TraceState:
    try:
        state = decoder.decode(line)
        messages = [*state.messages, state.student_action]
        msgspec.convert(messages, list[_RequiredMessage])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a state ({error}): {_AGAIN}") from None
    if state.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where} has schema_version {state.schema_version}, this release reads {SCHEMA_VERSION}: {_AGAIN}"
        )
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = storable_arguments(call["function"]["arguments"])
    return state


def check_own(path: Path, kind: type, what: str) -> None:
    """Raise ConfigError where the first line of `path` shows that it does not hold `what`, or cannot be read.

    A file that does not exist or is blank passes, and so does a first line that a crash cut short.
    """
    if not path.is_file():
        return
    line = next((line for line in state_lines(path) if line.strip()), b"")
    torn = not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line))
    try:
        if not torn:
            msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(
            f"{path} does not hold {what}, for it begins with {line[:60].decode('utf-8', 'replace').rstrip()!r}. "
            "It was left as it is: name another file, or move this one elsewhere"
        ) from None


def same_file(one: Path, other: Path) -> bool:
    """Return whether both paths name one file, by whatever spelling or link."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()
