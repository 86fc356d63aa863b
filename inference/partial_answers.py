"""Stream what long answers have so far, so that another node can continue them when this one is gone.

    every _LOOK_S: engine.progress -> requests with enough new tokens, or none sent for a while -> Sampled

Only tokens of proven weights leave: nothing is sent while a swap is unproven, or of a request that began before weights
were taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from composer_prime.errors import EngineError
from composer_prime.wire.node_messages import Generate, Sampled
from inference.engines.base import Engine
from inference.receiver import Receiver

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ENOUGH_TOKENS = 64
"""New tokens of a request that are sent at once. Fewer wait for _LONGEST_S, which spares the gateway messages."""
_LONGEST_S = 2.0


@dataclass(slots=True)
class _Stream:
    message: Generate
    rollbacks: int
    """Weights that the receiver had taken back when the request began."""
    sent: int
    sent_at: float


class ProgressStreams:
    """The requests that run, each from `begin` to `end`."""

    def __init__(self, engine: Engine, receiver: Receiver, send: Callable[[Sampled], None]) -> None:
        self._engine = engine
        self._receiver = receiver
        self._send = send
        self._streams: dict[str, _Stream] = {}

    def begin(self, engine_id: str, message: Generate) -> None:
        """The engine is about to answer `message` under the name `engine_id`."""
        self._streams[engine_id] = _Stream(message, self._receiver.rollbacks, 0, time.monotonic())

    def end(self, engine_id: str) -> None:
        self._streams.pop(engine_id, None)

    async def run(self) -> None:
        """Stream until cancelled. An engine that fails is noticed by its requests."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.flush(_ENOUGH_TOKENS)
            except EngineError as error:
                logger.debug("no progress is streamed: %s", error)

    async def flush(self, enough: int = 1) -> None:
        """Send what requests with `enough` new tokens have, or with any after _LONGEST_S. Raises EngineError."""
        receiver, rollbacks = self._receiver, self._receiver.rollbacks
        sent_by_request = {name: stream.sent for name, stream in self._streams.items() if stream.rollbacks == rollbacks}
        if not sent_by_request or not receiver.settled.is_set():
            return
        parts = await self._engine.progress(sent_by_request)
        if not receiver.settled.is_set() or receiver.rollbacks != rollbacks:
            return
        now = time.monotonic()
        for name, part in parts.items():
            stream = self._streams.get(name)
            if stream is None or stream.sent != sent_by_request[name]:
                continue
            if len(part) < enough and now - stream.sent_at < _LONGEST_S:
                continue
            message = Sampled(
                request_id=stream.message.request_id,
                lease=stream.message.lease,
                start=stream.sent,
                **msgspec.structs.asdict(part),
            )
            stream.sent, stream.sent_at = stream.sent + len(part), now
            self._send(message)
