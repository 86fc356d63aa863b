"""Messages between two processes of one machine, over a private socket pair (msgpack).

A frame is a little-endian uint32 length and that many bytes. The length is checked before anything is allocated. A
frame that does not decode to an expected message is logged and skipped, or in a strict stream an error. A length beyond
the limit ends the stream, because the next frame could not be found.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any, Generic, TypeVar

import msgspec

from composer_prime.errors import WireError

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
MessageT = TypeVar("MessageT")


class Frames(Generic[MessageT]):
    """Sends any message, and receives those of one union."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        receives: Any,
        peer: str,
        *,
        strict: bool = False,
    ) -> None:
        """`strict`: a lost message would leave someone waiting, so one that does not decode is a WireError."""
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._strict = strict
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. A closed connection drops it; the reader sees the end of the stream."""
        body = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> MessageT | None:
        """Return the next message, or None once the peer has closed. Raises WireError where the stream cannot go on."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"{self._peer}: a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if self._strict:
                    raise WireError(f"{self._peer}: a frame of {length} bytes does not decode: {error}") from None
                logger.warning("%s: dropped a frame of %d bytes: %s", self._peer, length, error)

    def close(self) -> None:
        self._writer.close()
