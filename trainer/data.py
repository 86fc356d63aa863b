"""A step's batch: how a rank gets it from the orchestrator, and as tensors on the device.

    rank --StepRequest--> orchestrator --BatchNotReady--> rank asks again ...       until StepReply or RunFinished
    all ranks: gather one word list each -> all have the batch, or all stop         no rank enters the step alone

The orchestrator answers at least every few seconds, so only silence is a failure: a DeadlineError after
silence_timeout_s. A request without an answer is sent again, after pauses that grow, for a large batch may be under
way over a slow link. The publication thread has a client of its own, which sends StepDone until it is acknowledged.
The next publication, a checkpoint and the very first request wait for that.

A micro-batch becomes what the forward pass, the head and the loss terms need, and nothing else:

    documents            sample ... | units of other terms ...
    N computed tokens    all of them in one forward pass; what starts alike is computed once
    R head rows          tokens that a term reads ... | tokens of hinted turns ...     each token once
    teacher documents    of the hinted turns, in passes of their own

A position counts the tokens of all documents (composer_prime/packing/pack.py); terms name those that they read.
`computed_N` leads from it to its place in the forward pass (-1: not read), `head_row_N` to its row of the head
(-1: none). The state of the token before predicts a token: source_R is computed_N[position - 1].
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composer_prime.channels.term import Term, TermRows
from composer_prime.errors import (
    ComposerError,
    DeadlineError,
    NonFiniteError,
    RoleFailedError,
    RunMismatchError,
    WireError,
)
from composer_prime.packing.pack import Prefixes, Row, Tree, joined, prefix_layout, span_positions
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.sockets import check_request, dealer
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    FromTrainer,
    MicroBatch,
    RunFinished,
    StepDone,
    StepNoted,
    StepPart,
    StepRefused,
    StepReply,
    StepRequest,
    ToTrainer,
    flags,
    floats,
    ints,
    verify_batch,
)
from trainer.world import POLL_S, Background, World, broadcast_bytes, gather_texts, gather_words

REPEAT_S, LONGEST_REPEAT_S = 5.0, 80.0
"""Silence after which a request is repeated; doubles each time."""
ATTACH_S = 3600.0
"""Silence that an announcement allows: the orchestrator loads task sets before it notes anything and may be busy later.
While steps are taken, the requests for a batch find out that it is gone."""
LOG_EVERY_S = 30.0
"""How often the log repeats what a wait is for."""
_DECODER = msgspec.msgpack.Decoder(ToTrainer)
_READY, _STOPPED, _FAILED, _WAITING = range(4)
_DENOMINATORS = {
    "samples": "samples with trained tokens",
    "tokens": "trained tokens",
    "micro_batches": "micro-batches with trained tokens",
    "distilled_turns": "distilled turns",
    "distilled_tokens": "distilled tokens",
    "units": "units of other loss terms",
    "unit_tokens": "tokens of these units",
}
"""The fields of StepTotals that the ranks check, and their names in messages."""
logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Stopped(Exception):
    """A stop was requested while waiting; this is no failure."""


def never() -> bool:
    return False


def wait_together(
    what: str, awaited: str, is_ready: Callable[[], bool], should_stop: Callable[[], bool] = never
) -> None:
    """Return on all ranks together, before `what` begins, once `is_ready` on each of them. A collective.

    `is_ready` takes a fraction of a second, so no rank waits for long in a collective, whatever one of them waits for.
    It and `should_stop` may raise ComposerError or Stopped. Raises on every rank when any failed: its own error, or
    RoleFailedError with the others'. Raises Stopped when any rank was stopped.
    """
    log_at = time.monotonic() + LOG_EVERY_S
    while True:
        status, error = _status(is_ready, should_stop)
        table = gather_words([status])
        _raise_together(table, error, what)
        if all(row == [_READY] for row in table):
            return
        if time.monotonic() >= log_at:
            log_at += LOG_EVERY_S
            logger.info("%s waits for %s", what, awaited)


def _status(is_ready: Callable[[], bool], should_stop: Callable[[], bool]) -> tuple[int, ComposerError | None]:
    try:
        if is_ready():
            return _READY, None
        return _STOPPED if should_stop() else _WAITING, None
    except Stopped:
        return _STOPPED, None
    except ComposerError as error:
        return _FAILED, error


def first_alone(world: World, what: str, awaited: str, work: Callable[[], Result]) -> Result | None:
    """Let rank 0 do `work`, and return its result there; the others get None, after as long as it takes. A collective.

    Raises as `wait_together` does.
    """
    results: list[Result] = []
    background = Background(torch.get_num_threads())
    if world.first:
        background.start(awaited, lambda: results.append(work()))
    wait_together(what, awaited, background.is_idle)
    return results[0] if results else None


def next_batch(
    client: StepClient, step: int, versions: tuple[int, int], context: DeviceMesh | None = None
) -> StepReply | RunFinished:
    """Return the batch of `step` on this rank, once all ranks have theirs and their counts match the totals.

    The first rank of a context group asks, and hands it on. A collective.

    Raises as `wait_together` does: a stop of one rank ends the wait of all. Raises RunMismatchError when
    the ranks' counts differ from the totals.
    """
    reply: StepReply | RunFinished | None = None
    asking = client.asking(step, versions)

    def is_ready() -> bool:
        nonlocal reply
        if context is not None and context.get_local_rank() > 0:
            if client.should_stop():
                raise Stopped
            return True
        reply = reply or next(asking)
        return reply is not None

    wait_together(f"step {step}", f"the batch of step {step}", is_ready)
    if context is not None:
        raw = broadcast_bytes(msgspec.msgpack.encode(reply) if reply else b"", context.get_group())
        reply = msgspec.msgpack.decode(raw, type=StepReply | RunFinished)
    batches = reply.micro_batches if isinstance(reply, StepReply) else []
    table = gather_words([int(isinstance(reply, StepReply)), len(batches), *_counts(batches)])
    if isinstance(reply, StepReply) and all(row[0] for row in table):
        _check_table(table[:: context.size() if context else 1], reply, step)
        return reply
    if isinstance(reply, RunFinished):
        return reply
    return RunFinished(reason="the orchestrator ended the run while the ranks were asking", failed=False)


def _raise_together(table: list[list[int]], error: ComposerError | None, what: str) -> None:
    statuses = [row[0] for row in table]
    if _FAILED in statuses:
        texts = gather_texts("" if error is None else str(error))
        if error is not None:
            raise error
        failures = [f"rank {rank}: {texts[rank]}" for rank, status in enumerate(statuses) if status == _FAILED]
        raise RoleFailedError(f"{what} cannot begin, other ranks failed: {'; '.join(failures)}")
    if _STOPPED in statuses:
        raise Stopped


def _check_table(table: list[list[int]], reply: StepReply, step: int) -> None:
    micro_batches = [row[1] for row in table]
    if len(set(micro_batches)) != 1 or micro_batches[0] == 0:
        raise RunMismatchError(
            f"step {step}: ranks got {micro_batches} micro-batches; they must be equal and at least 1"
        )
    counts = map(sum, zip(*(row[2:] for row in table), strict=True))
    for (field, name), count in zip(_DENOMINATORS.items(), counts, strict=True):
        total = getattr(reply.totals, field)
        total = sum(total.values()) if isinstance(total, dict) else total
        if count != total:
            raise RunMismatchError(
                f"step {step}: the ranks hold {count} {name}, the orchestrator's totals say {total}: the loss would "
                "have a wrong denominator"
            )


def _counts(batches: list[MicroBatch]) -> list[int]:
    """Count what _DENOMINATORS names, in its order."""
    trained = [np.flatnonzero(flags(batch.loss_mask)) for batch in batches]
    documents = [
        np.searchsorted(np.cumsum(batch.lengths), tokens, "right")
        for batch, tokens in zip(batches, trained, strict=True)
    ]
    return [
        sum(len(np.unique(numbers)) for numbers in documents),
        sum(map(len, trained)),
        sum(len(tokens) > 0 for tokens in trained),
        sum(len(batch.turns) for batch in batches),
        sum(turn.count for batch in batches for turn in batch.turns),
        sum(len(batch.units) for batch in batches),
        sum(len(span_positions(unit)) for batch in batches for unit in batch.units),
    ]


def find_endpoint(path: Path, timeout_s: float, should_stop: Callable[[], bool]) -> str:
    """Return the step server's address, which rank 0 reads in `path` (endpoints.json) once that server listens.

    A collective: every rank must call it. Raises as `wait_together` does, DeadlineError after `timeout_s` without one.
    """
    deadline, endpoint = time.monotonic() + timeout_s, ""

    def is_found() -> bool:
        nonlocal endpoint
        try:
            endpoint = endpoint or json.loads(path.read_bytes())["step"]
        except (FileNotFoundError, KeyError, json.JSONDecodeError):
            time.sleep(0.05)
        if not endpoint and time.monotonic() > deadline:
            awaited = f"the orchestrator to write its address to {path}"
            raise DeadlineError(f"waited {timeout_s:.0f} s for {awaited}: is it running?")
        return bool(endpoint)

    wait_together("training", "the orchestrator's address", is_found, should_stop)
    return gather_texts(endpoint)[0]


class StepClient:
    """One DEALER socket to the step server, for one thread. It polls `should_stop` often while it waits."""

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        rank: StepRequest,
        should_stop: Callable[[], bool],
        *,
        silence_timeout_s: float,
        name: str = "trainer",
    ) -> None:
        """`rank`: a request of this rank, for any step. `silence_timeout_s`: of the orchestrator, at most."""
        self._endpoint = endpoint
        self._keys = keys
        self._rank = rank
        self._silence_timeout_s = silence_timeout_s
        self.should_stop = should_stop
        self._context = zmq.Context()
        self._socket = dealer(self._context, endpoint, keys, identity=f"{name}-{rank.rank}".encode())
        self._session = secrets.token_hex(8)
        self._parts = bytearray()
        """Of a reply that is on its way."""
        self._announcer: StepClient | None = None
        """For the publication's thread."""

    def close(self) -> None:
        if self._announcer is not None:
            self._announcer.close()
        self._socket.close(linger=2000)
        self._context.term()

    def asking(self, step: int, versions: tuple[int, int]) -> Iterator[StepReply | RunFinished | None]:
        """Yield this rank's verified micro-batches of `step`, or RunFinished; before, None each fraction of a second.

        `versions`: oldest and newest policy version that they may hold tokens of. Raises DeadlineError (silence),
        RunMismatchError (another run, step or rank), ChecksumError, WireError (no protocol message), or Stopped.
        """
        request = msgspec.structs.replace(self._rank, step=step)
        for reply in self._ask(request, f"the batch of step {step}", lambda m: _is_batch(m, step), self.should_stop):
            assert reply is None or isinstance(reply, StepReply | RunFinished)
            if isinstance(reply, StepReply):
                self._check(reply, versions)
            yield reply

    def _check(self, reply: StepReply, versions: tuple[int, int]) -> None:
        rank, step = self._rank, reply.step
        for batches in (reply.micro_batches, reply.held_out):
            for index, batch in enumerate(batches):
                verify_batch(batch, run_id=rank.run_id, step=step, rank=rank.rank, versions=versions)
                if batch.index != index:
                    raise RunMismatchError(f"step {step}: micro-batch {index} says that it is number {batch.index}")

    def announce(
        self,
        step: int,
        version: int,
        sample_ids: list[str],
        divergence: dict[str, float],
        last_step: int | None,
        should_stop: Callable[[], bool],
    ) -> None:
        """Report that `version`, the newest after `step`, is in the weight store, and which step ends the run.

        Uses a connection for another thread, and returns when it is acknowledged. Raises DeadlineError, or Stopped when
        `should_stop` turns true.
        """
        if self._announcer is None:
            silence_s = self._silence_timeout_s
            self._announcer = StepClient(
                self._endpoint, self._keys, self._rank, should_stop, silence_timeout_s=silence_s, name="versions"
            )
        done = StepDone(
            run_id=self._rank.run_id,
            step=step,
            version=version,
            sample_ids=sample_ids,
            session=self._session,
            divergence=divergence,
            last_step=last_step,
        )

        def notes(message: ToTrainer) -> bool:
            return isinstance(message, StepNoted) and message.step >= step

        awaited = f"the orchestrator to note step {step}"
        next(filter(None, self._announcer._ask(done, awaited, notes, should_stop, ATTACH_S)))

    def checkpoint(self, step: int) -> CheckpointSaved:
        """Have the orchestrator write its part of checkpoint `step`. It must have noted every step that was taken.

        Raises as `asking` does, but never Stopped: a checkpoint that was begun is finished, also during a stop.
        """
        request = CheckpointRequest(run_id=self._rank.run_id, step=step)
        awaited = f"the orchestrator's part of checkpoint {step}"
        asking = self._ask(request, awaited, lambda m: isinstance(m, CheckpointSaved) and m.step == step)
        reply = next(filter(None, asking))
        assert isinstance(reply, CheckpointSaved)
        return reply

    def _ask(
        self,
        request: FromTrainer,
        awaited: str,
        accept: Callable[[ToTrainer], bool],
        should_stop: Callable[[], bool] = never,
        silence_s: float | None = None,
    ) -> Iterator[ToTrainer | None]:
        """Send `request`, and yield the message that `accept` takes; before, None now and then."""
        started = log_at = time.monotonic()
        self._send(request)
        for message in self._hear(request, awaited, should_stop, silence_s):
            if isinstance(message, StepRefused):
                raise RunMismatchError(f"the orchestrator refused the request for {awaited}: {message.error}")
            if message is None or isinstance(message, StepPart):
                yield None
            elif accept(message):
                yield message
            if not isinstance(message, BatchNotReady) or not isinstance(request, StepRequest):
                continue
            if message.step == request.step:
                if (now := time.monotonic()) >= log_at:
                    log_at = now + LOG_EVERY_S
                    logger.info("waiting for %s (%.0f s): %s", awaited, now - started, message.waiting_for)
                self._send(request)

    def _hear(
        self, request: FromTrainer, awaited: str, should_stop: Callable[[], bool], silence_s: float | None
    ) -> Iterator[ToTrainer | None]:
        """Yield each message, and None each fraction of a second without one; repeat `request` meanwhile.

        Raises DeadlineError after `silence_s` without any message; None takes the rank's silence_timeout_s.
        """
        limit = "the limit is" if silence_s is None else "the limit of an announcement is"
        silence_s = silence_s or self._silence_timeout_s
        heard = time.monotonic()
        patience_s, repeat_at = REPEAT_S, heard + REPEAT_S
        while not should_stop():
            message, now = self._receive(), time.monotonic()
            if message is not None:
                heard, patience_s, repeat_at = now, REPEAT_S, now + REPEAT_S
            elif now - heard > silence_s:
                raise DeadlineError(
                    f"waited for {awaited}, and the orchestrator at {self._endpoint} has been silent for the last "
                    f"{now - heard:.0f} s ({limit} {silence_s:g}): is it alive, and does this rank have the run's keys?"
                )
            elif now > repeat_at:
                patience_s = min(2 * patience_s, LONGEST_REPEAT_S, max(REPEAT_S, self._silence_timeout_s / 4))
                repeat_at = now + patience_s
                self._send(request)
            yield message
        raise Stopped

    def _send(self, message: FromTrainer) -> None:
        self._socket.send_multipart(check_request(msgspec.msgpack.encode(message), type(message).__name__))

    def _receive(self) -> ToTrainer | None:
        """Return the next message; None after POLL_S."""
        if not self._socket.poll(POLL_S * 1000):
            return None
        raw, *data = self._socket.recv_multipart()
        try:
            message = _DECODER.decode(raw)
            if isinstance(message, StepPart):
                message = self._with_part(message, b"".join(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"{len(raw)} bytes from the orchestrator at {self._endpoint} are not a protocol message: {error}; "
                "run one release on both sides"
            ) from None
        return message

    def _with_part(self, part: StepPart, data: bytes) -> ToTrainer:
        """Return the reply that `part` ends; `part` while more has to come."""
        if part.at == 0:
            self._parts = bytearray()
        if part.at == len(self._parts):  # Else a part was lost, and the reply is asked for again.
            self._parts += data
        if len(self._parts) < part.size:
            return part
        whole, self._parts = self._parts, bytearray()  # No second copy of the step's rows stays.
        return _DECODER.decode(whole)


def _is_batch(message: ToTrainer, step: int) -> bool:
    if isinstance(message, StepReply) and message.step > step:
        raise RunMismatchError(f"asked for the batch of step {step}, the orchestrator sent that of step {message.step}")
    return isinstance(message, RunFinished) or (isinstance(message, StepReply) and message.step == step)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Documents that one forward pass reads: N computed tokens."""

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]: position within the document."""
    trees: tuple[Tree, ...]
    """Which tokens attend to which: one tree a document, or several as branches of one."""
    source_R: Tensor
    """int64 [R]: index of the hidden state that predicts each of these tokens, that of the token before it."""
    first: int
    """Of a row that a context group shares, the tokens before this rank's part; input and position ids are the part."""
    own_R: Tensor | None
    """int64: which of the R this part predicts, in order; None for all."""

    def own(self, values_R: Tensor) -> Tensor:
        """Return the values of the tokens that this rank's part predicts."""
        return values_R if self.own_R is None else values_R[self.own_R]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRow:
    """A term's part of a row, on the device."""

    head_rows: Tensor | None
    """int64 [K]: the head's rows of its tokens; None for all, in order."""
    arrays: Mapping[str, Tensor]
    counts: Mapping[str, int]


Sides = list[tuple[np.ndarray, int]]
"""Documents whose ends the frozen base scores: their int32 ids, and where the scored tokens begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow(Reading):
    """A row to train on."""

    targets_R: Tensor
    """int64 [R]: the predicted tokens."""
    temperature_R: Tensor | None
    """float32 [R]: sampling temperature; None where it is 1 throughout."""
    document_R: Tensor
    """int64 [R]: the document of each token."""
    terms: Mapping[str, TermRow]
    """By the term's name."""
    taught: tuple[Reading, ...]
    """The passes that read the teacher documents; their D predicted tokens are the head's last D rows."""
    scored: Sides
    """What the frozen base scores (preference pairs); none where no term asks for it."""
    names: tuple[str, ...]
    """The sample or unit of each document."""
    packed_tokens: int
    """Tokens of all documents, before common prefixes were merged; 0 where another rank counts the row."""
    sample_ids: list[str]
    """Empty where another rank counts the row."""


def unpack(
    row: Row, terms: Sequence[Term], device: torch.device, *, share: bool = False, max_tokens: int | None = None,
    context: DeviceMesh | None = None,
) -> PackedRow:  # fmt: skip
    """Make the tensors of a checked micro-batch for `terms`. Documents of other terms are not read.

    `share` merges common beginnings. Teacher documents are read in passes of at most `max_tokens` computed tokens.
    The ranks of `context` share the row.
    """
    put = partial(_tensor, device=device)
    asked = {term.name: term.rows(row) for term in terms}
    read = [*range(row.samples), *row.documents(asked)]
    read = read or [0]  # the row may hold nothing but other terms' documents
    layout = prefix_layout([row.tokens(document) for document in read], share=share)
    positions = joined(np.arange(*row.starts[document : document + 2]) for document in read)
    computed_N = np.full(len(row.ids_N), -1, dtype=np.int64)
    computed_N[positions] = layout.where
    computed = positions[layout.kept]
    hinted = joined(asked[term.name].positions for term in terms if term.is_taught)
    # The positions that the head reads, each once with `hinted` last.
    predicted = np.r_[np.setdiff1d(joined(rows.positions for rows in asked.values()), hinted), hinted].astype(np.int64)
    head_row_N = np.full(len(row.ids_N), -1)
    head_row_N[predicted] = np.arange(len(predicted))
    document_R = row.document_of(predicted)
    own_rows = {name: head_row_N[rows.positions] for name, rows in asked.items()}
    temperatures = np.asarray(row.batch.temperatures, dtype=np.float32)
    counts_here = context is None or context.get_local_rank() == 0
    tokens = row.ids_N[computed], row.depth_N[computed]
    return PackedRow(
        **_part(tokens, layout.trees, computed_N[predicted - 1], put, context),
        targets_R=put(row.ids_N[predicted], torch.int64),
        temperature_R=None if (temperatures == 1.0).all() else put(temperatures[document_R], torch.float32),
        document_R=put(document_R, torch.int64),
        terms={name: _term_row(rows, own_rows[name], len(predicted), put) for name, rows in asked.items()},
        taught=_taught(row, device, share, max_tokens, context) if any(term.is_taught for term in terms) else (),
        scored=next((_scored(row, term.name) for term in terms if term.is_scored), []),
        names=tuple(row.name(index) for index in range(len(row.starts) - 1)),
        packed_tokens=len(row.ids_N) * counts_here,
        sample_ids=list(row.batch.sample_ids) * counts_here,
    )


def _term_row(rows: TermRows, head_rows: np.ndarray, count: int, put: partial[Tensor]) -> TermRow:
    in_order = np.array_equal(head_rows, np.arange(count))
    arrays = {
        name: put(array, torch.float32 if array.dtype.kind == "f" else torch.int64)
        for name, array in rows.arrays.items()
    }
    return TermRow(head_rows=None if in_order else put(head_rows, torch.int64), arrays=arrays, counts=rows.counts)


def _scored(row: Row, term: str) -> Sides:
    starts = [spans[0][0] for unit in row.units(term) for spans in unit.spans]
    return [
        (row.tokens(document), int(start - row.starts[document]))
        for start, document in zip(starts, row.documents([term]), strict=True)
    ]


def _taught(
    row: Row, device: torch.device, share: bool, max_tokens: int | None, context: DeviceMesh | None
) -> tuple[Reading, ...]:
    readings = []
    for teachers in _teacher_passes(row, share=share, max_tokens=max_tokens):
        ids = [row.tokens(teacher) for teacher in teachers]
        counts = [row.batch.turns[teacher - row.first_teacher].count for teacher in teachers]
        predicted = [np.arange(len(each) - count, len(each)) for each, count in zip(ids, counts, strict=True)]
        readings.append(reading_of(ids, predicted, device, share=share, context=context))
    return tuple(readings)


def reading_of(
    documents: list[np.ndarray], predicted: list[np.ndarray], device: torch.device, *, share: bool,
    context: DeviceMesh | None = None,
) -> Reading:  # fmt: skip
    """Make the forward pass over `documents` (ids, [T_i] each) for their tokens `predicted` (indices >= 1 within each).

    Without documents it reads one token, so that ranks stay in step.
    """
    if not documents:
        documents, predicted = [np.zeros(1, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    layout = prefix_layout(documents, share=share)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    tokens = joined(start + index for start, index in zip(starts, predicted, strict=True))
    positions = joined(np.arange(len(document)) for document in documents)
    read = np.concatenate(documents)[layout.kept], positions[layout.kept]
    return Reading(**_part(read, layout.trees, layout.where[tokens - 1], partial(_tensor, device=device), context))


def _part(
    tokens: tuple[np.ndarray, np.ndarray], trees: tuple[Tree, ...], source_R: np.ndarray, put: partial[Tensor],
    context: DeviceMesh | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a Reading of `tokens` (ids and positions): all of them, or this rank's part of the row.

    A row that the ranks of `context` do not divide ends in a tree of tokens that nothing reads.
    """
    first, own_R, part = 0, None, slice(None)
    if context is not None:
        width = -(-len(tokens[0]) // context.size())
        first, rest = context.get_local_rank() * width, width * context.size() - len(tokens[0])
        part, tokens = slice(first, first + width), (np.pad(tokens[0], (0, rest)), np.pad(tokens[1], (0, rest)))
        trees = (*trees, Tree(run=rest)) if rest else trees
        own_R = put(np.flatnonzero(source_R // width == context.get_local_rank()), torch.int64)
    input_ids, position_ids = (put(each[part], torch.int64)[None] for each in tokens)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "trees": trees,
        "source_R": put(source_R, torch.int64),
        "first": first,
        "own_R": own_R,
    }


def _tensor(values: np.ndarray, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values)).to(device=device, dtype=dtype, non_blocking=True)


def _teacher_passes(row: Row, *, share: bool, max_tokens: int | None) -> list[range]:
    """Cut the teacher documents into passes of at most `max_tokens` computed tokens."""
    passes: list[range] = []
    first, prefixes = row.first_teacher, Prefixes([row.tokens(teacher) for teacher in row.teachers()])
    for teacher in row.teachers():
        if passes:
            longer = range(passes[-1].start, teacher + 1)
            trees = prefixes.trees((each - first for each in longer), share=share)
            if max_tokens is None or sum(tree.tokens for tree in trees) <= max_tokens:
                passes[-1] = longer
                continue
        passes.append(range(teacher, teacher + 1))
    return passes


def checked_row(batch: MicroBatch, vocabulary: int) -> Row:
    """Cut `batch` into its documents, after a check of what the packer does not know.

    Raises RunMismatchError (lengths or temperatures that do not fit, token ids outside the vocabulary, a first token
    that is trained) or NonFiniteError (NaN or infinity among logprobs or advantages). Both name what is at fault.
    """
    where = f"micro-batch {batch.index} of step {batch.step} (samples {', '.join(batch.sample_ids) or 'none'})"
    count = len(ints(batch.input_ids))
    arrays = {"loss_mask": flags(batch.loss_mask), "logprobs": floats(batch.logprobs),
              "advantages": floats(batch.advantages)}  # fmt: skip
    for name, array in arrays.items():
        if len(array) != count:
            raise RunMismatchError(f"{where}: {name} has {len(array)} entries for {count} tokens")
    if sum(batch.lengths) != count or min(batch.lengths, default=0) < 1:
        raise RunMismatchError(f"{where}: lengths {batch.lengths} do not add up to {count} tokens")
    if len(batch.temperatures) != len(batch.lengths) or min(batch.temperatures) <= 0:
        raise RunMismatchError(f"{where}: temperatures {batch.temperatures} must be one positive number a document")
    row = Row.of(batch)
    first = np.isin(row.starts[: len(batch.lengths)], row.trained)
    if first.any():
        name = row.name(int(np.flatnonzero(first)[0]))
        raise RunMismatchError(f"{where}: the first token is marked as trained in {name}, but nothing predicts it")
    if row.ids_N.min() < 0 or row.ids_N.max() >= vocabulary:
        raise RunMismatchError(
            f"{where}: token ids {row.ids_N.min()}..{row.ids_N.max()}, the model's vocabulary is 0..{vocabulary - 1}"
        )
    _check_finite(row, where)
    return row


def _check_finite(row: Row, where: str) -> None:
    used = flags(row.batch.loss_mask).astype(bool)
    for turn in row.batch.turns:
        used[turn.student : turn.student + turn.count] = True
    for name, values in (("logprobs", row.sampler_logprobs), ("advantages", row.advantages)):
        bad = np.flatnonzero(used & ~np.isfinite(values))
        if len(bad):
            sample = row.name(int(row.document_of(bad[0])))
            raise NonFiniteError(f"{where}: {name} of sample {sample} hold NaN or infinity; nothing was trained")
