"""The last rollouts of a group do not wait for a slow node: a fast one tries too, and the first answer is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fleet import Fleet
from node_peer import failed

from composer_prime.wire.node import ComputeDevice
from composer_prime.wire.types import ints
from orchestrator.gateway.speed import Pace
from orchestrator.gateway.twins import SiblingRequests, start_twins
from orchestrator.gateway.waits import reclaim_quarantined


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


def test_another_attempt_is_the_same_rollout():
    """A rollout whose first attempt failed is open while its second one runs, and counts once."""
    siblings = SiblingRequests()
    for name in ("g1-0", "g1-1", "g1-2", "g1-3"):
        siblings.note(name)
    for name in ("g1-0", "g1-1", "g1-2"):
        siblings.end(name)
    siblings.note("g1-2r1")
    assert not siblings.holds_up("g1-3") and not siblings.holds_up("g1-2r1")
    siblings.end("g1-2r1")
    assert siblings.holds_up("g1-3")


USUAL = {"engine": "local", "device": ComputeDevice(name="L4", dtype="bfloat16")}


async def last_of_a_group(streamed: Sequence[int] = (10, 11), **changes: Any) -> Fleet:
    """Three siblings are over; the last one's request has run on the slow node for some tokens."""
    fleet = Fleet(fast=USUAL, slow=USUAL | changes)
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
    if streamed:
        fleet.stream("slow", fleet.sent["slow"][3], list(streamed))
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


async def test_a_tick_looks_at_some_requests_and_the_next_tick_goes_on():
    """With many requests that hold up their groups, none keeps the event loop, and each has its turn."""
    fleet = await last_of_a_group()
    await fleet.ask(session="g8-3")  # On the fast node: no other is faster.
    for sibling in range(3):
        fleet.router.siblings.note(f"g8-{sibling}")
        fleet.router.siblings.end(f"g8-{sibling}")
    assert len(fleet.sent["fast"]) == 1 and fleet.router.siblings.holds_up("g8-3")
    fleet.router.siblings.next_look = 1
    start_twins(fleet.router, max_looks=1)
    assert not fleet.router.counters.twins
    start_twins(fleet.router, max_looks=1)
    assert fleet.router.counters.twins == 1 and len(fleet.sent["fast"]) == 2
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
    """Places are for the requests that have none; and an equal node would not be done sooner, nor one not measured."""
    fleet = await last_of_a_group()
    fleet.node("slow").speed.pace = fleet.node("fast").speed.pace
    start_twins(fleet.router)
    fleet.node("slow").speed.pace = fleet.router.placing.fleet.median = Pace(1e-4, 1e-3, 6e-2)
    fleet.node("fast").speed.pace = None
    start_twins(fleet.router)
    assert not fleet.sent["fast"]
    await fleet.close()


@pytest.mark.parametrize(
    ("changes", "streamed"),
    [
        ({"engine": "other"}, []),
        ({"engine": "other"}, [10]),
        ({}, []),
        ({"engine": "vllm"}, [10]),
        ({"device": ComputeDevice(name="L4", dtype="float32")}, [10]),
        ({"device": ComputeDevice(name="H100", dtype="bfloat16")}, [10]),
        ({"device": ComputeDevice(name="L4", dtype="bfloat16", count=2)}, [10]),
        ({"device": ComputeDevice(name="L4")}, [10]),
        ({"device": None}, [10]),
    ],
)
async def test_a_node_whose_draws_no_other_repeats_gets_a_twin_only_when_it_is_silent(changes, streamed):
    """Else the first answer to end would be taken, which is the shorter one more often."""
    fleet = await last_of_a_group(streamed, **changes)
    [request], slow = fleet.router.open.values(), fleet.node("slow")
    for past in (0.0, 1000.0):
        request.placed -= past
        request.last_part -= past
        start_twins(fleet.router)
        assert not fleet.sent["fast"]
    slow.last_progress = slow.last_delivered = request.placed
    start_twins(fleet.router)
    assert len(fleet.sent["fast"]) == 1
    await fleet.close()


