"""Commands answer at once: they load what they need, and none of the heavy packages that only roles need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "verifiers", "scipy", "pydantic"}
CODE = """import json, sys
from composer_prime.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["composer", *words]
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    results.append([words, status or 0, list(sys.modules)])
print(json.dumps(results))"""
LOOKING = ("--help", "ladder --help", "rollouts --help", "report RUN", "doctor")


@pytest.mark.process
def test_commands_that_only_look_load_nothing_heavy(tmp_path):
    # Help, run directories and the quick check need neither torch nor the configuration's classes. One process runs all
    # of them, so the first command that loads too much is the one to repair.
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "a", "seed": 0}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "role": "trainer", "loss/total": 0.0, "reward/mean": 0.5}\n')
    commands = [[str(tmp_path) if word == "RUN" else word for word in words.split()] for words in LOOKING]
    command = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    for words, status, modules in json.loads(done.stdout.splitlines()[-1]):
        assert status == 0, (words, done.stdout, done.stderr)
        assert not HEAVY & set(modules), words
        assert words != ["--help"] or "numpy" not in modules
