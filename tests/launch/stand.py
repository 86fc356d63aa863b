"""A stand for launcher tests: real processes with small scripts as roles, run through a launcher process of its own.

    python stand.py FOLDER SCENARIO.json [--grace SECONDS] [arguments of trainer]

SCENARIO names, for each role, the Python text it runs; RUN_DIR is its working directory.
"""

import json
import sys
from pathlib import Path

from composer_prime.config.load import resolve
from trainer.launcher import supervise
from trainer.launcher.launch import launch
from trainer.launcher.supervise import RoleCommand

CONFIG = Path(__file__).with_suffix(".toml")
PRELUDE = """
import json, os, signal, subprocess, sys, time
def log(role, step, **values):
    with open('metrics.jsonl', 'a') as file:
        file.write(json.dumps({'step': step, 'time': time.time(), 'role': role, **values}) + '\\n')
"""


def kind_of(name: str) -> str:
    kinds = {"trainer": "rank", "node": "node", "teachers": "teachers"}
    return next((kind for start, kind in kinds.items() if name.startswith(start)), "orchestrator")


def main(folder: Path, scenario: dict[str, str], extra: list[str]) -> int:
    supervise.STOP_GRACE_S = 2.0
    if extra[:1] == ["--grace"]:
        supervise.STOP_GRACE_S, extra = float(extra[1]), extra[2:]
    words = ["@", str(CONFIG), "--run.output_dir", str(folder / "outputs"), *extra]

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
