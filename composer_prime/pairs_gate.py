"""The density gate's verdicts on a pairs file: PAIRS.gate.json. They decide whether beta may be above 0.

    composer pairs report PAIRS        one verdict, on the whole file
    teachers.online                    one verdict a window of the growing file, while training goes on

A verdict is bound to the lines it measured by their digest. A pair may be trained when a verdict that passed covers it;
a pair that was never measured, or whose lines changed since, may not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.pairs import PairFile
from composer_prime.run_dir import write_atomic


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """On the pairs `first` to `last` - 1 of the file, counted from 0."""

    first: int
    last: int
    digest: str
    """Of these pairs' lines (PairFile.digest)."""
    passed: bool
    reasons: list[str]
    """What was missed; empty where it passed."""
    min_pairs_a_trace: float
    votes: int
    """Lines of the votes file up to then."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    verdicts: list[Verdict]
    """In the order of the pairs, without gaps."""

    @property
    def measured(self) -> int:
        """Pairs that have a verdict."""
        return self.verdicts[-1].last if self.verdicts else 0

    @property
    def passed(self) -> int:
        """Pairs that may be trained."""
        return sum(verdict.last - verdict.first for verdict in self.verdicts if verdict.passed)


def gate_file(pairs: Path) -> Path:
    return pairs.with_name(f"{pairs.stem}.gate.json")


def read_gate(pairs: Path) -> Gate | None:
    """None where the file was never measured. Raises ConfigError when the verdicts cannot be read."""
    path = gate_file(pairs)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Gate)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no verdict ({error}): {_remedy(pairs)}") from None


def write_gate(pairs: Path, gate: Gate) -> None:
    """Raises OSError."""
    write_atomic(gate_file(pairs), msgspec.json.encode(gate) + b"\n")


def check_binding(gate: Gate, file: PairFile) -> None:
    """Raises ConfigError, naming both digests, when a verdict is on other pairs than the file holds."""
    available = file.refresh()
    for verdict in gate.verdicts:
        held = file.digest(min(verdict.last, available), min(verdict.first, available))
        if verdict.last > available or held != verdict.digest:
            raise ConfigError(
                f"{gate_file(file.path)} is the verdict on pairs {verdict.first} to {verdict.last} with digest "
                f"{verdict.digest}, but {file.path} holds {available} pairs, and there digest {held or 'of nothing'}: "
                f"{_remedy(file.path)}"
            )


def refusal(pairs: Path) -> str | None:
    """Why no pair of this file may be trained; None where some may. Raises ConfigError for verdicts on other pairs."""
    gate = read_gate(pairs)
    if gate is None:
        return f"{pairs} was never measured by the density gate: {_remedy(pairs)}"
    check_binding(gate, PairFile(pairs))
    if gate.passed:
        return None
    reasons = "; ".join(dict.fromkeys(reason for verdict in gate.verdicts for reason in verdict.reasons))
    return (
        f"{pairs} missed the density gate ({reasons}): replay longer traces, or measure again with a limit that suits "
        f"short ones (`composer pairs report {pairs} --base MODEL --min-pairs N`)"
    )


def _remedy(pairs: Path) -> str:
    return f"measure it with `composer pairs report {pairs} --base MODEL`"
