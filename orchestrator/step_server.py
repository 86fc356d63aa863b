"""Serve batches to the trainer: one ROUTER socket (CURVE) with the protocol of composer_prime/wire/types.py.

    rank --StepRequest--> poll task: batch there?  yes -> StepReply (packed once, in a thread)
                                                   no  -> waits at most POLL_S -> BatchNotReady{waiting_for}
    rank 0 --StepDone / CheckpointRequest--> handled one after another, in order of arrival; a repeated one once

A rank's newer request replaces its older one. Bytes that are not a protocol message are counted and dropped. A message
for another run, another layout or an impossible step is refused with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import zmq

from composer_prime.errors import ComposerError, WireError
from composer_prime.wire.sockets import SecureServer
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    FromTrainer,
    RunFinished,
    StepDone,
    StepNoted,
    StepRefused,
    StepRequest,
)
from orchestrator.batching.batches import Batches, BatchLayout
from orchestrator.event_loop import Notifier, watched

logger = logging.getLogger(__name__)

POLL_S = 1.5
"""How long a request waits here for its batch before BatchNotReady; the protocol allows 2 s."""
_CLOSE_S = 10.0
_PAST_S = 20.0
"""How long a rank waits for rank 0 to announce a restart."""
_DECODER = msgspec.msgpack.Decoder(FromTrainer)


class TrainerOrders:
    """StepDone and CheckpointRequest, handled one after another: a checkpoint sees the step before it."""

    def __init__(
        self, on_step_done: Callable[[StepDone], Awaitable[None]], on_checkpoint: Callable[[int], Awaitable[None]]
    ) -> None:
        self.waiting: asyncio.Queue[tuple[bytes, StepDone | CheckpointRequest]] = asyncio.Queue()
        """Each with the identity of its rank."""
        self._on_step_done = on_step_done
        self._on_checkpoint = on_checkpoint
        self._last_done: tuple[str, int] | None = None
        """Session and step of the newest StepDone that was acted on; None before the first."""

    async def follow(self, order: StepDone | CheckpointRequest) -> StepNoted | CheckpointSaved:
        """Act on an order and return the answer. Raises WireError for a StepDone that contradicts what was served."""
        if isinstance(order, StepDone):
            await self._note(order)
            return StepNoted(step=order.step)
        try:
            await self._on_checkpoint(order.step)
        except (ComposerError, OSError) as error:
            logger.error("checkpoint of step %d failed: %s", order.step, error)
            return CheckpointSaved(step=order.step, error=str(error))
        return CheckpointSaved(step=order.step)

    async def _note(self, order: StepDone) -> None:
        """Act on a StepDone, unless it is repeated because the answer was lost."""
        last = self._last_done
        if last is None or last[0] != order.session or order.step > last[1]:
            await self._on_step_done(order)
            self._last_done = (order.session, order.step)


@dataclass(slots=True)
class _Rank:
    poll: asyncio.Task[None] | None = None
    """The task that answers its newest StepRequest."""
    past_since: float | None = None
    """Since when it asks for trained steps, monotonic seconds."""


class StepServer:
    def __init__(
        self,
        *,
        socket: SecureServer,
        batches: Batches,
        orders: TrainerOrders,
        changed: Notifier,
        waiting_for: Callable[[int], str],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Answer at `socket` from now on; needs a running event loop. `close` closes the socket too.

        `waiting_for(step)`: what the batch of `step` still lacks. `changed` notifies when a batch is formed.
        """
        self.garbage = 0
        """Dropped messages that are not of the protocol."""
        self.refused = 0
        self.last_heard: float | None = None
        """Monotonic seconds of the last valid message of any rank; None before the first."""
        self._server = socket
        self._batches = batches
        self._orders = orders
        self._changed = changed
        self._waiting_for = waiting_for
        self._on_error = on_error
        self._ranks: defaultdict[bytes, _Rank] = defaultdict(_Rank)
        """By identity."""
        self._finished: RunFinished | None = None
        """The answer to every StepRequest once the run is over; None before that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._receive())
        self._spawn(self._in_order())

    @property
    def endpoint(self) -> str:
        """The address really bound, with its port."""
        return self._server.endpoint

    def finish(self, reason: str, *, failed: bool) -> None:
        """Answer every StepRequest with RunFinished from now on."""
        self._finished = RunFinished(reason=reason, failed=failed)
        self._changed.notify()

    async def close(self) -> None:
        """Answer the orders received, such as a checkpoint that is being saved, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._orders.waiting.join()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._server.close)

    def _spawn(self, work) -> asyncio.Task[None]:
        task = watched(work, self._on_error)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _receive(self) -> None:
        while True:
            received = await self._server.receive()
            identity, payload = received.identity, received.first
            try:
                message = _DECODER.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.garbage += 1
                logger.warning("step server: dropped %d bytes that are not a message: %s", len(payload), error)
                continue
            if message.run_id != (run_id := self._batches.run_id):
                await self._refuse(identity, f"this is run {run_id!r}, the message is for run {message.run_id!r}")
                continue
            self.last_heard = time.monotonic()
            if isinstance(message, StepRequest):
                self._poll(identity, message)
            else:
                self._orders.waiting.put_nowait((identity, message))

    def _poll(self, identity: bytes, request: StepRequest) -> None:
        rank = self._ranks[identity]
        if rank.poll is not None:
            rank.poll.cancel()
        rank.poll = self._spawn(self._answer(identity, request))

    async def _answer(self, identity: bytes, request: StepRequest) -> None:
        if not 0 <= request.rank < request.world_size:
            ranks = f"rank {request.rank} of {request.world_size} ranks"
            await self._refuse(identity, f"{ranks}: ranks count from 0 to world_size - 1")
            return
        if await self._is_past(identity, request.step):
            return
        # StepDone travels on its own: it may be behind this request, and a joint run's last step may still grow.
        is_noted = self._batches.trained >= request.step - 1
        if request.step > self._batches.last_step and is_noted and self._finished is None:
            finished = RunFinished(reason=f"all {self._batches.last_step} steps are done", failed=False)
            await self._send(identity, finished)
            return
        await self._changed.wait_for(lambda: self._batches.get(request.step) or self._finished, POLL_S)
        if self._finished is not None:
            await self._send(identity, self._finished)
        elif (batch := self._batches.get(request.step)) is None:
            await self._send(identity, BatchNotReady(step=request.step, waiting_for=self._waiting_for(request.step)))
        else:
            layout = BatchLayout(request.world_size, request.max_tokens)
            try:
                payload = await self._batches.packed.of_rank(batch, request.rank, layout)
            except ComposerError as error:
                await self._refuse(identity, str(error))
                return
            await self._send_bytes(identity, payload)

    async def _is_past(self, identity: bytes, step: int) -> bool:
        """Tell whether `step` is trained already; if so, answer. Rank 0's message of a restart may be on its way."""
        rank = self._ranks[identity]
        if step > self._batches.trained:
            rank.past_since = None
            return False
        if rank.past_since is None:
            rank.past_since = time.monotonic()
        if await self._changed.wait_for(lambda: step > self._batches.trained, POLL_S):
            return False
        text = f"steps up to {self._batches.trained} are trained; rank 0 has not said that it restarts before {step}"
        if time.monotonic() - (rank.past_since or 0.0) < _PAST_S:
            await self._send(identity, BatchNotReady(step=step, waiting_for=text))
        else:
            await self._refuse(identity, f"step {step} was asked for, but {text}")
        return True

    async def _in_order(self) -> None:
        while True:
            identity, order = await self._orders.waiting.get()
            try:
                await self._send(identity, await self._orders.follow(order))
            except WireError as error:
                await self._refuse(identity, str(error))
            finally:
                self._orders.waiting.task_done()

    async def _refuse(self, identity: bytes, reason: str) -> None:
        self.refused += 1
        logger.warning("step server: refused a request: %s", reason)
        await self._send(identity, StepRefused(error=reason))

    async def _send(self, identity: bytes, message: msgspec.Struct) -> None:
        await self._send_bytes(identity, msgspec.msgpack.encode(message))

    async def _send_bytes(self, identity: bytes, payload: bytes) -> None:
        try:
            await self._server.socket.send_multipart([identity, payload], copy=False)
        except zmq.ZMQError as error:
            logger.warning("step server: a rank is gone, its answer is dropped: %s", error)
