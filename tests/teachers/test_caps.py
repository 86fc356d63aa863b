"""The cap of a run: no order of replies passes it, and an overcharge ends the calls."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import USD, Endpoint, configured, overrule, play, replayed, serving, state

from composer_prime.config.teachers import OPENROUTER, BudgetConfig
from composer_prime.errors import CapError
from composer_prime.llm.client import Reservation
from composer_prime.run.costs import spent
from composer_prime.traces.records import read_pairs
from composer_prime.traces.replay.teacher_pool import teacher_budget

CAP = BudgetConfig(usd_per_run=1.75)
# Multiples of a sixteenth, which sums of doubles hold exactly.
BOUNDS = st.integers(2, 16).map(lambda sixteenths: sixteenths / 16)
ASK = st.tuples(st.just("ask"), st.sampled_from("ab"), BOUNDS)
LOSE = st.tuples(st.just("lose"), st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]))
DIE = st.tuples(st.just("die"))


def replies(*times: float) -> st.SearchStrategy[tuple]:
    return st.tuples(st.just("reply"), st.integers(0, 9), st.sampled_from(times))


class World:
    """A budget, those who ask it for money, and endpoints that charge what they like for what they were asked."""

    def __init__(self, path: Path) -> None:
        self.path, self.budget = path, teacher_budget(CAP, path)
        self.asking: list[asyncio.Task[Reservation]] = []
        self.in_flight: list[Reservation] = []
        self.charged = self.excess = 0.0

    async def ask(self, teacher: str, bound: float) -> None:
        self.asking.append(asyncio.create_task(self.budget.reserve(state="s", teacher=teacher, usd=bound)))

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
            self._charge(call, 1.0)
        self.asking, self.in_flight = [], []
        self.budget = teacher_budget(CAP, self.path)

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
        usd = times * call.usd
        self.charged += usd
        self.excess += max(usd - call.usd, 0.0)
        return usd


async def played(steps: list[tuple], world: World) -> None:
    """From where each teacher has kept to its bound once, so that calls may be in flight together."""
    kept = [step for teacher in "ab" for step in (("ask", teacher, 0.125), ("reply", 0, 0.0))]
    for name, *values in [*kept, *steps]:
        await getattr(world, name)(*values)
        await world.granted()
        assert world.charged <= CAP.usd_per_run + world.excess
    await world.die()


# Several teachers, any order of calls, replies, lost replies and deaths of the process: while no endpoint charges above
# its bound, the cap is not passed. Where one does, the cap is passed by what it charged above it and by no more, and no
# further call is made.
@pytest.mark.parametrize("most", [1.0, 8.0])
def test_no_cap_is_passed(most: float) -> None:
    charges = replies(0.0, 0.5, 1.0, most)

    @given(st.lists(ASK | ASK | charges | LOSE | DIE, max_size=40))
    def check(steps: list[tuple]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            world = World(Path(folder) / "costs.jsonl")
            asyncio.run(played(steps, world))
            assert most > 1 or not world.excess

    check()


# What fits to the last cent is granted at once: with nothing in flight there is nothing to wait for.
async def test_no_rest_of_rounding_stays_reserved(tmp_path: Path) -> None:
    budget = teacher_budget(BudgetConfig(usd_per_run=0.1), tmp_path / "costs.jsonl")
    budget.settle(await budget.reserve(state="s", teacher="x", usd=0.001), 0.0, status="ok")
    # In doubles, 0.01 + 0.007 + 0.02 - 0.01 - 0.007 - 0.02 > 0.
    held = [await budget.reserve(state="s", teacher="x", usd=usd) for usd in (0.01, 0.007, 0.02)]
    for reservation, usd in zip(held, (0.0, 0.0, 0.08), strict=True):
        budget.settle(reservation, usd, status="ok")
    async with asyncio.timeout(2):
        await budget.reserve(state="s", teacher="y", usd=0.02)


# No order of replies passes a cap: what is held for calls in flight counts.
@pytest.mark.parametrize("cap", [0.5, 1.0, 2.7])
def test_the_cap_of_a_run_holds_to_the_cent(tmp_path: Path, cap: float) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.02)
    states = [state(number, trace=f"t{number}") for number in range(30)]
    budget = {"usd_per_run": cap}
    progress, _ = play(tmp_path, states, endpoint=endpoint, budget=budget)
    assert progress.stopped is not None and "usd_per_run" in progress.stopped
    assert len(endpoint.answered) * USD <= cap
    assert spent(tmp_path / "costs.jsonl").usd <= cap
    before = len(endpoint.asked)
    # The money of earlier runs counts: a second replay under the same cap makes no call that does not fit.
    play(tmp_path, states, endpoint=endpoint, budget=budget)
    assert spent(tmp_path / "costs.jsonl").usd <= cap
    # With more money it goes on: nothing was lost.
    progress, _ = play(tmp_path, states, endpoint=endpoint, budget={"usd_per_run": 100.0})
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == 30 and len(endpoint.asked) > before


# An endpoint that charges more than the bound ends the replay after one call, whatever may be in flight: what it
# charged is on the record, its answer is kept, and no teacher is asked again. Repaired, it is asked for the rest.
@pytest.mark.parametrize("charges", [{"tokens_factor": 50.0}, {"billed_usd": 5.5}])
def test_an_endpoint_that_overcharges(tmp_path: Path, charges: dict) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.05, **charges)
    states = [state(number) for number in range(8)]
    progress, _ = play(tmp_path, states, endpoint=endpoint)
    assert progress.stopped is not None and "gpt-a charged $5.5" in progress.stopped
    assert len(endpoint.asked) == 1 and progress.states == 0
    assert progress.usd == pytest.approx(5.5)  # though no state was finished
    total = spent(tmp_path / "costs.jsonl")
    assert total.usd == pytest.approx(5.5) and total.unsettled == 0
    endpoint.tokens_factor, endpoint.billed_usd = 1.0, USD
    play(tmp_path, states, endpoint=endpoint)
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == 8


# OpenRouter is told with each request which price is held, so that it asks no dearer provider; other endpoints are not.
async def test_openrouter_is_told_the_price(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = configured(tmp_path, OPENROUTER)
        addresses = {name: endpoint.url for name in ("gpt-a", "qwen-b", "glm-c")}
        assert (await replayed(tmp_path, config, [state(0)], addresses=addresses)).pairs == 1
        most = {"prompt": 1010.0, "completion": 1010.0}
        assert [body["provider"] for body in endpoint.seen] == [{"max_price": most}] * 2
    async with serving(Endpoint(answers=overrule)) as endpoint:
        await replayed(tmp_path / "elsewhere", configured(tmp_path / "elsewhere", endpoint.url), [state(0)])
        assert endpoint.seen and not any("provider" in body for body in endpoint.seen)
