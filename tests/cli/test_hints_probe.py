"""`composer hints probe`: its table, and the real thing on the tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.cli import hints_command
from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError
from orchestrator.hints.probe import NONE, OTHER, OWN, KindOfHint

ROOT = Path(__file__).parents[2]


# Differences are paired over the tasks that both arms have; an arm without a redraw has no figure.
def test_the_table_pairs_by_task():
    kind = KindOfHint(turns={(0, 0), (0, 1), (1, 0)}, lost=1)
    for figures, without, own in ((kind.rewards, 0.0, 1.0), (kind.errors, 1.0, 0.0)):
        figures[NONE] = {"a": [without], "b": [without], "alone": [own]}
        figures[OWN] = {"a": [own], "b": [own, without]}
    _, reward, *_, errors = [line for line in hints_command.redraw_lines({"k": kind}) if line]
    assert re.split(r"\s{2,}", reward)[:2] == ["k", "3"] and " 0.333 [" in reward and "+0.750 [" in reward
    assert "-0.750 [" in errors and re.search(r"\s-\s+1$", errors) and not kind.rewards[OTHER]


def test_a_probe_needs_hints():
    with pytest.raises(ConfigError, match=r"orchestrator\.hints"):
        hints_command.main(["tiny", "@", "configs/a1.toml"])


def probe(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "composer_prime.cli.main", "hints", "probe", "tiny", "@", "configs/a2.toml"]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)


# Each redraw repeats its rollout up to the turn, and every kind of error that the group made has its row.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_model_is_probed():
    done = probe("--groups", "3", "--draws", "1", "--distil", "1", "--orchestrator.eval.tasks", "16")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +(\d+)  .* (\d+)$", done.stdout, re.MULTILINE)
    assert {"tool_not_found", "argument_name"} <= {name for name, _, _ in rows}
    assert all(int(turns) > 0 and lost == "0" for _, turns, lost in rows)


# The copy learns from the hints alone, whatever else the file or the flags say, and in its own folder.
@pytest.mark.parametrize("file", ["configs/a4.toml", "configs/code/a4.toml", "configs/smollm2/a4.toml"])
def test_the_copy_learns_from_hints_alone(file):
    words = ["@", file, "--run.name", "mine", "--run.max_steps", "60", "--orchestrator.hints.licence.share", "0.5"]
    config = resolve([*words, *hints_command._alone(resolve(words), Path("scratch"), 10)])
    assert [term.name for term in config.channels.terms(1)] == ["policy", "sdpo"] and not config.channels.policy.weight
    assert config.run_directory == Path("scratch/distil") and config.run.max_steps == 10
    assert config.orchestrator.hints.licence is None and config.channels.sdpo.teacher.kind == "frozen"


# The figures of the copy: a paired difference over tasks, and the divergence of each kind, first against last.
def test_the_lines_of_the_copy():
    scores = {0: {str(task): [0.0] for task in range(9)}, 4: {str(task): [1.0] for task in range(9)}}
    history = [{"step": step, "sdpo/jsd": 1.0, "sdpo/jsd/k": nats} for step, nats in enumerate((0.4, 0.3, 0.2, 0.1))]
    reward, kind, verdict = hints_command.distil_lines(scores, history, 4)
    assert "+1.000 [" in reward and kind.split()[:2] == ["k", "divergence"] and "0.4000" in kind and "0.1000" in kind
    assert verdict != hints_command.distil_lines({0: scores[0], 4: scores[0]}, history, 4)[-1]


@pytest.mark.parametrize("words", [["--save", "README.md"], ["--distil", "-3"], ["--orchestrator.hints.scope", "rest"]])
def test_what_a_probe_cannot_do_is_said_first(words):
    with pytest.raises(ConfigError, match=words[0].removeprefix("--orchestrator.")):
        hints_command.main(["tiny", "@", "configs/a2.toml", *words])


# Rules that find nothing are named, with what to change.
@pytest.mark.slow
def test_a_probe_without_failed_turns():
    done = probe("--groups", "1", "--orchestrator.hints.detect", '["test_failure"]')
    assert done.returncode != 0 and "orchestrator.hints.detect" in done.stderr and "--groups" in done.stderr
