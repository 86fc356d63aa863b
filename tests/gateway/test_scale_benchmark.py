"""The scale benchmark runs, also where its target is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_gateway_scale_measures_and_can_lose(tmp_path):
    """The exit status says whether a bound was missed, and the figures of what ran are written."""
    out = tmp_path / "gateway.json"
    command = [sys.executable, "-m", "benchmarks.gateway_scale", "--parts", "placing", "--nodes", "1", "8", "--placed",
               "128", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == int("MISSED" in done.stdout), done.stderr
    assert "placing with 8 nodes" in done.stdout
    placing = json.loads(out.read_text())["placing"]
    assert set(placing) == {"1", "8"} and all(cpu_us > 0 for cpu_us in placing.values())
