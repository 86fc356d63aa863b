"""Requests and runs survive nodes that come, go, come back, lag behind or send false data."""

import asyncio
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from gateway_made import MODEL, config_with, generate_body, post
from node_peer import PeerNode, failed, tokens_for

from composer_prime.errors import DeadlineError, PortInUseError, SignatureError
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.weights import Canary, Manifest, sign
from composer_prime.wire.node_messages import (
    MAX_PLACES,
    PROTOCOL,
    Dismissed,
    Generate,
    Heard,
    NodeHello,
    NodeWelcome,
    Status,
)
from composer_prime.wire.sockets import dealer
from orchestrator.gateway import Gateway
from tests.waiting import until


def signed_manifest(keys: RunKeys, version: int, chunks=(), run_id: str = "run-1") -> bytes:
    canary = Canary(token_ids=[1, 2], logprobs=[-1.0])
    manifest = Manifest(run_id=run_id, version=version, kind="anchor", dtype="float32",
                        chunks=list(chunks), tensors={}, canary=canary)  # fmt: skip
    return sign(manifest, keys.signer())


async def until_served(gateway: Gateway) -> None:
    await until(lambda: gateway.router.serving())


async def test_a_vanished_nodes_request_goes_to_another_with_a_new_lease(open_gateway, node_keys):
    """A node that dies silently costs lost_after_s, not the rollout."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=60) as a:
        call = asyncio.create_task(post(gateway.http_url, generate_body(5, 6)))
        await a.until(lambda: bool(a.generates))
        async with PeerNode(gateway.node_endpoint, node_keys, "b") as b:
            await a.vanish()
            status, reply = await call
            assert status == 200
            assert reply["choices"][0]["token_ids"] == tokens_for([5, 6], 6)[0].tolist()
            assert b.generates[0].lease != a.generates[0].lease
            assert gateway.router.counters["reissued"] == 1
            assert gateway.versions() == {"b": 0}


async def test_a_silent_nodes_late_answer_is_dropped_by_its_lease(open_gateway, node_keys):
    """A node without heartbeats counts as lost. Its later answers are dropped."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as a:
        held: list[Generate] = []
        a.answer = lambda request: held.append(request)
        a.heartbeat_s = 60
        gateway.records.open("r1")
        call = asyncio.create_task(post(gateway.http_url, generate_body(5, 6), X_Session_ID="r1"))
        await a.until(lambda: bool(held))
        async with PeerNode(gateway.node_endpoint, node_keys, "b"):
            assert (await call)[0] == 200
            [record] = gateway.records.take("r1")
            assert record.answer.node_id == "b"
            # It speaks again: the gateway asks for a Hello, and drops the old answer.
            a.send(a.usual_answer(held[0], token_ids=b"\0" * 24))
            await a.until(lambda: any(m == Heard(known=False) for m in a.received) or gateway.versions().get("a") == 0)
            a.send(a.usual_answer(held[0], token_ids=b"\0" * 24))
            await a.until(lambda: gateway.router.counters["late_answers"] == 1)
            assert gateway.router.counters["answered"] == 1


@pytest.mark.parametrize("comes_back", ["same process", "restarted"])
async def test_a_node_that_comes_back_takes_its_name_at_once(open_gateway, node_keys, comes_back):
    """A process on a new connection, and the successor of one that died, get the name and what the old one held."""
    endure = {"inference": {"heartbeat_s": 0.1, "lost_after_s": 60.0}}
    async with open_gateway(**endure) as gateway:
        old = PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=60, heartbeat_s=60)
        async with old:
            call = asyncio.create_task(post(gateway.http_url, generate_body(5)))
            await old.until(lambda: bool(old.generates))
            if comes_back == "restarted":
                await old.vanish()
            instance = old.instance if comes_back == "same process" else None
            async with PeerNode(gateway.node_endpoint, node_keys, "a", instance=instance) as new:
                assert isinstance(new.welcome, NodeWelcome)
                assert (await call)[0] == 200
                assert len(new.generates) == 1
                assert gateway.router.nodes["a"].record.answers == 1


@pytest.mark.parametrize("instance", ["another", ""])
async def test_nobody_takes_the_name_of_a_node_that_lives(open_gateway, node_keys, instance):
    """Another process under an attached node's name is turned away with the remedy; the node goes on."""
    other = PeerNode("", node_keys, "a")
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as holder:
        other.endpoint, other.instance = gateway.node_endpoint, instance
        async with other:
            assert isinstance(other.welcome, Dismissed)
            assert "its own name" in other.welcome.reason and "lost_after_s" in other.welcome.reason
            assert other.welcome.may_return  # the holder may vanish
            assert (await post(gateway.http_url, generate_body(5)))[0] == 200
            assert (len(holder.generates), len(other.generates)) == (1, 0)


