"""The files of the room: states.zst, votes.jsonl and pairs.jsonl.

    composer ingest ──> states.zst ──> composer replay ──> pairs.jsonl, then the state's line ──> votes.jsonl

A state is a recorded decision of some agent: what it saw and what it did. A file of states has one a line, as JSON
under zstd (or plain), whose long window takes out the context that states repeat.

A state is done once votes.jsonl has its line with a decision, and pairs.jsonl the pairs that the line names. Else it is
replayed from the cache, for free. Pairs are known by their ids, so none is written twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import zstandard

from composer_prime.config.teachers import SelectConfig
from composer_prime.data.pairs import Pair
from composer_prime.errors import ConfigError, UnwritableError
from composer_prime.llm.cache import Message
from composer_prime.llm.reply import storable_arguments

SCHEMA_VERSION = 1
_LEVEL, _WINDOW_LOG = 3, 27
"""A window of 128 MiB finds the context of the state before."""
_LONGEST_LINE = 1 << 28
"""Bytes of a line. A damaged or hostile file must not fill the memory."""
_READ_BYTES = 1 << 13
"""Compressed bytes that are read at once; they may stand for thousands of times as many."""
_BEGINNING = b'{"trace'
"""Begins lines of states, pairs and votes."""
_AGAIN = "make the file again with `composer ingest`"


class TraceState(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn of a trace, with everything before it."""

    trace_id: str
    state_id: str
    """`<trace_id>/<turn number>`; unique within a file of states."""
    step: int
    """Number of the assistant turn within its trace, from 0."""
    messages: list[Message]
    """What the agent saw, without thinking. Every call has a result."""
    student_action: Message
    """What it did: `content`, `tool_calls`, and its thinking as `reasoning_content`."""
    source_model: str | None
    source_family: str
    """As model_families.py names it; `unknown` where the trace does not tell."""
    tools: list[dict[str, Any]]
    """Function tools that the agent had, or all that its file calls."""
    error: str | None = None
    """The first error that followed the action, cut to 500 characters."""
    format: str
    """Format and the version that its reader is for: `claude_code/2`."""
    schema_version: int = SCHEMA_VERSION


def write_state(state: TraceState) -> bytes:
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
    """Whether zstd wrote the file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(zstandard.FRAME_HEADER)) == zstandard.FRAME_HEADER


def state_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of states. Raises ConfigError."""
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
    """Yield every state of a file of states. Raises ConfigError."""
    decoder = msgspec.json.Decoder(TraceState)
    for number, line in enumerate(state_lines(path), 1):
        try:
            state = decoder.decode(line)
            for message in (*state.messages, state.student_action):
                _check_message(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise ConfigError(f"{path}:{number} is not a state ({error}): {_AGAIN}") from None
        if state.schema_version != SCHEMA_VERSION:
            wrong = f"schema_version {state.schema_version}, this release reads {SCHEMA_VERSION}"
            raise ConfigError(f"{path}:{number} has {wrong}: {_AGAIN}")
        yield state


def _check_message(message: Message) -> None:
    """Make its calls' arguments storable. Raises ValueError for a message that lacks something."""
    try:
        functions = [call["function"] for call in message.get("tool_calls") or []]
        texts = [message["role"], message.get("content") or "", *(function["name"] for function in functions)]
        if all(isinstance(text, str) for text in texts):
            for function in functions:
                function["arguments"] = storable_arguments(function["arguments"])
            return
    except (LookupError, TypeError):
        pass
    raise ValueError("a message needs text as `role` and `content`, each call a `function` with name and arguments")


def selected_states(path: Path, select: SelectConfig) -> Iterator[TraceState]:
    """Yield the states that `teachers.select` takes of a file. Raises ConfigError."""
    taken = None if select.states is None and select.per_trace is None else _taken(path, select)
    for state in read_states(path):
        if taken is None or (state.trace_id, state.state_id) in taken:
            yield state


def count_selected(path: Path, select: SelectConfig) -> int:
    """Return how many states of a file are taken. Raises ConfigError."""
    if select.states is None and select.per_trace is None:
        return sum(1 for _ in read_states(path))
    return len(_taken(path, select))


def _taken(path: Path, select: SelectConfig) -> set[tuple[str, str]]:
    """Return (trace, state) of the taken states: first those that errors followed; traces take turns."""
    failed, others = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for state in read_states(path):
        (others if state.error is None else failed)[state.trace_id].append(state.state_id)
    traces = [
        [(trace, state) for state in (failed[trace] + others[trace])[: select.per_trace]]
        for trace in dict.fromkeys([*failed, *others])
    ]
    turns = (place for turn in zip_longest(*traces) for place in turn if place is not None)
    return set(islice(turns, select.states))


def check_own(path: Path, kind: type, what: str) -> None:
    """Raise ConfigError where the first line of `path` is not one of `what`. One that a crash cut short may be."""
    if not path.is_file():
        return
    line = next((line for line in state_lines(path) if line.strip()), b"")
    torn = not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line))
    try:
        if not torn:
            msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(
            f"{path} does not hold {what}, for it begins with {line[:60].decode('utf-8', 'replace').rstrip()!r}: "
            "it is left as it is; name another file, or move this one elsewhere"
        ) from None


