"""Requests leave a node that hangs, and reach one whose context is large enough."""

import asyncio
import time

import pytest
from fleet import Fleet, status
from gateway_made import generate_body, post
from node_peer import PeerNode, failed

from composer_prime.errors import RequestError
from composer_prime.wire.node_messages import NodeHello
from orchestrator.gateway.nodes import AttachedNode


def stall(node: AttachedNode) -> None:
    """Make it as if `node` had been silent about its requests for 100 s."""
    for request in node.leases.values():
        request.running.placed -= 100.0
    node.progress -= 100.0


async def test_a_hung_engine_loses_its_requests_while_its_heartbeats_go_on(open_gateway, node_keys):
    """They are answered elsewhere long before the rollout's own deadline."""
    source = {"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": 60.0}
    async with (
        open_gateway(orchestrator={"source": [source]}, inference={"heartbeat_s": 0.1, "lost_after_s": 0.4}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "a") as hung,
    ):
        hung.answer = lambda request: None
        calls = [asyncio.create_task(post(gateway.http_url, generate_body(5, i))) for i in range(4)]
        await hung.until(lambda: len(hung.generates) == 4)
        for request in gateway.router.open:
            request.running.placed -= 20.0
        hung_node = gateway.router.attached()[0]
        hung_node.progress -= 20.0
        async with PeerNode(gateway.node_endpoint, node_keys, "b") as other:
            replies = await asyncio.gather(*calls)
            assert [code for code, _ in replies] == [200] * 4
            assert len(other.generates) == 4 and gateway.versions() == {"a": 0, "b": 0}
            await hung.until(lambda: not hung.running)


async def test_a_stalled_node_gets_one_request_until_it_answers():
    """It is left alone for a while, then tried with a single request, then trusted again."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(6)
    node = fleet.node("a")
    stall(node)
    fleet.router.reclaim_stalled(75.0)
    assert not node.leases and len(fleet.node("b").leases) == 6
    assert "stalls in a row" in (node.cannot_serve(fleet.router.policy) or "")
    fleet.router.update_status(node, status(tokens_per_s=1.0, version=1))
    assert node.cannot_serve(fleet.router.policy) is not None, "a claim ends no suspension"
    fleet.router.update_status(node, status())
    node.record.suspended_until = 0.0
    fleet.router.update_status(fleet.node("b"), status(kv_used=0.97))
    await fleet.ask(6)
    assert len(node.leases) == 1
    fleet.answer("a", fleet.sent["a"][-1])
    await fleet.ask(6)
    assert len(node.leases) == 6


@pytest.mark.parametrize("instance", ["a", "restarted", ""])
async def test_a_suspension_outlasts_a_restart(instance):
    """Whatever process a node announces itself as, its suspension ends when its time is over, not before."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(6)
    stall(fleet.node("a"))
    fleet.router.reclaim_stalled(75.0)
    hello = NodeHello(node_id="a", engine="test", run_id=None, version=0, max_concurrent=64, instance=instance)
    node = fleet.router.attach(b"a2", hello)
    assert "stalls in a row" in (node.cannot_serve(fleet.router.policy) or "") and node.places == 1
    node.record.suspended_until = time.monotonic()
    assert node.cannot_serve(fleet.router.policy) is None


@pytest.mark.parametrize("leaves", ["says hello", "says goodbye"])
async def test_a_node_that_leaves_again_and_again_without_an_answer_is_suspended(open_gateway, node_keys, leaves):
    """Its requests would wait on it until their deadlines: whatever it leaves by, they come back to its free places."""
    async with (
        open_gateway(inference={"lost_after_s": 300.0}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "hoarder", heartbeat_s=300, answer=lambda request: None) as hoarder,
    ):
        call = asyncio.create_task(post(gateway.http_url, generate_body(5)))
        for count in range(1, 5):
            await hoarder.until(lambda count=count: len(hoarder.generates) == count)
            hoarder.welcome = None
            if leaves == "says goodbye":
                hoarder.goodbye()
            hoarder.say_hello(instance=f"life-{count}")
            await hoarder.until(lambda: hoarder.welcome is not None)
        assert "4 failures in a row" in gateway.waits.why_no_node() and len(hoarder.generates) == 4
        async with PeerNode(gateway.node_endpoint, node_keys, "other"):
            assert (await call)[0] == 200