async def test_full_nodes_make_requests_wait_in_order(open_gateway, node_keys):
    """A node never holds more than max_concurrent requests, and the queue is first come, first served."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=0.02, max_concurrent=2) as node,
    ):
        calls = []
        for i in range(10):
            calls.append(asyncio.create_task(post(gateway.http_url, generate_body(5, i))))
            await asyncio.sleep(0.005)
            assert len(node.running) <= 2
        assert all(status == 200 for status, _ in await asyncio.gather(*calls))
        order = [np.frombuffer(g.prompt_ids, "<i4")[1] for g in node.generates]
        assert order == list(range(10))


async def test_without_a_node_requests_end_with_a_message_that_says_what_was_waited_for(open_gateway):
    """The deadline's message has the command that starts a node. The run fails."""
    failures = []
    async with open_gateway(orchestrator={"no_node_timeout_s": 0.4}, fail=failures.append) as gateway:
        status, reply = await post(gateway.http_url, generate_body(5))
        assert status == 503
        for part in ("orchestrator invite", "0.4", "since"):
            assert part in reply["error"]["message"]
        assert isinstance(failures[0], DeadlineError) and "orchestrator invite" in str(failures[0])
        assert "none has connected" in gateway.waits.why_no_node()


async def test_a_wrong_key_is_turned_away(open_gateway, node_keys):
    """No message passes with an unlisted client key or a wrong server key. The right keys still work."""
    unlisted = zmq.curve_keypair()
    stranger = ClientKeys(node_keys.server_public, type(node_keys.own)(*unlisted))
    misled = ClientKeys(zmq.curve_keypair()[0], node_keys.own)
    async with open_gateway() as gateway:
        peers = [PeerNode(gateway.node_endpoint, keys, name) for keys, name in ((stranger, "x"), (misled, "y"))]
        for peer in peers:
            peer.connect()
        async with PeerNode(gateway.node_endpoint, node_keys, "z"):
            await asyncio.sleep(0.3)
            assert [peer.welcome for peer in peers] == [None, None]
            assert gateway.versions() == {"z": 0}
        for peer in peers:
            await peer.vanish()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"protocol": 1}, f"the node speaks protocol 1, this run {PROTOCOL}"),
        ({"run_id": "another"}, "'another'"),
        ({"node_id": ""}, "node id"),
        *(({"max_concurrent": places}, f"max_concurrent is {places}") for places in (-1, 0, MAX_PLACES + 1, 2**40)),
    ],
)
async def test_a_hello_that_does_not_fit_is_rejected_with_the_reason(open_gateway, node_keys, changes, complaint):
    """A node of another release or run, or without places, gets the reason why it cannot join."""
    async with open_gateway() as gateway:
        node = PeerNode(gateway.node_endpoint, node_keys, "a")
        node.connect()
        await node.until(lambda: isinstance(node.welcome, NodeWelcome))
        node.welcome = None
        node.say_hello(**changes)
        await node.until(lambda: node.welcome is not None)
        assert isinstance(node.welcome, Dismissed) and complaint in node.welcome.reason
        assert node.welcome.may_return is ("run_id" in changes)  # a new process would say none
        await node.vanish()


async def test_a_published_version_reaches_all_nodes_and_late_comers(open_gateway, node_keys, keys):
    """A Welcome carries the newest manifest and the configured copies, to the attached and to others at their Hello."""
    sources = ["http://*:5700", "https://cdn.example/run"]
    settings = {"weights": {"sources": sources}}
    async with open_gateway(orchestrator=settings) as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as a:
        assert isinstance(a.welcome, NodeWelcome) and a.welcome.manifest == b"" and a.welcome.sources == sources
        signed = signed_manifest(keys, 3)
        assert gateway.publish(signed) == 3
        await a.until(lambda: any(isinstance(m, NodeWelcome) and m.manifest == signed for m in a.received))
        async with PeerNode(gateway.node_endpoint, node_keys, "b", version=3) as b:
            assert isinstance(b.welcome, NodeWelcome) and b.welcome.manifest == signed and b.welcome.sources == sources
            assert b.welcome.verify_key == keys.verifier().public_bytes_raw()
            assert gateway.versions() == {"a": 0, "b": 3}
        with pytest.raises(SignatureError):
            gateway.publish(signed_manifest(keys, 4, run_id="another"))


