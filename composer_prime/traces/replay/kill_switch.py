"""What ends a replay or leaves out votes: the kill switch, and the value of information.

The kill switch stops a replay that costs too much, takes too long or fails too often. The value of information decides
whether a vote is worth its price:

    P(the votes give a pair | what is known) * value of a pair >= price of the votes that are still open

The votes give a pair where they overrule the student, and where they agree with it against a minority. P is the mean of
a Beta distribution for each situation: whether the action led to an error, how uncertain the student was, and whether
the first, cheap teacher disagreed. It starts from a prior and learns from every state that was voted on to the end. How
uncertain the student was (TraceState.entropy: the mean surprisal of its tokens) is known of this project's own
rollouts. Traces of other agents hold no log-probabilities. They are situations of their own, told apart by the error
and the cheap teacher's vote.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from composer_prime.config.teachers import KillSwitchConfig, VoiConfig


def percentile(values: Collection[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` do not exceed (nearest rank); 0 of nothing."""
    return _ranked(sorted(values), share)


def _ranked(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


@dataclass(slots=True)
class KillSwitch:
    """Takes in each state, those of earlier runs first, and is asked after each. So its lists are kept in order.

    States without a call (refused, from the cache, no money left) count nowhere: they would lower any mean.
    """

    config: KillSwitchConfig
    seconds: list[float] = field(default_factory=list)
    """Of each state on which a call was made, ascending."""
    usd_by_trace: dict[str, float] = field(default_factory=dict)
    """Of each trace on which a call was made."""
    calls: int = 0
    failed: int = 0
    states: int = 0
    """On which a call was made, or that broke."""
    _costs: list[float] = field(init=False)
    """Of usd_by_trace, ascending."""

    def __post_init__(self) -> None:
        self._costs = sorted(self.usd_by_trace.values())

    def note(
        self, trace: str, usd: float, seconds: float, *, calls: int, failed: int = 0, broken: bool = False
    ) -> None:
        """Take in one state. All calls of a `broken` state count as failed, and one where it made none."""
        if calls or usd:
            self._spend(trace, usd)
        if calls:
            insort(self.seconds, seconds)
        self.states += bool(calls or broken)
        self.calls += max(calls, broken)
        self.failed += max(calls, 1) if broken else failed

    def _spend(self, trace: str, usd: float) -> None:
        before = self.usd_by_trace.get(trace)
        if before is not None:
            del self._costs[bisect_left(self._costs, before)]
        self.usd_by_trace[trace] = (before or 0.0) + usd
        insort(self._costs, self.usd_by_trace[trace])

    def tripped(self) -> str | None:
        """Return why the replay has to stop; None while it may go on."""
        config = self.config
        if self.states < config.min_states:
            return None
        costs = self._costs
        limits = (
            ("mean_usd_per_trace", sum(costs) / max(len(costs), 1), config.mean_usd_per_trace, "$"),
            ("p95_usd_per_trace", _ranked(costs, 0.95), config.p95_usd_per_trace, "$"),
            ("p95_s_per_step", _ranked(self.seconds, 0.95), config.p95_s_per_step, ""),
            ("error_rate", self.failed / max(self.calls, 1), config.error_rate, ""),
        )
        for name, value, limit, unit in limits:
            if value > limit:
                return (
                    f"{name} is {unit}{value:.4g} after {self.states} states, teachers.kill.{name} is {unit}{limit:g}"
                )
        return None


VALUE_IN_STATES = 6.0
"""What a pair is worth by default, in prices of all votes on a state. Of 226 toolsmith states with 158 pairs, this
saved 4 % of the calls and lost 3 pairs; twice the price saved 15 % and lost 11."""
_LEVELS_NATS = (0.05, 0.1, 0.2, 0.5)
"""Nats a token between levels of uncertainty. Of 352 toolsmith states, 2 % were overruled below the first, 42, 80 and
99 % between the others, and all above the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a state before a vote."""

    error: bool
    entropy: float | None = None
    cheap_disagrees: bool | None = None
    """None before the first vote."""

    @property
    def bucket(self) -> tuple[object, ...]:
        level = None if self.entropy is None else bisect_right(_LEVELS_NATS, self.entropy)
        return (self.error, level, self.cheap_disagrees)


class ValueOfInformation:
    def __init__(self, config: VoiConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)
        self._states = 0
        self._votes_usd = 0.0
        self._counts: dict[tuple[object, ...], tuple[int, int]] = {}
        """(states that gave a pair, states) by situation."""

    def chance(self, situation: Situation) -> float:
        """Return P(the votes give a pair)."""
        gave, seen = self._counts.get(situation.bucket, (0, 0))
        config = self._config
        return (gave + config.prior_disagreement * config.prior_weight) / (seen + config.prior_weight)

    def expect(self, votes_usd: float) -> None:
        """Take in a new state, with what all votes on it are expected to cost."""
        self._states += 1
        self._votes_usd += votes_usd

    @property
    def pair_value_usd(self) -> float:
        if self._config.pair_value_usd is not None:
            return self._config.pair_value_usd
        return VALUE_IN_STATES * self._votes_usd / max(self._states, 1)

    def worth(self, situation: Situation, price_usd: float) -> bool:
        """Return whether to ask for votes that cost `price_usd` together."""
        if not self._config.enabled or price_usd <= 0:
            return True
        if self._random.random() < self._config.explore:
            return True
        return self.chance(situation) * self.pair_value_usd >= price_usd

    def learn(self, situation: Situation, gave_pair: bool) -> None:
        count, seen = self._counts.get(situation.bucket, (0, 0))
        self._counts[situation.bucket] = (count + gave_pair, seen + 1)
