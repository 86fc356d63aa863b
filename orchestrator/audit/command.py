"""`orchestrator audit`: start an auditor, which holds the model and checks what inference nodes sample.

The auditor is a console script of its own, as every role is: this package does not import the engines.
"""

from __future__ import annotations

import os

from composer_prime.console import EXIT_USAGE, console_script

_USAGE = """usage: orchestrator audit RUN_DIR [--node-name NAME] [--dry-run]     on the run's host
       orchestrator audit tcp://HOST:PORT --model PATH --token-file trainer.token [...]

Checks a share of the answers of a run with orchestrator.audit.enabled. HOST:PORT is orchestrator.audit.address; the
token is the run's keys/trainer.token, which gives full trust over the run's weights. For other options see
`inference join --help`."""


def main(words: list[str]) -> int:
    """Become the auditor's process. Returns only for --help and without words."""
    if words and words[0] not in ("--help", "-h"):
        where = words if words[0].startswith("tcp://") else ["--run-dir", *words]
        command = [*console_script("inference"), "audit", *where]
        os.execvp(command[0], command)
    print(_USAGE)
    return 0 if words else EXIT_USAGE
