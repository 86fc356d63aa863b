"""`composer replay`, with what it may start and assume: the server of local models, and a task set for no run."""

from __future__ import annotations

import json
import sys

from composer_prime.traces.replay import replay_console
from composer_prime.traces.replay.replay import NO_MODEL

SERVER = (sys.executable, "-m", "inference.model_server")
NO_RUN = {
    "--run.name": "replay",
    "--orchestrator.source": json.dumps(
        [{"name": "toolsmith", "taskset": {"id": "orchestrator.environments.toolsmith"}}]
    ),
    "--model.path": NO_MODEL,
    "--model.max_context": str(1 << 30),
    "--trainer.micro_batch_tokens": str(1 << 31),
    "--teachers.online": "false",
}
"""What stands for the run where only teachers are given: no step that limits the states."""


def main(words: list[str] | None = None) -> int:
    return replay_console.main(words, server=SERVER, no_run=NO_RUN)
