"""`composer try`: what it plays, what it prints, what it warns of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_prime.cli.environments.try_command import _parser, chosen, trial_config
from composer_prime.console import console_script
from composer_prime.errors import ConfigError
from orchestrator.outside_run import trial_warnings
from orchestrator.rollouts.groups import FinishedRollout
from orchestrator.workers.worker import overlap

BROKEN = Path(__file__).with_name("broken_env.py.txt").read_text()


def configured(*words: str):
    options, rest = _parser().parse_known_args(list(words))
    return trial_config(options, rest)


def composer(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*console_script("composer"), *words], capture_output=True, text=True, timeout=300, cwd=cwd, check=False
    )


def episode(reward: float | None, *, sampled_tokens: int = 5, truncated: bool = False):
    return FinishedRollout(
        rollout_id="r",
        sibling=0,
        task_id="t",
        seed=0,
        reward=reward,
        sampled_tokens=sampled_tokens,
        truncated=truncated,
    )


# A module's file gets a configuration around it: its folder is importable, the embedded model answers.
def test_module_file(tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text("")
    config = configured(str(file), "--taskset.split", "hard")
    (source,) = config.orchestrator.source
    assert source.taskset == {"id": "my_env", "split": "hard"}
    assert config.run.import_from == [tmp_path]
    assert (config.model.path, config.model.max_context) == ("tiny", 1024)


# `--eval` takes the split `eval`, where the task set has one.
def test_held_out_tasks_of_a_module(tmp_path):
    file = tmp_path / "split_env.py"
    file.write_text(BROKEN)
    (source,) = configured(str(file), "--eval").orchestrator.source
    assert source.eval_taskset == {"id": "split_env", "split": "eval"}
    (source,) = configured(str(file), "--eval", "--eval_taskset.split", "test").orchestrator.source
    assert source.eval_taskset == {"id": "split_env", "split": "test"}
    file = tmp_path / "whole_env.py"
    file.write_text(BROKEN.replace("split: str", "seed: str"))
    (source,) = configured(str(file), "--eval").orchestrator.source
    assert source.eval_taskset == {"id": "whole_env"}


# A configuration's source is played with the configuration's model and sampling.
def test_configuration():
    config = configured("a1", "--orchestrator.sampling.temperature", "0.5")
    assert config.model.max_context == 384
    assert config.orchestrator.sampling.temperature == 0.5
    assert [source.name for source in config.orchestrator.source] == ["toolsmith"]


# What names nothing is refused before anything loads, with the reason.
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no_such.py"], "there is no file no_such.py"),
        (["docs"], "neither a Python package"),
        (["configs/a1.toml", "-n", "0"], "-n is 0"),
    ],
)
def test_refused(words, reason):
    with pytest.raises(ConfigError, match=reason):
        configured(*words)


# An environment that fails while the model still loads ends the command with its status; nothing aborts under the
# thread that loads.
@pytest.mark.process
def test_a_failure_while_the_model_loads():
    code = """
import sys, torch
from composer_prime.cli.main import main
from inference.engines.local.local_engine import Computer

def load(self):
    while True:
        torch.randn(256, 256) @ torch.randn(256, 256)

Computer._load = load
sys.exit(main())
"""
    words = [sys.executable, "-c", code, "try", "no_such_environment"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "'no_such_environment' cannot be imported" in done.stderr


# Of many episodes the best, the worst and the first failed are shown, in their order.
def test_few_transcripts_are_shown():
    lines = [{"reward": reward} for reward in (0.5, None, 0.0, 1.0, None, 0.2)]
    assert [line["reward"] for line in chosen(lines)] == [None, 0.0, 1.0]
    assert chosen(lines[:4]) == lines[:4]


# Each reason why a run would learn nothing is one sentence; healthy episodes give none.
@pytest.mark.parametrize(
    ("episodes", "beginning"),
    [
        ([episode(1.0), episode(0.0)], None),
        ([episode(0.0), episode(0.0)], "all 2 rewards are 0"),
        ([episode(1.0, sampled_tokens=0), episode(0.0)], "in 1 episode with a reward the model sampled no token"),
        ([episode(1.0, truncated=True), episode(0.0)], "1 episode ended at a limit"),
        ([episode(None), episode(1.0)], None),
    ],
)
def test_warnings(episodes, beginning):
    warnings = trial_warnings(episodes)
    assert [warning[: len(beginning or "")] for warning in warnings] == ([] if beginning is None else [beginning])


# Held-out prompts that are training prompts are counted; the worker finds them.
def test_overlapping_splits_are_named():
    def prompts(*texts: str):
        return SimpleNamespace(num_tasks=len(texts), describe=lambda index: ("id", texts[index]))

    train = prompts("1 + 2", "2 + 2", "")
    sentence = overlap({"train": train, "eval": prompts("2 + 2", "1 + 2", "3 + 3", "")})
    assert sentence is not None and sentence.startswith("2 of 4 held-out tasks have the prompt of a training task")
    assert trial_warnings([episode(1.0), episode(0.0)], [sentence]) == [sentence]
    assert overlap({"train": train, "eval": prompts("3 + 3")}) is None
    assert overlap({"train": train}) is None


# One command plays toolsmith with the embedded model and prints transcript, parts, tools and tokens. It says at once
# what it reads and loads, and what is ready.
@pytest.mark.slow
def test_toolsmith_is_played():
    done = composer("try", "orchestrator.environments.toolsmith", "-n", "2", "--task", "1")
    assert done.returncode == 0, done.stderr
    assert "2 episodes, 2 with a reward" in done.stdout
    assert "(toolsmith/train/" in done.stdout
    assert "  tool  " in done.stdout
    assert "[1] assistant" in done.stdout
    assert "correct" in done.stdout and " sampled, " in done.stdout
    reading, loading, playing = [line for line in done.stderr.splitlines() if not line.endswith(" s)")][:3]
    assert reading == "reading the configuration of orchestrator.environments.toolsmith ..."
    assert {"g000000-0", "g000001-0"} <= {line.strip().partition(":")[0] for line in done.stderr.splitlines()}
    assert loading == "loading toolsmith and tiny ..." and playing == "playing 2 episodes ..."


# A reward that raises is named with file and line, and so is code that harms its worker.
@pytest.mark.slow
def test_broken_reward_is_named(tmp_path):
    harm = 'import os, signal; signal.alarm(99)\n        print("x" * 10_000_001)\n'
    (tmp_path / "echo_env.py").write_text(BROKEN.replace("raise", f"{harm}        raise"))
    done = composer("try", "echo_env.py", "-n", "2", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2 x task EchoTask scoring: LookupError: no word list (echo_env.py:17, in exact)" in done.stdout
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: environment")]
    assert {line.rpartition("(")[2] for line in warnings} == {f"echo_env.py:{line}, in exact)" for line in (15, 16)}
    assert 'raise LookupError("no word list")' in done.stdout
