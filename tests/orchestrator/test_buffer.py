"""Buffer: order by group number, staleness bound, sweep; permits: limit, lanes, order, cancellation."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_groups import ready

from composer_prime.event_loop import Notifier
from composer_prime.wire.types import HintedTurn, VersionSpan, flags, floats, pack_flags, pack_ints
from orchestrator.batching.batches import Buffer
from orchestrator.rollouts.groups import GroupOutcome, sdpo_only
from orchestrator.rollouts.rollout import Permits
from orchestrator.workers.pool import EVAL, TRAIN


def filled(*groups: tuple[int, int]) -> Buffer:
    """A buffer of groups (number, version), added in this order."""
    buffer = Buffer()
    for number, version in groups:
        buffer.add(ready(number, version))
    return buffer


def test_groups_leave_in_order_of_their_numbers_whatever_order_they_ended_in():
    """Data order depends on which groups are ready, not on when each became so."""
    buffer = filled((5, 0), (2, 0), (9, 0), (3, 0))
    assert [group.plan.group for group in buffer.take(3, oldest=0, newest=0)] == [2, 3, 5]
    assert buffer.take(2, oldest=0, newest=0) is None
    assert len(buffer) == 1


def test_distilled_groups_join_a_batch_in_the_order_of_their_numbers():
    """They never make a batch of their own, and at most as many join as there are others."""
    buffer = filled((2, 0), (5, 0))
    for number in (1, 3, 4):
        buffer.add(msgspec.structs.replace(ready(number, 0), outcome=GroupOutcome.DISTILLED))
    assert len(buffer) == 2
    taken = buffer.take(2, oldest=0, newest=0)
    assert taken is not None and [group.plan.group for group in taken] == [1, 2, 3, 5]
    assert buffer.group_numbers == [4] and buffer.take(1, oldest=0, newest=0) is None
    buffer.add(ready(6, 0))
    assert [group.plan.group for group in buffer.take(1, oldest=0, newest=0, with_distilled=False)] == [6]
    assert [group.plan.group for group in buffer.sweep(1)] == [4]


def test_only_groups_within_the_version_bounds_are_taken():
    """Too old is left for the sweep; too new (after a rewind) waits for its step."""
    buffer = filled((1, 0), (2, 1), (3, 2), (4, 3))
    assert buffer.usable(oldest=1, newest=2) == [2, 3]
    assert [group.plan.group for group in buffer.sweep(1)] == [1]
    assert buffer.group_numbers == [2, 3, 4]


def test_old_tokens_of_a_long_rollout_become_context_and_the_new_ones_are_trained():
    """The bound is per token: a group goes only when none of its tokens is new enough."""
    buffer = Buffer()
    buffer.add(ready(1, 1, 3, 4))
    assert buffer.sweep(2) == [] and buffer.usable(oldest=2, newest=4) == [1]
    taken = buffer.take(1, oldest=2, newest=4)
    assert taken is not None
    for sample in taken[0].without_stale_tokens(2).samples:
        assert flags(sample.loss_mask).tolist() == [0, 0, 0, 1, 1]
        assert floats(sample.advantages).tolist() == [0, 0, 0, 0.5, 0.5]
        assert floats(sample.logprobs).tolist() == [0, 0, -0.5, -0.5, -0.5]
        assert (sample.version_min, sample.version_max) == (3, 4)
    buffer.add(ready(2, 1, 3, 4))
    assert [group.plan.group for group in buffer.sweep(5)] == [2]


def test_a_hinted_turn_with_an_old_token_is_left_out():
    """SDPO learns from turns that new enough versions sampled, and the group goes with its last one."""
    old, new = (
        HintedTurn(start=at, end=at + 1, teacher_ids=pack_ints([1, 2]), teacher_start=1, turn=0, error="x")
        for at in (2, 3)
    )
    group = ready(1, 1, 3)
    samples = [msgspec.structs.replace(sdpo_only(sample), distillations=[old, new]) for sample in group.samples]
    group = msgspec.structs.replace(group, outcome=GroupOutcome.DISTILLED, samples=samples)
    assert [sample.distillations for sample in group.without_stale_tokens(2).samples] == [[new], [new]]
    assert group.without_stale_tokens(4).samples == []
    assert [group.trains_since(oldest) for oldest in (1, 2, 3, 4)] == [True, True, True, False]


@given(
    spans=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6),
    hinted=st.lists(st.booleans(), min_size=6, max_size=6),
    is_distilled=st.booleans(),
    oldest=st.integers(0, 5),
)
def test_whether_a_group_trains_is_what_cutting_it_shows(spans, hinted, is_distilled, oldest):
    """Any mix of versions, masked tokens and hinted turns."""
    turns = [
        HintedTurn(start=at, end=at + 1, teacher_ids=pack_ints([1, 2]), teacher_start=1, turn=0, error="x")
        for at, _ in enumerate(spans, start=2)
        if hinted[at - 2]
    ]
    group = ready(1, *(version for version, _ in spans), rewards=(1.0,))
    sample = msgspec.structs.replace(
        group.samples[0],
        distillations=turns,
        loss_mask=pack_flags([0, 0, *(trained and not is_distilled for _, trained in spans)]),
    )
    outcome = GroupOutcome.DISTILLED if is_distilled else GroupOutcome.READY
    samples = [sample] if turns or not is_distilled else []
    group = msgspec.structs.replace(group, outcome=outcome, samples=samples)
    cut = group.without_stale_tokens(oldest).samples
    assert group.trains_since(oldest) == (bool(cut) if is_distilled else any(sample.num_trained for sample in cut))


def test_looking_for_stale_groups_copies_no_sample():
    """The event loop looks at every notification; a sample may have a megabyte."""
    size = 1 << 20
    group = ready(1, 0)
    sample = msgspec.structs.replace(
        group.samples[0], loss_mask=b"\1" * size, advantages=b"\0" * 4 * size,
        version_spans=[VersionSpan(0, size // 2, 0), VersionSpan(size // 2, size, 1)],
    )  # fmt: skip
    buffer = Buffer()
    buffer.add(msgspec.structs.replace(group, samples=[sample]))
    tracemalloc.start()
    try:
        assert buffer.sweep(1) == [] and buffer.usable(1, 1) == [1] and buffer.take(1, 1, 1) is not None
        assert tracemalloc.get_traced_memory()[1] < size // 16
    finally:
        tracemalloc.stop()


def test_a_group_enters_once():
    """A second group of the same number would train its samples twice."""
    buffer = filled((1, 0))
    with pytest.raises(ValueError, match="group 1 is in the buffer already"):
        buffer.add(ready(1, 0))


class Rollouts:
    """Tasks that hold a permit until told to leave."""

    def __init__(self, permits: Permits) -> None:
        self.permits, self.begun, self.leave = permits, [], {}

    def start(self, name: str, taskset: str, order: int) -> asyncio.Task[None]:
        self.leave[name] = asyncio.Event()

        async def play() -> None:
            async with self.permits.hold(taskset, order):
                self.begun.append(name)
                await self.leave[name].wait()

        return asyncio.create_task(play(), name=name)


async def settle() -> None:
    """Let the event loop run everything that is ready, and what that makes ready."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_permits_keep_the_limit_and_go_to_the_lowest_order_first():
    """Two at a time; of those that wait, the lowest group number goes first."""
    permits = Permits(2, eval_share=0.5)
    rollouts = Rollouts(permits)
    tasks = [rollouts.start(f"t{order}", TRAIN, order) for order in (5, 4, 3, 2)]
    await settle()
    assert rollouts.begun == ["t5", "t4"]
    rollouts.leave["t5"].set()
    await settle()
    assert rollouts.begun == ["t5", "t4", "t2"]
    for event in rollouts.leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert sum(permits.running.values()) == 0


