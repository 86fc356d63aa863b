"""`composer ingest PATHS... -o states.jsonl` (composer_prime/cli/ingest_command.py starts this)."""

from __future__ import annotations

from composer_prime.console import until_the_reader_leaves
from orchestrator.ingest.command import main

if __name__ == "__main__":
    raise SystemExit(until_the_reader_leaves(main))
