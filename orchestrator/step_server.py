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
from collections.abc import Awaitable, Callable

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
"""How long ranks may ask for a trained step before rank 0 announces the restart."""


class StepServer:
    def __init__(
        self,
        *,
        socket: SecureServer,
        run_id: str,
        batches: Batches,
        changed: Notifier,
        waiting_for: Callable[[int], str],
        on_step_done: Callable[[StepDone], Awaitable[None]],
        on_checkpoint: Callable[[int], Awaitable[None]],
        on_error: Callable[[BaseException], None],
        poll_s: float = POLL_S,
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
        self._run_id = run_id
        self._batches = batches
        self._changed = changed
        self._waiting_for = waiting_for
        self._on_step_done = on_step_done
        self._on_checkpoint = on_checkpoint
        self._on_error = on_error
        self._poll_s = poll_s
        self._decoder = msgspec.msgpack.Decoder(FromTrainer)
        self._polls: dict[bytes, asyncio.Task[None]] = {}
        """The task that answers a rank's newest StepRequest, by the rank's identity."""
        self._orders: asyncio.Queue[tuple[bytes, StepDone | CheckpointRequest]] = asyncio.Queue()
        self._finished: RunFinished | None = None
        """The answer to every StepRequest once the run is over; None before that."""
        self._last_done: tuple[str, int] | None = None
        """Session and step of the newest StepDone that was acted on; None before the first."""
        self._past_since: dict[bytes, float] = {}
        """Since when a rank asks for trained steps, monotonic seconds."""
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
                await self._orders.join()
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
                message = self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.garbage += 1
                logger.warning("step server: dropped %d bytes that are not a message: %s", len(payload), error)
                continue
            if message.run_id != self._run_id:
                await self._refuse(identity, f"this is run {self._run_id!r}, the message is for run {message.run_id!r}")
                continue
            self.last_heard = time.monotonic()
            if isinstance(message, StepRequest):
                self._poll(identity, message)
            else:
                self._orders.put_nowait((identity, message))

    def _poll(self, identity: bytes, request: StepRequest) -> None:
        earlier = self._polls.pop(identity, None)
        if earlier is not None:
            earlier.cancel()
        self._polls[identity] = task = self._spawn(self._answer(identity, request))
        task.add_done_callback(lambda done: self._polls.get(identity) is done and self._polls.pop(identity))

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
        await self._changed.wait_for(lambda: self._batches.get(request.step) or self._finished, self._poll_s)
        if self._finished is not None:
            await self._send(identity, self._finished)
        elif self._batches.get(request.step) is None:
            await self._send(identity, BatchNotReady(step=request.step, waiting_for=self._waiting_for(request.step)))
        else:
            layout = BatchLayout(request.world_size, request.max_tokens)
            try:
                payload = await self._batches.reply(request.step, request.rank, layout)
            except ComposerError as error:
                await self._refuse(identity, str(error))
                return
            await self._send_bytes(identity, payload)

    async def _is_past(self, identity: bytes, step: int) -> bool:
        """Tell whether `step` is trained already; if so, answer. Rank 0's message of a restart may be on its way."""
        if step > self._batches.trained:
            self._past_since.pop(identity, None)
            return False
        since = self._past_since.setdefault(identity, time.monotonic())
        if await self._changed.wait_for(lambda: step > self._batches.trained, self._poll_s):
            return False
        text = f"steps up to {self._batches.trained} are trained; rank 0 has not said that it restarts before {step}"
        if time.monotonic() - since < _PAST_S:
            await self._send(identity, BatchNotReady(step=step, waiting_for=text))
        else:
            await self._refuse(identity, f"step {step} was asked for, but {text}")
        return True

    async def _in_order(self) -> None:
        """Handle StepDone and CheckpointRequest one after another: a checkpoint sees the step before it."""
        while True:
            identity, message = await self._orders.get()
            try:
                if isinstance(message, StepDone):
                    await self._note(identity, message)
                else:
                    await self._save(identity, message.step)
            except WireError as error:
                await self._refuse(identity, str(error))
            finally:
                self._orders.task_done()

    async def _note(self, identity: bytes, message: StepDone) -> None:
        """Act on a StepDone, unless it is repeated because the answer was lost."""
        last = self._last_done
        is_repeated = last is not None and last[0] == message.session and message.step <= last[1]
        if not is_repeated:
            await self._on_step_done(message)
            self._last_done = (message.session, message.step)
        await self._send(identity, StepNoted(step=message.step))

    async def _save(self, identity: bytes, step: int) -> None:
        try:
            await self._on_checkpoint(step)
        except (ComposerError, OSError) as error:
            logger.error("checkpoint of step %d failed: %s", step, error)
            await self._send(identity, CheckpointSaved(step=step, error=str(error)))
        else:
            await self._send(identity, CheckpointSaved(step=step))

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
