"""A rank's side of the step protocol (composer_prime/wire/step.py), and how the ranks agree on what they got.

    rank --StepRequest--> orchestrator --NotReady--> rank asks again ...     until StepReply or RunFinished
    all ranks: gather one word list each -> all have the batch, or all stop  no rank enters the step alone

The orchestrator answers at least every few seconds, so only silence is a failure: after silence_timeout_s without any
message the wait ends with a DeadlineError. What gets no answer is repeated, so a lost message costs seconds: requests,
ever more rarely (a large batch may be under way over a thin link, and each request would bring it once more), and
StepDone, which nobody waits for but which is sent again, in order, until it is noted.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq

from composer_prime.errors import ComposerError, DeadlineError, RoleFailedError, RunMismatchError, WireError
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.sockets import dealer
from composer_prime.wire.step import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    FromTrainer,
    RunFinished,
    StepDone,
    StepNoted,
    StepRefused,
    StepReply,
    StepRequest,
    ToTrainer,
)
from composer_prime.wire.types import MicroBatch, flags, verify
from trainer.world import World, gather_texts, gather_words

REPEAT_S, LONGEST_REPEAT_S = 5.0, 80.0
"""Silence after which a request is repeated, doubled with each repetition."""
SAY_S = 30.0
"""How often the log says again what a wait is for."""
_SLICE_S = 0.2
_READY, _FINISHED, _STOPPED, _FAILED = range(4)
_COUNTED = {
    "samples": "samples with trained tokens",
    "tokens": "trained tokens",
    "micro_batches": "micro-batches with trained tokens",
    "distilled_turns": "distilled turns",
    "distilled_tokens": "distilled tokens",
    "pairs": "preference pairs",
}
"""The fields of StepTotals, each the denominator of some loss, and what the ranks count to check them."""
logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A stop was requested while waiting: no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Who asks, for which run, and within what bounds."""

    run_id: str
    rank: int
    world_size: int
    max_tokens: int
    silence_timeout_s: float


