"""Sources and curricula: group number -> source, task and seeds, reproducible; proportions; epochs; the frontier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_groups import plan, ready
from orch_peers import make_config

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig
from orchestrator.rollouts.groups import GroupPlan
from orchestrator.tasks import Frontier, Shuffled, Sources, build_curriculum, source_spec


def config(*weights: float, **more: Any) -> OrchestratorConfig:
    tables = [{"name": f"s{at}", "weight": weight, "taskset": {"id": "x"}} for at, weight in enumerate(weights)]
    return OrchestratorConfig(source=tables, group_size=4, **more)


def sources(*weights: float, seed: int = 1, tasks: int | None = 10, **more: Any) -> Sources:
    return Sources(config(*weights), seed=seed, num_tasks={f"s{at}": tasks for at in range(len(weights))}, **more)


def test_plans_are_a_function_of_the_seed():
    """Two orchestrators with one seed plan the same groups; another seed plans others."""
    one, two, other = sources(1, 2), sources(1, 2), sources(1, 2, seed=2)
    plans = [one.plan(number) for number in range(50)]
    assert plans == [two.plan(number) for number in range(50)]
    assert plans != [other.plan(number) for number in range(50)]


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=5), st.integers(0, 1000), st.integers(0, 2**31))
def test_every_stretch_of_groups_holds_the_sources_by_weight(weights, start, seed):
    """Any 200 groups in a row differ from the exact proportions by a few groups at most."""
    found = sources(*weights, seed=seed)
    counts = Counter(found.source_of(number) for number in range(start, start + 200))
    for at, weight in enumerate(weights):
        assert abs(counts[f"s{at}"] - 200 * weight / sum(weights)) <= 8


@given(st.integers(0, 2**31 - 1), st.integers(2, 64), st.integers(1, 4))
def test_siblings_and_retries_have_distinct_seeds(seed, size, attempts):
    """No two tries of a group draw the same noise, and every seed fits 31 bits."""
    made = GroupPlan(group=0, source="s", task_index=0, seed=seed, size=size)
    seeds = [made.rollout_seed(sibling, attempt) for sibling in range(size) for attempt in range(attempts)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**31 for value in seeds)


def test_shuffled_plays_every_task_once_an_epoch_in_another_order():
    """Epochs are permutations, different ones; the state is one number."""
    curriculum = Shuffled(num_tasks=7, seed=3)
    epochs = [[curriculum.next_task() for _ in range(7)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    again = Shuffled(num_tasks=7, seed=3)
    again.load_state({"drawn": 10})
    assert [again.next_task() for _ in range(11)] == [*epochs[1][3:], *epochs[2]]


def test_the_frontier_prefers_tasks_that_sometimes_pass():
    """Tasks that always or never pass are seldom played; exploring keeps them from vanishing for ever."""
    curriculum = Frontier(num_tasks=30, seed=1)
    rates = {task: (0.0, 0.5, 1.0)[task % 3] for task in range(30)}

    def result(task: int):
        rewards = tuple(float(at < 4 * rates[task]) for at in range(4))
        return msgspec.structs.replace(ready(0, rewards=rewards), plan=plan(0, task_index=task, size=4))

    for task in range(30):
        curriculum.observe(result(task))
    played = Counter(curriculum.next_task() % 3 for _ in range(600))
    assert played[1] > 500
    assert played[0] > 5
    assert played[2] > 5
    again = Frontier(num_tasks=30, seed=1)
    again.load_state(msgspec.json.decode(msgspec.json.encode(curriculum.state())))
    assert [again.next_task() for _ in range(50)] == [curriculum.next_task() for _ in range(50)]


@pytest.mark.parametrize(
    ("name", "settings"), [("no_such_module:X", {}), ("shuffled", {"speed": 3}), ("collections:Counter", {})]
)
def test_a_curriculum_that_cannot_be_made_is_a_config_error(name, settings):
    with pytest.raises(ConfigError, match=r"orchestrator\.curriculum"):
        build_curriculum(PartConfig(name=name, settings=settings), num_tasks=5, seed=1)


def test_held_out_settings_are_merged_over_the_training_task_set():
    """eval_taskset names only what differs; a source without it has no evaluation task set."""
    whole = make_config(Path())
    made = whole.orchestrator.source[0].model_copy(update={"taskset": {"id": "x", "split": "train", "size": 5}})
    assert source_spec(made, whole, Path("m")).tasksets == {
        "train": {"id": "x", "split": "train", "size": 5},
        "eval": {"id": "x", "split": "held-out", "size": 5},
    }
    assert "eval" not in source_spec(config(1).source[0], whole, Path("m")).tasksets


# A checkpoint of a release with diloco.task_shard counts a part's tasks: its sources start over.
def test_the_state_of_a_part_of_the_tasks_is_left_out(caplog):
    found = sources(1)
    found.load_state({"s0": {"drawn": 3, "task_shard": [1, 2]}})
    assert found.plan(0) == sources(1).plan(0)
    assert "s0: diloco.task_shard was removed" in caplog.text


def test_a_source_without_weight_is_only_evaluated():
    """It gets no group, wherever it stands; without held-out tasks, or with nothing to train, it is refused."""
    with pytest.raises(ConfigError, match="'s0' has 0 training tasks"):
        sources(1, tasks=0)
    held_out = {"name": "other", "weight": 0, "taskset": {"id": "x"}, "eval_taskset": {"split": "eval"}}
    trained = {"name": "s0", "taskset": {"id": "x"}}
    for tables in ([held_out, trained], [trained, held_out]):
        both = OrchestratorConfig(source=tables, group_size=4)
        only = Sources(both, seed=1, num_tasks={"s0": 10, "other": 0})
        assert {only.plan(number).source for number in range(100)} == {"s0"} == set(only.curricula)
    with pytest.raises(ValueError, match="'other' has weight 0, so it is only evaluated, but no eval_taskset"):
        OrchestratorConfig(source=[trained, held_out | {"eval_taskset": {}}])
    with pytest.raises(ValueError, match=r"weights of \['other'\] are all 0"):
        OrchestratorConfig(source=[held_out])
