"""The requests that run on a node, one task each, and what long answers have so far, so that another node can go on.

    accept   Generate -> engine.generate -> wait until the weights are proven -> Sampled | GenerateFailed
    stream   every _LOOK_S: engine.progress -> requests with enough new tokens, or none sent for a while -> Sampled

Only tokens of proven weights leave: no part is sent while a swap is unproven, or of a request that began before weights
were taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from composer_prime.errors import BadRequestError, ComposerError, EngineError
from composer_prime.wire.node_messages import Generate, GenerateFailed, Sampled, cut_text
from composer_prime.wire.types import ints
from inference.engines.base import Engine
from inference.receiver import Receiver

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ENOUGH_TOKENS = 64
"""New tokens of a request that are sent at once. Fewer wait for _LONGEST_S, which spares the gateway messages."""
_LONGEST_S = 2.0
_LAST_WORDS_S = 2.0
"""How long a draining node waits for the tokens that unfinished requests have so far."""


@dataclass(slots=True)
class _Running:
    message: Generate
    task: asyncio.Task[None]
    rollbacks: int
    """Weights that the receiver had taken back when the request began."""
    sent_at: float
    sent: int = 0
    """Tokens."""


class RunningAnswers:
    """The requests of one node, from `accept` to their answers."""

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        send: Callable[[Sampled | GenerateFailed], None],
        ending: asyncio.Future[str],
    ) -> None:
        """`ending`: done once the node ends and takes no more; an engine that died is set there."""
        self._engine = engine
        self._receiver = receiver
        self._send = send
        self._ending = ending
        self._running: dict[str, _Running] = {}
        """By the engine's name for them."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [running.task for running in self._running.values()]

    def accept(self, message: Generate) -> None:
        name = f"{message.request_id}/{message.lease}"
        if name in self._running:
            return
        if self._ending.done():
            self._return_untried(message, "it is draining")
            return
        task = asyncio.create_task(self._answer(name, message))
        self._running[name] = _Running(message, task, self._receiver.rollbacks, time.monotonic())
        task.add_done_callback(lambda _: self._running.pop(name, None))

    def cancel(self, request_id: str, lease: int) -> None:
        if running := self._running.get(f"{request_id}/{lease}"):
            running.task.cancel()

    def drop(self) -> None:
        """Cancel all: the gateway reissues what this node holds."""
        for task in self.tasks:
            task.cancel()

    async def drain(self, limit_s: float) -> None:
        """Let what runs end within `limit_s`. What the rest has so far is sent: other nodes go on there."""
        if not self._running:
            return
        drained = asyncio.gather(self._engine.drain(), *self.tasks, return_exceptions=True)
        if not (await asyncio.wait([drained], timeout=limit_s))[0]:
            logger.warning("%d requests did not end within %g s; other nodes take over", len(self), limit_s)
            with suppress(EngineError, TimeoutError):
                await asyncio.wait_for(self.flush(), _LAST_WORDS_S)
            drained.cancel()

    async def _answer(self, name: str, message: Generate) -> None:
        request_id, lease = message.request_id, message.lease
        try:
            rollbacks = self._receiver.rollbacks
            prompt = ints(message.prompt_ids).tolist()
            done = await self._engine.generate(name, prompt, message.sampling, message.session)
            await self._receiver.settled.wait()
            if self._receiver.rollbacks != rollbacks:
                raise EngineError("weights that were refused were in use while this request ran")
        except Exception as error:  # An engine of one's own may raise anything.
            retryable = not isinstance(error, ValueError | BadRequestError)
            if retryable and self._ending.done():
                self._return_untried(message, str(error))
                return
            self._send(GenerateFailed(request_id=request_id, lease=lease, error=cut_text(error), retryable=retryable))
            if retryable:
                await self._check_engine(error)
            return
        self._send(Sampled(request_id=request_id, lease=lease, **msgspec.structs.asdict(done)))

    def _return_untried(self, message: Generate, why: str) -> None:
        """Return a request that this node cannot finish because it is draining. Not a failed attempt."""
        self._send(
            GenerateFailed(
                request_id=message.request_id, lease=message.lease, error=cut_text(why), retryable=True, tried=False
            )
        )

    async def _check_engine(self, error: Exception) -> None:
        """End the node when its engine cannot score two tokens, so that the launcher may start it again."""
        try:
            await self._engine.score([0, 0])
        except ComposerError as dead:  # Also no answer in time.
            if not self._ending.done():
                self._ending.set_exception(EngineError(f"the engine died: {dead}"))
        else:
            logger.warning("a request failed, but the engine still works: %s", error)

    async def stream(self) -> None:
        """Send parts until cancelled. An engine that fails is noticed by its requests."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.flush(_ENOUGH_TOKENS)
            except EngineError as error:
                logger.debug("no progress is streamed: %s", error)

    async def flush(self, enough: int = 1) -> None:
        """Send what requests with `enough` new tokens have, or with any after _LONGEST_S. Raises EngineError."""
        receiver, rollbacks = self._receiver, self._receiver.rollbacks
        sent = {name: one.sent for name, one in self._running.items() if one.rollbacks == rollbacks}
        if not sent or not receiver.settled.is_set():
            return
        parts = await self._engine.progress(sent)
        if not receiver.settled.is_set() or receiver.rollbacks != rollbacks:
            return
        now = time.monotonic()
        for name, part in parts.items():
            running = self._running.get(name)
            if running is None or running.task.done() or running.sent != sent[name]:
                continue
            if len(part) < enough and now - running.sent_at < _LONGEST_S:
                continue
            message, start = running.message, running.sent
            running.sent, running.sent_at = start + len(part), now
            fields = msgspec.structs.asdict(part)
            self._send(Sampled(request_id=message.request_id, lease=message.lease, start=start, **fields))
