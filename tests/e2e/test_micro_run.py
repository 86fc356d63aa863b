"""A short run of the tiny coding ladder: all roles, real tests in boxes, rewards and metrics of each step."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_run import QuickRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def secrets_outside(run: QuickRun) -> Iterator[Path]:
    """Files beside keys/ that hold a secret of keys/, as it is, in hexadecimal or in base64."""
    files = {path: path.read_bytes() for path in run.run_dir.keys.iterdir() if path.suffix != ".sqlite"}
    texts = {path: raw.strip() if raw.isascii() else raw for path, raw in files.items()}
    secrets = {raw[40:] if path.suffix == ".curve" else raw for path, raw in texts.items()}
    assert len(secrets) >= 7 and min(map(len, secrets)) >= 32
    secrets |= {form(secret) for form in (lambda raw: raw.hex().encode(), base64.b64encode) for secret in secrets}
    for path in run.output_dir.rglob("*"):
        if path.is_file() and run.run_dir.keys not in path.parents:
            raw = path.read_bytes()
            yield from (path for secret in secrets if secret in raw)


# No secret of the run is in any of its other files: logs, configuration, events, metrics, weights.
def test_the_coding_ladder_trains(tmp_path):
    # Two steps of a4, which is a1 with hints and pairs: finite losses, rollouts whose code ran, the metrics of cheats.
    run = QuickRun(tmp_path, f"micro-{os.getpid()}", steps=2, config="configs/code/a4.toml")
    run.settings += ["--orchestrator.source.0.taskset.runtime", "subprocess"]
    try:
        assert run.start().wait() == 0, run.output()[-3000:]
        lines = run.trainer_lines()
        assert [line["step"] for line in lines] == [1, 2]
        rollouts = [json.loads(line) for line in run.run_dir.rollouts(1).read_text().splitlines()]
        replies = [turn["text"] for row in rollouts for turn in row["turns"] if turn["role"] == "tool"]
        assert any(text == "pass" or text.startswith("FAILED ") for text in replies)
        assert {"solved", "hacks/rollouts", "lure_read", "tests_edit"} <= rollouts[0]["metrics"].keys()
        assert not list(secrets_outside(run))
        assert all(line["dpo/pairs"] > 0 for line in lines) and any(line["sdpo/turns"] > 0 for line in lines)
    finally:
        run.stop()


# With a licence to earn, the run redraws hinted turns beside training, and until one is earned it distills none.
def test_hints_earn_their_weight(tmp_path):
    run = QuickRun(tmp_path, f"licence-{os.getpid()}", steps=4, config="configs/a2.toml")
    run.settings += ["--orchestrator.hints.licence.share", "1", "--orchestrator.hints.licence.trust", "false"]
    try:
        assert run.start().wait() == 0, run.output()[-3000:]
        first, _, *lines = [json.loads(line) for line in run.run_dir.licence.read_text().splitlines()]
        assert first == {"model": "tiny"} and any("kind" in line for line in lines)
        assert all(line["sdpo/turns"] == 0 for line in run.trainer_lines())
        rollouts = [json.loads(line) for line in run.run_dir.rollouts(1).read_text().splitlines()]
        assert any(turn["hint"] for row in rollouts for turn in row["turns"])
    finally:
        run.stop()
