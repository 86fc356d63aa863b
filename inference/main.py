"""The console script `inference`: a node that samples (see inference/assignment.py for its command lines).

Exit status: 0 drained or stopped, 1 failed (it says what it waited for or what broke), 2 wrong configuration.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading

from composer_prime.config import load
from composer_prime.console import EXIT_USAGE, exit_on_version_flag, fail
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import model_ready, resolve_model
from inference.assignment import Assignment, describe_assignment, from_config, from_join, from_run_dir, node_usage

FAILED = 1
logger = logging.getLogger(__name__)


def main() -> int:
    status = _main()
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # An engine still loads, or hangs: taken down under its thread the interpreter may crash.
    return status


def _main() -> int:
    words = sys.argv[1:]
    exit_on_version_flag(words)
    try:
        assignment, dry_run = _assigned(words)
        if dry_run:
            model_ready(assignment.model)
            print(describe_assignment(assignment))
            return 0
        return _run(assignment)
    except ConfigError as error:
        fail(error)


def _assigned(words: list[str]) -> tuple[Assignment, bool]:
    """What the command line asks for, and whether it is a dry run. Raises ConfigError."""
    if words[:1] == ["join"]:
        return from_join(words[1:])
    if not words or words in (["--help"], ["-h"]):
        print(node_usage())
        raise SystemExit(0 if words else EXIT_USAGE)
    if any(word.split("=")[0] == "--run-dir" for word in words):
        dry_run = "--dry-run" in words
        return from_run_dir([word for word in words if word != "--dry-run"]), dry_run
    name = "node-0"
    if "--node-name" in words[:-1]:
        at = words.index("--node-name")
        name = words[at + 1]
        words = words[:at] + words[at + 2 :]
    command = load.parse_command_line(words)
    return from_config(command.config, name), command.dry_run


def _run(assignment: Assignment) -> int:
    from inference.serve import serve_assignment

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logger.info("node %s: loading %s", assignment.node_name, assignment.model)
    folder = resolve_model(assignment.model)
    try:
        asyncio.run(serve_assignment(assignment, folder))
        return 0
    except ConfigError:
        raise
    except (ComposerError, OSError) as error:
        print(f"inference: {assignment.node_name}: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
