"""The nodes of a run as a table: live ones as the gateway knows them, ended runs from what they recorded.

    gateway --NodeRow--> `orchestrator nodes`
    costs.jsonl (sums, "kind": "node") + metrics.jsonl (a line a change) --> `composer report`, the page

A node's line in metrics.jsonl: {"node": name, "node/state", "node/version", "node/in_flight", "node/trust",
"node/engine", "node/device", "node/usd_per_hour"}; trust only where it was audited, the last three when it attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from composer_prime.console import printable
from composer_prime.monitor.metrics_file import Line, ended, numeric_field
from composer_prime.run.costs import NodeTotals
from composer_prime.run.node_registry import LAUNCHER_NAME

SERVING, LOADING, SUSPENDED, DRAINING, AWAY = "serving", "loading", "suspended", "draining", "away"
"""States of a node: takes requests; has no accepted weights yet; gets none for a while; finishes its requests; not
connected."""
BANNED, ENDED = "banned", "ended"
"""Not let in any more; its run is over."""
_UNKNOWN = "-"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node. None is unknown."""

    name: str
    state: str
    why: str = ""
    """Why it gets no request."""
    device: str = ""
    """As the node says."""
    engine: str = ""
    version: int | None = None
    behind: int | None = None
    """Policy versions behind the newest."""
    trust: float | None = None
    usd_per_hour: float | None = None
    """As the node says."""
    in_flight: int = 0
    totals: NodeTotals = msgspec.field(default_factory=NodeTotals)

    def with_rates(self) -> dict[str, Any]:
        """Return the row as a table, with mean rates while the node was connected."""
        return msgspec.to_builtins(self) | {
            "tokens_per_s": self.totals.per_second("tokens"),
            "trained_tokens_per_s": self.totals.per_second("trained_tokens"),
            "usd_per_million": self.totals.usd_per_million,
        }


def recorded_rows(lines: list[Line], totals: Mapping[str, NodeTotals]) -> list[NodeRow]:
    """Return the rows of a run that is over, or that another process serves."""
    last: dict[str, dict[str, Any]] = {}
    for line in _node_lines(lines):
        last.setdefault(line["node"], {}).update(line)
    rows, is_over = [], ended(lines) is not None
    for name in dict.fromkeys([*last, *totals]):
        line, sums = last.get(name, {}), totals.get(name, NodeTotals())
        version = numeric_field(line, "node/version")
        rows.append(
            NodeRow(
                name=name,
                state=ENDED if is_over else str(line.get("node/state", AWAY)),
                device=str(line.get("node/device", "")),
                engine=str(line.get("node/engine", "")),
                version=None if version is None else int(version),
                trust=numeric_field(line, "node/trust"),
                usd_per_hour=numeric_field(line, "node/usd_per_hour"),
                totals=sums,
            )
        )
    return rows


def _node_lines(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines of nodes. A resume makes every node away: a crash writes no last lines."""
    last: dict[str, Line] = {}
    for line in lines:
        if isinstance(name := line.get("node"), str):
            last[name] = line
            yield line
        elif line.get("event") == "resume":
            for name, known in last.items():
                if known.get("node/state") != AWAY:
                    version = known.get("node/version")
                    last[name] = {"time": line.get("time"), "node": name, "node/state": AWAY, "node/version": version}
                    yield last[name]


_COLUMNS = (
    "node", "state", "device", "engine", "version", "tokens/s", "trained/s", "trust", "$/h", "$/M trained", "trained",
    "weights", "held", "failed",
)  # fmt: skip
_LEFT = 4
"""Columns of words before the figures."""


def table_lines(rows: list[NodeRow]) -> list[str]:
    """Return the table, why nodes do not serve, and which have no known price."""
    if not rows:
        return ["no node has connected yet"]
    cells = [list(_COLUMNS), *(_cells(row) for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(_COLUMNS))]
    text = []
    for line in cells:
        sized = list(zip(line, widths, strict=True))
        padded = [cell.ljust(width) for cell, width in sized[:_LEFT]]
        padded += [cell.rjust(width) for cell, width in sized[_LEFT:]]
        text.append("  ".join(padded).rstrip())
    text += [f"{printable(row.name)}: {printable(row.why)}" for row in rows if row.why]
    if unpriced := [printable(row.name) for row in rows if _lacks_price(row)]:
        named = ", ".join(unpriced[:4]) + (f" and {len(unpriced) - 4} more" if len(unpriced) > 4 else "")
        text.append(f"price unknown for {named}: pass --price (dollars per hour) to `inference join`")
    return text


def _lacks_price(row: NodeRow) -> bool:
    """The run's own nodes are paid with run.usd_per_hour."""
    return row.usd_per_hour is None and row.totals.usd is None and not LAUNCHER_NAME.fullmatch(row.name)


def _cells(row: NodeRow) -> list[str]:
    version = _UNKNOWN if row.version is None else str(row.version)
    totals = row.totals
    return [
        printable(row.name),
        row.state,
        printable(row.device) or _UNKNOWN,
        printable(row.engine) or _UNKNOWN,
        f"{version} (-{row.behind})" if row.behind else version,
        _number(totals.per_second("tokens"), ".0f"),
        _number(totals.per_second("trained_tokens"), ".0f"),
        _number(row.trust, ".2f"),
        _number(row.usd_per_hour, ".2f"),
        _number(totals.usd_per_million, ".2f"),
        f"{totals.trained_tokens:,}",
        size_text(totals.weight_bytes),
        str(row.in_flight),
        str(totals.failures),
    ]


def _number(value: float | None, shape: str) -> str:
    return _UNKNOWN if value is None else format(value, shape)


def size_text(count: float) -> str:
    """Return bytes as `1.2 GB`, by thousands."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
