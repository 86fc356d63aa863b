"""Links of a few kilobytes a second: what is under way there is small, and the connection lives."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_run import Blocks, adamw, inner_step, settings

from composer_prime.wire.sockets import bind_router
from diloco.rendezvous.rounds import Blob
from diloco.streaming import StreamingDiLoCo
from diloco.transport import connection
from diloco.transport.connection import PIECE_BYTES, WINDOW, Connection, Flow
from diloco.transport.messages import DeltaHeader, JointKey, Piece, Received, body_checksum, encode, from_peer

READ_BYTES = 1024


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


# A delta of 130 kB over a link of 0.1 Mbit/s, which needs 10 s for it, in which beats and answers come through: the
# round closes, on the connection that was made first.
@pytest.mark.slow
def test_a_slow_link(make_rendezvous, key_file):
    server, model = make_rendezvous(beat_timeout_s=10), Blocks(width=88)
    optimizer, waits = adamw(model), {"round_deadline_s": 60, "round_timeout_s": 70, "offline_timeout_s": 80}
    with slow_link(server.endpoint, bytes_per_s=12_500) as (address, connections):
        config = settings(address, key_file, "a", sync_every=1, **waits)
        with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
            engine.count(tokens=1)
            inner_step(model, optimizer, 0, 0)
    assert engine.outer_step == 1 and engine.metrics["diloco/bytes_sent"] > 130_000 and len(connections) == 1


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
            identity, number, raw = await server.socket.recv_multipart()
            request = from_peer(raw)
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


@contextmanager
def slow_link(endpoint: str, bytes_per_s: float) -> Iterator[tuple[str, list[str]]]:
    """A TCP relay to `endpoint`: its own address, and the connections that were made."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connections: list[str] = []
    loop, listener = asyncio.new_event_loop(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * READ_BYTES)  # what is queued waits at the sender
    listener.bind(("127.0.0.1", 0))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            await asyncio.sleep(len(data) / bytes_per_s)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(str(writer.get_extra_info("peername")))
        there = await asyncio.open_connection(host, int(port), limit=4 * READ_BYTES)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    async def serve() -> None:
        async with await asyncio.start_server(relay, sock=listener, limit=4 * READ_BYTES):
            await stop.wait()
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", connections
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
