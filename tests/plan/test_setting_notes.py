"""Settings that are allowed, but seldom meant, are notes of the plan."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from composer_prime.console import GIB
from composer_prime.plan.machine import Machine
from composer_prime.plan.plan import build_plan

A1 = str(Path(__file__).parents[2] / "configs" / "a1.toml")
ON = ("--channels.sdpo.weight", "0.5", "--orchestrator.hints.placement", "system")


def notes(folder: Path, *words: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = resolve(["@", A1, "--run.output_dir", str(folder), "--run.max_steps", "8", *words]).config
    return "\n".join(build_plan(config, Machine(cores=2, memory_bytes=16 * GIB, gpus=())).notes)


@pytest.mark.parametrize(
    ("quiet", "loud", "said"),
    [
        (
            ("--trainer.schedule.warmup_steps", "7"),
            ("--trainer.schedule.warmup_steps", "10"),
            "run.max_steps is 8 and trainer.schedule.warmup_steps is 10: all steps are warm-up, the learning rate ends "
            "at 80% of its peak",
        ),
        (
            (*ON, "--channels.sdpo.schedule.start_step", "8"),
            (*ON, "--channels.sdpo.schedule.start_step", "9"),
            "channels.sdpo.schedule.start_step is 9, but run.max_steps is 8: this loss never gets its weight of 0.5",
        ),
        (
            ("--orchestrator.eval.every_steps", "4"),
            ("--orchestrator.eval.every_steps", "0"),
            "orchestrator.source 'toolsmith' has an eval_taskset, but orchestrator.eval.every_steps is 0: nothing",
        ),
        (
            (*ON, "--channels.sdpo.beta", "0.05"),
            (*ON, "--channels.sdpo.beta", "0.01"),
            "channels.sdpo.beta is 0.01: near its ends the generalized JSD goes to 0",
        ),
        (
            ("--orchestrator.node_address", "tcp://0.0.0.0:5500", "--orchestrator.audit.enabled"),
            ("--orchestrator.node_address", "tcp://0.0.0.0:5500"),
            "orchestrator.node_address is tcp://0.0.0.0:5500 and orchestrator.audit.enabled is false: nodes from",
        ),
        (
            ("--orchestrator.audit.quarantine_s", "60", "--orchestrator.audit.enabled"),
            ("--orchestrator.audit.quarantine_s", "60", "--orchestrator.swarm.auditors", "2"),
            "orchestrator.audit has auditors = 2 and quarantine_s = 60.0, but orchestrator.audit.enabled is false",
        ),
        (
            ("--inference.max_usd_per_million", "40", "--inference.usd_per_hour", "2"),
            ("--inference.max_usd_per_million", "40"),
            "inference.max_usd_per_million is 40, but inference.usd_per_hour is not set: a node without a price",
        ),
    ],
)
def test_a_setting_that_is_seldom_meant_has_a_note(tmp_path, quiet, loud, said):
    # The limit itself is quiet, one past it has a note with key, value and remedy; nothing is printed as a warning.
    assert said not in notes(tmp_path, *quiet)
    assert said in notes(tmp_path, *loud)
