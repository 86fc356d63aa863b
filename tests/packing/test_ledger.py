"""The exactly-once ledger, its rewinds and its check; lines of metrics.jsonl."""

from __future__ import annotations

import json
import threading

import pytest

from composer_prime.errors import CheckpointError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.ledger import append_rewind, append_step, check_ledger, effective, left_out


def test_rewind_drops_later_steps(tmp_path):
    # After a crash at step 3 and a resume at checkpoint 1, steps 2 and 3 are taken again and count once.
    path = tmp_path / "ledger.jsonl"
    append_step(path, 1, ["a", "b"])
    append_step(path, 2, ["c"])
    append_step(path, 3, ["d"])
    append_rewind(path, 1)
    append_step(path, 2, ["c"])
    append_step(path, 3, ["e"])
    assert effective(path) == {1: ["a", "b"], 2: ["c"], 3: ["e"]}
    assert check_ledger(path) == []


def test_check_finds_doubles_and_gaps(tmp_path):
    # A sample in two steps and a missing step are both found.
    path = tmp_path / "ledger.jsonl"
    append_step(path, 1, ["a"])
    append_step(path, 3, ["a"])
    assert check_ledger(path) == ["steps [2] are missing", "sample a was trained in steps 1 and 3"]
    begun_late = tmp_path / "late.jsonl"
    append_step(begun_late, 2, ["b"])
    assert check_ledger(begun_late) == ["steps [1] are missing"]
    append_step(path, 3, ["z"])
    with pytest.raises(CheckpointError, match="step 3 appears twice"):
        effective(path)


def test_a_torn_line_is_not_a_step(tmp_path):
    # A crash in mid-write leaves half a line; the next append starts a fresh one.
    path = tmp_path / "ledger.jsonl"
    append_step(path, 1, ["a"])
    with path.open("a") as file:
        file.write('{"step": 2, "sample_i')
    append_rewind(path, 1)
    append_step(path, 2, ["b"])
    assert effective(path) == {1: ["a"], 2: ["b"]}


def test_an_empty_run_has_an_empty_ledger(tmp_path):
    # No file yet: nothing was trained, nothing is wrong.
    assert effective(tmp_path / "none.jsonl") == {} and check_ledger(tmp_path / "none.jsonl") == []


def test_metrics_lines_of_many_writers_never_mix(tmp_path):
    # Four threads write 200 lines each through their own MetricsFile; every line parses and none is missing.
    path = tmp_path / "metrics.jsonl"

    def write(role: str) -> None:
        metrics = MetricsFile(path, role)
        for step in range(200):
            metrics.log(step, {"loss/total": float("nan"), "reward/mean": 0.5, "absent": None})

    threads = [threading.Thread(target=write, args=(f"role-{i}",)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 800 and {line["role"] for line in lines} == {f"role-{i}" for i in range(4)}
    assert all(line["loss/total"] == "nan" and "absent" not in line for line in lines)


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path):
    # The path is a folder, so no line can be written: nothing is raised.
    MetricsFile(tmp_path, "trainer").log(1, {"loss/total": 1.0})


def test_left_out_samples_stay_so_over_rewinds(tmp_path):
    # Step 2 was not finite: it trained nothing, and its culprits stay known when a resume takes the step again.
    path = tmp_path / "ledger.jsonl"
    assert left_out(path) == set()
    append_step(path, 1, ["a"])
    append_step(path, 2, [], ["b", "pair p"])
    assert effective(path) == {1: ["a"], 2: []} and check_ledger(path) == []
    append_rewind(path, 1)
    append_step(path, 2, ["c"])
    assert effective(path) == {1: ["a"], 2: ["c"]} and left_out(path) == {"b", "pair p"}
