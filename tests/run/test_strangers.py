"""What a stranger can make a server hold before it has proven a key."""

import asyncio
import os
import socket
import struct

import pytest
import zmq.asyncio

from composer_prime.address import tcp_address
from composer_prime.errors import WireError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.sockets import MAX_REQUEST_BYTES, SERVER_FRAME_BYTES, bind_router, check_request, dealer

_GREETING = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)


# A stranger announces a frame of more than 64 KiB: its connection is closed before it has sent twice as much.
@pytest.mark.parametrize("size", [SERVER_FRAME_BYTES + 65, 512 << 20])
def test_a_large_frame_before_the_handshake_closes_the_connection(tmp_path, size):
    keys = RunKeys.create(tmp_path / "keys")
    server = bind_router("tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("trainer").public])
    stranger = socket.create_connection(("127.0.0.1", tcp_address(server.endpoint, "").port), timeout=20)
    try:
        stranger.sendall(_GREETING + bytes([6]) + struct.pack(">Q", size))
        with pytest.raises(ConnectionError):
            for _ in range(2):
                stranger.sendall(bytes(1 << 16))
            while stranger.recv(1 << 16):
                pass
            raise ConnectionError("closed")
    finally:
        stranger.close()
        server.close()


# Who sends more than a server takes learns why, and is not cut off in silence.
def test_a_request_that_is_too_large_is_not_sent():
    assert check_request(b"x", "StepDone") == [b"x"]
    with pytest.raises(WireError, match="StepDone"):
        check_request(bytes(MAX_REQUEST_BYTES + 1), "StepDone")


# A message up to the server's limit arrives whole, in frames; a longer one ends its connection, and the next is served.
async def test_long_messages_arrive_in_frames(tmp_path):
    keys, context = RunKeys.create(tmp_path / "keys"), zmq.asyncio.Context()
    server = bind_router("tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("trainer").public])
    client = dealer(context, server.endpoint, keys.client("trainer"))
    try:
        for raw in (b"x", bytes(range(256)) * 1000, os.urandom(MAX_REQUEST_BYTES)):
            await client.send_multipart(check_request(raw, "StepDone"))
            received = await server.receive()
            assert received.body == raw and received.num_frames == -(-len(raw) // SERVER_FRAME_BYTES)
        await client.send_multipart([bytes(SERVER_FRAME_BYTES)] * 65)
        assert (await server.receive()).body == b""
        await client.send(b"again")
        assert (await server.receive()).body == b"again"
    finally:
        context.destroy(linger=0)
        await asyncio.to_thread(server.close)
