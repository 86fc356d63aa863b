"""Verdicts of the density gate on made-up pairs, for tests of what comes after it."""

from __future__ import annotations

from pathlib import Path

from composer_prime.traces.pairs import Gate, PairFile, Verdict, write_gate


def release(path: Path, *, passed: bool = True, first: int = 0) -> Path:
    """Let the gate pass (or withhold) the pairs of `path` from `first` on; those before it are withheld."""
    file = PairFile(path)
    count = file.refresh()
    bounds = [(0, first, False), (first, count, passed)]
    write_gate(path, Gate(verdicts=[verdict(file, *each) for each in bounds if each[0] < each[1]]))
    return path


def verdict(file: PairFile, first: int, last: int, passed: bool) -> Verdict:
    return Verdict(
        first=first,
        last=last,
        digest=file.digest(last, first),
        passed=passed,
        reasons=[] if passed else ["1.00 pairs a trace, at least 5 are wanted"],
        min_pairs_a_trace=5.0,
        votes=0,
    )
