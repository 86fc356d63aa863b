"""Difficulty estimates in the curriculum: what they predict, what is then played, and an exact resume."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from orch_groups import plan, rollout

from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from orchestrator.tasks.curriculum import Frontier
from orchestrator.tasks.difficulty import DifficultyModel

ESTIMATES = [index / 39 for index in range(40)]
results = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=120)


def frontier(**more) -> Frontier:
    return Frontier(**{"num_tasks": 40, "seed": 1, "explore": 0.0, "candidates": 16, "difficulty": ESTIMATES, **more})


def play(curriculum: Frontier, skill: float, groups: int, size: int = 8) -> list[int]:
    """Play groups of a policy whose pass rate falls from 1 to 0 around the difficulty `skill`; return their tasks."""
    tasks = []
    for number in range(groups):
        task = curriculum.next_task()
        rate = 1 / (1 + math.exp(20 * (ESTIMATES[task] - skill)))
        passed = round(rate * size)
        rewards = [1.0] * passed + [0.0] * (size - passed)
        rollouts = [rollout(f"{number}/{at}", reward) for at, reward in enumerate(rewards)]
        made = plan(number, task_index=task, size=size)
        curriculum.observe(FinishedGroup(plan=made, outcome=GroupOutcome.READY, rollouts=rollouts))
        tasks.append(task)
    return tasks


@given(results)
def test_the_model_never_expects_nonsense(groups):
    # Whatever was played, rates lie within [0, 1], and more passed groups never lower an expectation at their place.
    model = DifficultyModel()
    for difficulty, rate in groups:
        model.observe(difficulty, rate)
    rates = [model.pass_rate(step / 10) for step in range(11)]
    assert all(0 <= rate <= 1 for rate in rates)
    again = DifficultyModel(*json.loads(json.dumps([model.played, model.passed])))
    assert [again.pass_rate(step / 10) for step in range(11)] == rates
    before = model.pass_rate(0.525)
    for _ in range(60):
        model.observe(0.525, 1.0)
    assert model.pass_rate(0.525) >= min(before, 0.9)


def test_one_difficulty_played_says_something_about_the_others():
    # Sure of what is easy, it expects less of what is harder; failing at it, it expects next to nothing of that.
    able, unable = DifficultyModel(), DifficultyModel()
    for _ in range(50):
        able.observe(0.3, 0.95)
        unable.observe(0.3, 0.05)
    assert able.pass_rate(0.3) > 0.85 > able.pass_rate(0.7) > 0.3
    assert unable.pass_rate(0.7) < unable.pass_rate(0.3) < 0.15


def test_the_model_finds_the_rates_of_a_known_policy():
    # Groups of a policy of that very form: the fit is near its rates.
    model = DifficultyModel()
    for number in range(400):
        difficulty = (number * 0.618) % 1
        model.observe(difficulty, 1 / (1 + math.exp(-(0.5 + 6 * (0.5 - difficulty)))))
    for difficulty in (0.1, 0.5, 0.9):
        expected = 1 / (1 + math.exp(-(0.5 + 6 * (0.5 - difficulty))))
        assert abs(model.pass_rate(difficulty) - expected) < 0.08


def test_the_tasks_follow_the_policy_to_harder_ones():
    # Tasks around what the policy can do are played; when it can do more, harder ones are, although not played before.
    curriculum = frontier()
    weak = play(curriculum, 0.3, 80)[40:]
    strong = play(curriculum, 0.7, 160)[80:]
    mean = [sum(ESTIMATES[task] for task in tasks) / len(tasks) for tasks in (weak, strong)]
    assert 0.15 < mean[0] < 0.45 < 0.55 < mean[1] < 0.85


def test_without_estimates_nothing_changes():
    # The draws of a source without estimates are those of an earlier version: only measured rates count.
    plain, unknown = frontier(difficulty=()), frontier(difficulty=[None] * 40)
    assert play(plain, 0.5, 60) == play(unknown, 0.5, 60)


@given(st.integers(0, 60), st.integers(1, 40), st.floats(0.1, 0.9), st.integers(0, 2**16))
def test_a_resumed_curriculum_continues_exactly(before, after, skill, seed):
    # Through JSON, as a checkpoint stores it, at any draw.
    whole, first = frontier(seed=seed, explore=0.2), frontier(seed=seed, explore=0.2)
    tasks = play(whole, skill, before + after)
    assert play(first, skill, before) == tasks[:before]
    second = frontier(seed=seed, explore=0.2)
    second.load_state(json.loads(json.dumps(first.state())))
    assert play(second, skill, after) == tasks[before:]
    assert second.state() == whole.state()
