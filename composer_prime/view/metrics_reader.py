"""Follow one run's metrics.jsonl for the list of runs, and pick lines for the run's own page.

The list decodes a few fields of each line, so a hundred runs open at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from composer_prime.monitor.metrics_file import Line
from composer_prime.monitor.progress import numeric_field

MEAN_STEPS = 10
"""Steps of the running mean; with fewer steps no trend is claimed."""
_SPARK_POINTS = 48


class _Glance(msgspec.Struct):
    """The fields of a line that the list of runs needs; the others are skipped without being decoded."""

    step: Any = None
    time: Any = None
    event: Any = None
    state: Any = None
    reward: Any = msgspec.field(default=None, name="reward/mean")
    loss: Any = msgspec.field(default=None, name="loss/total")
    eval_s: Any = msgspec.field(default=None, name="time/eval_s")


@dataclass(slots=True)
class HeldOut:
    """One evaluation as the orchestrator logged it: the mean over sources."""

    step: int
    mean: float
    low: float | None
    high: float | None


@dataclass(slots=True)
class RunGlance:
    """What the list of runs shows of one run."""

    rewards: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, HeldOut] = field(default_factory=dict)
    step: int = 0
    """The last optimizer step."""
    updated: float | None = None
    """Seconds since the epoch."""
    ended: str | None = None
    """How the launcher says that the run ended; None without such a note, and after a resume."""

    def take(self, raw: bytes) -> None:
        """Take in one line of the file; another one than a metrics line is skipped."""
        try:
            line = _decode_glance(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if not isinstance(line.step, int):
            return
        if isinstance(line.time, int | float):
            self.updated = float(line.time)
        if line.event == "ended":
            self.ended = str(line.state)
        if line.event == "resume":
            self.ended = None
            self.rewards = {step: value for step, value in self.rewards.items() if step <= line.step}
            self.held_out = {step: value for step, value in self.held_out.items() if step <= line.step}
            self.step = min(self.step, line.step)
        if line.loss is not None:
            self.step = line.step
            if isinstance(line.reward, int | float):
                self.rewards[line.step] = float(line.reward)
        if line.eval_s is not None and (held_out := _held_out(line.step, msgspec.json.decode(raw))):
            self.held_out[line.step] = held_out

    def recent_reward(self) -> float | None:
        """Return the mean reward of the last steps; None before the first."""
        values = list(self.rewards.values())[-MEAN_STEPS:]
        return fmean(values) if values else None

    def spark(self) -> list[float]:
        """Return the rewards in at most _SPARK_POINTS means."""
        values = list(self.rewards.values())
        count = min(_SPARK_POINTS, len(values))
        edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
        return [round(fmean(values[a:b]), 4) for a, b in pairwise(edges)]


_decode_glance = msgspec.json.Decoder(_Glance).decode


def read_glance(path: Path) -> RunGlance:
    """Read the account of a run from its metrics.jsonl; an empty one while there is no file."""
    glance = RunGlance()
    try:
        for raw in path.read_bytes().splitlines():
            glance.take(raw)
    except OSError:
        return RunGlance()
    return glance


def _held_out(step: int, line: Line) -> HeldOut | None:
    names = [name for name in line if name.startswith("eval/") and name.endswith("/reward_mean")]
    means = [value for name in names if (value := numeric_field(line, name)) is not None]
    if not means:
        return None
    only = names[0] if len(names) == 1 else ""
    low, high = numeric_field(line, f"{only}_low"), numeric_field(line, f"{only}_high")
    return HeldOut(step=step, mean=fmean(means), low=low, high=high)


def ended(lines: list[Line]) -> str | None:
    """Return how the run ended, by the launcher's last note since the last resume."""
    notes = [line for line in lines if line.get("event") in ("ended", "resume")]
    return str(notes[-1].get("state")) if notes and notes[-1]["event"] == "ended" else None


def trained_lines(lines: list[Line]) -> dict[int, Line]:
    """Return the trainer's line of each optimizer step, ascending."""
    return dict(sorted((line["step"], line) for line in lines if "loss/total" in line))
