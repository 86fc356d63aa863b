"""The rows of a plan about the link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from diloco.link_forecast import exposed_s, link_rows
from trainer.main import main

ROOT = Path(__file__).parents[2]
WRONG = ["--model.chat_template", "none.jinja"]
FILES = ["@", str(ROOT / "configs/a1.toml"), "@", str(ROOT / "configs/diloco/peer.toml")]


def text(folder: Path, *words: str) -> str:
    config = resolve([*FILES, "--run.output_dir", str(folder), *words])
    return "\n".join(line for _, line in link_rows(config))


# Without [diloco] a plan has no rows about links; with it, at 1 Gbit/s and 100 Mbit/s or at the configured limit.
def test_links(tmp_path):
    assert link_rows(resolve(["@", str(ROOT / "configs/a1.toml"), "--run.output_dir", str(tmp_path)])) == []
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


# The formula by hand: two peers, fp32, no delay. A delta goes up once and one comes down.
def test_utilization():
    moving_s = 1e8 * 32 * 1.047 * (2 + 2) / 1e9
    busy_s = 1e8 * 1e-9 * (25 + 2 * 10 + 4)
    whole_s, busy_alone_s = (
        exposed_s(1e8, 1e8 * 32 * 1.047, 25, mbit=1000.0, hidden_s=hidden_s) for hidden_s in (0.0, 1e3)
    )
    assert whole_s == pytest.approx(moving_s + 0.08 + busy_s) and busy_alone_s == pytest.approx(busy_s)


# A dry run shows them among its rows, in lines that the terminal has room for: the rest of a row stands below its
# text, and nothing is lost. A plan with problems ends with status 2.
@pytest.mark.process
def test_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.argv", ["trainer", *FILES, "--run.output_dir", str(tmp_path), "--dry-run", *WRONG])
    assert main() == 2
    shown = capsys.readouterr().out
    assert shown.index("disk ") < shown.index("link ") < shown.index("this run from starting")
    rows = shown[shown.index("link ") : shown.index("\n\n")].splitlines()
    assert len(rows) > 3 and all(len(line) <= 72 for line in rows)
    assert all(line.startswith(" " * 10) and line[10] != " " for line in rows[1:])
    assert " ".join(line[10:] for line in rows) == text(tmp_path).replace("\n", " ")
