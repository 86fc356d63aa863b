"""`composer ladder run`: from the command line to arms, the plan, and one real ladder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.cli.ladder.arms import parse, plan_arms, preregistration
from composer_prime.cli.ladder.run import main, plan_lines
from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir

ROOT = Path(__file__).parents[2]
A0, A1, A2 = (str(ROOT / f"configs/{name}.toml") for name in ("a0", "a1", "a2"))
SMALL = [
    "--orchestrator.groups_per_step", "2", "--orchestrator.group_size", "4", "--orchestrator.eval.tasks", "4",
    "--trainer.schedule.warmup_steps", "0",
]  # fmt: skip


# Options of the ladder and words for every run may stand in any order; layers and flags are the runs'.
def test_words_for_every_run_are_told_apart() -> None:
    words = "a1.toml @ x.toml --run.seed 4 -o out --run.overwrite --seeds 2 a2.toml @y.toml"
    options, common = parse(words.split())
    assert [str(file) for file in options.config] == ["a1.toml", "a2.toml"] and options.seeds == 2
    assert common == ["@", "x.toml", "--run.seed", "4", "--run.overwrite", "@y.toml"]


# A0 is an arm without training, A1 the baseline; the plan names the runs.
def test_a_ladder_is_planned(tmp_path: Path) -> None:
    ladder = tmp_path / "ladder"
    words = [A0, A1, A2, "-o", str(ladder), "--seeds", "2", "--steps", "30"]
    options, common = parse([*words, "--orchestrator.eval.every_steps", "5"])
    commands = plan_arms(options, common)
    planned = preregistration(options, [command.arm for command in commands])
    assert [(arm.name, arm.steps) for arm in planned.arms] == [("a0", 0), ("a1", 30), ("a2", 30)]
    assert (planned.baseline, planned.held_out) == ("a1", "toolsmith")
    assert [arm.name for arm in planned.challengers] == ["a2"]
    text = "\n".join(plan_lines(ladder, planned, commands))
    assert "3 arms x 2 seeds = 6: 6 new" in text and "a0 (not trained)" in text
    run_words = commands[1].run_words(1, RunDir(ladder / "a1-seed1"))
    assert run_words[:2] == ["@", A1] and run_words[-2:] == ["--run.seed", "1"] and "--resume" not in run_words
    (ladder / "a1-seed1" / "checkpoints").mkdir(parents=True)
    assert commands[1].run_words(1, RunDir(ladder / "a1-seed1"))[-1] == "--resume"


# What cannot be compared is refused before anything is written, with both values and the remedy.
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([A0], "no arm trains"),
        ([A1, "--held-out", "far"], "held-out source 'far' is not evaluated by arm a1, which has toolsmith"),
        ([A1, "--orchestrator.eval.every_steps", "0"], "arm a1 is never evaluated on held-out tasks"),
        ([A2, "--run.name", "again", A2.replace("a2", "a1")], "2 configurations have run.name"),
        ([A1, "--effect", "0"], "--effect 0.0"),
        ([A1, str(ROOT / "configs/code/a1.toml")], "run.max_steps is a1 60, code-a1"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    options, common = parse([*words, "-o", str(tmp_path / "ladder")])
    with pytest.raises(ConfigError, match=message):
        preregistration(options, [command.arm for command in plan_arms(options, common)])


# A real ladder of one arm and one step trains, writes its announcement first, and reports. Repeated, it trains nothing;
# with another effect of interest it is refused.
@pytest.mark.slow
def test_a_ladder_runs_once(tmp_path: Path) -> None:
    folder = tmp_path / "ladder"
    words = [A1, "-o", str(folder), "--seeds", "1", "--steps", "1", *SMALL]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "composer_prime.cli.main", "ladder", "run", *words, *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)

    first = run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1 arm x 1 seed = 1: 1 new" in first.stdout
    assert "compute of a run, at equal optimizer steps (1)" in first.stdout
    steps = [line for line in (folder / "a1-seed0" / "metrics.jsonl").read_text().splitlines() if "loss/total" in line]
    assert len(steps) == 1 and json.loads((folder / "preregistration.json").read_text())["seeds"] == [0]
    again = run()
    assert again.returncode == 0 and "a1-seed0: already finished" in again.stdout
    with pytest.raises(ConfigError, match=r"minimal_effect: registered 0.05, now 0.2"):
        main([*words, "--effect", "0.2"])