def find_endpoint(path: Path, timeout_s: float, stopping: Callable[[], bool]) -> str:
    """The step server's address from endpoints.json, which the orchestrator writes once it is bound.

    Raises DeadlineError after `timeout_s`, or Stopped.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stopping():
            raise Stopped
        try:
            return json.loads(path.read_bytes())["step"]
        except (FileNotFoundError, KeyError, json.JSONDecodeError):
            time.sleep(0.05)
    raise DeadlineError(
        f"waited {timeout_s:.0f} s for the orchestrator to write its address to {path}: is it running? "
        "(trainer.orchestrator_timeout_s bounds this wait)"
    )


class StepClient:
    """One DEALER to the step server. `stopping` is looked at several times a second while waiting for a batch."""

    def __init__(self, endpoint: str, keys: ClientKeys, asked: RankInfo, stopping: Callable[[], bool]) -> None:
        self._endpoint, self._asked, self._stopping = endpoint, asked, stopping
        self._context = zmq.Context()
        self._socket = dealer(self._context, endpoint, keys, identity=f"trainer-{asked.rank}".encode())
        self._decoder = msgspec.msgpack.Decoder(ToTrainer)
        self._session = secrets.token_hex(8)
        self._unnoted: list[StepDone] = []
        self._said_at = 0.0
        """When `_unnoted` was last sent, monotonic seconds."""

    def close(self) -> None:
        self._socket.close(linger=2000)
        self._context.term()

    def batch(self, step: int, versions: tuple[int, int]) -> StepReply | RunFinished:
        """This rank's verified micro-batches of `step`, or the news that there are none.

        `versions`: oldest and newest policy version that they may hold tokens of.

        Raises DeadlineError (silence), RunMismatchError, ChecksumError, WireError, or Stopped.
        """
        asked = self._asked
        request = StepRequest(run_id=asked.run_id, step=step, rank=asked.rank, world_size=asked.world_size,
                              max_tokens=asked.max_tokens)  # fmt: skip
        reply = self._ask(request, f"the batch of step {step}", lambda m: _is_batch(m, step))
        if isinstance(reply, StepReply):
            for index, batch in enumerate(reply.micro_batches):
                verify(batch, run_id=asked.run_id, step=step, rank=asked.rank, versions=versions)
                if batch.index != index:
                    raise RunMismatchError(f"step {step}: micro-batch {index} says that it is number {batch.index}")
        return reply

    def done(self, step: int, version: int, sample_ids: list[str]) -> None:
        """Tell that `version`, the newest after `step`, is in the weight store.

        Nothing is awaited; later calls repeat it until noted.
        """
        self._unnoted.append(
            StepDone(
                run_id=self._asked.run_id, step=step, version=version, sample_ids=sample_ids, session=self._session
            )
        )
        self._say_unnoted()

    def checkpoint(self, step: int) -> CheckpointSaved:
        """Have the orchestrator write its part of checkpoint `step`, also while this rank is being stopped.

        Raises as `batch` does, but never Stopped: a checkpoint that was begun is finished.
        """
        self._until_noted()
        request = CheckpointRequest(run_id=self._asked.run_id, step=step)
        wanted = f"the orchestrator's part of checkpoint {step}"
        return self._ask(request, wanted, lambda m: isinstance(m, CheckpointSaved) and m.step == step, stopping=_never)

    def _send(self, message: FromTrainer | None) -> None:
        if message is not None:
            self._socket.send(msgspec.msgpack.encode(message))

    def _until_noted(self) -> None:
        """Wait until the orchestrator knows of every step that was taken. Raises as `checkpoint` does."""
        if self._unnoted:
            wanted = f"the orchestrator to note step {self._unnoted[-1].step}"
            self._ask(None, wanted, lambda _: not self._unnoted, stopping=_never)

    def _say_unnoted(self) -> None:
        """All of them, in order: the orchestrator refuses a step whose predecessor it does not know."""
        self._said_at = time.monotonic()
        for message in self._unnoted:
            self._send(message)

    def _ask(
        self,
        request: FromTrainer | None,
        wanted: str,
        accept: Callable[[ToTrainer], bool],
        stopping: Callable[[], bool] | None = None,
    ):
        """Send `request`, if any, and wait for what `accept` takes; older or repeated answers are dropped."""
        stopping = stopping or self._stopping
        started = heard = time.monotonic()
        self._send(request)
        patience_s, say_at = REPEAT_S, heard
        repeat = heard + patience_s
        while True:
            if stopping():
                raise Stopped
            message = self._receive()
            now = time.monotonic()
            if self._unnoted and now - self._said_at > REPEAT_S:
                self._say_unnoted()
            if message is not None:
                heard, patience_s, repeat = now, REPEAT_S, now + REPEAT_S
                if isinstance(message, StepRefused):
                    raise RunMismatchError(f"the orchestrator refused the request for {wanted}: {message.error}")
                if accept(message):
                    return message
                if (
                    isinstance(message, BatchNotReady)
                    and isinstance(request, StepRequest)
                    and message.step == request.step
                ):
                    if now >= say_at:
                        say_at = now + SAY_S
                        logger.info("waiting for %s (%.0f s): %s", wanted, now - started, message.waiting_for)
                    self._send(request)
            elif now - heard > self._asked.silence_timeout_s:
                raise DeadlineError(
                    f"waited for {wanted} for {now - started:.0f} s, and the orchestrator at {self._endpoint} has been "
                    f"silent for the last {now - heard:.0f} s (trainer.orchestrator_timeout_s is "
                    f"{self._asked.silence_timeout_s:g}): is it alive, and does this rank have the run's keys?"
                )
            elif now > repeat:
                patience_s = min(2 * patience_s, LONGEST_REPEAT_S, max(REPEAT_S, self._asked.silence_timeout_s / 4))
                repeat = now + patience_s
                self._send(request)

    def _receive(self) -> ToTrainer | None:
        """The next message; None after a fraction of a second without one."""
        if not self._socket.poll(_SLICE_S * 1000):
            return None
        raw = self._socket.recv()
        try:
            message = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"{len(raw)} bytes from the orchestrator at {self._endpoint} are no message of this protocol: {error}; "
                "run one release on both sides"
            ) from None
        if isinstance(message, StepNoted):
            self._unnoted = [said for said in self._unnoted if said.step > message.step]
        return message


def _never() -> bool:
    return False


def _is_batch(message: ToTrainer, step: int) -> bool:
    if isinstance(message, StepReply) and message.step > step:
        raise RunMismatchError(f"asked for the batch of step {step}, the orchestrator sent that of step {message.step}")
    return isinstance(message, RunFinished) or (isinstance(message, StepReply) and message.step == step)


def next_batch(client: StepClient, world: World, step: int, versions: tuple[int, int]) -> StepReply | RunFinished:
    """The batch of `step` on this rank, once all ranks have theirs and their counts fit together.

    Raises, on every rank, RoleFailedError or the rank's own error when any rank failed; Stopped when any was stopped.
    """
    reply: StepReply | RunFinished | None = None
    error: BaseException | None = None
    try:
        reply = client.batch(step, versions)
    except (ComposerError, Stopped) as caught:
        error = caught
    batches = reply.micro_batches if isinstance(reply, StepReply) else []
    table = gather_words([_status(reply, error), len(batches), *_counts(batches)])
    _raise_together(table, error, step)
    if isinstance(reply, StepReply) and all(row[0] == _READY for row in table):
        _check_table(table, reply, step)
        return reply
    if isinstance(reply, RunFinished):
        return reply
    return RunFinished(reason="the orchestrator ended the run while the ranks were asking", failed=False)


def _status(reply: StepReply | RunFinished | None, error: BaseException | None) -> int:
    if isinstance(error, Stopped):
        return _STOPPED
    if error is not None:
        return _FAILED
    return _READY if isinstance(reply, StepReply) else _FINISHED


def _raise_together(table: list[list[int]], error: BaseException | None, step: int) -> None:
    statuses = [row[0] for row in table]
    if _FAILED in statuses:
        texts = gather_texts("" if error is None else str(error))
        if isinstance(error, ComposerError):
            raise error
        failed = [f"rank {rank}: {texts[rank]}" for rank, status in enumerate(statuses) if status == _FAILED]
        raise RoleFailedError(f"step {step} cannot begin, other ranks failed: {'; '.join(failed)}")
    if _STOPPED in statuses:
        raise Stopped


def _check_table(table: list[list[int]], reply: StepReply, step: int) -> None:
    counts = [row[1] for row in table]
    if len(set(counts)) != 1 or counts[0] == 0:
        raise RunMismatchError(f"step {step}: ranks got {counts} micro-batches; they must be equal and at least 1")
    held_by_all = map(sum, zip(*(row[2:] for row in table), strict=True))
    for (field, name), held in zip(_COUNTED.items(), held_by_all, strict=True):
        total = getattr(reply.totals, field)
        if held != total:
            raise RunMismatchError(
                f"step {step}: the ranks hold {held} {name}, the orchestrator's totals say {total}: the loss would "
                "have a wrong denominator"
            )


def _counts(batches: list[MicroBatch]) -> list[int]:
    """What _COUNTED names, in its order."""
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
        sum(len(batch.pairs) for batch in batches),
    ]
