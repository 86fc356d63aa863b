"""`composer replay states.jsonl -o pairs.jsonl @ file.toml` (composer_prime/cli/replay_command.py starts this)."""

from __future__ import annotations

from composer_prime.console import until_the_reader_leaves
from orchestrator.teachers.command import main

if __name__ == "__main__":
    raise SystemExit(until_the_reader_leaves(main))
