"""Garbage costs its sender, not the gateway."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from http_calls import generate_body, post
from node_peer import PeerNode

from composer_prime.run.keys import RunKeys
from composer_prime.wire.node import NodeWelcome, Rejected
from composer_prime.wire.sockets import bind_router, dealer
from orchestrator.gateway.link import NodeSocket


async def test_a_sender_of_garbage_is_evicted_at_its_budget(open_gateway, node_keys):
    """It learns why, loses its requests, and nothing from its connection is looked at; another node serves."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=60) as bad,
    ):
        for _ in range(5):
            bad.send_raw([b"\xc1" * (256 << 10)])
        await bad.until(lambda: isinstance(bad.welcome, Rejected))
        assert isinstance(bad.welcome, Rejected) and str(1 << 20) in bad.welcome.reason
        bad.say_hello()
        async with PeerNode(gateway.node_endpoint, node_keys, "b"):
            assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        assert gateway.state()["link"]["evicted"] == 1
        assert next((node["node_id"], node["attached"]) for node in gateway.state()["nodes"]) == ("a", False)


async def test_a_message_above_the_bound_never_arrives(open_gateway, node_keys):
    """The connection of its sender is closed before the bytes are held; the node attaches anew."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as node:
        node.welcome = None
        node.send_raw([b"\xc1" * (8 << 20)])
        node.say_hello()
        await node.until(lambda: isinstance(node.welcome, NodeWelcome))
        assert gateway.state()["link"]["garbage"] == 0
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200


async def test_of_a_message_with_many_frames_only_the_first_is_kept(keys: RunKeys):
    """The bound on size is one for each frame; the others are counted for the sender's budget, not copied."""
    socket = NodeSocket(keys, 1024)
    socket.bind("tcp://127.0.0.1:0")
    context = zmq.asyncio.Context()
    sender = dealer(context, socket.endpoint, keys.client("node"))
    await sender.send_multipart([b"first", *[b"x" * (256 << 10)] * 20])
    await sender.send(b"next")
    async with asyncio.timeout(10):
        received, following = await socket.receive(), await socket.receive()
    assert (received.first, received.num_frames, received.num_bytes) == (b"first", 21, 5 + 20 * (256 << 10))
    assert (following.first, following.num_frames, following.identity) == (b"next", 1, received.identity)
    context.destroy(linger=0)
    await socket.close()


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
        sender.send(b"x" * (512 << 10), zmq.NOBLOCK)
        sent += 1
    context.destroy(linger=0)
    server.close()
    assert sent < 200
