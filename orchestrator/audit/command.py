"""`orchestrator audit`: start an auditor, which holds the model and checks what inference nodes sample.

The auditor is a console script of its own, as every role is: this package does not import the engines.
"""

from __future__ import annotations

import os
from pathlib import Path

from composer_prime.config import load
from composer_prime.console import EXIT_USAGE, console_script
from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir

_USAGE = """usage: orchestrator audit RUN_DIR [--node-name NAME] [--dry-run]     on the run's host
       orchestrator audit tcp://HOST:PORT --model PATH --token-file trainer.token [...]

Checks a share of the answers of a run with orchestrator.audit.enabled. HOST:PORT is orchestrator.audit.address; the
token is the run's keys/trainer.token, which gives full trust over the run's weights. For other options see
`inference join --help`."""


def main(words: list[str]) -> int:
    """Become the auditor's process. Returns only for --help and without words. Raises ConfigError without audits."""
    if words and words[0] not in ("--help", "-h"):
        is_elsewhere = words[0].startswith("tcp://")
        if not is_elsewhere and not load.read_config(RunDir(Path(words[0])).config).orchestrator.audit.enabled:
            raise ConfigError(
                f"orchestrator.audit.enabled is false for {words[0]}, which then has no work for an auditor: start the "
                "run with --orchestrator.audit.enabled"
            )
        where = words if is_elsewhere else ["--run-dir", *words]
        command = [*console_script("inference"), "audit", *where]
        os.execvp(command[0], command)
    print(_USAGE)
    return 0 if words else EXIT_USAGE
