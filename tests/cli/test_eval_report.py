"""`composer eval`: the base as baseline, pass@k, folders, and environments without a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from composer_prime.cli import eval_command
from composer_prime.cli.eval_command import Evaluation, evaluation_config
from composer_prime.config.load import dump, resolve
from composer_prime.errors import ConfigError
from composer_prime.model_source import resolve_model

ROOT = Path(__file__).parents[2]


def write_run(folder: Path) -> Path:
    """A finished run of six steps whose first and last evaluations are on disk."""
    config = resolve(["@", str(ROOT / "configs/a1.toml"), "--run.max_steps", "6"]).config
    shutil.copytree(resolve_model("tiny"), folder / "final")
    (folder / "config.json").write_text(dump(config))
    (folder / "run_id").write_text("run-1")
    (folder / "rollouts").mkdir()
    for step in (0, 6):
        rows = [
            {"step": step, "source": "toolsmith", "task_id": f"t{task}", "rollout_id": f"e{task}",
             "reward": float(step > 0 and task % 2)}
            for task in range(8)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"eval_{step:06d}.jsonl").write_text(text)
    return folder


# A run alone is compared with the model it began with, and each flipped task can be looked at.
def test_a_run_alone(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert eval_command.main([str(run)]) == 0
    text = capsys.readouterr().out
    assert f"toolsmith: {run} - tiny = +0.500" in text
    assert f"4 tasks solved by {run}, not by tiny: t1, t3, t5, t7" in text
    assert f"uv run composer rollouts {run} --eval --step 0 --task TASK    (tiny)" in text
    assert f"uv run composer rollouts {run} --eval --step 6 --task TASK    ({run})" in text


# pass@k has an interval over tasks; a task with fewer samples than k has no part in it.
def test_pass_at_k(tmp_path):
    words = ["@", str(ROOT / "configs/a1.toml"), "--orchestrator.eval.samples", "2"]
    config = resolve([*words, "--orchestrator.eval.pass_k", "1", "2"]).config
    scores = {f"toolsmith/t{task}": [1.0, 0.0] for task in range(6)} | {"toolsmith/t6": [1.0]}
    lines = eval_command.report({"tiny": Evaluation(scores=scores, folder=tmp_path)}, config)
    assert any(line.startswith("tiny: pass@1 0.571 [") for line in lines)
    assert any(line.startswith("tiny: pass@2 1.000 [") for line in lines)


# Folders are numbered, so that no evaluation replaces an earlier one.
def test_folders(tmp_path):
    config = resolve(["@", str(ROOT / "configs/a1.toml"), "--run.output_dir", str(tmp_path)]).config
    names = [eval_command._evaluation_folder("tiny", config).root.name for _ in range(3)]
    assert names == ["a1-tiny", "a1-tiny-2", "a1-tiny-3"]


# Any module of tasks can be evaluated without a run; its settings for held-out tasks can be given.
def test_environment_without_a_run(tmp_path):
    words = ["--env", "orchestrator.environments.toolsmith", "--eval_taskset.split", "eval"]
    config = evaluation_config(eval_command._with_environment(words, ["tiny"], tmp_path))
    (source,) = config.orchestrator.source
    assert source.eval_taskset == {"id": "orchestrator.environments.toolsmith", "split": "eval"}
    with pytest.raises(ConfigError, match="--env needs an environment"):
        eval_command._with_environment(["--env"], ["tiny"], tmp_path)


# A stop loses nothing: what is on disk with a reward is not played again, failures are.
def test_played_rollouts_are_known(tmp_path):
    from composer_prime.run.run_dir import RunDir
    from orchestrator.held_out import _played

    (tmp_path / "rollouts").mkdir()
    rows = [("eval0-my-env-3-1", 0.0), ("eval0-my-env-12-0r2", 1.0), ("eval0-my-env-4-0", None)]
    lines = [json.dumps({"rollout_id": name, "source": "my-env", "reward": reward}) + "\n" for name, reward in rows]
    (tmp_path / "rollouts" / "eval_000000.jsonl").write_text("".join(lines))
    assert _played(RunDir(tmp_path)) == {("my-env", "3", 1), ("my-env", "12", 0)}
