"""`composer eval`: two models, pass@k, folders, environments without a run, and the whole command."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.cli import eval_command
from composer_prime.cli.eval_command import Evaluation, evaluation_config
from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError

ROOT = Path(__file__).parents[2]


# Two models are compared task by task, and each flipped task can be looked at.
def test_two_models(tmp_path):
    config = resolve(["@", str(ROOT / "configs/a1.toml")])
    folders = {"tiny": tmp_path / "tiny", "a1": tmp_path / "a1"}
    before, after = ({f"toolsmith/t{task}": [float(task % odd == 1)] for task in range(8)} for odd in (9, 2))
    evaluations = {
        name: Evaluation(scores=scores, folder=folders[name]) for name, scores in (("tiny", before), ("a1", after))
    }
    text = "\n".join(eval_command.report(evaluations, config))
    assert "  +0.375 [" in text and "3 tasks solved by a1, not by tiny\n    t3\n    t5\n    t7\n" in text
    assert f"uv run composer rollouts {folders['a1']} --eval --task TASK    (a1)" in text


# pass@k has an interval over tasks; a task with fewer samples than k has no part in it.
def test_pass_at_k(tmp_path):
    words = ["@", str(ROOT / "configs/a1.toml"), "--orchestrator.eval.samples", "2"]
    config = resolve([*words, "--orchestrator.eval.pass_k", "1", "2"])
    scores = {f"toolsmith/t{task}": [1.0, 0.0] for task in range(6)} | {"toolsmith/t6": [1.0]}
    lines = eval_command.report({"tiny": Evaluation(scores=scores, folder=tmp_path)}, config)
    assert any(line.startswith("tiny: pass@1 0.571 [") for line in lines)
    assert any(line.startswith("tiny: pass@2 1.000 [") for line in lines)


# Folders are numbered, so that no evaluation replaces an earlier one.
def test_folders(tmp_path):
    config = resolve(["@", str(ROOT / "configs/a1.toml"), "--run.output_dir", str(tmp_path)])
    for name in ("a1-tiny", "a1-tiny-2", "a1-tiny-3"):
        (folder := eval_command._evaluation_folder("tiny", config).root).mkdir(parents=True)
        assert folder.name == name


# Any module of tasks can be evaluated without a run; its settings for held-out tasks can be given.
def test_environment_without_a_run(tmp_path):
    words = ["--env", "orchestrator.environments.toolsmith", "--eval_taskset.split", "eval"]
    config = evaluation_config(eval_command._with_environment(words, ["tiny"], tmp_path))
    (source,) = config.orchestrator.source
    assert source.eval_taskset == {"id": "orchestrator.environments.toolsmith", "split": "eval"}
    with pytest.raises(ConfigError, match="--env needs an environment"):
        eval_command._with_environment(["--env"], ["tiny"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eval_of_two_models_prints_intervals_and_their_difference(tmp_path):
    # The same folder under two names meets the same tasks with the same seeds: intervals for both, and a paired change.
    twin = ROOT / "composer_prime/assets/tiny/policy"
    words = ["tiny", str(twin), "@", "configs/a0.toml", "--run.output_dir", str(tmp_path)]
    words += ["--orchestrator.eval.tasks", "8", "--orchestrator.eval.samples", "2", "--orchestrator.eval.pass_k", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "composer_prime.cli.main", "eval", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean reward [95 %]" in done.stdout and "solved by" in done.stdout
    assert len(list((tmp_path / "evals").iterdir())) == 2
