"""costs.jsonl: what was spent, one line an event, appended and never rewritten.

    {"kind": "reserved", "call": id, "usd": held, "bound": …, …}      before a teacher is called: more than it may cost
    {"kind": "settled", "call": id, "usd": cost, …}                   after: the cost by the endpoint's own token counts
    {"kind": "stopped", "reason": …}                                  replay ended early
    {"kind": "hint", "endpoint": …, "usd": cost}                      a call that judged a turn or wrote a hint
    {"kind": "seconds", "role": …, "seconds": …, "gpu_seconds": …}    a process of the run, when the launcher ends
    {"kind": "bytes", "link": …, "bytes": …}                          what went over a link, likewise

A reservation without its settlement (the process died, the reply was lost) counts as spent: it may have been paid.
Hints have a budget of their own, so their calls are no part of what teachers spent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_prime.errors import LedgerError


@dataclass(slots=True)
class Spent:
    """Sums of a costs.jsonl."""

    usd: float = 0.0
    calls: int = 0
    by_trace: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_teacher: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    charge_ratios: dict[str, float] = field(default_factory=dict)
    """Of each teacher: what a call cost over what it was bounded by, as `charge_ratio` takes it."""
    unsettled: int = 0
    failed: int = 0
    hint_usd: float = 0.0
    """By calls for hints, which none of the other sums holds."""
    hint_calls: int = 0
    process_s: float = 0.0
    """Of all processes of the run together."""
    gpu_s: float = 0.0
    link_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class CostLedger:
    """Appends to one costs.jsonl; a line that was written outlives the process, though perhaps not a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)

    def write(self, kind: str, **values: Any) -> None:
        """Raises OSError."""
        line = json.dumps({"kind": kind, "time": time.time(), **values}, separators=(",", ":")).encode() + b"\n"
        with self.path.open("ab") as file:
            file.write(line)


def read_costs(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line."""
    return (line for _, line in _numbered(path))


def spent(path: Path) -> Spent:
    """What the ledger says was spent, open reservations included.

    Raises LedgerError, naming the line, where one lacks what has to be summed: a sum without it would be too low.
    """
    total, open_calls = Spent(), dict[str, dict[str, Any]]()
    for number, line in _numbered(path):
        try:
            _count(total, open_calls, line)
        except _WrongLineError as error:
            raise LedgerError(
                f"{path}:{number} is no line of a ledger ({error}), so that nobody can tell what was spent: correct "
                "the line, or take it out if nothing was paid by it"
            ) from None
    for line in open_calls.values():
        total.unsettled += 1
        _add(total, line, _number(line, "usd"))
    return total


class _WrongLineError(Exception):
    """Says what is wrong."""


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(its number from 1 on, line) of every whole line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield number, line


def _count(total: Spent, open_calls: dict[str, dict[str, Any]], line: dict[str, Any]) -> None:
    """Add one line. Raises _WrongLineError."""
    kind = line.get("kind")
    if kind == "reserved":
        _number(line, "usd")
        open_calls[_text(line, "call")] = line
    elif kind == "settled":
        usd = _number(line, "usd")
        reserved = open_calls.pop(_text(line, "call"), line)
        total.failed += line.get("status") != "ok"
        _add(total, reserved, usd)
        bound = _number(reserved, "bound") if "bound" in reserved else 0.0
        if line.get("status") == "ok" and bound > 0:
            teacher = str(reserved.get("teacher"))
            before = total.charge_ratios.get(teacher, 0.0)
            total.charge_ratios[teacher] = charge_ratio(before, usd, reserved["usd"], bound)
    elif kind == "hint":
        total.hint_usd += _number(line, "usd")
        total.hint_calls += 1
    elif kind == "seconds":
        total.process_s += _number(line, "seconds")
        total.gpu_s += _number(line, "gpu_seconds")
    elif kind == "bytes":
        total.link_bytes[_text(line, "link")] += int(_number(line, "bytes"))


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise _WrongLineError(f"{key} is {value!r}, expected a number from 0 on")
    return value


def _text(line: dict[str, Any], key: str) -> str:
    value = line.get(key)
    if not isinstance(value, str):
        raise _WrongLineError(f"{key} is {value!r}, expected text")
    return value


def charge_ratio(before: float, usd: float, held: float, bound: float) -> float:
    """How many times its bound a teacher is taken to charge, once it charged `usd` for a call bounded by `bound`: so
    many, but not less than `before` by a call for which less was `held`, as was in flight before it was known."""
    return usd / bound if held >= before * bound else max(before, usd / bound)


def _add(total: Spent, line: dict[str, Any], usd: float) -> None:
    total.usd += usd
    total.calls += 1
    total.by_trace[str(line.get("trace"))] += usd
    total.by_teacher[str(line.get("teacher"))] += usd


def _end_torn_line(path: Path) -> None:
    """A crash may have cut the last line short: end it, so that the next one stands alone."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
