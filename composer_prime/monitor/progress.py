"""The state of a run from its metrics lines: its progress, and which process waits for what."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

from composer_prime.monitor.metrics_file import Line, is_number, numeric_field

TREND_STEPS = 10
"""With fewer, first and last rewards differ more by their tasks than by what was learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    what: str
    """`subject: how far that is`."""
    since: float
    """Unix seconds."""

    @property
    def subject(self) -> str:
        """The part of `what` that stays as the wait goes on."""
        return self.what.partition(":")[0]


@dataclass(slots=True, kw_only=True)
class RunProgress:
    steps: dict[int, Line] = field(default_factory=dict)
    """The trainer's line of each step; the latest counts."""
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """Figures after step N, without the prefix `eval/`."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """By role."""
    joint_end: Line | None = None

    def update(self, lines: Iterable[Line]) -> list[Line]:
        """Take in new lines and return those of steps among them."""
        new_steps = []
        for line in lines:
            if line.get("event") == "resume":
                self._rewind(line["step"])
            self._update_waiting(line)
            figures = {name[5:]: line[name] for name in line if name.startswith("eval/") and is_number(line[name])}
            if figures:
                self.evals.setdefault(line["step"], {}).update(figures)
            if "diloco/final_hash" in line:
                self.joint_end = line
            if "loss/total" in line:
                self.steps[line["step"]] = line
                new_steps.append(line)
        return new_steps

    def _rewind(self, step: int) -> None:
        """Forget what a resume from `step` undoes."""
        self.steps = {each: line for each, line in self.steps.items() if each <= step}
        self.evals = {each: figures for each, figures in self.evals.items() if each <= step}
        if self.joint_end is not None and self.joint_end["step"] > step:
            self.joint_end = None

    def _update_waiting(self, line: Line) -> None:
        """Update the role's wait, until another subject or "" (nothing)."""
        what, role = line.get("waiting_for"), str(line.get("role", "?"))
        if not isinstance(what, str):
            return
        previous = self.waiting.pop(role, None)
        if what:
            current = Waiting(what=what, since=line.get("time", time.time()))
            if previous is not None and previous.subject == current.subject:
                current = replace(current, since=previous.since)
            self.waiting[role] = current

    @property
    def last_step(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def joint_model(self) -> str | None:
        """Names the global model that a joint run ended with, unless steps follow or a resume undid it."""
        end = self.joint_end
        if end is None or end["step"] < (self.last_step or 0):
            return None
        outer_step, left_behind = int(end["diloco/final_outer_step"]), end.get("diloco/final_left_behind")
        late = "" if left_behind is None else f"; a delta of outer step {int(left_behind)} was left behind"
        where = f"outer step {outer_step}, hash {end['diloco/final_hash']}"
        return f"{where}, equal on every peer that ended at this outer step{late}"

    def rewards(self) -> list[float]:
        """Return each step's mean reward, by step."""
        ordered = (numeric_field(self.steps[step], "reward/mean") for step in sorted(self.steps))
        return [reward for reward in ordered if reward is not None]

    def recent_reward(self) -> float | None:
        """Return the mean reward of the last TREND_STEPS steps, once there are so many."""
        rewards = self.rewards()
        return fmean(rewards[-TREND_STEPS:]) if len(rewards) >= TREND_STEPS else None

    def left_s(self, max_steps: int) -> float | None:
        """Return about how many seconds the remaining steps take, at the median pace of the last ten."""
        times = [self.steps[step].get("time", 0.0) for step in sorted(self.steps)]
        gaps = [after - before for before, after in pairwise(times)][-10:]
        last = max(self.steps, default=0)
        return median(gaps) * (max_steps - last) if gaps and last < max_steps else None

    def tokens_per_s(self) -> float | None:
        """Return all trained tokens over the time of their steps, where known."""
        timed = [line for line in self.steps.values() if "tokens/trained" in line and line.get("time/step_s")]
        seconds = sum(line["time/step_s"] for line in timed)
        return sum(line["tokens/trained"] for line in timed) / seconds if seconds else None


def ends(values: list[float]) -> tuple[list[float], list[float]]:
    """Return up to 5 values from the start and 10 from the end; of few values half each."""
    head = min(5, len(values) // 2)
    return values[:head], values[max(head, len(values) - 10) :]


def averaged(values: list[float], most: int) -> list[float]:
    """Return the means of at most `most` parts of about equal length."""
    count = min(most, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    return [fmean(values[start:end]) for start, end in pairwise(edges)]


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Return `values` as at most `width` blocks, averaged, from the least to the most."""
    means = averaged(values, width)
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / span)) if span else 3] for mean in means)
