"""Garbage and floods of valid messages cost their sender, not the gateway."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from gateway_made import generate_body, post
from node_peer import PeerNode
from test_weight_chunks import own_node

from composer_prime.errors import ConfigError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import (
    ChunkRequest,
    Dismissed,
    FromNode,
    GenerateFailed,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    Sampled,
    Status,
)
from composer_prime.wire.sockets import MAX_FRAMES, FromConnection, NodeSocket, bind_router, dealer, frames_of
from orchestrator.gateway.link import Conduct


async def test_a_sender_of_garbage_is_cut_off_at_its_budget(open_gateway, node_keys):
    """It learns why, loses its requests, and nothing from its connection is looked at; another node serves."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=60) as bad,
    ):
        for _ in range(5):
            bad.send_raw(frames_of(b"\xc1" * (256 << 10)))
        await bad.until(lambda: isinstance(bad.welcome, Dismissed))
        assert isinstance(bad.welcome, Dismissed) and "not a message" in bad.welcome.reason
        assert bad.welcome.may_return  # one bad link is enough
        bad.say_hello()
        async with PeerNode(gateway.node_endpoint, node_keys, "b"):
            assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        assert len(gateway.link.conduct.ignored) == 1
        assert not gateway.router.nodes["a"].attached


async def test_a_message_above_the_bound_never_arrives(open_gateway, node_keys):
    """The connection of its sender is closed before the bytes are held; the node attaches anew."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as node:
        node.welcome = None
        node.send_raw([b"\xc1" * (8 << 20)])
        node.say_hello()
        await node.until(lambda: isinstance(node.welcome, NodeWelcome))
        assert gateway.link.conduct.garbage == 0
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200


async def test_a_message_of_many_frames_does_not_hold_the_event_loop(keys: RunKeys):
    """It is read bit by bit once it is there, and others get their turns in between."""
    socket, turns = NodeSocket(keys, 1024), 0
    socket.bind("tcp://127.0.0.1:0")
    assert socket._server is not None
    context = zmq.asyncio.Context()
    await dealer(context, socket.endpoint, keys.client("node")).send_multipart([b""] * 20_000)
    assert await socket._server.socket.poll(60_000)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    receiving = asyncio.create_task(socket.receive())
    while turns < 20:
        await asyncio.sleep(0)
    assert time.monotonic() - socket.behind_at < 100 and not receiving.done()
    assert (await receiving).num_frames == 20_000
    counting.cancel()
    context.destroy(linger=0)
    await socket.close()


async def test_a_silent_node_is_found_though_messages_of_many_frames_are_read(open_gateway, node_keys, monkeypatch):
    """Its heartbeats may wait behind them, so it hears from the gateway, and has four times as long, and no longer."""
    async with (
        open_gateway(inference={"heartbeat_s": 0.1, "lost_after_s": 1000.0}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", heartbeat_s=1e6) as node,
    ):
        [attached] = gateway.router.attached()
        ticked = asyncio.Event()
        monkeypatch.setattr(gateway.control, "tick", ticked.set)

        async def is_lost_after(silent_s: float) -> bool:
            attached.heard = time.monotonic() - silent_s
            for _ in range(2):
                ticked.clear()
                await ticked.wait()
            return not attached.attached

        gateway.link._socket._server.behind_at = math.inf
        assert not await is_lost_after(3000)
        await node.until(lambda: Heard() in node.received)
        assert await is_lost_after(5000)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found as on Linux")
async def test_a_message_of_many_frames_ends_its_connection(open_gateway, keys: RunKeys):
    """A key of its own may not connect again for a while. It could delay the messages of all others without end."""
    async with open_gateway() as gateway, own_node(gateway, keys, "bad") as bad:
        events = bad.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bad.send_raw([b""] * (MAX_FRAMES + 1))
        async with asyncio.timeout(100):
            await events.recv_multipart()
        await bad.until(lambda: gateway.link.conduct.garbage == 1)
        assert not gateway.link.conduct.ignored, "its budget has room for many more"
        key = bad.keys.own.public
        with pytest.raises(ConfigError, match="bad is turned away for 60 s"):
            gateway.link.admission.is_admitted(key)
        gateway.link.admission._turned_away[key] = 0.0
        assert gateway.link.admission.is_admitted(key)


async def test_the_key_that_nodes_share_is_never_turned_away(open_gateway, node_keys):
    """A holder of it has its connection closed, and others can still connect."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "bad") as bad:
        bad.send_raw([b""] * MAX_FRAMES)
        await bad.until(lambda: gateway.link.conduct.garbage == 1)
        async with PeerNode(gateway.node_endpoint, node_keys, "good") as good:
            assert isinstance(good.welcome, NodeWelcome)


