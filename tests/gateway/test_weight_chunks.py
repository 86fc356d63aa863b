"""Nodes pull weights through their link: from any offset, not without end, and without filling the gateway's memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from node_peer import PeerNode
from test_nodes import signed_manifest

from composer_prime.run.keys import ClientKeys, CurvePair, RunKeys
from composer_prime.run.weights import CHUNK_BYTES, Canary, ChunkRef, Manifest
from composer_prime.wire.node_messages import ChunkRequest, WeightPiece
from orchestrator.gateway.link import MAX_ACCOUNTS, PIECE_BYTES, ChunkServer
from tests.waiting import until


async def test_weight_chunks_are_served_in_pieces_from_any_offset(open_gateway, node_keys, store):
    """A node that lost its connection goes on where it stopped; missing chunks are said to be missing."""
    data = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 12345)
    exact = np.random.default_rng(1).bytes(PIECE_BYTES)
    [ref], [exact_ref] = store.put_chunks(data), store.put_chunks(exact)
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as node:

        async def pull(sha256: str, offset: int) -> WeightPiece:
            before = len(node.received)
            node.send(ChunkRequest(sha256=sha256, offset=offset))
            await node.until(lambda: any(isinstance(m, WeightPiece) for m in node.received[before:]))
            return next(m for m in node.received[before:] if isinstance(m, WeightPiece))

        got, offset, last = b"", 0, False
        while not last:
            piece = await pull(ref.sha256, offset)
            assert piece.data is not None and len(piece.data) <= PIECE_BYTES
            got, offset, last = got + piece.data, offset + len(piece.data), piece.last
        assert got == data
        resumed = await pull(ref.sha256, 2 * PIECE_BYTES + 10_000)
        assert resumed.data == data[-2345:] and resumed.last
        whole = await pull(exact_ref.sha256, 0)
        assert whole.data == exact and whole.last
        for sha256, offset in (("0" * 64, 0), ("../../keys/server.curve", 0), (ref.sha256, -1), (ref.sha256, 1 << 63)):
            assert await pull(sha256, offset) == WeightPiece(sha256=sha256, offset=offset)


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
            chunks = gateway.link.chunks
            sent = lambda: sum(chunks.pulled.values()) // PIECE_BYTES
            slow.connect(gateway.node_endpoint)

            async def ask(offset: int) -> None:
                await slow.send(msgspec.msgpack.encode(ChunkRequest(sha256=sha256, offset=offset)))

            for piece in range(count):
                await ask(piece * PIECE_BYTES)
            await until(lambda: sent() + chunks.dropped == count)
            queued = sent()
            assert queued <= 24  # 16, and what the kernel's buffers took meanwhile
            for _ in range(queued):
                await asyncio.wait_for(slow.recv(), 100)
            await ask((count - 1) * PIECE_BYTES)
            last = msgspec.msgpack.decode(await asyncio.wait_for(slow.recv(), 100), type=WeightPiece)
            assert (last.offset, last.last) == ((count - 1) * PIECE_BYTES, True)


def own_node(gateway, keys: RunKeys, name: str) -> PeerNode:
    own = CurvePair(*zmq.curve_keypair())
    keys.registry.admit(own.public, name)
    return PeerNode(gateway.node_endpoint, ClientKeys(keys.client("node").server_public, own), name)


def empty_chunks(store, names: str) -> list[ChunkRef]:
    """Chunks of full size that take no disk."""
    refs = [ChunkRef(name * 64, CHUNK_BYTES) for name in names]
    (store.root / "chunks").mkdir(parents=True, exist_ok=True)
    for ref in refs:
        with (store.root / "chunks" / ref.sha256).open("wb") as file:
            file.truncate(ref.size)
    return refs


async def pull_all(node: PeerNode, refs: list[ChunkRef]) -> str | None:
    """Pull chunks whole, and return why the gateway gives no more."""
    for ref in refs:
        for offset in range(0, ref.size, PIECE_BYTES):
            node.received.clear()
            node.send(ChunkRequest(sha256=ref.sha256, offset=offset))
            await node.until(lambda: any(isinstance(m, WeightPiece) for m in node.received))
            for message in node.received:
                if isinstance(message, WeightPiece) and message.refusal is not None:
                    return message.refusal
    return None


async def test_a_node_that_pulls_again_and_again_spends_its_allowance(open_gateway, keys, store, caplog):
    """After three pulls it is refused, on a new connection too. It serves on, others pull, a new version gives more."""
    refs = empty_chunks(store, "ab")
    async with open_gateway() as gateway:
        gateway.publish(signed_manifest(keys, 0, refs))
        async with own_node(gateway, keys, "greedy") as greedy, own_node(gateway, keys, "honest") as honest:
            for _ in range(3):
                assert await pull_all(greedy, refs) is None
            refusal = await pull_all(greedy, refs)
            assert refusal is not None
            assert all(part in refusal for part in ("pulled 100.7 MB", "100.7 MB is its allowance", "--state-dir"))
            assert "node greedy gets no more weights" in caplog.text and caplog.text.count("gets no more") == 1
            assert await pull_all(honest, refs) is None
            async with PeerNode(gateway.node_endpoint, greedy.keys, "greedy", instance=greedy.instance) as again:
                assert await pull_all(again, refs) is not None
            greedy.say_hello()
            await greedy.until(lambda: {"greedy", "honest"} == {node.node_id for node in gateway.router.serving()})
            [new] = empty_chunks(store, "c")
            gateway.publish(signed_manifest(keys, 1, [refs[0], new]))
            for _ in range(3):
                assert await pull_all(greedy, [new]) is None
            assert await pull_all(greedy, [new]) is not None


def manifest_of(version: int, *chunks: ChunkRef) -> Manifest:
    return Manifest(run_id="run-1", version=version, kind="anchor", dtype="float32", chunks=list(chunks),
                    tensors={}, canary=Canary(token_ids=[1, 2], logprobs=[-1.0]))  # fmt: skip


def test_an_allowance_does_not_pile_up_and_its_accounts_are_bounded(store):
    """Versions give back at most what was pulled; who pulled most is remembered longest; model files count."""
    model_files = SimpleNamespace(num_bytes=1 << 30)
    chunks = ChunkServer(store, model_files)
    chunks.charge(b"before any version", 1 << 40)
    assert chunks.refusal(b"before any version") is None
    for version in range(20):
        chunks.grant(manifest_of(version, ChunkRef(f"{version:064x}", 1 << 30)))
    assert chunks.allowance == 6 << 30
    chunks.charge(b"node", (6 << 30) - 1)
    assert chunks.refusal(b"node") is None
    chunks.charge(b"node", 1)
    assert chunks.refusal(b"node") is not None
    for number in range(4 * MAX_ACCOUNTS):
        chunks.charge(b"connection %d" % number, 1)
    assert chunks.refusal(b"node") is not None and len(chunks.pulled) <= MAX_ACCOUNTS
    chunks.grant(manifest_of(20, ChunkRef("e" * 64, 1 << 30)))
    assert chunks.refusal(b"node") is None
