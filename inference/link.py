"""A node's end of the wire: one CURVE DEALER socket, opened again for each attempt to reach the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from composer_prime.errors import DeadlineError
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.node import ChunkMissing, ChunkRequest, FromNode, ToNode, WeightChunk
from composer_prime.wire.sockets import dealer

logger = logging.getLogger(__name__)


class GatewayLink:
    """Messages to and from the gateway. Anything else that arrives is counted, logged and dropped."""

    def __init__(self, address: Callable[[], str | None], keys: ClientKeys) -> None:
        """`address` is called for each connection, because an orchestrator that restarts may bind another port.

        It returns None before the orchestrator has bound one. Then nothing is sent or heard until the next `reopen`.
        """
        self._address = address
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(ToNode)
        self._encoder = msgspec.msgpack.Encoder()
        self.endpoint: str | None = None
        self.garbage = 0
        self.last_heard = time.monotonic()
        """When the last message of the gateway came, monotonic seconds."""

    def reopen(self) -> None:
        """Connect again and drop what was queued on the old connection. Raises ConfigError for a bad address."""
        self._drop_socket(linger_ms=0)
        self.endpoint = self._address()
        if self.endpoint is not None:
            self._socket = dealer(self._context, self.endpoint, self._keys)

    def send(self, message: FromNode) -> None:
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
            if not await self._socket.poll(left_s * 1000):
                return None
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
                message = self._decoder.decode(frames[0])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._drop_garbage(frames, error)
                continue
            self.last_heard = time.monotonic()
            return message
        return None

    def _drop_garbage(self, frames: list[bytes], error: Exception) -> None:
        self.garbage += 1
        if self.garbage <= 10 or self.garbage % 1000 == 0:
            size = sum(map(len, frames))
            logger.warning("dropped %d bytes from the gateway that are no message (%s); %d so far", size, error,
                           self.garbage)  # fmt: skip

    def _drop_socket(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None

    def close(self) -> None:
        """Close the socket; queued messages get half a second."""
        self._drop_socket(linger_ms=500)
        self._context.term()


class LinkSource:
    """Weight chunks over the node's own link, also behind NAT. Implements inference.receiver.ChunkSource."""

    def __init__(self, link: GatewayLink, piece_timeout_s: float) -> None:
        self._link = link
        self._timeout_s = piece_timeout_s
        self._waiting: dict[tuple[str, int], asyncio.Future[bytes | None]] = {}

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError when the gateway does not answer in time."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[sha256, offset] = future
        self._link.send(ChunkRequest(sha256=sha256, offset=offset))
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s (inference.chunk_timeout_s) for weight chunk {sha256} at byte {offset} "
                f"from the gateway at {self._link.endpoint}"
            ) from None
        finally:
            self._waiting.pop((sha256, offset), None)

    def arrived(self, message: WeightChunk | ChunkMissing) -> None:
        """Pass an answer to the reads that wait for it, if any."""
        missing = isinstance(message, ChunkMissing)
        for (sha256, offset), future in self._waiting.items():
            if sha256 == message.sha256 and (missing or offset == message.offset) and not future.done():
                future.set_result(None if missing else message.data)
