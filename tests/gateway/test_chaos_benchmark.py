"""What the benchmark of failing nodes calls passed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet_chaos import verdict


def side(scores: list[float]) -> Any:
    return SimpleNamespace(
        options=SimpleNamespace(nodes=8, steps=1, groups=1),
        seen=Counter(),
        struck=Counter(),
        scores=lambda: {f"task-{number}": [score] for number, score in enumerate(scores)},
        minutes=lambda: 1.0,
        faults=list,
        identities=lambda: (8, 8, 8),
        found_hangs=lambda: 0,
        restarts=lambda: 0,
        lost=lambda: 0.0,
        drawn=lambda: 1,
    )


@pytest.mark.parametrize(
    ("calm", "chaos", "is_good"),
    [([0.5], [0.5], False), ([0.5, 0.6] * 10, [0.6, 0.5] * 10, True), ([0.9, 0.8] * 10, [0.1, 0.2] * 10, False)],
)
def test_a_reward_passes_by_its_interval(calm, chaos, is_good):
    """A single task gives no interval, which shows nothing."""
    [(text, passed)] = [line for line in verdict(side(chaos), side(calm)) if line[0].startswith("reward")]
    assert passed is is_good, text
