"""Nodes pull weights through their link: from any offset, and without filling the gateway's memory."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from node_peer import PeerNode

from composer_prime.wire.node import ChunkMissing, ChunkRequest, WeightChunk
from orchestrator.gateway.chunks import PIECE_BYTES


async def test_weight_chunks_are_served_in_pieces_from_any_offset(open_gateway, node_keys, store):
    """A node that lost its connection goes on where it stopped; missing chunks are said to be missing."""
    data = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 12345)
    exact = np.random.default_rng(1).bytes(PIECE_BYTES)
    [ref], [exact_ref] = store.put_chunks(data), store.put_chunks(exact)
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as node:

        async def pull(sha256: str, offset: int) -> WeightChunk | ChunkMissing:
            before = len(node.received)
            node.send(ChunkRequest(sha256=sha256, offset=offset))
            kinds = (WeightChunk, ChunkMissing)
            await node.until(lambda: any(isinstance(m, kinds) for m in node.received[before:]))
            return next(m for m in node.received[before:] if isinstance(m, kinds))

        got, offset, last = b"", 0, False
        while not last:
            piece = await pull(ref.sha256, offset)
            assert isinstance(piece, WeightChunk) and len(piece.data) <= PIECE_BYTES
            got, offset, last = got + piece.data, offset + len(piece.data), piece.last
        assert got == data
        resumed = await pull(ref.sha256, 2 * PIECE_BYTES + 10_000)
        assert isinstance(resumed, WeightChunk) and resumed.data == data[-2345:] and resumed.last
        whole = await pull(exact_ref.sha256, 0)
        assert isinstance(whole, WeightChunk) and whole.data == exact and whole.last
        for sha256, offset in (("0" * 64, 0), ("../../keys/server.curve", 0), (ref.sha256, -1), (ref.sha256, 1 << 63)):
            assert isinstance(await pull(sha256, offset), ChunkMissing)


async def test_a_slow_reader_costs_a_few_pieces_of_memory_not_the_model(open_gateway, node_keys, store):
    """64 pieces asked for by a connection that reads none: the rest is dropped, and is there once it reads."""
    sha256, count = "a" * 64, 64
    path = store.root / "chunks" / sha256
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(count * PIECE_BYTES)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as slow:
        slow.set(zmq.RCVHWM, 1)  # without it the socket's own thread would read everything
        slow.set(zmq.RCVBUF, 1 << 16)
        slow.curve_serverkey = node_keys.server_public
        slow.curve_publickey, slow.curve_secretkey = node_keys.own.public, node_keys.own.secret
        async with open_gateway() as gateway:
            link = lambda: gateway.state()["link"]
            slow.connect(gateway.node_endpoint)

            async def ask(offset: int) -> None:
                await slow.send(msgspec.msgpack.encode(ChunkRequest(sha256=sha256, offset=offset)))

            async def until(condition) -> None:
                async with asyncio.timeout(20):
                    while not condition():
                        await asyncio.sleep(0.01)

            for piece in range(count):
                await ask(piece * PIECE_BYTES)
            await until(lambda: link()["chunk_bytes_sent"] // PIECE_BYTES + link()["chunk_requests_dropped"] == count)
            queued = link()["chunk_bytes_sent"] // PIECE_BYTES
            assert queued <= 24  # 16, and what the kernel's buffers took meanwhile
            for _ in range(queued):
                await asyncio.wait_for(slow.recv(), 100)
            await ask((count - 1) * PIECE_BYTES)
            last = msgspec.msgpack.decode(await asyncio.wait_for(slow.recv(), 100), type=WeightChunk)
            assert (last.offset, last.last) == ((count - 1) * PIECE_BYTES, True)