async def test_evaluation_takes_its_share_and_all_that_training_leaves():
    """With both lanes waiting, evaluation holds a quarter; alone it takes everything."""
    permits = Permits(8, eval_share=0.25)
    rollouts = Rollouts(permits)
    tasks = [rollouts.start("gate", TRAIN, 0)]
    tasks += [rollouts.start(f"g{at}", TRAIN, 0) for at in range(7)]
    tasks += [rollouts.start(f"e{at}", EVAL, at) for at in range(10)]
    tasks += [rollouts.start(f"t{at}", TRAIN, at) for at in range(10)]
    await settle()
    for at in range(7):
        rollouts.leave[f"g{at}"].set()
    await settle()
    assert permits.running == {TRAIN: 6, EVAL: 2}
    for at in range(10):
        rollouts.leave[f"t{at}"].set()
    await settle()
    assert permits.running == {TRAIN: 1, EVAL: 7}
    for event in rollouts.leave.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_takes_no_permit():
    """Cancelling before, at and after the grant leaks nothing."""
    permits = Permits(1, eval_share=1.0)
    rollouts = Rollouts(permits)
    first, second, third = (rollouts.start(name, TRAIN, 0) for name in ("a", "b", "c"))
    await settle()
    second.cancel()
    rollouts.leave["a"].set()
    await settle()
    assert rollouts.begun == ["a", "c"]
    fourth = rollouts.start("d", TRAIN, 0)
    await settle()
    rollouts.leave["c"].set()
    await asyncio.sleep(0)
    # Granted, or about to be, but cancelled before it ran.
    fourth.cancel()
    await asyncio.gather(first, second, third, fourth, return_exceptions=True)
    assert permits.running[TRAIN] == 0
    assert permits.waiting(TRAIN) == 0


async def test_a_pulse_wakes_every_waiter_and_a_condition_that_holds_needs_none():
    """wait_for looks first; every beat makes all waiters look again; time runs out without one."""
    notifier, seen = Notifier(), []
    assert await notifier.wait_for(lambda: True, 0.0)
    waiters = [asyncio.create_task(notifier.wait_for(lambda: len(seen) > 1, 100.0)) for _ in range(3)]
    for _ in range(2):
        await settle()
        seen.append(1)
        notifier.notify()
    assert await asyncio.gather(*waiters) == [True] * 3
    assert not await notifier.wait(0.01)
