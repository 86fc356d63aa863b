"""Commands answer at once: they load what they need, and none of the heavy packages that only roles need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """import importlib, json, sys, trainer.main
results, main = [], importlib.import_module(sys.argv[1] + ".main").main
for words in json.loads(sys.argv[2]):
    sys.argv = ["command", *words]
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    results.append([words, status or 0, list(sys.modules)])
print(json.dumps(results))"""
LOOKING = "torch transformers verifiers scipy pydantic"
DRY_RUN = "@ configs/a1.toml --dry-run --run.output_dir RUN"
ROLES = "torch transformers verifiers vllm"


# Help, run directories and the quick check need neither torch nor the configuration's classes, and the help and the dry
# run of a role not what it works with. One process runs all commands of a script, so the first that loads too much is
# the one to repair. Nothing heavy loads before a command waits for Ctrl-C.
@pytest.mark.process
@pytest.mark.parametrize(
    ("package", "heavy", "commands"),
    [
        ("composer_prime.cli", LOOKING, ("--help", "ladder --help", "rollouts --help", "report RUN", "doctor")),
        ("trainer", ROLES, (DRY_RUN,)),
        ("orchestrator", ROLES, ("--help", DRY_RUN)),
        ("inference", ROLES, ("--help", "join --help", DRY_RUN)),
    ],
)
def test_commands_that_only_look_load_nothing_heavy(tmp_path, package, heavy, commands):
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "a", "seed": 0}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "role": "trainer", "loss/total": 0.0, "reward/mean": 0.5}\n')
    words = [[str(tmp_path) if word == "RUN" else word for word in command.split()] for command in commands]
    command = [sys.executable, "-c", CODE, package, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr
    for words, status, modules in json.loads(done.stdout.splitlines()[-1]):
        assert status == 0, (words, done.stdout, done.stderr)
        assert not set(heavy.split()) & set(modules), words
        assert package != "composer_prime.cli" or words != ["--help"] or "numpy" not in modules
