"""Verdicts of the density gate on made-up pairs, for tests of what comes after it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from composer_prime.data.pairs import Gate, PairFile, Verdict, gate_file


def release(path: Path, *, passed: bool = True, first: int = 0) -> Path:
    """Let the gate pass (or withhold) the pairs of `path` from `first` on; those before it are withheld."""
    file = PairFile(path)
    count = file.refresh()
    bounds = [(0, first, False), (first, count, passed)]
    gate = Gate(verdicts=[verdict(*each) for each in bounds if each[0] < each[1]])
    gate_file(path).write_bytes(msgspec.json.encode(gate))
    return path


def verdict(first: int, last: int, passed: bool) -> Verdict:
    return Verdict(
        first=first,
        last=last,
        passed=passed,
        reasons=[] if passed else ["1.00 pairs a trace, at least 5 are wanted"],
        min_pairs_a_trace=5.0,
    )