async def test_nodes_behind_the_required_version_get_no_request(open_gateway, node_keys, keys):
    """A node that joins with version 0 samples nothing until it has caught up; one from a lost future neither."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "old") as old,
        PeerNode(gateway.node_endpoint, node_keys, "ahead", version=9) as ahead,
    ):
        gateway.publish(signed_manifest(keys, 5))
        gateway.require_version(4)
        call = asyncio.create_task(post(gateway.http_url, generate_body(5)))
        await asyncio.sleep(0.3)
        assert not old.generates and not ahead.generates
        assert "needs a version in 4..5" in gateway.waits.why_no_node()
        old.version = 5
        old.beat()
        assert (await call)[0] == 200
        assert len(old.generates) == 1


async def test_what_a_leaving_node_gives_back_is_no_failure(open_gateway, node_keys):
    """A draining node gives back more requests than failures are allowed: all are answered once another is there."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as leaving:
        leaving.answer = lambda request: failed(request, "it is draining", retryable=True, tried=False)
        calls = [asyncio.create_task(post(gateway.http_url, generate_body(5 + k))) for k in range(6)]
        await leaving.until(lambda: bool(leaving.generates) and len(gateway.router.queue) == 6)
        assert len(leaving.generates) <= 6
        assert gateway.router.nodes["a"].record.failures == 0 and gateway.waits.why_no_node() == "a draining"
        async with PeerNode(gateway.node_endpoint, node_keys, "b"):
            assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 6
        assert gateway.router.counters["failed"] == 0


async def test_ports_in_use_are_named(open_gateway, keys, store):
    """The error names the address that is taken, and a failed start leaves nothing bound."""
    async with open_gateway() as gateway:
        taken = {"node_address": gateway.node_endpoint}
        other = Gateway(config_with(orchestrator=taken), keys, "run-1", store, model_dir=MODEL)
        with pytest.raises(PortInUseError, match=gateway.node_endpoint):
            await other.start()
    # Free again after close: the same port can be bound.
    async with open_gateway(orchestrator=taken) as gateway:
        assert gateway.node_endpoint == taken["node_address"]


async def test_a_node_survives_a_restart_of_the_orchestrator(open_gateway, node_keys):
    """The new gateway does not know the connection, asks for a Hello, and the node serves again."""
    async with open_gateway() as first:
        endpoint = first.node_endpoint
        node = PeerNode(endpoint, node_keys, "a")
        await node.__aenter__()
    async with open_gateway(orchestrator={"node_address": endpoint}) as second:
        await until_served(second)
        assert any(m == Heard(known=False) for m in node.received)
        assert (await post(second.http_url, generate_body(5)))[0] == 200
        await node.until(lambda: Heard() in node.received)
    await node.vanish()


async def test_closing_ends_waiting_requests_at_once(open_gateway, node_keys):
    """Ctrl-C does not wait for tokens: callers get a 503, and nodes are told that the run is over."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a", delay_s=60) as node:
        call = asyncio.create_task(post(gateway.http_url, generate_body(5)))
        await node.until(lambda: bool(node.running))
        async with asyncio.timeout(30):
            await gateway.close(finished=True)
            status, reply = await call
        assert status == 503 and "stopping" in reply["error"]["message"]
        await node.until(lambda: any(isinstance(m, Dismissed) for m in node.received))


async def test_a_stall_of_the_orchestrator_does_not_lose_its_nodes(open_gateway, node_keys):
    """Heartbeats that waited in the socket during a stall of this process are read before a node counts as lost."""
    async with open_gateway() as gateway:
        stop = threading.Event()
        beating = threading.Thread(target=_beat_from_a_thread, args=(gateway.node_endpoint, node_keys, stop))
        beating.start()
        try:
            await until_served(gateway)
            node = gateway.router.nodes["t"]
            for _ in range(2):
                time.sleep(0.6)  # Longer than lost_after_s.
                await asyncio.sleep(0.3)
            assert gateway.router.nodes["t"] is node and node.attached
        finally:
            stop.set()
            await asyncio.to_thread(beating.join)


def _beat_from_a_thread(endpoint: str, node_keys: ClientKeys, stop: threading.Event) -> None:
    context = zmq.Context()
    socket = dealer(context, endpoint, node_keys)
    encode = msgspec.msgpack.encode
    socket.send(encode(NodeHello(node_id="t", engine="thread", run_id=None, version=0, max_concurrent=1)))
    while not stop.wait(0.05):
        socket.send(encode(Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None)))
    context.destroy(linger=0)
