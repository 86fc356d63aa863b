"""Following metrics.jsonl, what its lines add up to, and trackers that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.monitor.metrics_file import MetricsFile, Tail, numeric_field, read_history
from composer_prime.monitor.progress import RunProgress, ends, sparkline
from trainer.launcher.trackers import Feeder, numbers_of

CONFIG = {
    "run": {"name": "one", "max_steps": 4},
    "model": {"path": "tiny", "max_context": 512},
    "orchestrator": {"source": [{"name": "a", "taskset": {"id": "x"}}], "sampling": {"max_tokens": 64}},
}


def trained(step: int, reward: float) -> dict[str, float]:
    return {"loss/total": 0.1, "reward/mean": reward, "tokens/trained": 100, "time/step_s": 0.5}


@settings(deadline=None)
@given(cuts=st.lists(st.integers(1, 30), max_size=20), count=st.integers(0, 12))
def test_any_cut_into_writes_reads_the_same_lines(tmp_path_factory, cuts, count):
    # However the bytes arrive, each line is read exactly once and whole. A broken line is skipped.
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    data = b"".join(json.dumps({"step": step, "text": "é" * step}).encode() + b"\nnonsense\n" for step in range(count))
    tail, seen = Tail(path), []
    assert tail.read() == []
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        with path.open("ab") as file:
            file.write(piece)
        seen += [line["step"] for line in tail.read()]
    assert seen == list(range(count)) and tail.read() == []


def test_resume_takes_back_later_steps(tmp_path):
    # After {"event": "resume", "step": 2} the lines of step 3 before it do not count.
    metrics, launcher = MetricsFile(tmp_path / "m.jsonl", "trainer"), MetricsFile(tmp_path / "m.jsonl", "launcher")
    for step in (1, 2, 3):
        metrics.log(step, trained(step, 0.1 * step))
    launcher.log(2, {"event": "resume"})
    metrics.log(3, trained(3, 0.9))
    lines = read_history(tmp_path / "m.jsonl")
    assert [line["reward/mean"] for line in lines if line["step"] == 3] == [0.9]
    progress = RunProgress()
    progress.update(Tail(tmp_path / "m.jsonl").read())
    assert progress.rewards() == pytest.approx([0.1, 0.2, 0.9])


def test_progress_knows_who_waits_since_when(tmp_path):
    # Lines that say nothing of waits leave them; another batch is another wait; "" ends it.
    metrics = MetricsFile(tmp_path / "m.jsonl", "orchestrator")
    tail, progress = Tail(metrics.path), RunProgress()
    metrics.log(1, {"waiting_for": "batch 1: 3 of 64 rollouts"})
    progress.update(tail.read())
    since = progress.waiting["orchestrator"].since
    time.sleep(0.01)
    metrics.log(1, {"eval/a/reward_mean": 0.5})
    metrics.log(1, {"waiting_for": "batch 1: 40 of 64 rollouts"})
    progress.update(tail.read())
    assert progress.waiting["orchestrator"].since == since and "40 of 64" in progress.waiting["orchestrator"].what
    metrics.log(1, {"waiting_for": "batch 2: 1 of 64 rollouts"})
    progress.update(tail.read())
    assert progress.waiting["orchestrator"].since > since
    metrics.log(1, {"waiting_for": ""} | trained(1, 0.5))
    progress.update(tail.read())
    assert progress.waiting == {} and progress.tokens_per_s() == 200


def test_missing_figures_are_none_and_text_is_no_number(tmp_path):
    # NaN arrives as text; it must not reach a tracker as a number, nor a missing figure as 0.
    metrics = MetricsFile(tmp_path / "m.jsonl", "trainer")
    metrics.log(1, {"loss/total": float("nan"), "reward/mean": None, "memory/peak_bytes": 5})
    (line,) = Tail(metrics.path).read()
    assert numbers_of(line) == {"memory/peak_bytes": 5.0}
    progress = RunProgress()
    (step,) = progress.update([line])
    assert progress.rewards() == [] and numeric_field(step, "loss/total") is None


def test_other_roles_numbers_stand_below_their_role():
    # Two roles may use one metric name.
    assert numbers_of({"step": 1, "time": 2.0, "role": "orchestrator", "lag": 1}) == {"orchestrator/lag": 1.0}


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
def test_sparkline_has_one_block_a_value_up_to_its_width(values, width):
    # Never longer than asked, never an index error, whatever the values.
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_no_value_is_among_the_first_and_the_last(values):
    # At most 5 and 10, in order, none in both; from 2 values on neither is empty.
    first, last = ends(values)
    assert len(first) <= 5 and len(last) <= 10 and len(first) + len(last) <= len(values)
    assert first == values[: len(first)] and last == values[len(values) - len(last) :]
    assert len(values) < 2 or (first and last)


class Broken:
    """A tracker whose third line fails."""

    def __init__(self) -> None:
        self.lines = 0

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.lines += 1
        if self.lines == 3:
            raise OSError("the server went away")

    def close(self) -> None:
        raise AssertionError("a failed tracker is not closed")


def test_failing_tracker_is_switched_off_with_one_warning():
    # The caller never sees the exception; later lines are dropped.
    warnings: list[str] = []
    broken = Broken()
    feeder = Feeder("broken", lambda: (broken.log, broken.close), warnings.append)
    for step in range(10):
        feeder.put(step, {"a": 1.0})
        time.sleep(0.01)
    feeder.close(5)
    assert feeder.failed and len(warnings) == 1 and "the server went away" in warnings[0]


class Hanging(Broken):
    released = threading.Event()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.released.wait()


def test_hanging_tracker_does_not_hold_the_end_up():
    # close() comes back while the tracker still hangs, and says so.
    warnings: list[str] = []
    hanging = Hanging()
    feeder = Feeder("hanging", lambda: (hanging.log, hanging.close), warnings.append)
    feeder.put(1, {"a": 1.0})
    feeder.close(0.3)
    assert "did not finish" in warnings[0]
    Hanging.released.set()


TRACK_THREE_STEPS = """
import sys
from pathlib import Path
from composer_prime.config import Config
from trainer.launcher.trackers import start_trackers
warnings = []
(feeder,) = start_trackers(Config.model_validate_json(sys.argv[1]), Path.cwd(), warnings.append)
for step in range(3):
    feeder.put(step, {"reward/mean": step / 3})
feeder.close(120)
print("failed" if feeder.failed else "fed", warnings)
"""


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
@pytest.mark.process  # its own process: trackio reads TRACKIO_DIR when anything first imports it
def test_tracker_writes_or_names_its_extra(name, tmp_path):
    # Installed: lines arrive on disk, offline. Not installed: one warning that names the extra.
    config = {**CONFIG, "monitor": {"trackers": [name]}}
    command = [sys.executable, "-c", TRACK_THREE_STEPS, json.dumps(config)]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcome = ended.stdout.splitlines()[-1]
    if outcome == "fed []":
        assert any(path.is_file() for path in tmp_path.rglob("*")), ended.stdout
    else:
        assert outcome.startswith("failed") and f"uv sync --extra {name}" in outcome, ended.stdout
