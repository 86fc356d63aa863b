"""Events: which logging calls become one, how repetitions are counted, what readers get."""

from __future__ import annotations

import io
import json
import logging

import pytest

from composer_prime.console import MAX_WARNINGS, LogHandler
from composer_prime.monitor.events import EventFile, EventHandler, event, read_events
from composer_prime.run.run_dir import RunDir


@pytest.fixture
def log(tmp_path):
    """A logger of ours that nothing else hears."""
    logger = logging.getLogger("orchestrator.event_test")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = EventHandler(EventFile(RunDir(tmp_path), "orchestrator"), logging.INFO)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def events(tmp_path):
    return read_events(tmp_path / "events.jsonl")


# A warning is an event without any further call; an information is one only where the call says so.
def test_which_calls_are_events(log, tmp_path):
    log.info("a detail")
    log.warning("node %s is silent", "n1")
    log.info("checkpoint of step %d is saved", 20, extra=event("checkpoint"))
    assert [(each.kind, each.level, each.text) for each in events(tmp_path)] == [
        ("warning", "warning", "node n1 is silent"),
        ("checkpoint", "info", "checkpoint of step 20 is saved"),
    ]


# Texts that differ in numbers only are one event with a count; those of another cause are another.
def test_repetitions_are_counted(log, tmp_path):
    for number in range(250):
        log.warning("dropped %d bytes", number)
    log.warning("cannot read the disk")
    first, second = events(tmp_path)
    assert (first.text, first.count, second.count) == ("dropped 199 bytes", 200, 1)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 5


# Information about each step is an event of its own. However many there were, new warnings are told apart.
def test_informations_do_not_use_up_the_warnings(log, tmp_path):
    for step in range(400):
        log.info("checkpoint of step %d is saved", step, extra=event("checkpoint"))
    log.warning("the disk is full")
    log.warning("the node is gone")
    assert [each.text for each in events(tmp_path)][400:] == ["the disk is full", "the node is gone"]


# A resumed run counts from one again: its line is the newer one, and the counts of both starts are added.
def test_counts_of_a_resumed_run_are_added(tmp_path):
    def line(time, name, count, pid):
        texts = {"role": "trainer", "level": "warning", "kind": "warning", "text": name, "id": name}
        return json.dumps({"time": time, "count": count, "pid": pid, **texts})

    told = [(1, "a", 1, 7), (2, "a", 10, 7), (3, "b", 1, 7), (4, "a", 1, 8), (5, "a", 100, 7), (6, "b", 1, 9)]
    told += [(7, "a", 1, 7), (8, "a", 10, 7)]  # a container gives the same ids again
    (tmp_path / "events.jsonl").write_text("\n".join(line(*each) for each in told))
    assert [(each.text, each.time, each.count) for each in events(tmp_path)] == [("b", 6, 2), ("a", 8, 111)]


# An exception gives cause, file and line; without one the place is that of the call.
def test_cause_and_place(log, tmp_path):
    try:
        json.loads("{")
    except ValueError:
        log.exception("the state is broken")
    log.warning("odd")
    broken, odd = events(tmp_path)
    assert broken.level == "error" and broken.cause.startswith("JSONDecodeError: Expecting property name")
    assert "json/decoder.py:" in broken.where
    assert "tests/monitor/test_events.py:" in odd.where


# A caller that counts by itself gives the count, and what repeats is its decision.
def test_own_count(log, tmp_path):
    for count in (1, 2, 3, 100):
        about = event("failure", where="env.py:3", cause="KeyError", same_as="env/KeyError", text="failed", count=count)
        log.warning("rollout %d failed", count, extra=about)
    (failure,) = events(tmp_path)
    assert (failure.text, failure.count, failure.where) == ("failed", 100, "env.py:3")


# Torn and foreign lines are skipped, and no file means no events.
def test_broken_lines(log, tmp_path):
    assert events(tmp_path / "nothing") == []
    log.warning("one")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": 3}\n[1]\n{"time": 1, "ro')
    assert [each.text for each in events(tmp_path)] == ["one"]


# Nothing that a record quotes begins a line, in the log or where the launcher shows it. One line of code writes so many
# records a minute, and the last one says so.
def test_no_line_is_forged_and_no_log_is_flooded(tmp_path):
    stream = io.StringIO()
    handler, forged = LogHandler(stream), "bye\n2026-11-30 10:00:00,000 ERROR orchestrator: all is lost\r\x1b[2J"
    for number in range(MAX_WARNINGS + 5):
        record = logging.LogRecord("orchestrator", logging.WARNING, "x.py", 1, "%s", (f"{number} {forged}",), None)
        record.created = 1e9
        handler.handle(record)
    records = [line for line in stream.getvalue().splitlines() if not line.startswith("    ")]
    assert len(records) == MAX_WARNINGS and records[0].endswith("WARNING orchestrator: 0 bye")
    assert "left out" in stream.getvalue() and "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    record.created += 60
    handler.handle(record)
    assert f"{MAX_WARNINGS + 4} bye" in stream.getvalue()
    EventFile(RunDir(tmp_path), "orchestrator").write("node", forged)
    assert "\n    2026-11-30" in events(tmp_path)[0].line
