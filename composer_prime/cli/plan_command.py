"""`composer plan @ file.toml [overrides]`: the same as `trainer @ file.toml --dry-run`."""

from __future__ import annotations

from composer_prime.config.load import EXIT_USAGE, parse
from composer_prime.plan import build


def run(words: list[str]) -> int:
    plan = build(parse(words).config)
    print(plan.text())
    return EXIT_USAGE if plan.problems else 0
