"""Resume = checkpoint state + journal: nothing finished is lost, nothing formed changes, nothing is trained twice."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from orch_groups import ended, plan, ready

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.config.orchestrator import OrchestratorConfig, SourceConfig
from composer_prime.errors import CheckpointError
from composer_prime.import_path import PartConfig
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import pack_ints
from orchestrator.batching.batches import Versions
from orchestrator.durability import (
    Dropped,
    Entry,
    Finished,
    Formed,
    Journal,
    OrchestratorState,
    Started,
    load_state,
    resume,
    save_state,
    state_path,
)
from orchestrator.rollouts.groups import GroupOutcome
from orchestrator.tasks import Sources


def sources(curriculum: str = "shuffled") -> Sources:
    source = SourceConfig(name="s", taskset={"id": "x"})
    config = OrchestratorConfig(source=[source], group_size=2, curriculum=PartConfig(name=curriculum))
    return Sources(config, seed=3, num_tasks={"s": 10})


def state(**changes: Any) -> OrchestratorState:
    base = {
        "run_id": "run", "step": 1, "journal_seq": 10, "next_group": 6, "in_flight": [plan(4), plan(5)],
        "ready": [2], "dropped": [3], "batches": {2: [0, 1]}, "curricula": sources().state(), "counters": {"ready": 3},
        "versions": Versions(trained=1, newest=1, since=1),
    }  # fmt: skip
    return OrchestratorState(**(base | changes))


def before() -> list[Entry]:
    """What the journal holds up to the checkpoint."""
    made = [Started(seq=at + 1, plan=plan(at)) for at in range(6)]
    return [
        *made,
        Finished(seq=7, group=ready(0)),
        Finished(seq=8, group=ready(1)),
        Finished(seq=9, group=ready(2)),
        Dropped(seq=10, group=ended(3, GroupOutcome.FILTERED, 1.0, 1.0)),
    ]


FORMED_2 = Formed(seq=10, step=2, groups=[0, 1], dropped=[], metrics={"reward/mean": 0.5})


def test_state_alone_is_taken_up_when_nothing_happened_since():
    """The buffer, the batch formed ahead, the groups in flight and those dropped are what they were."""
    found = resume(state(), [*before(), FORMED_2], sources())
    assert found.in_flight == [plan(4), plan(5)]
    assert found.ready == [ready(2)]
    assert found.batches[0].groups == [ready(0), ready(1)]
    assert found.batches[0].metrics == {"reward/mean": 0.5}
    assert [group.plan.group for group in found.dropped] == [3]
    assert found.next_group == 6


def test_what_happened_after_the_checkpoint_counts():
    """Groups finished since are ready, batches formed since are served unchanged, the rest is dispatched again."""
    after = [
        Finished(seq=11, group=ready(4)),
        Started(seq=12, plan=plan(6)),
        Started(seq=13, plan=plan(7)),
        Formed(seq=14, step=3, groups=[2, 4], dropped=[3], metrics={}),
        Finished(seq=15, group=ready(7)),
        Dropped(seq=16, group=ended(6, GroupOutcome.FAILED, None)),
    ]
    found = resume(state(), [*before(), FORMED_2, *after], sources())
    assert [batch.step for batch in found.batches] == [2, 3]
    assert found.batches[1].group_numbers == [2, 4]
    assert found.ready == [ready(7)]
    assert found.in_flight == [plan(5)]
    assert [group.plan.group for group in found.dropped] == [6]
    assert found.next_group == 8


def test_a_ready_group_that_went_stale_stays_gone():
    """A group that was swept out of the buffer after the checkpoint doesn't come back."""
    stale = ready(2).without_samples(GroupOutcome.STALE)
    found = resume(state(), [*before(), FORMED_2, Dropped(seq=11, group=stale)], sources())
    assert found.ready == []
    assert [group.plan.group for group in found.dropped] == [3, 2]


@pytest.mark.parametrize("name", ["Shuffled", "Frontier"])
def test_the_curriculum_goes_on_as_if_nothing_had_happened(name):
    """Replaying the calls since the checkpoint gives the tasks that an uninterrupted run would have drawn."""
    live = sources(f"orchestrator.tasks:{name}")
    plans = [live.plan(number) for number in range(6)]
    entries: list[Entry] = [Started(seq=seq, plan=plan) for seq, plan in enumerate(plans, start=1)]
    saved = state(journal_seq=6, curricula=live.state(), ready=[], dropped=[], batches={}, in_flight=plans)
    for number in range(6):
        group = ready(number, rewards=(1.0, float(number % 2)))
        group = msgspec.structs.replace(group, plan=plans[number])
        live.observe(group)
        entries.append(Finished(seq=len(entries) + 1, group=group))
        entries.append(Started(seq=len(entries) + 1, plan=live.plan(6 + number)))
    again = sources(f"orchestrator.tasks:{name}")
    found = resume(saved, entries, again)
    assert [each.group for each in found.in_flight] == list(range(6, 12))
    assert [again.plan(12 + at) for at in range(20)] == [live.plan(12 + at) for at in range(20)]


def test_samples_that_made_a_step_not_finite_are_left_out():
    """A formed batch comes back without the samples and pairs that the ledger names; everything else is unchanged."""
    first, second = ready(0).samples[0].sample_id, ready(1).samples
    pairs = [
        pair_unit(pair_id=name, chosen_ids=pack_ints([1, 2]), rejected_ids=pack_ints([1, 3]), context=1, epsilon=0.1)
        for name in "ab"
    ]
    formed = msgspec.structs.replace(FORMED_2, units=pairs)
    found = resume(state(), [*before(), formed], sources(), {first, "pair a"})
    batch = found.batches[0]
    assert first not in {sample.sample_id for sample in batch.samples} and batch.preferences == pairs[1:]
    assert batch.samples == [*ready(0).samples[1:], *second] and batch.metrics == FORMED_2.metrics
    assert [group.rollouts for group in batch.groups] == [ready(0).rollouts, ready(1).rollouts]


async def test_a_resume_holds_what_is_named_and_no_more(tmp_path):
    """Of a journal of 64 MiB, one segment and the groups that are still needed are in memory."""
    journal = Journal.create(tmp_path, segment_bytes=1 << 20)
    for number in range(64):
        large = msgspec.structs.replace(ready(number).samples[0], input_ids=bytes(1 << 20))
        await journal.append(Finished(seq=number + 1, group=msgspec.structs.replace(ready(number), samples=[large])))
    await journal.close()
    tracemalloc.start()
    try:
        found = resume(state(journal_seq=64, dropped=[], batches={}), Journal(tmp_path), sources())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [group.plan.group for group in found.ready] == [2] and peak < 16 << 20


def test_a_missing_group_is_named():
    """A resume fails when the journal lost a group that a batch needs."""
    with pytest.raises(CheckpointError, match=r"lacks groups \[1\]"):
        resume(state(), [entry for entry in [*before(), FORMED_2] if entry.seq != 8], sources())


def test_the_state_file_survives_a_round_trip_and_refuses_another_run(tmp_path):
    """state.json reads back equal; a state of another run, a torn one and a missing one are refused by name."""
    run_dir = RunDir(tmp_path)
    save_state(run_dir, state())
    assert load_state(run_dir, 1, "run") == state()
    with pytest.raises(CheckpointError, match="belongs to run 'run', this is run 'other'"):
        load_state(run_dir, 1, "other")
    path = state_path(run_dir, 1)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="not an orchestrator state"):
        load_state(run_dir, 1, "run")
    with pytest.raises(CheckpointError, match="no orchestrator state"):
        load_state(run_dir, 2, "run")
