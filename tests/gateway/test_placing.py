"""Where requests go: measured speed, warm conversations, and a cost that does not grow with the fleet."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace

import pytest
from fleet import Fleet, status
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.wire.node_messages import NodeHello
from orchestrator.gateway.nodes import UNPROVEN_PLACES, AttachedNode, GatewayRequest, NodeSpeed, Pace, Placing


def measured(prompt_s: float, token_s: float, answers: int = 40) -> NodeSpeed:
    """A node that takes this long, with loads and lengths drawn from a seed."""
    draw, speed = random.Random(0), NodeSpeed()
    for _ in range(answers):
        cold, sampled, load = draw.randint(10, 4000), draw.randint(20, 400), draw.randint(1, 16)
        speed.note(prompt_s * cold + token_s * load * sampled, cold=cold, sampled=sampled, load=load)
    return speed


def test_prompt_and_sampling_speed_are_told_apart():
    """Both rates are found from whole answers, roughly."""
    for prompt_s, token_s in ((1e-3, 1e-3), (1e-4, 4e-3), (2e-5, 5e-4)):
        pace = measured(prompt_s, token_s).pace
        assert pace is not None
        assert pace.prompt_s == pytest.approx(prompt_s, rel=0.25) and pace.token_s == pytest.approx(token_s, rel=0.15)


def test_no_answer_makes_a_node_faster_than_sixteen_times_the_median():
    """A node that answers at once does not draw all requests; one that is not measured counts as the median."""
    placing, instant = Placing(), measured(1e-9, 1e-9)
    placing.update_median([*(measured(1e-4, 1e-3) for _ in range(7)), instant])

    def pace(speed: NodeSpeed, places: int = UNPROVEN_PLACES) -> Pace:
        return placing.pace(SimpleNamespace(speed=speed, hello=SimpleNamespace(max_concurrent=places)))

    usual = pace(NodeSpeed())
    assert pace(instant).token_s == pytest.approx(usual.token_s / 16)
    assert pace(NodeSpeed(), UNPROVEN_PLACES // 4).token_s == pytest.approx(4 * usual.token_s)
    assert usual.token_s == pytest.approx(1e-3, rel=0.1)


def set_pace(node: AttachedNode, pace: Pace, fleet: Fleet) -> None:
    node.speed.pace = pace
    fleet.router.placing.median = Pace(1e-3, 1e-2)


async def test_a_fast_node_gets_as_many_more_requests_as_it_is_faster():
    """Six times as fast: six of seven requests."""
    fleet = Fleet(fast={}, slow={})
    set_pace(fleet.node("fast"), Pace(1e-4, 5e-3), fleet)
    set_pace(fleet.node("slow"), Pace(6e-4, 3e-2), fleet)
    await fleet.ask(42)
    assert (len(fleet.sent["fast"]), len(fleet.sent["slow"])) == (36, 6)


@pytest.mark.parametrize(("was_measured", "expected"), [(True, (24, 4, 0)), (False, (28, 0, 0))])
async def test_a_node_that_comes_back_is_tried_beside_faster_ones_with_room(was_measured, expected):
    """Most of the fleet is slow. A node that is not measured counts as slow, but not when it is idle.

    It gets that once: a node that restarts before it is measured is not tried first again.
    """
    fleet = Fleet(back={}, fast={}, slow={})
    if was_measured:
        set_pace(fleet.node("back"), Pace(1e-4, 5e-4, 1e-2), fleet)
    hello = NodeHello(node_id="back", engine="test", run_id=None, version=0, max_concurrent=64, instance="restarted")
    fleet.router.attach(b"back again", hello).speed.tokens = 1 << 20
    set_pace(fleet.node("fast"), Pace(1e-4, 5e-4, 1e-2), fleet)
    set_pace(fleet.node("slow"), Pace(6e-4, 3e-3, 6e-2), fleet)
    fleet.router.placing.median = Pace(6e-4, 3e-3, 6e-2)
    await fleet.ask(28)
    assert (len(fleet.sent["fast"]), len(fleet.sent["back"]), len(fleet.sent["slow"])) == expected


@pytest.mark.parametrize(("others", "stays"), [(3, True), (40, False)])
async def test_a_conversation_leaves_when_waiting_costs_more_than_its_prompt_elsewhere(others, stays):
    """With a few requests beside it, it stays where 4,000 tokens are warm; behind a crowd it goes."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(prompt=4000, session="s")
    fleet.answer("a", fleet.sent["a"][0])
    for name in "ab":
        set_pace(fleet.node(name), Pace(1e-3, 1e-3), fleet)
    fleet.node("b").draining = True
    await fleet.ask(others, max_tokens=2000)
    fleet.node("b").draining = False
    await fleet.ask(prompt=4010, session="s", max_tokens=2000)
    assert fleet.sent["a" if stays else "b"][-1].session == "s"


