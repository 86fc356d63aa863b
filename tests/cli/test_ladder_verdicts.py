"""A registered ladder: what is announced holds, and the verdict follows from held-out rewards by the stated rule."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from composer_prime.cli.ladder.preregistration import PlannedArm, Preregistration, read_preregistration, register
from composer_prime.cli.ladder.verdicts import Comparison, compare, result_lines
from composer_prime.cli.ladder_command import main
from composer_prime.errors import ConfigError
from composer_prime.run.costs import write_cost

TASKS = 128
STEPS = 40


def planned_arm(name: str, weight: float) -> PlannedArm:
    sources = [
        {"name": "far", "weight": 0.0, "eval_taskset": {"split": "eval"}},
        {"name": "near", "weight": 1.0, "eval_taskset": {"split": "eval"}},
    ]
    settings = {"channels": {"sdpo": {"weight": weight}}, "orchestrator": {"source": sources}}
    return PlannedArm(name=name, settings=settings, steps=STEPS)


def ladder(seeds: int = 3, **more: Any) -> Preregistration:
    arms = [planned_arm("a1", 0.0), planned_arm("a2", 0.5)]
    values: dict[str, Any] = {
        "arms": arms, "baseline": "a1", "seeds": list(range(seeds)), "held_out": "near",
        "minimal_effect": 0.05,
    }  # fmt: skip
    return Preregistration(**(values | more))


def write_evaluation(folder: Path, run: str, step: int, rewards: dict[str, Sequence[float]]) -> None:
    path = folder / run / "rollouts" / f"eval_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"source": source, "task_id": f"t{task}", "reward": float(reward)}
        for source, values in rewards.items()
        for task, reward in enumerate(values)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rewards_of(rate: float, seed: int) -> list[float]:
    """Return rewards of 0 and 1. The same tasks are solved at a higher rate, so that differences are paired."""
    ease = np.random.default_rng(11).random(TASKS)
    luck = np.random.default_rng(100 + seed).normal(0, 0.02, TASKS)
    return [float(value) for value in ease + luck < rate]


def judged(base: float, other: float, seeds: int = 3, **more: Any) -> Comparison:
    registered = ladder(seeds, **more)
    means = [
        {seed: {f"near/t{task}": reward for task, reward in enumerate(rewards_of(rate, seed))} for seed in range(seeds)}
        for rate in (base, other)
    ]
    result = compare(registered, *means)
    assert result is not None
    return result


# A large difference that every seed has is VALIDATED; the same one upside down REFUTED, and told as a loss. Equal arms
# refute an effect that is far larger than their spread, and decide nothing about one of its size.
def test_verdicts_follow_the_rule() -> None:
    better, worse = judged(0.3, 0.7), judged(0.7, 0.3)
    assert better.verdict == "VALIDATED" and "better, on other tasks" in better.meaning
    assert worse.verdict == "REFUTED" and worse.meaning.startswith("worse, on other tasks")
    assert worse.over_tasks.mean == pytest.approx(-better.over_tasks.mean)
    assert judged(0.5, 0.52, minimal_effect=0.4).verdict == "REFUTED"
    small = judged(0.5, 0.52)
    assert small.verdict == "UNDECIDED" and "neither a gain nor a loss is shown, and one of 0.050" in small.meaning


# With one seed the interval covers tasks alone: a gain is PARTIAL, a loss UNDECIDED, and both say what one seed lacks.
# A gain below the smallest effect of interest is PARTIAL too.
def test_one_seed_cannot_validate() -> None:
    gain, loss = judged(0.3, 0.7, seeds=1), judged(0.7, 0.3, seeds=1)
    assert (gain.verdict, loss.verdict) == ("PARTIAL", "UNDECIDED")
    assert gain.over_seeds.low is None and "not shown for other seeds" in gain.meaning
    assert "these models are worse" in loss.meaning
    less = judged(0.3, 0.6, minimal_effect=0.5)
    assert less.over_tasks.low is not None and less.over_tasks.low > 0 and less.verdict == "PARTIAL"
    assert "by less than the 0.500 of interest" in less.meaning


# Only seeds and tasks that both arms have are compared, and there is no verdict before the last seed.
def test_only_what_both_have_is_compared() -> None:
    registered = ladder(3)
    base = {0: {"a": 0.0, "b": 1.0}, 1: {"a": 0.0, "b": 0.0}}
    other = {1: {"a": 1.0, "b": 0.0, "c": 1.0}, 2: {"a": 1.0}}
    result = compare(registered, base, other)
    assert result is not None and result.by_seed == {1: 0.5} and result.over_tasks.count == 2
    assert result.verdict == "so far"
    assert compare(registered, base, {2: {"a": 1.0}}) is None and compare(registered, base, {0: {"c": 1.0}}) is None


# A second start must be the ladder that was announced: both values are named, by arm and setting.
def test_a_ladder_that_differs_is_refused(tmp_path: Path) -> None:
    assert register(tmp_path, ladder()) and not register(tmp_path, ladder(written="later"))
    other_arms = [planned_arm("a1", 0.0), planned_arm("a2", 0.75)]
    with pytest.raises(ConfigError, match=r"seeds: registered \[0, 1, 2\], now \[0, 1\]"):
        register(tmp_path, ladder(2))
    with pytest.raises(ConfigError, match=r"arms.a2.settings.channels.sdpo.weight: registered 0.5, now 0.75"):
        register(tmp_path, ladder(arms=other_arms))
    path = tmp_path / "preregistration.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_preregistration(tmp_path)


def played(folder: Path, registered: Preregistration) -> None:
    """Write runs: a2 gains .4; far tasks get worse by .4."""
    levels = {"a1": 0.3, "a2": 0.7}
    for arm in registered.arms:
        for seed in registered.seeds:
            name, last = registered.run_name(arm.name, seed), levels[arm.name]
            write_evaluation(folder, name, STEPS, {"near": rewards_of(last, seed), "far": rewards_of(1 - last, seed)})
            settings = arm.settings | {"run": {"name": name, "seed": seed}}
            (folder / name / "config.json").write_text(json.dumps(settings))
            tokens = 100 if arm.name == "a1" else 150
            line = {"step": 1, "role": "trainer", "loss/total": 0.0, "reward/mean": last, "tokens/trained": tokens,
                    "time/step_s": 2.0}  # fmt: skip
            (folder / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            write_cost(folder / name / "costs.jsonl", "machine", seconds=3600.0, usd=0.5)


# The report of a ladder's folder: verdict first, tasks that are never trained on without a verdict, and compute and
# dollars against the baseline.
def test_the_report_has_verdict_other_tasks_and_dollars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered = ladder()
    register(tmp_path, registered)
    played(tmp_path, registered)
    text = "\n".join(result_lines(tmp_path, registered))
    assert "a2 - a1, held-out near after step 40: +0.3" in text and "VALIDATED: better" in text
    assert "held-out far\n  a2 - a1: over tasks  -0.3" in text
    assert "150 tokens trained" in text and "$0.50" in text
    assert "channels.sdpo.weight: 0.0 -> 0.5" in text
    assert main([str(tmp_path)]) == 0
    assert text in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"preregistration\.json"):
        main([str(tmp_path / "elsewhere")])
    assert "no finished run" in "\n".join(result_lines(tmp_path / "elsewhere", registered))


# The file is plain JSON, and comes back as it was written. Keys of an older release are left out.
def test_the_file_holds_the_whole_question(tmp_path: Path) -> None:
    registered = ladder()
    register(tmp_path, registered)
    assert read_preregistration(tmp_path) == registered
    values = json.loads((tmp_path / "preregistration.json").read_text())
    assert values["seeds"] == [0, 1, 2] and [arm["name"] for arm in values["arms"]] == ["a1", "a2"]
    assert "VALIDATED" in values["rule"]
    older = json.dumps(values | {"alpha": 0.05, "stopping": "all seeds"})
    assert msgspec.json.decode(older, type=Preregistration) == registered
