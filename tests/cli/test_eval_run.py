"""`composer eval` for real: the same roles as in training, evaluation only."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eval_of_two_models_prints_intervals_and_their_difference(tmp_path):
    # The same folder under two names meets the same tasks with the same seeds: intervals for both, and a paired change.
    twin = ROOT / "composer_prime/assets/tiny/policy"
    words = ["tiny", str(twin), "@", "configs/a0.toml", "--run.output_dir", str(tmp_path)]
    words += ["--orchestrator.eval.tasks", "8", "--orchestrator.eval.samples", "2", "--orchestrator.eval.pass_k", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "composer_prime.cli.main", "eval", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean reward [95 %]" in done.stdout and "solved by" in done.stdout
    assert len(list((tmp_path / "evals").iterdir())) == 2
