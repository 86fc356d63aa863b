"""A stand for launcher tests: real processes with small scripts as roles, run through a launcher process of its own.

    python stand.py FOLDER SCENARIO.json [--grace SECONDS] [arguments of trainer]

SCENARIO names, for each role, the Python text it runs; RUN_DIR is its working directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from composer_prime.config.load import resolve
from trainer.launcher import supervise
from trainer.launcher.launch import launch
from trainer.launcher.supervise import RoleCommand

CONFIG = """
[run]
name = "stand"
max_steps = 3
[model]
path = "tiny"
max_context = 512
[[orchestrator.source]]
name = "toolsmith"
taskset = { id = "orchestrator.environments.toolsmith" }
eval_taskset = { split = "eval" }
[orchestrator.sampling]
max_tokens = 64
[trainer.checkpoint]
stop_timeout_s = 1.0
"""
PRELUDE = """
import json, os, signal, subprocess, sys, time
def log(role, step, **values):
    with open('metrics.jsonl', 'a') as file:
        file.write(json.dumps({'step': step, 'time': time.time(), 'role': role, **values}) + '\\n')
"""


def kind_of(name: str) -> str:
    kinds = {"trainer": "rank", "node": "node", "teachers": "teachers"}
    return next((kind for start, kind in kinds.items() if name.startswith(start)), "orchestrator")


def config_file(folder: Path) -> Path:
    path = folder / "stand.toml"
    path.write_text(CONFIG)
    return path


def main(folder: Path, scenario: dict[str, str], extra: list[str]) -> int:
    supervise.STOP_GRACE_S = 2.0
    if extra[:1] == ["--grace"]:
        supervise.STOP_GRACE_S, extra = float(extra[1]), extra[2:]
    words = ["@", str(config_file(folder)), "--run.output_dir", str(folder / "outputs"), *extra]

    def commands(config, run_dir):
        return [
            RoleCommand(
                name=name,
                kind=kind_of(name),
                argv=[sys.executable, "-c", f"{PRELUDE}\nos.chdir({str(run_dir.root)!r})\n{text}"],
            )
            for name, text in scenario.items()
        ]

    return launch(resolve(words), commands)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3:]))