async def test_a_conversation_stays_until_the_fleet_is_measured():
    """After three answers a node has a pace, but the fleet has no median to judge it by: loads alone move nobody."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(session="s")
    fleet.answer("a", fleet.sent["a"][0])
    fleet.node("b").draining = True
    await fleet.ask(8)
    fleet.node("b").draining = False
    for name in "ab":
        fleet.node(name).speed.pace = Pace(1e-4, 1e-3)
    await fleet.ask(session="s")
    assert fleet.sent["a"][-1].session == "s"


async def turn(fleet: Fleet, session: str, prompt: int) -> str:
    """Play a turn on a fast and a six times slower node; return the name of the one it went to."""
    set_pace(fleet.node("fast"), Pace(1e-4, 5e-3), fleet)
    set_pace(fleet.node("slow"), Pace(6e-4, 3e-2), fleet)
    await fleet.ask(prompt=prompt, session=session, max_tokens=200)
    name = next(name for name, sent in fleet.sent.items() if sent and sent[-1].request_id == f"g{len(fleet.calls) - 1}")
    fleet.answer(name, fleet.sent[name][-1])
    await asyncio.sleep(0)
    return name


def fast_and_slow(**kv_tokens: int) -> Fleet:
    """Two nodes whose KV caches hold this many tokens."""
    fleet = Fleet(fast={}, slow={})
    for name, tokens in kv_tokens.items():
        fleet.router.update_status(fleet.node(name), status(kv_tokens=tokens))
    return fleet


async def test_a_conversation_goes_where_the_cache_has_room_for_it():
    """The fast node takes what fits into nine tenths of its KV cache, and more when a conversation there is over."""
    fleet = fast_and_slow(fast=1000, slow=1000)
    assert [await turn(fleet, f"s{number}", 400) for number in range(4)] == ["fast", "fast", "slow", "slow"]
    assert await turn(fleet, "s0", 410) == "fast"
    fleet.router.placing.forget("s1")
    assert await turn(fleet, "s4", 400) == "fast"


async def test_as_many_conversations_leave_a_full_cache_as_must():
    """They grow until they are larger than the KV cache: the one that has the next turn goes, and the others stay."""
    fleet = fast_and_slow(fast=1000, slow=2000)
    assert [await turn(fleet, f"s{number}", 100) for number in range(4)] == ["fast"] * 4
    assert [await turn(fleet, f"s{number}", 260) for number in range(4)] == ["fast"] * 4
    assert [await turn(fleet, f"s{number}", 270) for number in range(4)] == ["slow", "fast", "fast", "fast"]


async def test_a_conversation_stays_where_it_is_when_no_node_has_room():
    """Two conversations that have outgrown the KV caches stay apart, though one is on the slower node."""
    fleet = fast_and_slow(fast=1000, slow=1000)
    for prompt in (800, 1200, 1300, 1400):
        assert [await turn(fleet, f"s{number}", prompt) for number in range(2)] == ["fast", "slow"]


async def test_a_node_without_room_is_better_than_a_far_slower_one():
    """Crowding counts as being 16 times as slow or more, not as being of no use."""
    fleet = fast_and_slow(fast=1000, slow=1 << 20)
    for number in range(2):
        assert await turn(fleet, f"s{number}", 400) == "fast"
    set_pace(fleet.node("slow"), Pace(1e-1, 5.0), fleet)
    await fleet.ask(prompt=400, session="s2")
    assert fleet.sent["fast"][-1].session == "s2"


async def test_what_is_over_takes_no_room(monkeypatch):
    """Neither a request without a session does, nor a conversation that had no turn for ten minutes."""
    fleet, now = fast_and_slow(fast=1000, slow=1000), time.monotonic()
    await fleet.ask(prompt=800)
    fleet.answer("fast", fleet.sent["fast"][-1])
    await fleet.calls[-1]
    assert await turn(fleet, "s0", 800) == "fast" and await turn(fleet, "s1", 800) == "slow"
    monkeypatch.setattr(time, "monotonic", lambda: now + 601.0)
    assert await turn(fleet, "s1", 810) == "slow" and await turn(fleet, "s2", 800) == "fast"


async def test_a_prompt_is_warm_only_for_the_weights_that_read_it():
    """A node that has swapped weights computes the prompt again. Metrics count what nodes had cached, of anyone's."""
    fleet, cold = Fleet(a={}), []
    for version in (0, 0, 1):
        fleet.router.policy.newest = version
        fleet.router.update_status(fleet.node("a"), status(version=version))
        await fleet.ask(prompt=100, session="s")
        cold += [request.running.cold for request in fleet.node("a").leases.values()]
        fleet.stream("a", fleet.sent["a"][-1], [2], version=version, finish_reason="stop", prompt_cached=30)
        await fleet.calls[-1]
    assert cold == [100, 1, 100]
    assert (fleet.router.placing.prompt_tokens, fleet.router.placing.warm_tokens) == (300, 90)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 20), st.integers(0, 3)), max_size=14),
)
@settings(deadline=None)
def test_nothing_waits_that_a_free_node_may_answer(nodes, requests):
    """With versions and places of any kind, what is passed over has no free node, and no fit is skipped."""

    async def scenario() -> None:
        hellos = {
            f"n{index}": {"version": version, "max_concurrent": places} for index, (version, places) in enumerate(nodes)
        }
        fleet = Fleet(**hellos)
        fleet.router.policy.newest = 3
        for prompt, max_tokens, oldest in requests:
            await fleet.ask(prompt=prompt, max_tokens=max_tokens, oldest_version=oldest)
        serving = fleet.router.serving()
        for request in fleet.router.queue.values():
            able = [node for node in serving if request.may_run_on(node)]
            assert all(len(node.leases) >= node.places for node in able)
        assert sum(map(len, fleet.sent.values())) == sum(len(node.leases) for node in serving)

    asyncio.run(scenario())


