"""Commands answer at once: they load what they need, and none of the heavy packages that only roles need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "verifiers", "scipy", "pydantic"}
CODE = """import sys
from composer_prime.cli.main import main
sys.argv = ["composer", *sys.argv[1:]]
try:
    status = main()
except SystemExit as ended:
    status = ended.code
print(status or 0, *sys.modules)"""


LOOKING = ("--help", "ladder --help", "ladder RUN", "report RUN", "rollouts --help", "doctor --quick")


@pytest.mark.process
@pytest.mark.parametrize("words", LOOKING)
def test_a_command_that_looks_loads_nothing_heavy(tmp_path, words):
    # Help, run directories and the quick check need neither torch nor the configuration's classes.
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "a", "seed": 0}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "role": "trainer", "loss/total": 0.0, "reward/mean": 0.5}\n')
    words = [str(tmp_path) if word == "RUN" else word for word in words.split()]
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0", done.stdout + done.stderr
    assert not HEAVY & set(modules)
    assert words != ["--help"] or "numpy" not in modules
