"""`composer replay STATES -o PAIRS @ file.toml`: states to preference pairs, by the teachers' votes (the orchestrator's
work, so in a process of its own)."""

from __future__ import annotations

from composer_prime.console import run_module


def run(words: list[str]) -> int:
    return run_module("orchestrator.teachers", words)
