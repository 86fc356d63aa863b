"""One rank's connection to the rendezvous: numbered requests, repeated until they are answered.

Bytes go in pieces, several under way at once. An interrupted transfer continues where it broke off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

import zmq
import zmq.asyncio

from composer_prime.errors import DeadlineError, WireError
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.sockets import check_request, dealer
from diloco.transport import messages

logger = logging.getLogger(__name__)


PIECE_BYTES = 1 << 18
"""Most bytes of a piece: LEAST_BYTES times a power of two."""
WINDOW = 32
"""Most pieces under way at once."""
LEAST_BYTES = 1 << 14
_FIRST_WINDOW, _LEAST_WINDOW = 4, 2
_SLOW_S = 2.0
_RESEND_S = 3.0
_PIECE_TIMEOUT_S = 15.0
BodyRequest = TypeVar("BodyRequest", messages.Piece, messages.Get)


class RefusedError(WireError):
    """The rendezvous refused a request; the message is its own."""


class Flow:
    """How much of one transfer is under way, by how long answers take. No I/O."""

    def __init__(self) -> None:
        self.piece_bytes = LEAST_BYTES
        self.window = _FIRST_WINDOW

    def note_answer(self, took_s: float) -> None:
        if took_s < _SLOW_S:
            if self.piece_bytes < PIECE_BYTES:
                self.piece_bytes *= 2
            else:
                self.window = min(WINDOW, self.window + 1)
        elif self.window > _LEAST_WINDOW:
            self.window -= 1
        else:
            self.piece_bytes = max(LEAST_BYTES, self.piece_bytes // 2)

    def note_timeout(self) -> None:
        self.piece_bytes, self.window = LEAST_BYTES, _LEAST_WINDOW


def free_again(free_at: float, now: float, seconds: float, burst_s: float) -> float:
    """Return when a limited link is free again after what takes `seconds` of it.

    Who waits for that keeps the limit over any long time; what takes `burst_s` may pass at once.
    """
    return max(free_at, now - burst_s) + seconds


class Connection:
    def __init__(self, address: str, keys: ClientKeys, identity: str, rate_limit_mbit: float | None) -> None:
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self._context = zmq.asyncio.Context()
        self._socket = dealer(self._context, address, keys, identity.encode())
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[messages.ToPeer]] = {}
        self._bytes_per_s = rate_limit_mbit * 1e6 / 8 if rate_limit_mbit is not None else math.inf
        self._free_at = -math.inf
        """When the limit lets the next piece go."""
        self.receiver = asyncio.create_task(self._receive())

    async def close(self) -> None:
        self.receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.receiver
        self._socket.close(linger=200)
        self._context.term()

    async def call(self, request: messages.FromPeer, timeout_s: float = float("inf")) -> messages.ToPeer:
        """Return the answer to `request`, which is sent again every few seconds.

        Raises DeadlineError after `timeout_s`, or RefusedError.
        """
        began = time.monotonic()
        while (left := timeout_s - (time.monotonic() - began)) > 0:
            with contextlib.suppress(TimeoutError):
                return _accepted(await asyncio.wait_for(await self._send(request), min(_RESEND_S, left)))
        raise DeadlineError(
            f"the rendezvous at {self.address} has not answered for {timeout_s:g} s ({type(request).__name__}): is "
            "`diloco rendezvous` running there, with the same key file?"
        )

    async def _send(self, request: messages.FromPeer) -> asyncio.Future[messages.ToPeer]:
        number = next(self._numbers).to_bytes(8, "little")
        future: asyncio.Future[messages.ToPeer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        frames = check_request(messages.encode(request), type(request).__name__)
        self.bytes_sent += sum(map(len, frames))
        await self._socket.send_multipart([number, *frames])
        return future

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            future = self._waiting.get(frames[0]) if len(frames) == 2 else None
            if future is None or future.done():
                continue  # the answer to a request that was sent again
            self.bytes_received += len(frames[1])
            try:
                future.set_result(messages.to_peer(frames[1]))
            except WireError as error:
                future.set_exception(error)

    async def upload(
        self,
        header: messages.BlobHeader,
        body: memoryview,
        instance: int,
        on_wait: Callable[[str], None] = lambda waiting_for: None,
    ) -> bool:
        """Upload a blob; return False when it is not wanted any more. Raises RefusedError.

        `on_wait` gets what the rendezvous waits for while it has no room.
        """
        flow = Flow()
        while True:
            answer = await self.call(messages.DeltaOffer(header=header, instance=instance))
            if isinstance(answer, messages.Gone):
                return False
            if isinstance(answer, messages.RoundNotReady):
                on_wait(answer.waiting_for)
                continue
            assert isinstance(answer, messages.Received)
            if answer.size == header.size:
                return True
            chunks = (
                messages.Piece(name=header.name, offset=at, data=bytes(body[at : at + size]), instance=instance)
                for at, size in _spans(answer.size, header.size, flow)
            )
            # Whatever goes wrong, the answer to the next offer says where to continue.
            with contextlib.suppress(TimeoutError):
                async for chunk, reply in self._pipelined(chunks, flow):
                    if not isinstance(reply, messages.Received) or reply.size < chunk.offset + len(chunk.data):
                        break

    async def download(self, header: messages.BlobHeader, progress: str = "") -> bytearray | None:
        """Return a blob's body; None when it is not kept any more. `progress`: its name in the log.

        Raises ChecksumError, WireError, RefusedError.
        """
        body, done, checksum, flow = bytearray(header.size), 0, messages.running_checksum(), Flow()
        logged_at = time.monotonic()
        while done < header.size:
            spans = _spans(done, header.size, flow)
            requests = (messages.Get(name=header.name, offset=at, length=size) for at, size in spans)
            with contextlib.suppress(TimeoutError):
                async for get, piece in self._pipelined(requests, flow):
                    if not isinstance(piece, messages.Piece):
                        return None
                    if len(piece.data) != get.length:
                        raise WireError(f"{header.name}: {len(piece.data)} bytes at {get.offset}, not {get.length}")
                    body[get.offset : get.offset + get.length] = piece.data
                    checksum.update(piece.data)  # not all at once at the end: beats go out meanwhile
                    done = get.offset + get.length
                    if progress and time.monotonic() - logged_at > 10:
                        logged_at = time.monotonic()
                        logger.info("%s: %.0f %% of %.1f MB", progress, 100 * done / header.size, header.size / 1e6)
        messages.check_body(header, len(body), checksum.hexdigest())
        return body

    async def _keep_limit(self, size: int) -> None:
        now, burst_s = time.monotonic(), min(1.0, 2 * PIECE_BYTES / self._bytes_per_s)
        self._free_at = free_again(self._free_at, now, size / self._bytes_per_s, burst_s)
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    async def _pipelined(
        self, requests: Iterable[BodyRequest], flow: Flow
    ) -> AsyncIterator[tuple[BodyRequest, messages.ToPeer]]:
        """Yield requests with their answers, in order. Raises TimeoutError."""
        waiting: deque[tuple[BodyRequest, float, asyncio.Future[messages.ToPeer]]] = deque()
        source = iter(requests)
        try:
            while True:
                while len(waiting) < flow.window and (request := next(source, None)) is not None:
                    if isinstance(request, messages.Piece):
                        await self._keep_limit(len(request.data))
                    waiting.append((request, time.monotonic(), await self._send(request)))
                if not waiting:
                    return
                request, sent_at, future = waiting.popleft()
                try:
                    answer = _accepted(await asyncio.wait_for(future, _PIECE_TIMEOUT_S))
                except TimeoutError:
                    flow.note_timeout()
                    raise
                flow.note_answer(time.monotonic() - sent_at)
                yield request, answer
        finally:
            for _, _, future in waiting:
                future.cancel()


def _spans(start: int, end: int, flow: Flow) -> Iterator[tuple[int, int]]:
    while start < end:
        size = min(flow.piece_bytes, end - start)
        yield start, size
        start += size


def _accepted(answer: messages.ToPeer) -> messages.ToPeer:
    if isinstance(answer, messages.RequestRefused):
        raise RefusedError(answer.error)
    return answer