async def test_an_identity_stays_with_the_connection_that_has_it(keys: RunKeys):
    """Who names another's is not heard, and does not get what is sent to that one."""
    socket = NodeSocket(keys, 512)
    socket.bind("tcp://127.0.0.1:0")
    context = zmq.asyncio.Context()
    own = dealer(context, socket.endpoint, keys.client("node"), b"same")
    await own.send(b"first")
    async with asyncio.timeout(100):
        assert (await socket.receive()).body == b"first"
    thief = dealer(context, socket.endpoint, keys.client("node"), b"same")
    await thief.send(b"stolen")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(socket.receive(), 0.5)
    assert socket.send(b"same", Heard()) and await own.poll(100_000) and not await thief.poll(0)
    context.destroy(linger=0)
    await socket.close()


async def test_a_message_under_another_key_than_its_nodes_is_dropped(open_gateway, node_keys):
    """Whatever a socket hands over: it neither ends the node nor answers in its name."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a"):
        [node] = gateway.router.attached()
        leaving = msgspec.msgpack.encode(Goodbye(reason="forged"))
        forged = FromConnection(
            identity=node.identity, key=b"k" * 40, peer="", body=leaving, num_frames=1, num_bytes=len(leaving)
        )
        for _ in range(2):
            gateway.link._handle(forged)
        assert node.attached and gateway.link.conduct.garbage == 2
        gateway.link._handle(replace(forged, key=node.key))
        assert not node.attached


def test_unread_messages_wait_at_their_sender(keys: RunKeys):
    """A process that does not read holds some messages of a connection; the others stay in the sender's queue."""
    server = bind_router(
        "tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("node").public], max_message_bytes=1 << 20, max_unread=8
    )
    context = zmq.Context()
    sender = context.socket(zmq.DEALER)
    sender.setsockopt(zmq.SNDHWM, 1)
    client = keys.client("node")
    sender.curve_serverkey = client.server_public
    sender.curve_publickey, sender.curve_secretkey = client.own.public, client.own.secret
    sender.connect(server.endpoint)
    sent = 0
    while sent < 1000 and sender.poll(2000, zmq.POLLOUT):
        sender.send_multipart(frames_of(b"x" * (512 << 10)), zmq.NOBLOCK)
        sent += 1
    context.destroy(linger=0)
    server.close()
    assert sent < 200


_HELD_BY_NOBODY: dict[str, Any] = {"request_id": "g0", "lease": 1}
_SAMPLED: dict[str, Any] = {"token_ids": b"", "logprobs": b"", "version_spans": []}
_FLOODS: list[FromNode] = [
    Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None),
    Sampled(**_HELD_BY_NOBODY, **_SAMPLED, finish_reason="stop"),
    Sampled(**_HELD_BY_NOBODY, **_SAMPLED, start=0),
    GenerateFailed(**_HELD_BY_NOBODY, error="none", retryable=True),
    ChunkRequest(sha256="00" * 32, offset=0),
    NodeHello(node_id="a", engine="peer", run_id=None, version=0, max_concurrent=64, instance="a"),
]


