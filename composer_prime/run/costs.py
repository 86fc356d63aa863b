"""costs.jsonl: what was spent, one line per event, appended and never rewritten.

    {"kind": "reserved", "call": id, "usd": held, …}                  before a call to a teacher: the most it may cost
    {"kind": "settled", "call": id, "usd": cost, …}                   after it: the cost by the endpoint's token counts
    {"kind": "stopped", "reason": …}                                  replay ended early
    {"kind": "hint", "endpoint": …, "usd": cost}                      a call that judged a turn or wrote a hint
    {"kind": "machine", "seconds": …, "usd": …}                       a start of the launcher, by run.usd_per_hour
    {"kind": "seconds", "role": …, "seconds": …, "gpu_seconds": …}    a process of the run, when the launcher ends
    {"kind": "bytes", "link": …, "bytes": …}                          bytes over a link, when the launcher ends
    {"kind": "node", "node": name, "seconds": …, "usd": …, …}         an inference node since its line before

A reservation without its settlement (the process died, the reply was lost) counts as spent. Hints have their own
budget.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_prime.errors import LedgerError
from composer_prime.run.run_dir import append_line


@dataclass(slots=True, kw_only=True)
class NodeTotals:
    """What an inference node did and cost."""

    seconds: float = 0.0
    """Attached."""
    usd: float | None = None
    """By the price that it said; None while none was known."""
    tokens: int = 0
    """Of accepted answers."""
    trained_tokens: int = 0
    """Those of them that a step's policy loss trained; repeated steps count again."""
    weight_bytes: int = 0
    """As the node says."""
    failures: int = 0
    """Requests that it returned with an error or answered badly."""

    def plus(self, usd: float | None, **counts: float) -> NodeTotals:
        sums: dict[str, Any] = {name: getattr(self, name) + amount for name, amount in counts.items()}
        return replace(self, usd=self.usd if usd is None else (self.usd or 0.0) + usd, **sums)

    def since(self, earlier: NodeTotals) -> dict[str, Any]:
        """Return what was added since `earlier`, without an unknown price."""
        names = ("seconds", *_NODE_COUNTS)
        added = {name: round(getattr(self, name) - getattr(earlier, name), 3) for name in names}
        return added if self.usd is None else {**added, "usd": round(self.usd - (earlier.usd or 0.0), 8)}

    def per_second(self, count: str) -> float | None:
        """Return the mean of `tokens` or `trained_tokens` a second of the time attached; None before the first one."""
        return getattr(self, count) / self.seconds if self.seconds >= 1 else None

    @property
    def usd_per_million(self) -> float | None:
        """Dollars for a million trained tokens; None without a price or a trained token."""
        return None if self.usd is None or not self.trained_tokens else self.usd / self.trained_tokens * 1e6


_NODE_COUNTS = ("tokens", "trained_tokens", "weight_bytes", "failures")


@dataclass(slots=True)
class Spent:
    """The sums of a costs.jsonl."""

    usd: float = 0.0
    calls: int = 0
    by_teacher: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unsettled: int = 0
    failed: int = 0
    hint_usd: float = 0.0
    """Spent on calls for hints; no other sum includes it."""
    hint_calls: int = 0
    machine_usd: float = 0.0
    """The launcher's machine at run.usd_per_hour; in no other sum."""
    process_s: float = 0.0
    """Seconds of all processes of the run together."""
    gpu_s: float = 0.0
    link_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nodes: dict[str, NodeTotals] = field(default_factory=dict)
    """By node; their dollars are in no other sum."""

    @property
    def total_usd(self) -> float:
        """Machine, nodes, teachers and hints."""
        nodes = sum(node.usd or 0.0 for node in self.nodes.values())
        return self.machine_usd + nodes + self.usd + self.hint_usd


def write_cost(path: Path, kind: str, **values: Any) -> None:
    """Append one line, which outlives the process, though perhaps not a power cut. Raises OSError."""
    line = json.dumps({"kind": kind, "time": time.time(), **values}, separators=(",", ":"))
    append_line(path, line.encode())


def read_costs(path: Path) -> Iterator[dict[str, Any]]:
    """Return every whole line."""
    return (line for _, line in _numbered(path))


def spent(path: Path) -> Spent:
    """Return the sums of the ledger, open reservations included. Raises LedgerError for a line without a figure."""
    total = Spent()
    open_calls: dict[str, dict[str, Any]] = {}
    for number, line in _numbered(path):
        try:
            _count(total, open_calls, line)
        except ValueError as error:
            raise LedgerError(
                f"{path}:{number} is not a ledger line ({error}), so the amount spent is unknown: correct the line, "
                "or remove it if nothing was paid by it"
            ) from None
    for line in open_calls.values():
        total.unsettled += 1
        _add(total, line, _number(line, "usd"))
    return total


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line from 1, value) of every whole line."""
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
    """Add one line to `total`. Raises ValueError."""
    match line.get("kind"):
        case "reserved":
            _number(line, "usd")
            open_calls[_text(line, "call")] = line
        case "settled":
            usd = _number(line, "usd")
            _add(total, open_calls.pop(_text(line, "call"), line), usd)
            total.failed += line.get("status") != "ok"
        case "hint":
            total.hint_usd += _number(line, "usd")
            total.hint_calls += 1
        case "machine":
            total.machine_usd += _number(line, "usd")
        case "seconds":
            total.process_s += _number(line, "seconds")
            total.gpu_s += _number(line, "gpu_seconds")
        case "bytes":
            total.link_bytes[_text(line, "link")] += int(_number(line, "bytes"))
        case "node":
            name = _text(line, "node")
            counts = {count: int(_number(line, count)) for count in _NODE_COUNTS}
            usd = _number(line, "usd") if "usd" in line else None
            node = total.nodes.get(name, NodeTotals())
            total.nodes[name] = node.plus(usd, seconds=_number(line, "seconds"), **counts)


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{key} is {value!r}, expected a number of at least 0")
    return value


def _text(line: dict[str, Any], key: str) -> str:
    value = line.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, expected text")
    return value


def _add(total: Spent, line: dict[str, Any], usd: float) -> None:
    total.usd += usd
    total.calls += 1
    total.by_teacher[str(line.get("teacher"))] += usd
