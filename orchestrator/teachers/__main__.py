"""`composer replay states.jsonl -o pairs.jsonl @ file.toml` (composer_prime/cli/replay_command.py starts this)."""

from __future__ import annotations

from orchestrator.teachers.command import main

if __name__ == "__main__":
    raise SystemExit(main())
