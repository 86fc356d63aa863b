"""What nodes claim about themselves is bounded, checked, and counts only as far as their answers bear it out."""

from __future__ import annotations

import math

import pytest
from fleet import Fleet, status
from gateway_config import config_with
from http_calls import generate_body, post
from node_peer import PeerNode
from pydantic import ValidationError

from composer_prime.wire.node import MAX_PLACES, Rejected


async def test_a_node_that_claims_many_places_gets_its_share_and_no_more():
    """Of 1,000 requests to 31 nodes, the one that claims the most places gets a thirty-first."""
    fleet = Fleet(liar={"max_concurrent": MAX_PLACES}, **{f"n{i:02d}": {} for i in range(30)})
    await fleet.ask(1000)
    assert len(fleet.sent["liar"]) <= 40
    await fleet.close()


@pytest.mark.parametrize("places", [2**40, MAX_PLACES + 1, -1])
async def test_a_claim_of_places_beyond_the_bound_is_refused(open_gateway, node_keys, places):
    """The refusal has the claimed number and the bound."""
    async with open_gateway() as gateway:
        node = PeerNode(gateway.node_endpoint, node_keys, "a", max_concurrent=places)
        async with node:
            assert isinstance(node.welcome, Rejected)
            assert str(places) in node.welcome.reason and str(MAX_PLACES) in node.welcome.reason
            assert not gateway.router.nodes.attached()


def test_the_configuration_has_the_bound_of_the_wire():
    """inference.max_concurrent ends where a gateway would refuse the node."""
    assert config_with(inference={"max_concurrent": MAX_PLACES}).inference.max_concurrent == MAX_PLACES
    for count in (0, MAX_PLACES + 1):
        with pytest.raises(ValidationError, match="max_concurrent"):
            config_with(inference={"max_concurrent": count})


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
    assert credible is not None and (credible.running, credible.waiting) == (1, 2)
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


async def test_an_empty_instance_takes_nobodys_name(open_gateway, node_keys):
    """A Hello without an instance is another process: the holder of the name keeps it, and its requests."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as holder:
        other = PeerNode(gateway.node_endpoint, node_keys, "a")
        other.instance = ""
        async with other:
            assert isinstance(other.welcome, Rejected)
            assert (await post(gateway.http_url, generate_body(5)))[0] == 200
            assert (len(holder.generates), len(other.generates)) == (1, 0)
