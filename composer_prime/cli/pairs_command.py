"""`composer pairs report PAIRS.jsonl --base MODEL`: the density gate of a replay (the orchestrator's work, so in a
process of its own)."""

from __future__ import annotations

from composer_prime.console import run_module
from composer_prime.errors import ConfigError

USAGE = "usage: composer pairs report PAIRS.jsonl --base MODEL [--chart FILE.svg]   (composer pairs report --help)"


def run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] != "report":
        raise ConfigError(f"composer pairs has no command {words[0]!r}\n{USAGE}")
    return run_module("orchestrator.teachers.report", words[1:])
