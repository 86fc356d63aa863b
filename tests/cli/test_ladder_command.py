"""Arms and seeds side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_prime.cli.ladder.compare import ladder_table
from composer_prime.cli.ladder.seeds import Arm, differences, differing, load_run, over_seeds, windows
from composer_prime.cli.ladder_command import main
from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir


def run_folder(root: Path, name: str, seed: int, weight: float, rewards: list[float]) -> str:
    folder = root / name
    folder.mkdir()
    config = {"run": {"name": name, "seed": seed}, "channels": {"sdpo": {"weight": weight}}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {"step": step, "role": "trainer", "loss/total": 0.0, "reward/mean": reward}
        for step, reward in enumerate(rewards, 1)
    ]
    lines += [{"step": 2, "role": "orchestrator", "eval/toolsmith/reward_mean": rewards[1]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


# Runs are grouped by configuration, compared at the length of the shortest, and paired by seed: differences of 0.1 and
# 0.3 have the mean 0.2; two seeds have no interval. An evaluation that one run alone has is named, not shown.
def test_arms_are_paired_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        run_folder(tmp_path, "a1-seed0", 0, 0.0, [0.2, 0.2, 9.0]),
        run_folder(tmp_path, "a1-seed1", 1, 0.0, [0.5, 0.5]),
        run_folder(tmp_path, "a2-seed0", 0, 0.5, [0.3, 0.3]),
        run_folder(tmp_path, "a2-seed1", 1, 0.5, [0.8, 0.8]),
    ]
    with (Path(folders[0]) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "role": "orchestrator", "eval/toolsmith/reward_mean": 0.1}) + "\n")
    assert main([*folders, "--bins", "1"]) == 0
    shown = capsys.readouterr().out
    assert "2 arms at 2 steps" in shown and "channels.sdpo.weight: 0.0 -> 0.5" in shown
    assert shown.count("a2 - a1") == 2 and shown.count("+0.200 (+0.100, +0.300)") == 2  # in training, held-out
    assert "only evaluations that every arm has: steps 2; left out: 1\n" in shown
    assert max(map(len, shown.splitlines())) <= 120


# The trainer's figures of held-out rows and the orchestrator's rewards of one step are on lines of their own.
def test_evaluations_of_a_step_are_one(tmp_path: Path) -> None:
    folder = Path(run_folder(tmp_path, "sft-seed0", 0, 0.0, [0.2, 0.5]))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "role": "trainer", "eval/demonstrations/loss": 1.5}) + "\n")
    assert load_run(RunDir(folder)).evaluations[2] == {
        "eval/toolsmith/reward_mean": 0.5, "eval/demonstrations/loss": 1.5,
    }  # fmt: skip


# A table that one arm lacks is one line with all its values; entries of lists of tables have the numbers that overrides
# use; None is as good as not there.
def test_differing_settings_are_grouped_by_table() -> None:
    source = {"name": "toolsmith", "weight": 1.0}
    plain = {"model": {"path": "tiny"}, "orchestrator": {"hints": None, "judge": None, "source": [source]}}
    hints = {"layers": ["template"], "judge": None, "llm": {"model": "big"}}
    hinted = {"model": {"path": "tiny"}, "orchestrator": {"hints": hints, "source": [source | {"weight": 2.0}]}}
    first, second = Arm(name="a1", settings=plain), Arm(name="a2", settings=hinted)
    weight = "orchestrator.source.0.weight: "
    added = "{'layers': ['template'], 'llm': {'model': 'big'}}"
    assert sorted(differing(first, second)) == [f"orchestrator.hints: unset -> {added}", f"{weight}1.0 -> 2.0"]
    assert sorted(differing(second, first)) == [f"orchestrator.hints: {added} -> unset", f"{weight}2.0 -> 1.0"]
    assert differing(first, first) == []


# Columns that do not fit beside the others follow below them, each line within the width; rows without a figure go.
def test_wide_tables_are_continued_below() -> None:
    labels, rows = ["a1", "a2", "a2 - a1"], {"1-10": ["0.1", "0.25", "+0.15"], "11-20": ["-", "-", "-"]}
    assert ladder_table(labels, rows, 80) == [f"  {'':8}   a1    a2     a2 - a1", f"  {'1-10':>8}   0.1   0.25   +0.15"]
    narrow = ladder_table(labels, rows, 26)
    assert len(narrow) == 4 and max(map(len, narrow)) <= 26 and narrow[2].split() == ["a2", "-", "a1"]


# The interval is Student's: for 1, 2, 3 it is 2 -+ 4.3027 / sqrt(3) (a table's quantile for two degrees of freedom).
def test_interval_over_seeds() -> None:
    interval = over_seeds({0: 1.0, 1: 2.0, 2: 3.0})
    assert interval is not None and interval.low is not None
    assert interval.low == pytest.approx(2 - 4.30265 / 3**0.5, abs=1e-4)
    single = over_seeds({0: 1.0, 1: None})
    assert single is not None and single.text() == "1.000"
    assert over_seeds({0: None}) is None


# Only seeds that both arms have are compared.
def test_unpaired_seeds_are_left_out() -> None:
    assert differences({0: 1.0, 1: 2.0}, {1: 5.0, 2: 7.0}) == {1: 3.0}


# Windows cover every step once, also when there are fewer steps than windows.
@pytest.mark.parametrize(("steps", "count"), [(60, 6), (7, 3), (2, 6), (1, 1)])
def test_windows_cover_every_step_once(steps: int, count: int) -> None:
    assert [step for part in windows(steps, count) for step in part] == list(range(1, steps + 1))


# Two runs of one configuration and seed are one run twice: refused by name. So is a length that a run does not have.
def test_refusals(tmp_path: Path) -> None:
    first = run_folder(tmp_path, "a1-seed0", 0, 0.0, [0.2, 0.2])
    second = run_folder(tmp_path, "again", 0, 0.0, [0.2, 0.2])
    with pytest.raises(ConfigError, match="a1-seed0 and again have the same configuration and the same seed 0"):
        main([first, second])
    with pytest.raises(ConfigError, match="--steps 5: the shortest of the runs has 2"):
        main([first, "--steps", "5"])
