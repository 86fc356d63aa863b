"""What nodes claim about themselves is bounded, checked, and counts only as far as their answers bear it out."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
from gateway_config import config_with
from http_calls import generate_body, post
from node_peer import PeerNode, tokens_for
from pydantic import ValidationError

from composer_prime.wire.node import MAX_PLACES, Generate, Generated, NodeHello, Sampling, Status
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from orchestrator.gateway.nodes import AttachedNode
from orchestrator.gateway.routing import Router


class Fleet:
    """A router whose nodes answer when the test says so."""

    def __init__(self, **hellos: dict) -> None:
        self.sent: dict[str, list[Generate]] = {name: [] for name in hellos}
        self.router = Router(
            self._send,
            vocab_size=256,
            suspend_s=1.0,
            no_node_timeout_s=60.0,
            request_timeout_s=60.0,
            join_hint=lambda: "",
        )
        for name, changes in hellos.items():
            hello = NodeHello(node_id=name, engine="test", run_id=None, version=0, max_concurrent=64, instance=name)
            self.router.nodes.attach(name.encode(), msgspec.structs.replace(hello, **changes))
        self.calls: list[asyncio.Task] = []

    def _send(self, node: AttachedNode, message) -> bool:
        if isinstance(message, Generate):
            self.sent[node.node_id].append(message)
        return True

    def node(self, name: str) -> AttachedNode:
        return next(node for node in self.router.nodes if node.node_id == name)

    async def ask(self, count: int = 1, prompt: int = 1, session: str | None = None, max_tokens: int = 8) -> None:
        """Send requests and let them be placed."""
        for _ in range(count):
            name = f"g{len(self.calls)}"
            work = self.router.generate(name, session or name, pack_ints([5] * prompt), Sampling(max_tokens=max_tokens))
            self.calls.append(asyncio.create_task(work))
        await asyncio.sleep(0)

    def answer(self, name: str, request: Generate) -> None:
        ids, logprobs = tokens_for([5], 6)
        self.router.on_generated(
            self.node(name),
            Generated(
                request_id=request.request_id,
                lease=request.lease,
                token_ids=pack_ints(ids),
                logprobs=pack_floats(logprobs),
                version_spans=[VersionSpan(0, 6, 0)],
                finish_reason="stop",
            ),
        )

    async def close(self) -> None:
        self.router.close("the test is over")
        await asyncio.gather(*self.calls, return_exceptions=True)


def status(**changes) -> Status:
    usual = Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None)
    return msgspec.structs.replace(usual, **changes)


async def test_a_node_that_claims_many_places_gets_its_share_and_no_more():
    """Of 1,000 requests to 31 nodes, the one that claims the most places gets a thirty-first until it has answered."""
    fleet = Fleet(liar={"max_concurrent": MAX_PLACES}, **{f"n{i:02d}": {} for i in range(30)})
    await fleet.ask(1000)
    assert len(fleet.sent["liar"]) <= 40
    for request in list(fleet.sent["n00"]):
        fleet.answer("n00", request)
    assert fleet.node("n00").load < fleet.node("n01").load
    await fleet.close()


@pytest.mark.parametrize("places", [2**40, MAX_PLACES + 1, -1])
async def test_a_claim_of_places_beyond_the_bound_is_refused(open_gateway, node_keys, places):
    """The refusal has the claimed number and the bound."""
    async with open_gateway() as gateway:
        node = PeerNode(gateway.node_endpoint, node_keys, "a", max_concurrent=places)
        async with node:
            reason = node.welcome.reason
            assert str(places) in reason and str(MAX_PLACES) in reason
            assert not gateway.router.nodes.attached()


def test_the_configuration_has_the_bound_of_the_wire():
    """inference.max_concurrent ends where a gateway would refuse the node."""
    assert config_with(inference={"max_concurrent": MAX_PLACES}).inference.max_concurrent == MAX_PLACES
    with pytest.raises(ValidationError, match="max_concurrent"):
        config_with(inference={"max_concurrent": MAX_PLACES + 1})


@pytest.mark.parametrize(
    "claim",
    [
        {"waiting": 2**62},
        {"waiting": -5},
        {"running": -1},
        {"kv_used": math.nan},
        {"kv_used": 97.0},
        {"kv_used": -0.1},
        {"tokens_per_s": math.nan},
        {"version": -3},
    ],
)
async def test_a_report_out_of_range_is_garbage(open_gateway, node_keys, claim):
    """A heartbeat with an impossible figure counts as garbage and changes nothing."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a", heartbeat_s=60) as node:
        node.send(status(**claim))
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200
        assert gateway.state()["nodes"][0]["garbage"] == 1
        [attached] = gateway.router.nodes.attached()
        assert attached.status is None


async def test_a_node_reports_no_more_requests_than_it_was_given():
    """A queue that a node makes up does not lower the fleet's limit."""
    fleet = Fleet(a={})
    await fleet.ask(2)
    fleet.router.nodes.update_status(fleet.node("a"), status(running=1, waiting=500_000))
    credible = fleet.node("a").credible_status
    assert (credible.running, credible.waiting) == (1, 2)
    await fleet.close()


async def test_a_node_with_a_full_cache_gets_no_further_conversation():
    """New sessions and those of the full node go where there is room; when all are full, they stay where they are."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(session="s")
    assert len(fleet.sent["a"]) == 1
    fleet.answer("a", fleet.sent["a"][0])
    fleet.router.nodes.update_status(fleet.node("a"), status(kv_used=0.97))
    await fleet.ask(3)
    await fleet.ask(session="s")
    assert (len(fleet.sent["a"]), len(fleet.sent["b"])) == (1, 4)
    fleet.router.nodes.update_status(fleet.node("b"), status(kv_used=0.97))
    await fleet.ask(session="s")
    assert (len(fleet.sent["a"]), len(fleet.sent["b"])) == (1, 5)
    await fleet.close()
