"""What every benchmark with aims does at its end."""

from __future__ import annotations

from collections.abc import Iterable


def conclude(answers: Iterable[tuple[str, bool]], *, is_quick: bool) -> int:
    """Print each aim beside what was measured. Return the exit status: 1 when one is missed, 0 of a quick run."""
    missed = 0
    for text, is_met in answers:
        missed += not is_met
        print(f"{'met   ' if is_met else 'MISSED'} {text}")
    if is_quick:
        print("a quick run shows that the benchmark works; its figures mean nothing")
    return int(missed > 0 and not is_quick)
