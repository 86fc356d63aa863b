"""The JSON of `composer ladder --html`: arms at equal steps, paired by seed."""

from __future__ import annotations

import time
from importlib.metadata import version
from statistics import fmean
from typing import Any

from composer_prime.console import pluralize
from composer_prime.stats.intervals import Interval
from composer_prime.stats.ladder import Arm, differences, differing, level, over_seeds, seeds_text, windows
from composer_prime.view.verdict import signed

CURVES = (
    "reward/mean", "policy/entropy", "policy/mismatch_kl", "rollout/turn_error_rate", "rollout/sampled_tokens_mean",
    "groups/filtered_share", "sdpo/turn_jsd", "dpo/accuracy", "optim/grad_norm",
)  # fmt: skip


def ladder_payload(arms: list[Arm], steps: int, metrics: list[str], bins: int) -> dict[str, Any]:
    """Return arms, their mean curves over seeds, held-out levels and tables of differences from the first arm."""
    held_out = [_held_out(arms, steps, name) for name in _held_out_names(arms)]
    return {
        "mode": "ladder",
        "steps": steps,
        "arms": [
            {
                "name": arm.name,
                "seeds": sorted(arm.runs),
                "runs": [run.name for run in arm.runs.values()],
                "differs": [] if arm is arms[0] else differing(arms[0], arm),
            }
            for arm in arms
        ],
        "verdicts": _verdicts(arms, held_out),
        "curves": {name: curves for name in CURVES if any((curves := _curves(arms, steps, name)).values())},
        "held_out": held_out,
        "tables": [table for name in metrics if (table := _table(arms, steps, name, bins))["rows"]],
        "written": time.time(),
        "version": version("composer-prime"),
    }


def _curves(arms: list[Arm], steps: int, metric: str) -> dict[str, list[tuple[int, float]]]:
    """Return each arm's mean over seeds by step; empty for a figure that no run has."""
    found: dict[str, list[tuple[int, float]]] = {}
    for arm in arms:
        points = []
        for step in range(1, steps + 1):
            values = [run.training[step][metric] for run in arm.runs.values() if metric in run.training.get(step, {})]
            if values:
                points.append((step, fmean(values)))
        found[arm.name] = points
    return found


def _held_out_names(arms: list[Arm]) -> list[str]:
    figures = [figures for arm in arms for run in arm.runs.values() for figures in run.evaluations.values()]
    return sorted({name for each in figures for name in each if name.endswith("/reward_mean")})


def _held_out(arms: list[Arm], steps: int, name: str) -> dict[str, Any]:
    """Return each arm's level at the evaluations that all its runs have, with intervals over seeds."""
    shown: dict[str, list[dict[str, Any]]] = {}
    for arm in arms:
        shared = set.intersection(*({step for step in run.evaluations if step <= steps} for run in arm.runs.values()))
        points = []
        for step in sorted(shared):
            figures = {seed: run.evaluations[step].get(name) for seed, run in arm.runs.items()}
            if interval := over_seeds(figures):
                points.append({"step": step, "mean": interval.mean, "low": interval.low, "high": interval.high})
        shown[arm.name] = points
    return {"name": name.removeprefix("eval/"), "metric": name, "arms": shown}


def _verdicts(arms: list[Arm], held_out: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return one sentence for each arm after the first and each held-out figure at the last shared evaluation."""
    found = []
    for each in held_out:
        steps = set.intersection(*({point["step"] for point in each["arms"][arm.name]} for arm in arms))
        if not steps:
            continue
        last = max(steps)
        base = {seed: run.evaluations[last].get(each["metric"]) for seed, run in arms[0].runs.items()}
        for arm in arms[1:]:
            own = {seed: run.evaluations[last].get(each["metric"]) for seed, run in arm.runs.items()}
            change = over_seeds(differences(base, own))
            text, tone = _sentence(change)
            source = each["name"].removesuffix("/reward_mean")
            sentence = f"{arm.name} − {arms[0].name} on held-out {source} after step {last}: {text}"
            found.append({"text": sentence, "tone": tone})
    return found


def _sentence(change: Interval | None) -> tuple[str, str]:
    if change is None:
        return "no seed that both arms have", "open"
    seeds = pluralize(change.count, "seed")
    if change.low is None or change.high is None:
        return f"{signed(change)} over {seeds}: no interval from so few seeds, undecided", "open"
    if change.low > 0:
        return f"{signed(change)} over {seeds}: better", "good"
    if change.high < 0:
        return f"{signed(change)} over {seeds}: worse", "bad"
    return f"{signed(change)} over {seeds}: undecided, the interval holds 0", "open"


def _table(arms: list[Arm], steps: int, metric: str, bins: int) -> dict[str, Any]:
    labels = [*(arm.name for arm in arms), *(f"{arm.name} − {arms[0].name}" for arm in arms[1:])]
    rows = []
    for part in [*windows(steps, bins), range(1, steps + 1)]:
        figures = [{seed: level(run, metric, part) for seed, run in arm.runs.items()} for arm in arms]
        cells = [seeds_text(each) or "–" for each in figures]
        cells += [seeds_text(differences(figures[0], each), sign=True) or "–" for each in figures[1:]]
        if any(cell != "–" for cell in cells):
            rows.append({"name": f"{part[0]}–{part[-1]}", "cells": cells})
    return {"title": metric, "labels": labels, "rows": rows}
