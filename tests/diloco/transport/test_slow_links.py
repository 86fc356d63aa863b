"""Slow links: what is under way there is small, and the limit of their rate."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from composer_prime.wire.sockets import bind_router
from diloco.rendezvous.rounds import Blob
from diloco.transport import connection
from diloco.transport.connection import PIECE_BYTES, WINDOW, Connection, Flow, free_again
from diloco.transport.messages import DeltaHeader, JointKey, Piece, Received, body_checksum, encode, from_peer


# Whatever a link was before, on one of `rate` what is under way comes to what is sent in 4 s, or to two of the smallest
# pieces; on one that is quick it comes to all that may be under way, however long the trip.
@given(before=st.lists(st.floats(0, 60), max_size=60), rate=st.floats(1e3, 1e9), trip_s=st.floats(0, 0.5))
def test_what_is_under_way(before, rate, trip_s):
    flow = Flow()
    for took_s in before:
        flow.note_answer(took_s) if took_s < 15 else flow.note_timeout()
    for _ in range(100):
        flow.note_answer(trip_s + flow.window * flow.piece_bytes / rate)
    under_way = flow.window * flow.piece_bytes
    assert under_way <= 4 * rate or under_way == 2 << 14
    if rate > 1e8:
        assert (flow.piece_bytes, flow.window) == (PIECE_BYTES, WINDOW)


# A link that becomes slow once pieces have grown, so that large ones do not come through any more: the upload goes on
# from where it was, with small ones.
def test_a_link_that_becomes_slow(monkeypatch):
    monkeypatch.setattr(connection, "_PIECE_TIMEOUT_S", 0.2)
    body = bytes(1_500_000)
    lost = asyncio.run(asyncio.wait_for(lost_on_the_way(body, quick_bytes=1_000_000, passes=1 << 16), 30))
    assert PIECE_BYTES in lost


async def lost_on_the_way(body: bytes, quick_bytes: int, passes: int) -> list[int]:
    """Sizes of pieces of an upload that were lost: after `quick_bytes` those of more than `passes` bytes are."""
    key, lost = JointKey(b"k" * 32), []
    header = DeltaHeader(
        run="joint", peer="a", rank=0, fragment=0, codec="", weight=1.0, inner_steps=1, outer_step=0,
        base_hash="", layout_hash="", size=len(body),
        checksum=body_checksum(body),
    )  # fmt: skip
    server, blob = bind_router("tcp://127.0.0.1:0", key.server(), [key.client().own.public]), Blob(header)

    async def answer_all() -> None:
        while True:
            identity, number, *frames = await server.socket.recv_multipart()
            request = from_peer(b"".join(frames))
            if isinstance(request, Piece):
                if blob.received > quick_bytes and len(request.data) > passes:
                    lost.append(len(request.data))
                    continue
                blob.add(request.offset, request.data)
            answer = encode(Received(size=blob.received))
            await server.socket.send_multipart([identity, number, answer])

    answering = asyncio.create_task(answer_all())
    client = Connection(server.endpoint, key.client(), "a/0", None)
    try:
        assert await client.upload(header, memoryview(body), 1) and blob.complete
    finally:
        answering.cancel()
        await asyncio.wait({answering})
        await client.close()
        server.close()
    return lost


BURST = 1000


# A sender that waits as required, with pauses of its own, has sent at most rate * t + burst bytes from any moment t ago
# at which it asked; also where a body is larger than the burst.
@given(
    sends=st.lists(st.tuples(st.integers(0, 3 * BURST), st.floats(0, 10)), min_size=1, max_size=30),
    rate=st.floats(1, 1e6),
)
def test_rate(sends, rate):
    now, free_at = 0.0, float("-inf")
    spans: list[tuple[float, float, int]] = []
    for size, pause_s in sends:
        asked = now = now + pause_s
        free_at = free_again(free_at, now, size / rate, BURST / rate)
        now = max(now, free_at)
        spans.append((asked, now, size))
    for first, (asked, *_) in enumerate(spans):
        sent = 0
        for _, moment, size in spans[first:]:
            sent += size
            assert sent <= (rate * (moment - asked) + BURST) * (1 + 1e-9) + 1e-9 * rate * moment
