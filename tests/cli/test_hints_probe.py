"""`composer hints probe`: its verdicts, and the real thing on the tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.cli import hints_command
from composer_prime.errors import ConfigError
from orchestrator.hints.probe import NONE, OTHER, OWN, KindOfHint

ROOT = Path(__file__).parents[2]


def kind(without: float, own: float, tasks: int = 40) -> KindOfHint:
    """A kind whose turns earn `without` and `own` on average, alternating between tasks."""
    made = KindOfHint(turns=tasks)
    for task in range(tasks):
        made.rewards[NONE][f"t{task}"] = [float(task < tasks * without)]
        made.rewards[OWN][f"t{task}"] = [float(task < tasks * own)]
    return made


# A kind is licensed by both: its own hint lifts the reward beyond doubt, and its divergence falls on other tasks.
@pytest.mark.parametrize(
    ("without", "own", "divergence", "word"),
    [
        (0.2, 0.6, [0.02, 0.018, 0.012, 0.01, 0.008], "teaches: "),
        (0.2, 0.6, [0.09, 0.085, 0.09, 0.084, 0.086], "not taken over"),
        (0.4, 0.4, [0.02, 0.018, 0.012, 0.01, 0.008], "teaches nothing"),
        (0.6, 0.2, [0.02, 0.018, 0.012, 0.01, 0.008], "teaches nothing"),
        (0.2, 0.6, [], "not taken over"),
    ],
)
def test_the_verdict(tmp_path, without, own, divergence, word):
    lines = [{"step": step, "sdpo/jsd": value} for step, value in enumerate(divergence, 1)]
    lines += [{"step": 0, "eval/t/turn_error_rate": 0.5}, {"step": 5, "eval/t/turn_error_rate": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert word in hints_command.verdict("k", kind(without, own), tmp_path / "metrics.jsonl")


# The paired difference is over the tasks that both arms have; an arm without a reward has no figure.
def test_the_lift_is_paired_by_task():
    made = kind(0.5, 0.5)
    made.rewards[NONE]["alone"] = [1.0]
    assert made.lift(OWN).mean == 0.0 and made.mean(NONE).count == 41
    assert made.lift(OTHER) is None and made.mean(OTHER) is None


@pytest.mark.parametrize(
    "words", [["tiny", "@", "configs/a1.toml"], ["tiny", "@", "configs/a2.toml", "--channels.sdpo.weight", "0"]]
)
def test_a_probe_needs_hints_and_a_weight(words):
    with pytest.raises(ConfigError, match=r"channels\.sdpo\.weight is 0"):
        hints_command.main(words)


def probe(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "composer_prime.cli.main", "hints", "probe", "tiny", "@", "configs/a2.toml"]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)


# Each redraw repeats its rollout; each kind of error has its own row; a distillation gives each a verdict.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_model_is_probed(tmp_path):
    done = probe(
        "--groups", "3", "--draws", "1", "--steps", "2", "-o", str(tmp_path), "--orchestrator.eval.tasks", "16"
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +(\d+)  .* (\d+)$", done.stdout, re.MULTILINE)
    assert {"tool_not_found", "argument_name"} <= {name for name, _, _ in rows}
    assert all(int(turns) > 0 and lost == "0" for _, turns, lost in rows)
    assert {line.split(":")[0] for line in done.stdout.splitlines() if "divergence" in line} == {row[0] for row in rows}


# Rules that find nothing are named, with what to change.
@pytest.mark.slow
def test_a_probe_without_failed_turns(tmp_path):
    done = probe("--groups", "1", "-o", str(tmp_path), "--orchestrator.hints.detect", '["test_failure"]')
    assert done.returncode != 0 and "orchestrator.hints.detect" in done.stderr and "--groups" in done.stderr
