"""The budget itself: no order of reserving, settling and dying passes a cap."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config.teachers import BudgetConfig
from composer_prime.errors import CapError
from composer_prime.llm.budget import OVERCHARGE, Budget, Reservation
from composer_prime.run.costs import spent
from composer_prime.traces.replay.teachers import teacher_budget

CAPS = BudgetConfig(usd_per_call=1.0, usd_per_trace=1.25, usd_per_run=1.75)
# Multiples of a sixteenth, which sums of doubles hold exactly.
BOUNDS = st.integers(2, 9).map(lambda sixteenths: sixteenths / 16)
ASK = st.tuples(st.just("ask"), st.sampled_from("ab"), st.sampled_from("tu"), BOUNDS)
LOSE = st.tuples(st.just("lose"), st.integers(0, 9), st.sampled_from([0.0, 0.5, 2.0]))
DIE = st.tuples(st.just("die"))


def replies(*times: float) -> st.SearchStrategy[tuple]:
    return st.tuples(st.just("reply"), st.integers(0, 9), st.sampled_from(times))


class World:
    """A budget, those who ask it for money, and endpoints that charge what they like for what they were asked."""

    def __init__(self, path: Path) -> None:
        self.path, self.budget = path, teacher_budget(CAPS, path)
        self.asking: list[asyncio.Task[Reservation]] = []
        self.in_flight: list[Reservation] = []
        self.charged = defaultdict[str, float](float)
        self.excess = defaultdict[str, float](float)

    async def ask(self, teacher: str, trace: str, bound: float) -> None:
        self.asking.append(asyncio.create_task(self.budget.reserve(trace=trace, state="s", teacher=teacher, usd=bound)))

    async def reply(self, index: int, times: float) -> None:
        for call in self._taken(index):
            usd = self._charge(call, times)
            self.budget.note_charge(call, usd)
            self.budget.settle(call, usd, status="ok")

    async def lose(self, index: int, times: float) -> None:
        for call in self._taken(index):
            self._charge(call, times)
            self.budget.settle(call, call.usd, status="connection")

    async def die(self) -> None:
        """The process ends and another goes on; all calls in flight are charged at the worst."""
        for task in self.asking:
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        for call in self.in_flight:
            self._charge(call, OVERCHARGE)
        self.asking, self.in_flight = [], []
        self.budget = teacher_budget(CAPS, self.path)

    async def granted(self) -> None:
        """Calls that may be made now are in flight."""
        for _ in range(3):
            await asyncio.sleep(0)
        done = [task for task in self.asking if task.done()]
        self.asking = [task for task in self.asking if not task.done()]
        for task in done:
            if task.exception() is None:
                assert self.budget.closed is None
                self.in_flight.append(task.result())
            else:
                assert isinstance(task.exception(), CapError)

    def _taken(self, index: int) -> list[Reservation]:
        return [self.in_flight.pop(index % len(self.in_flight))] if self.in_flight else []

    def _charge(self, call: Reservation, times: float) -> float:
        usd = times * call.bound_usd
        beyond = max(usd - OVERCHARGE * call.bound_usd, 0.0)
        assert usd <= CAPS.usd_per_call + beyond
        for scope in ("run", call.trace):
            self.charged[scope] += usd
            self.excess[scope] += beyond
        return usd


async def played(steps: list[tuple], world: World) -> None:
    """From where each teacher has kept to its bound once, so that calls may be in flight together."""
    kept = [step for teacher in "ab" for step in (("ask", teacher, "t", 0.125), ("reply", 0, 0.0))]
    for name, *values in [*kept, *steps]:
        await getattr(world, name)(*values)
        await world.granted()
        for scope, usd in world.charged.items():
            assert usd <= (CAPS.usd_per_run if scope == "run" else CAPS.usd_per_trace) + world.excess[scope]
    await world.die()


# Several teachers and traces, any order of calls, replies, lost replies and deaths of the process: while no endpoint
# charges more than the factor times its bound, no cap of a call, a trace or the run is passed, and once one charged
# more than its bound no call is made.
@given(st.lists(ASK | ASK | replies(0.0, 0.5, 1.0, 1.5, 2.0) | LOSE | DIE, max_size=40))
def test_no_cap_is_passed(steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "costs.jsonl")
        asyncio.run(played(steps, world))
        assert not any(world.excess.values())


# Where endpoints charge more than the factor, caps are passed by what they charged above it, and by no more.
@given(st.lists(ASK | ASK | replies(0.5, 1.0, 3.0, 8.0) | LOSE | DIE, max_size=40))
def test_caps_are_passed_by_the_excess_alone(steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(played(steps, World(Path(folder) / "costs.jsonl")))


def once(budget: Budget, usd: float) -> Reservation:
    async def reserve() -> Reservation:
        async with asyncio.timeout(10):
            return await budget.reserve(trace="t", state="s", teacher="a", usd=usd)

    return asyncio.run(reserve())


# A teacher that charged more than the factor times its bound has as many times held for its next call, which the cap of
# a call has to allow too, until it is charged less for one.
def test_what_a_teacher_charged_is_held(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    first = teacher_budget(CAPS, path)
    first.settle(once(first, 0.125), 0.625, status="ok")
    assert spent(path).charge_ratios == {"a": 5.0}
    resumed = teacher_budget(CAPS, path)
    told = r"needs \$1.2500, 5 times its bound of \$0.2500 \(as it charged last\)"
    with pytest.raises(CapError, match=told) as refused:
        once(resumed, 0.25)
    assert refused.value.scope == "call"
    call = once(resumed, 0.125)
    assert call.usd == 0.625
    resumed.settle(call, 0.0625, status="ok")
    assert once(resumed, 0.125).usd == 0.25 and once(teacher_budget(CAPS, path), 0.125).usd == 0.25


# The reply to a call that was in flight when its teacher charged too much says nothing about the teacher since then.
def test_a_reply_that_was_under_way(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    budget = teacher_budget(CAPS, path)
    budget.settle(once(budget, 0.0625), 0.0625, status="ok")
    early, late = once(budget, 0.0625), once(budget, 0.0625)
    budget.settle(early, 0.25, status="ok")
    budget.settle(late, 0.0625, status="ok")
    assert once(budget, 0.0625).usd == once(teacher_budget(CAPS, path), 0.0625).usd == 0.25


# A small budget is used up, but for what is held for one more call.
def test_a_dollar(tmp_path: Path) -> None:
    budget = teacher_budget(BudgetConfig(usd_per_run=1.0), tmp_path / "costs.jsonl")
    calls = 0
    with pytest.raises(CapError, match="usd_per_run"):
        while True:
            budget.settle(once(budget, 0.02), 0.005, status="ok")
            calls += 1
    assert calls >= (1.0 - 0.04) / 0.005