def same_file(one: Path, other: Path) -> bool:
    """Return whether both paths name one file."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()


T = TypeVar("T")
RULES = 7
"""Version of how actions are compared (voting.py). Raise it when forms change."""
UNDECIDED = {"refused", "failed", "budget"}
"""Outcomes that the next replay tries again: a teacher may be back, a family named."""


class VoteRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One teacher's vote, as votes.jsonl holds it."""

    teacher: str
    family: str
    form: str
    """Digest of the canonical form."""
    agrees: bool
    answer: str
    """Key of the answer in the cache."""
    cached: bool
    cost_usd: float
    """Paid now; 0 from the cache."""
    price_usd: float = 0.0
    """Paid when first asked for."""


class StateRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one state."""

    trace: str
    state: str
    outcome: str
    """overruled | agreed | no_majority | cannot_run | refused | failed; earlier releases had budget too"""
    reason: str | None = None
    votes: list[VoteRecord] = []
    failed_calls: int = 0
    """Calls of this replay without a vote; answers from the cache are none."""
    cost_usd: float = 0.0
    """Paid now, retries included."""
    price_usd: float = 0.0
    """As cost_usd, with cached answers at what they cost when first asked for."""
    content: str = ""
    """Digest of what the student saw and did, for states that share an id."""
    pairs: list[str] = []
    rules: int = 0
    """By which the forms were compared (RULES)."""

    @property
    def calls(self) -> int:
        return sum(not vote.cached for vote in self.votes) + self.failed_calls


@contextmanager
def only_writer(pairs: Path) -> Iterator[None]:
    """Hold the pairs file, with its votes and costs, for one replay: two would each count only their own money.

    Raises ConfigError when another replay holds it, UnwritableError when it cannot be written.
    """
    try:
        pairs.parent.mkdir(parents=True, exist_ok=True)
        file = pairs.open("ab")
    except OSError as error:
        raise UnwritableError(f"pairs cannot be written to {pairs} ({error.strerror}): name another file") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another replay writes {pairs}, and two could pass the caps of teachers.budget: wait for it, stop "
                "it, or name another file of pairs"
            ) from None
        yield


class ReplayRecords:
    """The two files of a replay. One writer at a time (`only_writer`)."""

    def __init__(self, pairs: Path, votes: Path) -> None:
        """Raises ConfigError where a file holds something else or votes by other rules."""
        self.pairs_path = pairs
        self.votes_path = votes
        check_own(pairs, Pair, "pairs")
        check_own(votes, StateRecord, "votes")
        for path, kind in ((pairs, Pair), (votes, StateRecord)):
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_last_line(path, kind)
        self.history = list(read_records(votes))
        """Of earlier replays."""
        if other := [record.rules for record in self.history if record.votes and record.rules != RULES]:
            raise ConfigError(
                f"{votes} holds votes compared by rules {other[0]}, this release has rules {RULES}: replay into "
                f"another file of pairs (cached answers are free), or move {pairs.name} and {votes.name} elsewhere"
            )
        self._ids: dict[tuple[str, str, str], str] = {}
        for pair in read_pairs(pairs):
            self._note(pair)
        pair_ids = set(self._ids.values())
        self.done = {
            place: record.content
            for place, record in latest(self.history).items()
            if record.outcome not in UNDECIDED and pair_ids.issuperset(record.pairs)
        }
        """(trace, state) -> digest of the state."""

    def add(self, record: StateRecord, pairs: list[Pair]) -> None:
        """Write both down. Raises OSError."""
        fresh = [pair for pair in pairs if self.written_as(pair) is None]
        _append(self.pairs_path, fresh)
        for pair in fresh:
            self._note(pair)
        _append(self.votes_path, [record])
        if record.outcome not in UNDECIDED:
            self.done[record.trace, record.state] = record.content

    def written_as(self, pair: Pair) -> str | None:
        """Return the id of the file's pair with this state and rejected form, if any.

        A crash may have come before its votes were written, and other votes may give another text.
        """
        return self._ids.get(_place(pair))

    def _note(self, pair: Pair) -> None:
        self._ids[_place(pair)] = pair.pair_id


def read_records(path: Path) -> Iterator[StateRecord]:
    return _read(path, StateRecord)


def latest(records: Iterable[StateRecord]) -> dict[tuple[str, str], StateRecord]:
    """Return the last record of each (trace, state)."""
    return {(record.trace, record.state): record for record in records}


def read_pairs(path: Path) -> Iterator[Pair]:
    return _read(path, Pair)


def votes_beside(pairs: Path) -> Path:
    return pairs.with_name(f"{pairs.stem}.votes.jsonl")


def digest(value: Any) -> str:
    """Return 64 bits of a JSON value."""
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a character, which JSON can escape
        content = json.dumps(value).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _place(pair: Pair) -> tuple[str, str, str]:
    """Return (trace, state, digest of the rejected form)."""
    message = pair.rejected
    calls = [call["function"] for call in message.get("tool_calls") or []]  # ids differ between equal traces
    form = [message["role"], message.get("content"), calls]
    return pair.trace, pair.state.state_id, pair.teachers.get("rejected_form") or digest(form)


def _append(path: Path, values: list[Any]) -> None:
    if not values:
        return
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(value) + b"\n" for value in values))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, kind: type[T]) -> Iterator[T]:
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for raw in file:
            if (value := _decoded(decoder, raw)) is not None:
                yield value


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes) -> T | None:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _end_last_line(path: Path, kind: type) -> None:
    """Drop a last line that a crash cut short; end a whole one."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        last, end = b"", 0
        for last in file:
            end += len(last)
        file.seek(end)
        if last and not last.endswith(b"\n"):
            if _decoded(msgspec.json.Decoder(kind), last) is None:
                file.truncate(end - len(last))
            else:
                file.write(b"\n")


def figures_of(records: Iterable[StateRecord]) -> str:
    """Return pairs a trace over the traces that anybody could judge, and dollars over those that teachers were asked
    about, cached answers at their first price. Refused traces would thin both out.
    """
    decided = latest(records).values()
    judged = {record.trace for record in decided if record.outcome != "refused"}
    asked = {record.trace for record in decided if record.votes or record.calls or record.price_usd}
    pairs, usd = sum(len(record.pairs) for record in decided), sum(record.price_usd for record in decided)
    return (
        f"{pairs / max(len(judged), 1):.2f} pairs over {len(judged)} that were not refused, "
        f"${usd / max(len(asked), 1):.4f} over {len(asked)} that teachers were asked about"
    )
