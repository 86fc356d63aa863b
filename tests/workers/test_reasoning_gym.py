"""The reasoning-gym task set: reproducible tasks, splits that share no question, the dataset's own score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_prime.errors import ConfigError
from orchestrator.environments.answers import find_answer
from orchestrator.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig
from orchestrator.workers.pool import SourceSpec
from orchestrator.workers.verifiers_adapter import Environment

pytestmark = pytest.mark.process  # verifiers' subprocess runtime

ID = "orchestrator.environments.reasoning_gym"
TINY = Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy"


def tasks(**config: Any) -> list[Any]:
    return list(ReasoningGym(ReasoningGymConfig(id=ID, **config)))


def spec(**taskset: Any) -> SourceSpec:
    harness = {"id": "orchestrator.environments.tool_loop"}
    return SourceSpec(name="gym", tasksets={"train": {"id": ID, **taskset}}, harness=harness, model_path=str(TINY))


def score(task: Any, reply: str) -> float:
    return asyncio.run(task.correct(SimpleNamespace(last_reply=reply)))


def test_splits_share_no_question_whatever_their_seeds() -> None:
    """Training and held-out questions are disjoint even where the generator repeats itself under another seed."""
    options = {"datasets": {"chain_sum": {"max_terms": 2, "max_digits": 1}}}
    train = {task.data.prompt for seed in (0, 1) for task in tasks(**options, seed=seed, num_tasks=60)}
    held = {task.data.prompt for seed in (0, 1) for task in tasks(**options, seed=seed, num_tasks=20, split="eval")}
    assert train
    assert held
    assert not train & held


def test_tasks_are_reproducible_and_alternate() -> None:
    """The same configuration gives the same tasks; several datasets take turns; a longer set begins like a shorter."""
    options = {"datasets": ["chain_sum", "leg_counting"], "seed": 3}
    long, short = tasks(**options, num_tasks=7), tasks(**options, num_tasks=5)
    assert [task.data.prompt for task in long[:5]] == [task.data.prompt for task in short]
    assert [task.data.dataset for task in short] == ["chain_sum", "leg_counting"] * 2 + ["chain_sum"]


def test_the_score_is_the_datasets_own() -> None:
    """A right tagged answer scores 1, a wrong, missing or absurdly long one 0."""
    task = tasks(datasets="chain_sum", num_tasks=1)[0]
    assert score(task, f"so <answer> {task.data.answer} </answer>") == 1.0
    assert score(task, "<answer>no</answer>") == 0.0
    assert score(task, task.data.answer) == 0.0
    assert score(task, f"<answer>{task.data.answer}{'0' * 3000}</answer>") == 0.0


def test_an_answer_that_breaks_the_scorer_is_wrong() -> None:
    """What a scorer cannot parse is the model's fault and scores 0; it must not take the rollout out of the loss."""
    for name in ("countdown", "polynomial_equations", "rush_hour", "mini_sudoku"):
        for answer in ("(((", "1/0", "\x00", "é" * 50, "[" * 500):
            assert 0.0 <= score(tasks(datasets=name, num_tasks=1)[0], f"<answer>{answer}</answer>") < 1.0


def test_answers_are_found_where_they_are_asked_for() -> None:
    """The last tagged answer, the last line, or the whole reply."""
    reply = "<answer>1</answer> no\n<answer>\n2</answer>\nthree "
    assert [find_answer(reply, place) for place in ("tag", "last_line")] == ["2", "three"]
    assert find_answer(" 4 ", "whole") == "4"
    assert [find_answer(reply, "number") for reply in ("5 - 8 is -3.", "about 2.5", "none")] == ["-3", "2.5", None]
    assert [find_answer(" ", place) for place in ("tag", "last_line", "whole")] == [None, None, None]


@pytest.mark.parametrize(
    ("taskset", "says"),
    [
        ({"datasets": "chain_sums"}, r"'gym'.*no dataset 'chain_sums'; did you mean chain_sum\?"),
        ({"datasets": {"chain_sum": {"max_term": 3}}}, r"chain_sum does not take.*max_terms"),
        ({"datasets": {"chain_sum": {"min_terms": 9, "max_terms": 2}}}, "chain_sum does not take"),
        ({"datasets": "chain_sum", "eval_shar": 0.5}, r"taskset\.eval_shar: no such setting; did you mean eval_share"),
    ],
)
def test_wrong_settings_say_what_is_right(taskset: dict[str, Any], says: str) -> None:
    """An unknown dataset gets a did-you-mean, an unknown setting the list of those that exist."""
    with pytest.raises(ConfigError, match=says):
        Environment(spec(**taskset), "train", None)


def test_a_generator_with_too_few_questions_says_so() -> None:
    """A set that cannot be filled is an error, not an endless loop."""
    tiny = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    with pytest.raises(ConfigError, match="too few different"):
        tasks(datasets=tiny, num_tasks=20, split="eval", eval_share=1e-9)
