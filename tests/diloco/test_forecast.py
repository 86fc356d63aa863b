"""The rows of a plan about the link."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from composer_prime.cli.plan_command import main
from composer_prime.config.diloco import CodecConfig
from composer_prime.config.load import resolve
from diloco.link_forecast import JointRun, _memory_rows, forecast_link, link_rows

ROOT = Path(__file__).parents[2]
FILES = ["@", str(ROOT / "configs/a1.toml"), "@", str(ROOT / "configs/diloco/peer.toml")]


def text(folder: Path, *words: str) -> str:
    config = resolve([*FILES, "--run.output_dir", str(folder), *words]).config
    return "\n".join(line for _, line in link_rows(config))


# Without [diloco] a plan has no rows about links; with it, at 1 Gbit/s and 100 Mbit/s or at the configured limit.
def test_links(tmp_path):
    assert link_rows(resolve(["@", str(ROOT / "configs/a1.toml"), "--run.output_dir", str(tmp_path)]).config) == []
    assert re.findall(r"at ([\d,]+) Mbit/s", text(tmp_path)) == ["1,000", "100"]
    assert re.findall(r"at ([\d,]+) Mbit/s", text(tmp_path, "--diloco.rate-limit-mbit", "7")) == ["7"]


# Bytes follow the parameters that are trained, the codec and the schedule: 32 bits each way for the half of the model
# that is due, twice as much a day with half the interval.
def test_bytes(tmp_path):
    said = text(tmp_path, "--diloco.codec.type", "fp32", "--diloco.delay", "0")
    parameters = float(re.match(r"([\d.]+) M parameters \(one of 2 fragments\) every 2 steps", said)[1])
    sent = float(re.search(r"([\d.]+) MB each way", said)[1])
    assert sent == pytest.approx(4 * parameters * 1.047, rel=0.05)
    often = text(tmp_path, "--diloco.codec.type", "fp32", "--diloco.delay", "0", "--diloco.sync-every", "2")
    days = [float(re.search(r"([\d.]+) GB a day", each)[1]) for each in (said, often)]
    assert days[1] == pytest.approx(2 * days[0], rel=0.02)
    assert float(text(tmp_path, "--trainer.lora.rank", "4").split()[0]) < parameters / 10


# A link on which a delta takes longer than the rounds' deadline gives a warning with both figures.
def test_link_slower_than_the_deadline(tmp_path):
    said = text(tmp_path, "--diloco.rate-limit-mbit", "0.01", "--diloco.round-deadline-s", "60")
    found = re.search(r"warning: .* takes ([\d.]+) s, more than diloco.round_deadline_s = 60", said)
    assert found and float(found[1]) > 60
    shorter = text(tmp_path, "--diloco.rate-limit-mbit", "0.01", "--diloco.round-deadline-s", f"{float(found[1]) + 1}")
    assert "round_deadline_s" not in shorter and "warning" not in text(tmp_path)


# So does a state that takes a joining peer longer than its timeout; without outer momentum the state is smaller.
def test_link_too_slow_to_join(tmp_path):
    slow = ["--diloco.rate-limit-mbit", "0.1"]
    found = [
        int(re.search(r"warning: the state takes (\d+) s .* diloco.heal_timeout_s = 900", said)[1])
        for said in (text(tmp_path, *slow, "--diloco.outer.momentum", each) for each in ("0.9", "0"))
    ]
    assert 1 < found[0] / found[1] < 2
    enough = [*slow, "--diloco.heal-timeout-s", f"{found[1] + 1}", "--orchestrator.trainer-timeout-s", "1e6"]
    assert "heal_timeout_s" not in text(tmp_path, *enough, "--diloco.outer.momentum", "0")


# The formula by hand: two peers, fp32, no delay. A delta goes up once and one comes down; then the utilization is
# compute over compute and what the synchronization adds.
def test_utilization():
    run = JointRun(parameters=2e8, step_s=1.0, every=4, fragments=2, delay=0, codec=CodecConfig(type="fp32"))
    forecast = forecast_link(run, 1.0)
    moving_s = 1e8 * 32 * 1.047 * (2 + 2) / 1e9
    busy_s = 1e8 * 1e-9 * (25 + 2 * 10 + 4)
    assert forecast.exposed_s == pytest.approx(moving_s + 0.08 + busy_s)
    assert forecast.utilization == pytest.approx(2 / (2 + forecast.exposed_s))
    hidden = forecast_link(dataclasses.replace(run, delay=1e3), 1.0)
    assert hidden.exposed_s == pytest.approx(busy_s)


# More memory than the rendezvous has by default gives a warning with the value to set.
def test_memory():
    run = JointRun(parameters=8e9, step_s=60, every=8, fragments=4, delay=1, codec=CodecConfig(), peers=8)
    ((_, said),) = _memory_rows(run)
    assert "--memory-gb 90" in said and not _memory_rows(dataclasses.replace(run, parameters=8e6))


# A run that has steps gives the time of one.
def test_step_time_of_the_run(tmp_path):
    assert "60 s a step (assumed)" in text(tmp_path)
    (tmp_path / "a1" / "a").mkdir(parents=True)
    lines = [{"step": step, "role": "trainer", "time/step_s": 2.0 * step} for step in (1, 2, 3)]
    (tmp_path / "a1" / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "4 s a step (as in the last" in text(tmp_path)


# `composer plan` shows them among its rows, in lines that the terminal has room for: the rest of a row stands below its
# text, and nothing is lost. A plan with problems ends with status 2.
@pytest.mark.process
def test_composer_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "72")
    assert main([*FILES, "--run.output_dir", str(tmp_path)]) == 2  # there is no key file
    shown = capsys.readouterr().out
    assert shown.index("disk ") < shown.index("link ") < shown.index("this run from starting")
    rows = shown[shown.index("link ") : shown.index("\n\n")].splitlines()
    assert len(rows) > 3 and all(len(line) <= 72 for line in rows)
    assert all(line.startswith(" " * 10) and line[10] != " " for line in rows[1:])
    assert " ".join(line[10:] for line in rows) == text(tmp_path).replace("\n", " ")
