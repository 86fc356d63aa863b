"""All three channels in one run, through a kill -9: hints and pairs come back as they were, each sample trains once."""

from __future__ import annotations

import json
import os
import signal

import pytest
from quick_run import QuickRun

from composer_prime.run import ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# Killed after step 3, between two checkpoints: the launcher stops the others, exits non-zero and names the role.
def test_three_channels_survive_a_killed_orchestrator(tmp_path):
    run = QuickRun(tmp_path, f"e2e-{os.getpid()}-channels", steps=5, config="configs/a4.toml")
    try:
        run.start().wait_for_step(3)
        os.kill(run.pid_of("orchestrator"), signal.SIGKILL)
        assert run.wait() != 0
        run.wait_until_gone()
        assert "orchestrator" in run.output()
        assert run.start("--resume").wait() == 0, run.output()[-3000:]
        run.wait_until_gone()
    finally:
        run.stop()
    assert ledger.check_ledger(run.run_dir.ledger) == []
    assert sorted(ledger.effective(run.run_dir.ledger)) == [1, 2, 3, 4, 5]
    assert (run.run_dir.final / "model.safetensors").exists()
    lines = {line["step"]: line for line in run.trainer_lines()}
    assert sorted(lines) == [1, 2, 3, 4, 5]
    for line in lines.values():
        assert line["sdpo/turns"] > 0 and 0 < line["sdpo/jsd"] < 0.7
        assert line["dpo/pairs"] == line["pairs/served"] == 8
        assert line["hints/hinted"] >= line["sdpo/turns"] and 0 < line["rollout/turn_error_rate"] < 1
    rollouts = [json.loads(text) for text in run.run_dir.rollouts(5).read_text().splitlines()]
    hinted = [turn for rollout in rollouts for turn in rollout["turns"] if turn["hint"]]
    assert hinted and all(turn["role"] == "assistant" and turn["error"] for turn in hinted)
    assert all(turn["hint"].startswith("Reminder: ") for turn in hinted)