async def test_a_node_gets_few_requests_until_its_pace_is_measured():
    """Four at first, one more for each 32 tokens that it delivers, all of its places after three answers."""
    fleet = Fleet(new={})
    new = fleet.node("new")
    new.speed.tokens = 0
    await fleet.ask(64, max_tokens=100)
    assert len(new.leases) == 4
    fleet.stream("new", fleet.sent["new"][0], [10] * 64)
    assert len(new.leases) == 6
    for request in fleet.sent["new"][1:4]:
        assert len(new.leases) <= 7
        fleet.answer("new", request)
    assert len(new.leases) == 61


class Counting(Placing):
    """How many nodes each choice compared."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: list[int] = []

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        self.compared.append(len(free))
        return super().choose(request, free)


async def test_a_large_fleet_costs_no_more_than_a_small_one():
    """Of 100 nodes 16 are compared for a request, its conversation's own among them; each gets its share."""
    fleet = Fleet(**{f"n{number}": {"max_concurrent": 2} for number in range(100)})
    placing = fleet.router.placing = Counting()
    await fleet.ask(session="s")
    own = next(name for name, sent in fleet.sent.items() if sent)
    fleet.answer(own, fleet.sent[own][0])
    await fleet.ask(100)
    await fleet.ask(session="s")
    assert fleet.sent[own][-1].session == "s"
    await fleet.ask(100)
    assert max(placing.compared) == 16 and len(fleet.router.queue) == 1
    assert all(len(fleet.node(name).leases) == 2 for name in fleet.sent)


async def test_requests_that_no_free_node_may_take_are_not_looked_at_one_by_one(monkeypatch):
    """Of 600 in three kinds, each further look for a node takes one of each; what comes then is placed."""
    fleet, looks = Fleet(old={}), []
    fleet.router.policy.newest = 3
    for oldest in (1, 2, 3):
        await fleet.ask(200, oldest_version=oldest)
    node_for = fleet.router._node_for
    monkeypatch.setattr(fleet.router, "_node_for", lambda *given: [looks.append(given), node_for(*given)][1])
    fleet.router.place()
    assert len(looks) == 3
    await fleet.ask()
    assert len(fleet.sent["old"]) == 1 and len(fleet.router.queue) == 600
    fleet.router.update_status(fleet.node("old"), status(version=2))
    fleet.router.place()
    assert [request.request_id for request in fleet.sent["old"][1:]] == [f"g{number}" for number in range(63)]
