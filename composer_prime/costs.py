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
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def spent(path: Path) -> Spent:
    """What the ledger says was spent, open reservations included."""
    total, open_calls = Spent(), {}
    for line in read_costs(path):
        if line.get("kind") == "reserved":
            open_calls[line["call"]] = line
        elif line.get("kind") == "settled":
            reserved = open_calls.pop(line["call"], line)
            total.failed += line.get("status") != "ok"
            _add(total, reserved, line["usd"])
            bound = reserved.get("bound", 0.0)
            if line.get("status") == "ok" and bound > 0:
                teacher = str(reserved.get("teacher"))
                before = total.charge_ratios.get(teacher, 0.0)
                total.charge_ratios[teacher] = charge_ratio(before, line["usd"], reserved["usd"], bound)
        elif line.get("kind") == "hint":
            total.hint_usd += line["usd"]
            total.hint_calls += 1
        elif line.get("kind") == "seconds":
            total.process_s += line["seconds"]
            total.gpu_s += line["gpu_seconds"]
        elif line.get("kind") == "bytes":
            total.link_bytes[line["link"]] += line["bytes"]
    for line in open_calls.values():
        total.unsettled += 1
        _add(total, line, line["usd"])
    return total


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
