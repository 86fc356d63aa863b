"""What a stranger can make a server hold before it has proven a key."""

from __future__ import annotations

import socket
import struct

import pytest

from composer_prime.address import tcp_address
from composer_prime.errors import WireError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.sockets import MAX_REQUEST_BYTES, bind_router, check_request

_GREETING = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)


# A stranger announces a frame of 512 MiB: its connection is closed before it has sent more than the limit.
def test_a_large_frame_before_the_handshake_closes_the_connection(tmp_path):
    keys = RunKeys.create(tmp_path / "keys")
    server = bind_router("tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("trainer").public])
    stranger = socket.create_connection(("127.0.0.1", tcp_address(server.endpoint, "").port), timeout=20)
    try:
        stranger.sendall(_GREETING + bytes([6]) + struct.pack(">Q", 512 << 20))
        with pytest.raises(ConnectionError):
            for _ in range(2 * MAX_REQUEST_BYTES >> 16):
                stranger.sendall(bytes(1 << 16))
            while stranger.recv(1 << 16):
                pass
            raise ConnectionError("closed")
    finally:
        stranger.close()
        server.close()


# Who sends more than a server takes learns why, and is not cut off in silence.
def test_a_request_that_is_too_large_is_not_sent():
    assert check_request(b"x", "StepDone") == b"x"
    with pytest.raises(WireError, match="StepDone"):
        check_request(bytes(MAX_REQUEST_BYTES + 1), "StepDone")