@pytest.mark.parametrize("message", _FLOODS, ids=lambda message: type(message).__name__)
async def test_a_flood_of_valid_messages_cuts_its_sender_off(open_gateway, node_keys, message):
    """Who sends what nobody asked for learns why it must go, loses its requests, and is not looked at any more."""
    async with (
        open_gateway(inference={"lost_after_s": 300.0}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", instance="a", heartbeat_s=300) as bad,
        PeerNode(gateway.node_endpoint, node_keys, "b", heartbeat_s=300),
    ):
        async with asyncio.timeout(100):
            while not isinstance(bad.welcome, Dismissed):
                for _ in range(500):
                    bad.send(message)
                await asyncio.sleep(0.01)
        assert "unrequested" in bad.welcome.reason and type(message).__name__ in bad.welcome.reason
        assert "4224 at once and 50 a second" in bad.welcome.reason and bad.welcome.may_return
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        assert len(gateway.link.conduct.ignored) == 1 and list(gateway.versions()) == ["b"]


async def test_a_new_connection_brings_no_new_budget_for_garbage(open_gateway, keys: RunKeys):
    """A node with a key of its own is cut off for what its earlier connections sent, too."""
    async with open_gateway() as gateway:
        async with own_node(gateway, keys, "bad") as bad:
            gateway.link.conduct = Conduct(burst=40, per_s=0)
            for _ in range(30):
                bad.send_raw([b"\xc1"])
            await bad.until(lambda: gateway.link.conduct.garbage == 30)
        async with PeerNode(gateway.node_endpoint, keys.client("node"), "good") as good:
            for _ in range(20):
                good.send_raw([b"\xc1"])
            await good.until(lambda: gateway.link.conduct.garbage == 50)
        again = PeerNode(gateway.node_endpoint, bad.keys, "bad")
        again.socket = dealer(again._context, gateway.node_endpoint, bad.keys)
        for _ in range(20):
            again.send_raw([b"\xc1"])
        await bad.until(lambda: gateway.link.conduct.garbage == 70)
        assert len(gateway.link.conduct.ignored) == 1
        await again.vanish()


async def test_answers_that_were_asked_for_are_not_counted(open_gateway, node_keys):
    """A node with one place may answer any number of requests."""
    async with (
        open_gateway(inference={"lost_after_s": 300.0}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", heartbeat_s=300) as node,
    ):
        for _ in range(3):
            assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        assert len(node.generates) == 3
        assert [used for used, _ in gateway.link.conduct.used.values()] == [16], "the cost of its hello"


def test_a_budget_is_a_burst_and_what_is_refunded_is_free():
    """Beyond burst and extra a charge is refused; other peers have their own; refunded charges never add up."""
    budgets = Conduct(burst=10, per_s=0)
    assert [budgets.charge(b"a", 4) for _ in range(3)] == [True, True, False]
    assert budgets.charge(b"a", 4, extra=100)
    assert all(budgets.charge(b"b", 1) for _ in range(10))
    for _ in range(100):
        assert budgets.charge(b"c", 10)
        budgets.refund(b"c", 10)


@pytest.mark.slow
async def test_a_message_that_never_ends_costs_a_bounded_memory(open_gateway, node_keys):
    """600 MiB of one message: the connection is closed at about 256 MiB, others are served."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a"):
        context = zmq.Context()
        hoarder = dealer(context, gateway.node_endpoint, node_keys)
        before = psutil.Process().memory_info().rss
        frame, most = bytes(64 << 10), 0
        for _ in range(600 * 16):
            hoarder.send(frame, zmq.SNDMORE, copy=False)
        hoarder.send(b"end")
        for _ in range(100):
            await asyncio.sleep(0.1)
            most = max(most, psutil.Process().memory_info().rss - before)
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        context.destroy(linger=0)
        # The 600 MiB of the sender are one shared buffer.
        assert 64 << 20 < most < 450 << 20