@pytest.mark.parametrize("first_to_go", ["slow", "fast"])
async def test_an_answer_and_the_loss_of_the_other_node_may_come_in_one_burst(first_to_go):
    """What the lost node held besides goes on, and an answer counts once: the caller has not run in between."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    slow, fast = fleet.sent["slow"][3], fleet.sent["fast"][0]
    fleet.node("fast").places = 0
    fleet.router.placing.update(fleet.node("fast"))
    await fleet.ask(session="other")
    if first_to_go == "slow":
        fleet.finish("fast", fast, [12])
        fleet.stream("slow", slow, [12], start=2)
        fleet.node("fast").places = 64
        fleet.router.placing.update(fleet.node("fast"))
        fleet.router.nodes.leave(fleet.node("slow"), "silent")
        assert [request.session for request in fleet.sent["fast"]] == ["g7-3", "other"]
    else:
        fleet.finish("slow", slow, [10, 11, 12])
        fleet.finish("fast", fast, [12])
        fleet.router.nodes.leave(fleet.node("fast"), "silent")
    assert (await fleet.calls[3]).token_ids.tolist() == [10, 11, 12]
    counters = fleet.router.counters
    assert (counters.answered, counters.tokens, counters.bad_answers) == (4, 6, 0)
    await fleet.close()


@pytest.mark.parametrize(("winner", "lost"), [("fast", 1), ("slow", 2)])
async def test_streamed_tokens_that_the_winner_kept_are_not_lost(winner, lost):
    """Only what the slower node streamed after its twin began, or the twin itself, is in no answer."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    fleet.stream("slow", fleet.sent["slow"][3], [12], start=2)
    fleet.stream("fast", fleet.sent["fast"][0], [12, 13])
    if winner == "fast":
        fleet.finish("fast", fleet.sent["fast"][0], [12, 13, 14])
    else:
        fleet.finish("slow", fleet.sent["slow"][3], [10, 11, 12, 13, 14])
    await fleet.calls[3]
    assert fleet.router.counters.tokens_lost == lost
    await fleet.close()


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_twin_that_fails_is_not_tried_again_and_the_first_node_goes_on(retryable):
    """A second node that fails at once would be asked again at each tick."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    [fast] = fleet.sent["fast"]
    fleet.router.on_failed(fleet.node("fast"), failed(fast, "no room", retryable=retryable))
    start_twins(fleet.router)
    [request] = fleet.router.open.values()
    assert len(fleet.sent["fast"]) == 1 and request.node is fleet.node("slow") and request.twin is None
    assert (request.failures, request.refused_by) == ((1, set()) if retryable else (0, {"fast"}))
    fleet.finish("slow", fleet.sent["slow"][3], [10, 11, 12])
    assert (await fleet.calls[3]).token_ids.tolist() == [10, 11, 12]
    await fleet.close()


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_last_failure_does_not_end_a_request_that_a_second_node_works_on(retryable):
    """The twin began before anything was streamed, so it goes on whatever the first node did."""
    fleet = await last_of_a_group(streamed=[])
    fleet.node("slow").streams = True
    start_twins(fleet.router)
    [request] = fleet.router.open.values()
    request.failures, request.refused_by = 2, {"fast", "other"}
    fleet.router.on_failed(fleet.node("slow"), failed(fleet.sent["slow"][3], "broken", retryable=retryable))
    fleet.finish("fast", fleet.sent["fast"][0], [9])
    assert (await fleet.calls[3]).node_id == "fast"
    await fleet.close()


async def test_a_twin_does_not_save_the_tokens_of_a_node_whose_answers_are_wrong():
    """It continues after what the node in quarantine streamed, so both are taken back and the request starts anew."""
    fleet = await last_of_a_group()
    start_twins(fleet.router)
    reclaim_quarantined(fleet.router, "slow", "in quarantine")
    assert fleet.cancelled == {"slow": [fleet.sent["slow"][3].lease], "fast": [fleet.sent["fast"][0].lease]}
    again = fleet.sent["fast"][1]
    assert ints(again.prompt_ids).tolist() == [5] and again.sampling.resumed == 0
    fleet.finish("fast", again, [9])
    assert (await fleet.calls[3]).sampled_by == (("fast", 1),)
    await fleet.close()
