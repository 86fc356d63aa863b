"""The socket pair's framing: every message round-trips, bad bytes cost one frame, an impossible length the stream."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import WireError
from composer_prime.wire.sockets import Frames
from orchestrator.workers.pool import CancelRollout, ToWorker


async def pair(**options: bool) -> tuple[socket.socket, Frames[Any]]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    return ours, Frames(reader, writer, ToWorker, "test", **options)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_garbage_frames_are_dropped(garbage: list[bytes]) -> None:
    """Between frames of arbitrary bytes every real message arrives, and nothing else does."""

    async def scenario() -> None:
        ours, frames = await pair()
        for index, body in enumerate(garbage):
            good = msgspec.msgpack.encode(CancelRollout(rollout_id=str(index)))
            ours.sendall(struct.pack("<I", len(body)) + body + struct.pack("<I", len(good)) + good)
        ours.close()
        received = []
        while (message := await frames.receive()) is not None:
            received.append(message)
        frames.close()
        assert [message.rollout_id for message in received] == [str(index) for index in range(len(garbage))]

    logging.disable(logging.WARNING)
    try:
        asyncio.run(scenario())
    finally:
        logging.disable(logging.NOTSET)


async def test_an_impossible_length_ends_the_stream() -> None:
    """A length beyond the limit is refused before anything is allocated."""
    ours, frames = await pair()
    ours.sendall(b"\xff\xff\xff\xff and more")
    with pytest.raises(WireError, match="4294967295 bytes"):
        await frames.receive()
    ours.close()
    frames.close()


async def test_garbage_ends_a_strict_stream() -> None:
    ours, frames = await pair(strict=True)
    ours.sendall(struct.pack("<I", 4) + b"junk")
    with pytest.raises(WireError, match="4 bytes does not decode"):
        await frames.receive()
    ours.close()
    frames.close()
