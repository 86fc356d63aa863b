"""`composer ingest PATHS... -o states.jsonl` (composer_prime/cli/ingest_command.py starts this)."""

from __future__ import annotations

from orchestrator.ingest.command import main

if __name__ == "__main__":
    raise SystemExit(main())
