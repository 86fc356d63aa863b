"""The lag gate: nothing too old is trained, nothing starts that could not be used, and the gate never locks up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.batching.batches import Versions, free_slots, last_batch, oldest_accepted


def room(version: int, formed: int, under_way: int, max_staleness: int, groups: int = 4, steps: int = 100) -> int:
    return free_slots(last_batch(version, max_staleness, steps, Versions()) - formed, under_way, groups)


def test_batch_n_accepts_exactly_the_documented_versions():
    """Batch N accepts versions >= N - 1 - max_staleness: no off-by-one on either side of the rule."""
    for step in range(1, 30):
        for max_staleness in range(5):
            for version in range(step):
                accepted = version >= oldest_accepted(step, max_staleness, Versions())
                assert accepted == (version >= step - 1 - max_staleness)
                assert accepted == (step <= last_batch(version, max_staleness, 10**6, Versions()))


def test_staleness_zero_is_synchronous():
    """At version N-1 exactly batch N's groups start; once they are formed nothing starts until version N."""
    assert room(version=0, formed=0, under_way=0, max_staleness=0) == 4
    assert room(version=0, formed=0, under_way=4, max_staleness=0) == 0
    assert room(version=0, formed=1, under_way=0, max_staleness=0) == 0
    assert room(version=1, formed=1, under_way=0, max_staleness=0) == 4


def test_staleness_one_keeps_one_batch_ahead():
    """While batch N trains, batch N+1's groups run, and not one more."""
    assert room(version=0, formed=0, under_way=0, max_staleness=1) == 8
    assert room(version=0, formed=1, under_way=4, max_staleness=1) == 0
    assert room(version=0, formed=1, under_way=3, max_staleness=1) == 1


def test_a_node_that_lags_behind_gets_fewer_groups():
    """What starts on old weights must still fit: places follow the version that is served, not the one published."""
    assert room(version=4, formed=5, under_way=0, max_staleness=1) == 4
    assert room(version=3, formed=5, under_way=0, max_staleness=1) == 0


def test_nothing_starts_beyond_the_last_step():
    """The orchestrator does not outrun the trainer at the end of the run."""
    assert room(version=9, formed=9, under_way=0, max_staleness=5, steps=10) == 4
    assert room(version=9, formed=10, under_way=0, max_staleness=5, steps=10) == 0


@settings(max_examples=300, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    groups=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from(["end", "filter", "train", "swap"]), st.integers(0, 63)), max_size=200),
)
def test_groups_that_end_in_any_order_are_never_wasted_but_for_overtaking(max_staleness, groups, events):
    """A random run: every formed batch obeys the rule, and with in-order endings no group ever goes stale.

    After any events the run still completes: the gate can't lock up.
    """
    steps, version, trained, formed = 6, 0, 0, 0
    flying: list[int] = []
    ready: list[int] = []

    def start() -> None:
        flying.extend([version] * room(version, formed, len(flying) + len(ready), max_staleness, groups, steps))

    def form() -> None:
        nonlocal formed, ready
        while len(ready) >= groups and formed < min(trained + 2, steps):
            taken, ready = ready[:groups], ready[groups:]
            formed += 1
            assert all(oldest_accepted(formed, max_staleness, Versions()) <= age < formed for age in taken)

    def happen(event: str) -> None:
        nonlocal trained, version
        if event == "end" and flying:
            ready.append(flying.pop(0))
        elif event == "filter" and flying:
            flying.pop(0)
        elif event == "train" and trained < formed:
            trained += 1
        elif event == "swap":
            version = trained
        form()
        start()

    start()
    for event, _ in events:
        happen(event)
    for _ in range(10 * steps * groups):
        for event in ("end", "train", "swap"):
            happen(event)
    assert trained == steps
    assert not flying
    assert not ready


# Where a version stands for several steps (a joint run), the same rule holds in versions: a rollout of version V may go
# into exactly the batches that begin with a newest version of at most V + max_staleness.
@given(
    period=st.integers(1, 6), since=st.integers(0, 20), over=st.integers(0, 20), newest=st.integers(0, 9),
    max_staleness=st.integers(0, 3), age=st.integers(0, 3),
)  # fmt: skip
def test_versions_that_stand_for_several_steps(period, since, over, newest, max_staleness, age):
    versions = Versions(trained=since + over, newest=newest, since=since, period=period)
    version = max(0, newest - age)
    last = last_batch(version, max_staleness, 10**6, versions)
    for batch in range(versions.trained + 1, versions.trained + 30):
        accepted = version >= oldest_accepted(batch, max_staleness, versions)
        assert accepted == (batch <= last)
    assert versions.before(versions.trained + 1) == newest  # also where the next version is overdue: nothing locks up


# As steps are taken: the version of a planned batch is known as long as rounds are in time; with one step to a version
# it is the plain rule.
def test_versions_follow_the_steps():
    versions = Versions(period=4)
    for step in range(1, 41):
        assert versions.before(step) == (step - 1) // 4
        assert versions.before(step + 4) == (step - 1) // 4 + 1
        versions = versions.after(step, step // 4)
    late = versions.after(41, 10).after(42, 10).after(43, 10).after(44, 10)  # the sweep of step 44 is still to come
    assert (late.before(45), late.before(48), late.before(49)) == (10, 10, 11)
    assert [Versions().after(7, 7).before(batch) for batch in (8, 9)] == [7, 8]
    assert Versions(period=4).after(0, 12).last_batch(12) == 4  # who joins late begins at the others' version
