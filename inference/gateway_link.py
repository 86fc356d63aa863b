"""The encrypted link to the gateway: one DEALER socket, the node's end of orchestrator/gateway/link.py.

    send      message --> gateway; dropped without a connection
    receive   gateway --> decode --> caller; a chunk also goes to the `read` that waits for it

Auditors use it too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from composer_prime.errors import DeadlineError, PullRefusedError
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.audit_messages import FromAuditor
from composer_prime.wire.node_messages import ChunkRequest, FromNode, ToNode, WeightPiece
from composer_prime.wire.sockets import dealer
from inference.weight_sources import CHUNK_TIMEOUT_S, ChunkSource

logger = logging.getLogger(__name__)


class GatewayLink(ChunkSource):
    """One CURVE DEALER socket, opened again for each attempt to reach the gateway, and the ChunkSource behind it.

    Bytes that are not a valid message are counted, logged and dropped.
    """

    def __init__(
        self,
        address: Callable[[], str | None],
        keys: ClientKeys,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        messages: Any = ToNode,
    ) -> None:
        """`address` is called for each connection, because an orchestrator that restarts may bind another port.

        It returns None before the orchestrator has bound one. Then nothing is sent or heard until the next `reopen`.
        `messages`: the union of what may arrive.
        """
        self._address = address
        self._keys = keys
        self._chunk_timeout_s = chunk_timeout_s
        self._chunks: dict[tuple[str, int], asyncio.Future[bytes | None]] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self.endpoint: str | None = None
        self.garbage = 0
        self.last_heard = time.monotonic()
        """When the last message of the gateway came, monotonic seconds."""

    def reopen(self) -> None:
        """Connect again and drop what was queued on the old connection. Raises ConfigError for a bad address."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self.endpoint = self._address()
        self._socket = dealer(self._context, self.endpoint, self._keys) if self.endpoint is not None else None

    def send(self, message: FromNode | FromAuditor) -> None:
        """Queue `message`. Without a connection it is dropped: the gateway reissues what it misses."""
        if self._socket is not None:
            # A DEALER without a high-water mark never blocks, so the returned future is done.
            self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)

    async def receive(self, timeout_s: float) -> ToNode | None:
        """Return the next message, or None after `timeout_s` of silence."""
        if self._socket is None:
            await asyncio.sleep(timeout_s)
            return None
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if not await self._socket.poll(math.ceil(left_s * 1000)):
                return None
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
                message = self._decoder.decode(frames[0])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self.garbage += 1
                if self.garbage <= 10 or self.garbage % 1000 == 0:
                    logger.warning("dropped %d bytes from the gateway that are not a message (%s); %d so far",
                                   sum(map(len, frames)), error, self.garbage)  # fmt: skip
                continue
            self.last_heard = time.monotonic()
            if isinstance(message, WeightPiece):
                self._take_piece(message)
            return message
        return None

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError when the gateway does not answer in time, PullRefusedError when it gives no more."""
        future = self._chunks[sha256, offset] = asyncio.get_running_loop().create_future()
        self.send(ChunkRequest(sha256=sha256, offset=offset))
        try:
            return await asyncio.wait_for(future, self._chunk_timeout_s)
        except TimeoutError:
            limit = f"{self._chunk_timeout_s:g} s"
            what = f"weight chunk {sha256} at byte {offset} from the gateway at {self.endpoint}"
            raise DeadlineError(f"waited {limit} for {what}") from None
        finally:
            self._chunks.pop((sha256, offset), None)

    def _take_piece(self, piece: WeightPiece) -> None:
        future = self._chunks.get((piece.sha256, piece.offset))
        if future is None or future.done():
            return
        if piece.refusal is not None:
            future.set_exception(PullRefusedError(piece.refusal))
        else:
            future.set_result(piece.data)

    def close(self) -> None:
        """Close the socket; queued messages get half a second."""
        self._context.destroy(linger=500)
