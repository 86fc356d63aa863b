"""The last rollouts of a group do not wait for a slow node: a fast one tries too, and the first answer is taken."""

from __future__ import annotations

import asyncio

import pytest
from fleet import Fleet

from composer_prime.wire.types import ints
from orchestrator.gateway.speed import Pace
from orchestrator.gateway.stragglers import SiblingRequests, start_twins


def test_a_group_ends_when_three_quarters_of_it_are_over():
    """Names tell groups, rollouts and their agents; sessions of no group hold up nothing."""
    siblings = SiblingRequests()
    for name in ("g1-0", "g1-1", "g1-1#2", "g1-2", "g1-3", "g2-0", "alone"):
        siblings.note(name)
    for name in ("g1-0", "g1-1", "g1-1#2"):
        siblings.end(name)
    assert not siblings.holds_up("g1-3")
    siblings.end("g1-2")
    assert siblings.holds_up("g1-3") and siblings.holds_up("g1-3#1")
    assert not siblings.holds_up("g2-0") and not siblings.holds_up("alone")


async def last_of_a_group() -> Fleet:
    """Three siblings are over; the last one's request has run on the slow node for some tokens."""
    fleet = Fleet(fast={}, slow={})
    placing = fleet.router.placing
    placing.fleet.median = Pace(1e-3, 1e-2)
    fleet.node("fast").places = 0
    placing.update(fleet.node("fast"))
    for sibling in range(4):
        await fleet.ask(session=f"g7-{sibling}", max_tokens=256)
    for request in list(fleet.sent["slow"])[:3]:
        fleet.finish("slow", request, [9])
        fleet.router.forget(request.session)
    await asyncio.gather(*fleet.calls[:3])
    fleet.stream("slow", fleet.sent["slow"][3], [10, 11])
    fleet.node("fast").places = 64
    placing.update(fleet.node("fast"))
    placing.mean_sampled = 256.0
    for name, factor in (("fast", 1.0), ("slow", 6.0)):
        fleet.node(name).speed.pace = Pace(1e-4 * factor, 1e-2 * factor)
    return fleet


@pytest.mark.parametrize("winner", ["fast", "slow"])
async def test_the_first_of_two_answers_is_taken_and_the_other_node_stops(winner):
    """The second node continues after the streamed tokens. What the slower one streamed in vain is counted."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    start_twins(fleet.router)
    [slow, fast] = fleet.sent["slow"][3], fleet.sent["fast"][0]
    assert len(fleet.sent["fast"]) == 1 and ints(fast.prompt_ids).tolist() == [5, 10, 11]
    if winner == "fast":
        fleet.finish("fast", fast, [12])
    else:
        fleet.finish("slow", slow, [10, 11, 12])
    answer = await fleet.calls[3]
    assert answer.token_ids.tolist() == [10, 11, 12] and answer.node_id == winner
    loser, lease = ("slow", slow.lease) if winner == "fast" else ("fast", fast.lease)
    assert fleet.cancelled[loser] == [lease] and not fleet.node(loser).leases
    counters = fleet.router.counters
    assert (counters.twins, counters.twins_won) == (1, int(winner == "fast"))
    await fleet.close()


@pytest.mark.parametrize("lost", ["slow", "fast"])
async def test_when_one_of_two_nodes_is_gone_the_other_ones_work_goes_on(lost):
    """Nothing is sent a third time."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    slow, fast = fleet.sent["slow"][3], fleet.sent["fast"][0]
    fleet.router.nodes.leave(fleet.node(lost), "silent")
    assert (len(fleet.sent["slow"]), len(fleet.sent["fast"]), fleet.router.queued) == (4, 1, 0)
    if lost == "slow":
        fleet.finish("fast", fast, [12])
    else:
        fleet.finish("slow", slow, [10, 11, 12])
    assert (await fleet.calls[3]).token_ids.tolist() == [10, 11, 12]
    await fleet.close()


async def test_nobody_tries_twice_while_requests_wait_or_the_node_is_as_fast():
    """Places are for the requests that have none; and an equal node would not be done sooner."""
    fleet = await last_of_a_group()
    fleet.node("slow").speed.pace = fleet.node("fast").speed.pace
    start_twins(fleet.router)
    assert not fleet.sent["fast"]
    await fleet.close()
