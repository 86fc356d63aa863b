"""What nodes claim about themselves is bounded, checked, and counts only as far as their answers bear it out."""

import math

import msgspec
import pytest
from fleet import Fleet, status

from composer_prime.wire.node_messages import MAX_PLACES, FromNode, NodeHello
from composer_prime.wire.types import VersionSpan


async def test_a_node_that_claims_many_places_gets_its_share_and_no_more():
    """Of 1,000 requests to 31 nodes, the one that claims the most places and speed gets a thirty-first."""
    fleet = Fleet(liar={"max_concurrent": MAX_PLACES}, **{f"n{i:02d}": {} for i in range(30)})
    fleet.router.update_status(fleet.node("liar"), status(tokens_per_s=1e12))
    await fleet.ask(1000)
    assert len(fleet.sent["liar"]) <= 40


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
def test_a_report_out_of_range_does_not_decode(claim):
    """So a heartbeat with an impossible figure counts as garbage, and changes nothing."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(status(**claim)), type=FromNode)


async def test_no_instance_swaps_a_version_in_again():
    """A name gets no request with older weights than it reported before, whatever process it says that it is.

    With a swap in each answer, most tokens of a node with old weights would not be compared with those.
    """
    fleet = Fleet(cheat={"version": 3})
    fleet.router.policy.newest = 4
    fleet.router.update_status(fleet.node("cheat"), status(version=4))
    hello = NodeHello(node_id="cheat", engine="test", run_id=None, version=3, max_concurrent=64, instance="another")
    fleet.router.attach(b"cheat", hello)
    await fleet.ask()
    assert not fleet.sent["cheat"] and "has policy version 3, needs version 4" in fleet.waits.why_no_node()
    fleet.router.update_status(fleet.node("cheat"), status(version=4))
    fleet.router.place()
    [request] = fleet.sent["cheat"]
    spans = [VersionSpan(0, 1, 3), VersionSpan(1, 6, 4)]
    fleet.stream("cheat", request, [10] * 6, finish_reason="stop", version_spans=spans)
    assert fleet.node("cheat").record.bad_answers == 1, "it got this one after the swap"


async def test_an_honest_node_that_starts_again_below_its_version_is_not_blamed():
    """It gets requests once it is back at that version, so none of them shows the swap."""
    fleet = Fleet(a={})
    fleet.router.policy.newest = 1
    fleet.router.update_status(fleet.node("a"), status(version=1))
    fleet.router.leave(fleet.node("a"), "crashed")
    hello = NodeHello(node_id="a", engine="test", run_id=None, version=0, max_concurrent=64, instance="restarted")
    fleet.router.attach(b"a2", hello)
    await fleet.ask(4)
    assert not fleet.sent["a"]
    fleet.router.update_status(fleet.node("a"), status(version=1))
    fleet.router.place()
    for request in fleet.sent["a"]:
        fleet.finish("a", request, [10], version=1)
    assert [len(await call) for call in fleet.calls] == [1] * 4
    assert fleet.node("a").record.bad_answers == fleet.node("a").record.failures_in_row == 0


async def test_a_rewound_version_is_served_again():
    """A trainer that resumed publishes it once more: reports of it, and of later ones, mean nothing any more."""
    fleet = Fleet(a={"version": 8})
    fleet.router.policy.newest = 8
    fleet.router.update_status(fleet.node("a"), status(version=8))
    fleet.router.policy.newest = 5
    fleet.node("a").record.forget_version(5)
    fleet.router.update_status(fleet.node("a"), status(version=5))
    await fleet.ask()
    assert len(fleet.sent["a"]) == 1


@pytest.mark.parametrize(("version", "bad"), [(4, 0), (6, 1), (8, 0), (2, 0)])
async def test_a_version_that_never_was(version, bad):
    """In joint runs the numbers jump. What there was before the first known version is not known."""
    fleet = Fleet(a={"version": version})
    fleet.router.policy.newest, fleet.router.policy.published = 8, {4, 8}
    await fleet.ask()
    [request] = fleet.sent["a"]
    fleet.finish("a", request, [10], version=version)
    assert fleet.node("a").record.bad_answers == bad