async def test_a_node_that_delivered_something_may_leave():
    """One that streams, or has answered since it got its oldest request, is slow or has a bad connection."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(2)
    for name in ("a", "b"):
        assert len(fleet.sent[name]) == 1
    fleet.stream("a", fleet.sent["a"][0], [10])
    fleet.router.leave(fleet.node("a"), "reconnecting")
    fleet.router.leave(fleet.node("b"), "reconnecting")
    assert [fleet.node(name).record.failures_in_row for name in ("a", "b")] == [0, 1]


@pytest.mark.parametrize("obstacle", ["outdated", "draining", "suspended"])
async def test_a_hung_node_that_may_not_serve_loses_its_requests_too(obstacle):
    """An engine that hangs cannot swap weights, so it soon counts as outdated; the only other node takes over."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(6)
    node = fleet.node("a")
    stall(node)
    node.draining = obstacle == "draining"
    node.record.suspended_until = time.monotonic() + 60.0 if obstacle == "suspended" else 0.0
    if obstacle == "outdated":
        fleet.router.policy.newest = fleet.router.policy.oldest = 1
        fleet.router.update_status(fleet.node("b"), status(version=1))
    assert [other.node_id for other in fleet.router.serving()] == ["b"]
    fleet.router.reclaim_stalled(75.0)
    assert not node.leases and len(fleet.node("b").leases) == 6


async def test_tokens_that_are_reported_and_never_delivered_do_not_count_for_long():
    """A node that claims to sample, and streams no more, loses its requests after twice the time.

    One that never streams keeps them: it delivers whole answers, and long ones take long.
    """
    fleet = Fleet(a={}, b={})
    await fleet.ask(2)
    node = fleet.node("a")
    for waited_s, holds in ((1000.0, True), (100.0, True), (60.0, False)):
        if waited_s == 100.0:
            fleet.stream("a", fleet.sent["a"][0], [10])
        stall(node)
        node.delivered -= waited_s
        for request in node.leases.values():
            request.running.placed -= waited_s
        fleet.router.update_status(node, status(tokens_per_s=1e12))
        fleet.router.reclaim_stalled(75.0)
        assert bool(node.leases) == holds


async def test_progress_and_a_lack_of_other_nodes_keep_requests_where_they_are():
    """A node that samples is slow, not hung. The only node keeps its requests: nobody else could answer them."""
    for reports, nodes in ((status(tokens_per_s=3.0), {"a": {}, "b": {}}), (status(), {"a": {}})):
        fleet = Fleet(**nodes)
        await fleet.ask(2)
        node = fleet.node("a")
        stall(node)
        fleet.router.update_status(node, reports)
        fleet.router.reclaim_stalled(75.0)
        assert node.leases


@pytest.mark.parametrize("ended_by", ["gateway", "caller"])
@pytest.mark.parametrize(
    ("held_s", "delivers", "is_suspended"), [(20.0, False, True), (20.0, True, False), (10.0, False, False)]
)
async def test_a_node_that_lets_deadlines_pass_is_suspended(held_s, delivers, is_suspended, ended_by):
    """Its reports of progress do not help it, what it delivers to others does.

    Requests that were queued for most of their time are not its fault.

    The caller's deadline, a rollout's, may come first.
    """
    fleet = Fleet(a={})
    await fleet.ask(4)
    node = fleet.node("a")
    fleet.router.update_status(node, status(running=4, tokens_per_s=1e12))
    for request in fleet.router.open:
        request.since -= 100.0
        request.running.placed -= held_s
    if not delivers:
        node.delivered -= 100.0
    if ended_by == "caller":
        for call in fleet.calls:
            call.cancel()
    else:
        fleet.waits.enforce()
        fleet.waits.enforce()
    replies = await asyncio.gather(*fleet.calls, return_exceptions=True)
    assert ["node a has not answered" in str(reply) for reply in replies] == [ended_by == "gateway"] * 4
    assert (node.record.failures_in_row, node.places) == ((4, 1) if is_suspended else (0, 64))
    assert ("4 failures in a row" in (node.cannot_serve(fleet.router.policy) or "")) == is_suspended


async def test_nodes_that_refuse_what_others_answer_are_suspended():
    """Three of four refuse all: every request reaches the fourth, and soon the three get none."""
    fleet = Fleet(a={}, b={}, c={}, good={})
    refused = 0
    for asked in range(8):
        await fleet.ask()
        while not fleet.calls[-1].done() and not fleet.node("good").leases:
            [name] = [name for name in "abc" if fleet.node(name).leases]
            refused += 1
            fleet.router.on_failed(fleet.node(name), failed(fleet.sent[name][-1], "I refuse", retryable=False))
        fleet.answer("good", fleet.sent["good"][-1])
        assert (await fleet.calls[asked]).node_id == "good"
    assert refused == 12 and [node.node_id for node in fleet.router.serving()] == ["good"]


async def test_a_request_that_every_node_refuses_is_no_nodes_fault():
    """It ends at once, and the nodes serve on."""
    fleet = Fleet(a={}, b={}, c={}, d={})
    for asked in range(6):
        await fleet.ask()
        while holders := [node for node in fleet.router.nodes.values() if node.leases]:
            request = fleet.sent[holders[0].node_id][-1]
            fleet.router.on_failed(holders[0], failed(request, "no such sampling", retryable=False))
        with pytest.raises(RequestError, match="no such sampling"):
            await fleet.calls[asked]
    assert len(fleet.router.serving()) == 4 and [len(sent) for sent in fleet.sent.values()] == [6] * 4
