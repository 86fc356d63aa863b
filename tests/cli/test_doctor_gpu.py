"""`composer doctor --gpu`: each check computes on the CPU too, in small. Only the device itself is not shown here."""

from __future__ import annotations

import sys

import pytest

from composer_prime.cli import doctor_command
from composer_prime.cli.device_checks import run_ranks
from composer_prime.cli.doctor_gpu import DEADLINES_S, run_check, run_checks
from composer_prime.plan.machine import visible_gpus


@pytest.mark.skipif(bool(visible_gpus()), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_checked(capsys):
    # At once, with exit status 2 and no verdict.
    assert doctor_command.main(["--gpu"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no GPU is visible to the CUDA driver here" in printed.err


@pytest.mark.process
def test_a_check_that_fails_or_hangs_has_a_verdict_and_others_follow(capsys):
    # An exception, a deadline that passes, and a budget that is spent: each is a line, and none ends the command.
    finding = run_check("nonsense", "cpu", small=True, deadline_s=300)
    assert finding.level == "bad" and finding.text == "ended with status 1: KeyError: 'nonsense'"
    assert run_checks("cpu", ["step", "head"], budget_s=0.01) == 1
    text = capsys.readouterr().out
    assert "bad   step       not done after 0 s" in text and "skip  head       no time was left" in text
    assert "bad: step; not run: head" in text


@pytest.mark.process
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path):
    # Rank 0 would wait for rank 1 for ever.
    code = """import os, signal
if os.environ["RANK"] == "1":
    raise ValueError("no device for rank 1")
signal.pause()"""
    with pytest.raises(RuntimeError, match="rank 1 ended with status 1: ValueError: no device for rank 1"):
        run_ranks([sys.executable, "-c", code], 2, tmp_path)
    code = "import os; print('world of', os.environ['WORLD_SIZE'])"
    assert run_ranks([sys.executable, "-c", code], 2, tmp_path) == "world of 2\n"


# The same code as on a GPU, with the CPU as the device: its comparison holds, and it has figures. A process's memory
# holds its libraries and caches, so the verdict on memory means something on a GPU only.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DEADLINES_S if name not in ("a1", "vllm")])
def test_each_check_computes_on_the_cpu(name):
    finding = run_check(name, "cpu", small=True, deadline_s=600)
    assert finding.level == "ok" or name == "memory", finding
    assert any(character.isdigit() for character in finding.text), finding


@pytest.mark.slow
def test_the_check_of_a_whole_run_on_the_cpu():
    finding = run_check("a1", "cpu", small=True, deadline_s=600)
    assert finding.level == "ok" and finding.text.startswith("2 steps, median"), finding
