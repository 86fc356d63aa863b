"""The scale benchmark runs, also where its target is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
def test_orchestrator_scale_reports_every_level(tmp_path):
    """Two small levels in one run: every request is answered and recorded, the figures are written, exit status 0."""
    out = tmp_path / "scale.json"
    command = [sys.executable, "benchmarks/orchestrator_scale.py", "--levels", "4", "8", "--delay-s", "0.1",
               "--num-tokens", "8", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert [result["requests"] for result in figures["results"]] == [4 * 2 * 3, 8 * 2 * 3]
    assert figures["lag_p99_s"] > 0 and "CPU per rollout" in done.stdout
