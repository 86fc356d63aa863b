"""The licence of a kind of hint: earned by pairs of redraws, lost by pairs or by a divergence that stays."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError
from composer_prime.monitor.licence import Licence, write_pairs

HELPS, NEITHER, HURTS = ((0.9, 0.3), (0.3, 0.3), (0.05, 0.3))
"""Rates of success with a hint and without."""


def licence(folder: Path, **about) -> Licence:
    return Licence(folder / "licence.jsonl", "tiny", **about)


def draw(made: Licence, rates: tuple[float, float], count: int, *, seed: int = 0, kind: str = "k") -> list[float]:
    """Note pairs, and return the weight after each."""
    noise, weights = random.Random(seed), []
    for _ in range(count):
        hinted, free = (float(noise.random() < rate) for rate in rates)
        made.note_pair(kind, (hinted, free))
        weights.append(made.weight(kind))
    return weights


def train(made: Licence, divergences: list[float], *, first: int = 1, kind: str = "k") -> None:
    for step, nats in enumerate(divergences, start=first):
        made.note_step(step, {kind: nats})


# A hint that lifts the reward from .3 to .9 earns its weight within 60 pairs; until then it has none.
def test_a_hint_that_helps_earns_its_weight(tmp_path):
    weights = draw(licence(tmp_path), HELPS, 60)
    assert weights[0] == 0 and weights[-1] == 1


# Of 200 kinds without any lift no more than one in 20 ever teaches, in 150 pairs each.
def test_a_hint_without_lift_earns_nothing(tmp_path):
    made = licence(tmp_path)
    lucky = [max(draw(made, NEITHER, 150, seed=seed, kind=str(seed))) for seed in range(200)]
    assert sum(lucky) <= 10


# A kind that is poisoned after it has earned its licence loses it within 60 pairs.
def test_a_poisoned_hint_loses_it(tmp_path):
    made = licence(tmp_path)
    draw(made, HELPS, 60)
    weights = draw(made, HURTS, 60, seed=1)
    assert weights[0] == 1 and weights[-1] == 0
    assert max(draw(made, HURTS, 60, seed=2)) == 0


# The second licence needs twice the evidence of the first, and comes.
def test_a_licence_can_come_again(tmp_path):
    made = licence(tmp_path)
    first = draw(made, HELPS, 60).index(1)
    draw(made, HURTS, 60, seed=1)
    assert first < draw(made, HELPS, 80).index(1) < 80


# A lift that the student does not take over teaches for ten steps; no further pair brings it back.
def test_a_divergence_that_stays_ends_it(tmp_path):
    made = licence(tmp_path)
    draw(made, HELPS, 60)
    train(made, [0.08] * 9)
    assert made.weight("k") == 1
    train(made, [0.08], first=10)
    assert made.weight("k") == 0 and max(draw(made, HELPS, 60, seed=3)) == 0


# One that falls keeps it; when it climbs back, the licence ends.
def test_a_divergence_that_falls_keeps_it(tmp_path):
    made = licence(tmp_path)
    draw(made, HELPS, 60)
    train(made, [0.1 * 0.9**step for step in range(20)])
    assert made.weight("k") == 1
    train(made, [0.1] * 5, first=21)
    assert made.weight("k") == 0


# With trust a kind teaches from the start for ten steps, and ends unless its divergence falls; one that hurts, sooner.
def test_a_kind_may_begin_on_trust(tmp_path):
    made = licence(tmp_path, trust=True)
    assert made.weight("k") == 1
    train(made, [0.08] * 10)
    assert made.weight("k") == 0
    assert draw(made, HURTS, 60, kind="poison")[-1] == 0
    assert draw(made, HELPS, 60, kind="good")[-1] == 1


# A resumed run stands where it stood, but for what the steps measured that it takes again, however often it resumes.
def test_it_survives_a_resume(tmp_path):
    made = licence(tmp_path)
    draw(made, HELPS, 60)
    train(made, [0.08] * 10)
    assert licence(tmp_path, step=8).weight("k") == 1
    again = licence(tmp_path, step=8)
    train(again, [0.01] * 2, first=9)
    assert again.weight("k") == 1 and licence(tmp_path, step=10).weight("k") == 1
    again.resume(8)
    train(again, [0.08] * 2, first=9)
    assert again.weight("k") == 0 and licence(tmp_path, step=10).weight("k") == 0


# A line that a crash cut short costs that line.
def test_a_line_that_was_cut(tmp_path):
    made = licence(tmp_path)
    draw(made, HELPS, 60)
    with (tmp_path / "licence.jsonl").open("a") as file:
        file.write('{"step": 11, "ki')
    again = licence(tmp_path, step=8)
    again.note_pair("k", (1.0, 0.0))
    assert licence(tmp_path, step=10).metrics()["hints/pairs"] == 61


# Rewards beyond 0 and 1 would make its bets worthless: such a pair does not count.
def test_rewards_out_of_range_do_not_count(tmp_path):
    made = licence(tmp_path)
    made.note_pair("k", (3.0, 0.0))
    assert made.metrics()["hints/pairs"] == 0


# A probe's pairs count in a run of its model, and in no other's.
def test_a_probe_can_give_it(tmp_path):
    saved = tmp_path / "probe.jsonl"
    write_pairs(saved, "tiny", [("k", 1.0, 0.0)] * 20)
    assert licence(tmp_path, earlier=saved).weight("k") == 1
    with pytest.raises(ConfigError, match=r"smollm2.*tiny|tiny.*smollm2"):
        Licence(tmp_path / "other.jsonl", "smollm2", earlier=saved)


# Also without a redraw, and with rewards whose difference no bet can take.
_OTHER = '{"model": "tiny"}\n{"kind": "k", "step": 0, "with": 2.0, "without": 0.5}\n'


@pytest.mark.parametrize(
    "text", ["", "no json\n", '{"step": 1}\n', '{"model": "tiny"}\n', _OTHER, _OTHER.replace(', "with"', "")]
)
def test_a_file_that_holds_no_redraws(tmp_path, text):
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"licence\.file.*wrong\.jsonl"):
        licence(tmp_path, earlier=path)


# The same folder, written in another way, is the same model.
def test_a_model_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "probe.jsonl", "runs/final", [("k", 1.0, 0.0)] * 20)
    path, earlier = tmp_path / "licence.jsonl", tmp_path / "probe.jsonl"
    assert Licence(path, f"{tmp_path}/runs/final", earlier=earlier).weight("k") == 1


# A step whose divergence is no number says nothing of its kind.
def test_a_divergence_that_is_no_number(tmp_path):
    made = licence(tmp_path, trust=True)
    train(made, [1.0, 0.9, float("nan"), 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert made.weight("k") == 1 and "NaN" not in (tmp_path / "licence.jsonl").read_text()


# A disk that takes no line costs the file, not the run.
def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    made = Licence(tmp_path / "file" / "licence.jsonl", "tiny", trust=True)
    train(made, [1.0] * 10)
    assert made.weight("k") == 0


# What a line holds is the contract with `composer hints probe --save` and with a resume.
def test_the_lines(tmp_path):
    made = licence(tmp_path)
    made.note_pair("k", (1.0, 0.5))
    made.note_step(1, {"k": 0.25})
    made.note_step(2, {})
    lines = [json.loads(line) for line in (tmp_path / "licence.jsonl").read_text().splitlines()]
    assert lines == [
        {"model": "tiny"},
        {"resume": 0},
        {"step": 0, "kind": "k", "with": 1.0, "without": 0.5},
        {"step": 1, "divergence": {"k": 0.25}},
    ]
