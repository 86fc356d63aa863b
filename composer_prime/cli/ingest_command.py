"""`composer ingest PATHS... -o states.jsonl`: agent sessions to states. The readers are the orchestrator's, so they run
in a process of their own: this package imports no role."""

from __future__ import annotations

from composer_prime.console import run_module


def run(words: list[str]) -> int:
    return run_module("orchestrator.ingest", words)
