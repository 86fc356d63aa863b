"""The state of a run from its metrics lines: its progress, and which process waits for what. No drawing here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

from composer_prime.monitor.metrics_file import Line

TREND_STEPS = 10
"""With fewer steps the rewards of the first and last ones differ by their tasks more than by what was learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The global model that a joint run ended with."""

    step: int
    """The last optimizer step."""
    text: str
    """Names the model; people compare it across machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress:
    """The last outer step of a joint run, as one peer's trainer logs it."""

    number: int
    """Outer steps so far."""
    peers: int
    """Peers whose deltas it averaged."""
    sent_bytes: float
    """Sent by rank 0 since its start."""
    waited_s: float
    """How long training waited for its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """One optimizer step, from the trainer's line. None where the line has no such figure."""

    step: int
    time: float
    """Seconds since the epoch."""
    reward: float | None
    reward_std: float | None
    loss: float | None
    tokens: float | None
    """Tokens trained in this step."""
    step_s: float | None
    wait_s: float | None
    staleness: float | None
    mismatch_kl: float | None
    hinted_turns: float | None
    """Turns that SDPO trained on; None where it is off."""
    jsd: float | None
    """Their divergence from the hinted teacher, nats a token."""
    endorsed: float | None
    """Share of them that the hint makes likelier."""
    pairs: float | None
    """Preference pairs of replay-DPO; None where it is off."""
    accuracy: float | None
    """Share of the pairs that the policy prefers as the teachers did."""
    joint: RoundProgress | None
    """The last outer step of a joint run; steps without a new one repeat it."""

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens is not None and self.step_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What a role waits for, and since when."""

    what: str
    """`subject: how far that is`."""
    since: float
    """Seconds since the epoch."""

    @property
    def subject(self) -> str:
        """The part of `what` that stays the same as the wait progresses."""
        return self.what.partition(":")[0]


@dataclass(slots=True, kw_only=True)
class RunProgress:
    steps: dict[int, StepProgress] = field(default_factory=dict)
    """By step; a step trained again after a resume replaces the older one."""
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """Figures of the evaluation after step N, without the prefix `eval/`."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """By role."""
    ended: Ending | None = None
    """End of a joint run; None when steps follow it, or when a resume undid its steps."""

    def update(self, lines: Iterable[Line]) -> list[StepProgress]:
        """Take in new lines and return the steps among them."""
        new_steps = []
        for line in lines:
            if line.get("event") == "resume":
                self.steps = {step: value for step, value in self.steps.items() if step <= line["step"]}
                self.evals = {step: value for step, value in self.evals.items() if step <= line["step"]}
                if self.ended is not None and self.ended.step > line["step"]:
                    self.ended = None
            step = self._take(line)
            if step is not None:
                self.steps[step.step] = step
                if self.ended is not None and self.ended.step < step.step:
                    self.ended = None
                new_steps.append(step)
        return new_steps

    def _take(self, line: Line) -> StepProgress | None:
        role = str(line.get("role", "?"))
        self._update_waiting(role, line)
        self.ended = _ending(line) or self.ended
        figures = {
            name[5:]: line[name] for name in line if name.startswith("eval/") and numeric_field(line, name) is not None
        }
        if figures:
            self.evals.setdefault(line["step"], {}).update(figures)
        return _step(line) if "loss/total" in line else None

    def _update_waiting(self, role: str, line: Line) -> None:
        """Update the role's wait, which lasts until the role waits for another subject or for nothing ("")."""
        what = line.get("waiting_for")
        if not isinstance(what, str):
            return
        previous = self.waiting.pop(role, None)
        if what:
            current = Waiting(what=what, since=line.get("time", time.time()))
            if previous is not None and previous.subject == current.subject:
                current = replace(current, since=previous.since)
            self.waiting[role] = current

    @property
    def last(self) -> StepProgress | None:
        return self.steps[max(self.steps)] if self.steps else None

    def rewards(self) -> list[float]:
        """Return the mean reward of every step that has one, by step."""
        ordered = (self.steps[step].reward for step in sorted(self.steps))
        return [reward for reward in ordered if reward is not None]

    def recent_reward(self) -> float | None:
        """Return the mean reward of the last TREND_STEPS steps; None before there are so many."""
        rewards = self.rewards()
        return fmean(rewards[-TREND_STEPS:]) if len(rewards) >= TREND_STEPS else None

    def left_s(self, max_steps: int) -> float | None:
        """Return about how many seconds the remaining steps take; None before two steps and after the last.

        The pace is the median of the last ten steps, so that pauses and evaluations weigh little.
        """
        times = [self.steps[step].time for step in sorted(self.steps)]
        gaps = [after - before for before, after in pairwise(times)][-10:]
        last = max(self.steps, default=0)
        return median(gaps) * (max_steps - last) if gaps and last < max_steps else None

    def tokens_per_s(self) -> float | None:
        """Return all trained tokens over the time of their steps; None where no step has both figures."""
        timed = [(step.tokens, step.step_s) for step in self.steps.values() if step.tokens is not None and step.step_s]
        seconds = sum(step_s for _, step_s in timed)
        return sum(tokens for tokens, _ in timed) / seconds if seconds else None


