"""A key holder that requests pieces of deltas and does not read the answers."""

from __future__ import annotations

import asyncio

import zmq
from joint_run import until

from composer_prime.wire.sockets import dealer
from diloco.rendezvous.rounds import Round
from diloco.transport.connection import PIECE_BYTES, WINDOW, Connection
from diloco.transport.messages import (
    AskRound,
    DeltaHeader,
    Get,
    JointKey,
    Piece,
    RoundNotReady,
    body_checksum,
    encode,
    to_peer,
)

SIZE, REQUESTS = 1 << 22, 600


# It asks 600 times for 4 MiB. What waits for it stays below 64 pieces of 256 KiB and what TCP holds; before, all of it
# was kept. Meanwhile others are answered, and when it reads on, so is this one.
def test_a_reader_that_stalls(make_rendezvous, key_file):
    server = make_rendezvous()
    blob = DeltaHeader(
        run="joint", peer="a", rank=0, fragment=0, codec="", weight=1.0, inner_steps=1, outer_step=0,
        base_hash="", layout_hash="", size=SIZE,
        checksum=body_checksum(bytes(SIZE)),
    )  # fmt: skip
    handler, handled = server.server.handler, 0
    current = server.server.rounds.rounds[0] = Round(0, is_closed=True)
    kept = server.server.rounds.delta(blob)
    kept.add(0, bytes(SIZE))
    assert kept.complete and current.blobs
    answer = handler.answer

    def count(request):
        nonlocal handled
        handled += 1
        return answer(request)

    handler.answer = count
    keys = JointKey.read(key_file).client()
    context = zmq.Context()
    stalled = context.socket(zmq.DEALER)
    stalled.setsockopt(zmq.RCVHWM, 1)  # it takes no more from the connection than it reads
    stalled.curve_serverkey, stalled.curve_publickey = keys.server_public, keys.own.public
    stalled.curve_secretkey = keys.own.secret
    stalled.connect(server.endpoint)

    async def another() -> bytearray | None:
        connection = Connection(server.endpoint, keys, "reads", None)
        try:
            return await connection.download(blob)
        finally:
            await connection.close()

    def unread() -> int:
        total = 0
        while stalled.poll(500):
            piece = to_peer(stalled.recv_multipart()[1])
            assert isinstance(piece, Piece) and len(piece.data) == PIECE_BYTES
            total += len(piece.data)
        return total

    try:
        for number in range(REQUESTS):
            stalled.send_multipart([number.to_bytes(8, "little"), encode(Get(name=blob.name, offset=0, length=SIZE))])
        until(lambda: handled == REQUESTS, "not all requests arrive")
        assert asyncio.run(another()) == bytes(SIZE)
        assert 2 * WINDOW * PIECE_BYTES <= unread() < REQUESTS * PIECE_BYTES / 3
        stalled.send_multipart([bytes(8), encode(Get(name=blob.name, offset=0, length=SIZE))])
        assert unread() == PIECE_BYTES
    finally:
        stalled.close(0)
        context.term()


# A key holder's connection asks 2,000 times for an outcome that nobody brings: 64 requests wait, and the others get no
# answer. Before, each waited and was looked at again at every change.
def test_many_polls_of_one_connection(make_rendezvous, key_file):
    server, answered = make_rendezvous(), 0
    ask = encode(AskRound(peer="a", rank=0, instance=1, outer_step=0, base_hash=""))
    with zmq.Context() as context, dealer(context, server.endpoint, JointKey.read(key_file).client()) as asking:
        for number in range(2000):
            asking.send_multipart([number.to_bytes(8, "little"), ask])
        while asking.poll(3000):
            answered += isinstance(to_peer(asking.recv_multipart()[1]), RoundNotReady)
    assert 64 <= answered < 1000
