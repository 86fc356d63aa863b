"""What nodes did and cost: sums and lines on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from fleet import Fleet, status
from waiting import Clock

from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.node_table import recorded_rows
from composer_prime.run.costs import spent
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node_messages import ComputeDevice, NodeHello
from orchestrator.gateway.node_control import NodeControl


def accounts_of(fleet: Fleet, clock: Clock, folder: Path) -> NodeControl:
    return NodeControl(fleet.router, RunKeys(RunDir(folder).keys), clock=clock)


def pass_time(accounts: NodeControl, clock: Clock, seconds: float) -> None:
    """Tick every five seconds, as a gateway does more often."""
    for _ in range(round(seconds / 5)):
        clock.now += 5
        accounts.tick()


async def work_for(fleet: Fleet, name: str, count: int) -> None:
    """Have node `name`, the only free one, answer `count` requests of six tokens."""
    before = len(fleet.sent[name])
    await fleet.ask(count)
    for request in fleet.sent[name][before:]:
        fleet.answer(name, request)


# An hour at $2.40 with a million trained tokens is $2.40 a million; time away costs nothing, and neither does a node
# without a price, whose dollars stay unknown.
async def test_dollars_are_of_the_time_attached(tmp_path):
    fleet = Fleet(a={"usd_per_hour": 2.4}, b={})
    clock = Clock()
    accounts = accounts_of(fleet, clock, tmp_path)
    accounts.tick()
    pass_time(accounts, clock, 3600)
    accounts.note_trained(1, {"a": 1_000_000})
    fleet.router.leave(fleet.node("a"), "test")
    pass_time(accounts, clock, 3600)
    rows = {row.name: row for row in accounts.rows()}
    assert rows["a"].totals.usd == pytest.approx(2.4) and rows["a"].totals.seconds == pytest.approx(3595, abs=10)
    assert rows["a"].totals.usd_per_million == pytest.approx(2.4, rel=0.01) and rows["a"].state == "away"
    assert rows["b"].totals.usd is None and rows["b"].totals.usd_per_million is None


# The lines on disk give the table of the live run again, and a second start of the orchestrator goes on with the sums.
async def test_records_give_the_table_again(tmp_path):
    device = ComputeDevice(name="L4", count=2, memory_gib=45.0)
    fleet = Fleet(a={"device": device, "usd_per_hour": 2.0})
    clock = Clock()
    accounts = accounts_of(fleet, clock, tmp_path)
    await work_for(fleet, "a", 3)
    fleet.router.update_status(fleet.node("a"), status(weight_bytes=5000))
    accounts.tick()
    fleet.node("a").record.trust.clean = 8
    pass_time(accounts, clock, 100)
    accounts.note_trained(4, {"a": 12})
    (live,) = accounts.rows()
    accounts.close()
    lines = read_history(RunDir(tmp_path).metrics)
    (row,) = recorded_rows(lines, spent(tmp_path / "costs.jsonl").nodes)
    assert asdict(row.totals) == pytest.approx(asdict(live.totals), rel=1e-4)
    assert (row.totals.tokens, row.totals.trained_tokens, row.totals.weight_bytes) == (18, 12, 5000)
    assert (row.state, live.state, row.device, row.engine) == ("away", "serving", "2 x L4, 45 GiB", "test")
    assert row.trust == live.trust == 0.9 and row.usd_per_hour == 2.0 and [line["step"] for line in lines] == [0, 0, 4]
    again = accounts_of(fleet, clock, tmp_path)
    again.note_trained(5, {"a": 1})
    again.close()
    totals = spent(tmp_path / "costs.jsonl").nodes["a"]
    assert totals.trained_tokens == 13 and totals.seconds == pytest.approx(100)


# A change of state or version is a line at once; a count of requests alone waits five seconds.
async def test_a_line_for_each_change(tmp_path):
    fleet = Fleet(a={})
    clock = Clock()
    accounts = accounts_of(fleet, clock, tmp_path)
    accounts.tick()
    await fleet.ask(2)
    clock.now += 1
    accounts.tick()
    fleet.router.policy.newest = fleet.router.policy.oldest = 1
    clock.now += 1
    accounts.tick()
    fleet.router.update_status(fleet.node("a"), status(version=1, running=2))
    clock.now += 1
    accounts.tick()
    lines = [json.loads(raw) for raw in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["node/state"], line["node/version"], line["node/in_flight"]) for line in lines]
    assert found == [("serving", 0, 0), ("loading", 0, 2), ("serving", 1, 2)]


# The first tick after a Hello may come before the first report: what was pulled is not counted again, and a node that
# outlives its orchestrator pulled nothing for the next one. A process that starts anew pulls anew.
async def test_pulled_bytes_count_once(tmp_path):
    def pulled(fleet: Fleet, accounts: NodeControl, count: int) -> int:
        fleet.router.update_status(fleet.node("a"), status(weight_bytes=count))
        return accounts.rows()[0].totals.weight_bytes

    def hello(fleet: Fleet, accounts: NodeControl, instance: str, run_id: str | None) -> None:
        said = NodeHello(node_id="a", engine="e", run_id=run_id, version=0, max_concurrent=1, instance=instance)
        fleet.router.attach(b"again", said)
        accounts.tick()

    fleet = Fleet(a={})
    accounts = accounts_of(fleet, Clock(), tmp_path / "before")
    accounts.tick()
    assert pulled(fleet, accounts, 5000) == 5000
    hello(fleet, accounts, "a", "run-1")
    assert pulled(fleet, accounts, 5000) == 5000 and pulled(fleet, accounts, 5100) == 5100
    hello(fleet, accounts, "new", None)
    assert pulled(fleet, accounts, 3000) == 8100
    after_restart = accounts_of(fleet, Clock(), tmp_path / "after")
    hello(fleet, after_restart, "new", "run-1")
    assert pulled(fleet, after_restart, 3000) == 0 and pulled(fleet, after_restart, 3500) == 500