def numeric_field(line: Line, name: str) -> float | None:
    """Return a numeric field; None when it is missing or not a number."""
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _step(line: Line) -> StepProgress:
    return StepProgress(
        step=line["step"],
        time=float(line.get("time", 0.0)),
        reward=numeric_field(line, "reward/mean"),
        reward_std=numeric_field(line, "reward/std"),
        loss=numeric_field(line, "loss/total"),
        tokens=numeric_field(line, "tokens/trained"),
        step_s=numeric_field(line, "time/step_s"),
        wait_s=numeric_field(line, "time/wait_s"),
        staleness=numeric_field(line, "policy/staleness_max"),
        mismatch_kl=numeric_field(line, "policy/mismatch_kl"),
        hinted_turns=numeric_field(line, "sdpo/turns") if "loss/sdpo" in line else None,
        jsd=numeric_field(line, "sdpo/jsd"),
        endorsed=numeric_field(line, "sdpo/endorsed"),
        pairs=numeric_field(line, "dpo/pairs") if "loss/replay_dpo" in line else None,
        accuracy=numeric_field(line, "dpo/accuracy"),
        joint=_round(line),
    )


def _ending(line: Line) -> Ending | None:
    """Read the trainer's last line; None for any other line."""
    if "diloco/final_hash" not in line:
        return None
    outer_step, model_hash = int(line["diloco/final_outer_step"]), line["diloco/final_hash"]
    text = f"outer step {outer_step}, hash {model_hash}, equal on every peer that ended at this outer step"
    if (left_behind := line.get("diloco/final_left_behind")) is not None:
        text += f"; a delta of outer step {int(left_behind)} was left behind"
    return Ending(step=line["step"], text=text)


def _round(line: Line) -> RoundProgress | None:
    outer_step, peers = numeric_field(line, "diloco/outer_step"), numeric_field(line, "diloco/participants")
    if outer_step is None or peers is None:
        return None
    return RoundProgress(
        number=int(outer_step),
        peers=int(peers),
        sent_bytes=numeric_field(line, "diloco/bytes_sent") or 0.0,
        waited_s=numeric_field(line, "diloco/sync_s") or 0.0,
    )


def ends(values: list[float]) -> tuple[list[float], list[float]]:
    """Return up to 5 values from the start and 10 from the end, none in both; of few values half each."""
    head = min(5, len(values) // 2)
    return values[:head], values[max(head, len(values) - 10) :]


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Return `values` as a line of at most `width` blocks, averaged, on a scale from the least to the most."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / span)) if span else 3] for mean in means)
