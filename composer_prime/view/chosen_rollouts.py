"""The best, the worst and a typical rollout of a run, to be read in its report."""

from __future__ import annotations

from statistics import median
from typing import Any

from composer_prime.view.rollout_index import RolloutIndex
from composer_prime.view.rollout_payload import public


def chosen_rollouts(index: RolloutIndex) -> list[dict[str, Any]]:
    """Return up to three rollouts with why each was chosen: of the last evaluation, else of the last batch."""
    rows = _last_scored(index, "eval") or _last_scored(index, "step")
    if not rows:
        return []
    middle = median(row["tokens"] or 0 for row in rows)
    level = median(row["reward"] for row in rows)
    ranked = {
        "best": min(rows, key=lambda row: (-row["reward"], row["tool_errors"], row["tokens"] or 0)),
        "typical": min(rows, key=lambda row: (abs(row["reward"] - level), abs((row["tokens"] or 0) - middle))),
        "worst": min(rows, key=lambda row: (row["reward"], -row["tool_errors"], -(row["tokens"] or 0))),
    }
    chosen = []
    for why, row in ranked.items():
        if all(row is not earlier for _, earlier, _ in chosen) and (rollout := index.read(row)):
            chosen.append((why, row, rollout))
    return [{"why": why, "entry": public(row), "rollout": rollout} for why, row, rollout in chosen]


def _last_scored(index: RolloutIndex, kind: str) -> list[dict[str, Any]]:
    steps = index.distinct("step", kind)
    if not steps:
        return []
    where = "kind = ? AND step = ? AND reward IS NOT NULL"
    return index.select(where, (kind, steps[-1]), order="rollout_id")
