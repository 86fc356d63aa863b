"""The first sentence of a report: what the held-out evaluations say, and nothing that they do not say."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from composer_prime.console import pluralize
from composer_prime.monitor.rollouts import Scores
from composer_prime.stats.intervals import difference_interval, mean_interval

MEAN_STEPS = 10
"""Steps of a mean; with fewer steps no trend is claimed."""


def verdict(evaluations: Mapping[int, Scores], rewards: list[float]) -> dict[str, Any]:
    """Return `text` and `tone` (good | bad | open) of a run. `rewards`: the mean reward of every trained step.

    Only a paired interval over held-out tasks that leaves out 0 says that the model learned, or got worse.
    """
    scored = {step: scores for step, scores in evaluations.items() if scores}
    first, last = min(scored, default=0), max(scored, default=0)
    if first == last or not scored[first].keys() & scored[last].keys():
        return {"text": _without_comparison(scored, rewards), "tone": "open"}
    change = difference_interval(scored[first], scored[last])
    text = f"held-out {change.text(sign=True)} over {pluralize(change.count, 'task')}"
    levels = f"{mean_of(scored[first]):.3f} after step {first}, {mean_of(scored[last]):.3f} after step {last}"
    if change.low is None or change.high is None:
        return {"text": f"{text}: one task decides nothing ({levels})", "tone": "open"}
    if change.low > 0:
        return {"text": f"{text}: it learned ({levels})", "tone": "good"}
    if change.high < 0:
        return {"text": f"{text}: it got worse ({levels})", "tone": "bad"}
    return {"text": f"{text}: undecided, the interval holds 0 ({levels})", "tone": "open"}


def _without_comparison(scored: Mapping[int, Scores], rewards: list[float]) -> str:
    if scored:
        step = max(scored)
        interval = mean_interval(scored[step])
        text = f"held-out {interval.text()} over {pluralize(interval.count, 'task')} after step {step}"
        return f"{text}: no second evaluation of these tasks to compare with"
    if not rewards:
        return "nothing trained or evaluated yet"
    if len(rewards) < 2 * MEAN_STEPS:
        few = f"mean training reward {fmean(rewards):.3f} of {pluralize(len(rewards), 'step')}"
        return f"no held-out evaluation; {few}: too few for a trend"
    ends = f"{fmean(rewards[:MEAN_STEPS]):.3f} in the first, {fmean(rewards[-MEAN_STEPS:]):.3f} in the last"
    return f"no held-out evaluation; training reward {ends} {MEAN_STEPS} steps, on other tasks: no verdict"


def mean_of(scores: Scores) -> float:
    return fmean(fmean(values) for values in scores.values())
