"""The table of nodes, and their lanes, from recorded values."""

from __future__ import annotations

from composer_prime.monitor.node_table import NodeRow, recorded_rows, size_text, table_lines
from composer_prime.run.costs import NodeTotals


# Every figure has its column; what is unknown is "-", and who has no price is named once with the remedy.
def test_the_table_names_what_is_unknown():
    totals = NodeTotals(
        seconds=3600, usd=2.5, tokens=4_443_840, trained_tokens=500_000, weight_bytes=270_000_000, failures=2
    )
    rented = NodeRow(name="rented", state="serving", device="L4, 22 GiB", engine="vllm", version=7, behind=0,
                     trust=0.5, usd_per_hour=2.5, in_flight=3,
                     totals=totals)  # fmt: skip
    late = NodeRow(name="late", state="loading", why="has policy version 5, needs 7", version=5, behind=2)
    head, first, second, why, price = table_lines([rented, late])
    assert first.split() == ["rented", "serving", "L4,", "22", "GiB", "vllm", "7", "1234", "139", "0.50", "2.50",
                             "5.00", "500,000", "270.0", "MB", "3", "2"]  # fmt: skip
    assert second.split() == ["late", "loading", "-", "-", "5", "(-2)", *["-"] * 5, "0", "0", "B", "0", "0"]
    assert why == "late: has policy version 5, needs 7"
    assert price == "price unknown for late: pass --price (dollars per hour) to `inference join`"
    assert head.index("engine") == first.index("vllm") == second.index("-", second.index("-") + 1)


# The run's own nodes are priced with the machine that they are on; and no node is away from a run that is over.
def test_nodes_of_a_laptop():
    assert len(table_lines([NodeRow(name="node-0", state="serving")])) == 2
    end = {"step": 0, "time": 9.5, "event": "ended", "state": "finished"}
    assert {row.state for row in recorded_rows([*LINES, end], {})} == {"ended"}


# Text of a node cannot steer the terminal.
def test_names_are_printable():
    text = "\n".join(table_lines([NodeRow(name="\x1b[2J", state="away", device="\x07", engine="e")]))
    assert "\x1b" not in text and "\x07" not in text


def test_no_node():
    assert table_lines([]) == ["no node has connected yet"]


def test_sizes():
    shown = [size_text(count) for count in (0, 999, 1500, 2.5e9, 3e15)]
    assert shown == ["0 B", "999 B", "1.5 kB", "2.5 GB", "3000.0 TB"]


def line(time: float, name: str, state: str, version: int, held: int) -> dict:
    return {"step": 0, "time": time, "node": name, "node/state": state, "node/version": version, "node/in_flight": held}


LINES = [
    {"step": 0, "time": 0.0, "gateway/nodes": 1},
    {**line(1.0, "a", "serving", 0, 0), "node/device": "L4", "node/engine": "vllm", "node/usd_per_hour": 2.0},
    line(3.0, "a", "serving", 0, 4),
    line(5.0, "a", "loading", 0, 4),
    line(6.0, "a", "serving", 1, 4),
    line(7.0, "b", "serving", 1, 0),
    line(9.0, "a", "away", 1, 0),
]


# A crash writes no last lines: at the resume every node is away, until it is back.
def test_nodes_are_away_after_a_crash():
    lines = [*LINES, {"step": 0, "time": 12.0, "event": "resume"}, line(13.0, "c", "serving", 1, 0)]
    assert [row.state for row in recorded_rows(lines, {})] == ["away", "away", "serving"]
    lines.append(line(13.5, "b", "serving", 1, 0))
    assert [row.state for row in recorded_rows(lines, {})] == ["away", "serving", "serving"]


# What a node said when it attached stays, its state is the last one, and a node that only costs.jsonl knows has a row.
def test_rows_of_a_run_that_is_over():
    totals = {"a": NodeTotals(seconds=8.0, usd=0.004, tokens=80, trained_tokens=40), "c": NodeTotals(seconds=1.0)}
    a, b, c = recorded_rows(LINES, totals)
    assert (a.state, a.device, a.engine, a.version, a.usd_per_hour) == ("away", "L4", "vllm", 1, 2.0)
    rates = ("tokens_per_s", "trained_tokens_per_s", "usd_per_million")
    assert [a.with_rates()[name] for name in rates] == [10.0, 5.0, 100.0]
    assert (b.state, b.totals.seconds, c.name, c.state) == ("serving", 0.0, "c", "away")
