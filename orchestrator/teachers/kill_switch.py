"""Stops a replay that costs too much, takes too long or fails too often, and says why."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from composer_prime.config.teachers import KillSwitchConfig


def percentile(values: Collection[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed (nearest rank); 0 of nothing."""
    return _ranked(sorted(values), share)


def _ranked(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


@dataclass(slots=True)
class KillSwitch:
    """Fed after each state, those of earlier runs first. It looks after each state too, so what it knows is kept in
    order: nothing is sorted anew."""

    config: KillSwitchConfig
    seconds: list[float] = field(default_factory=list)
    """Of each state that made a call, ascending."""
    usd_by_trace: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    failed: int = 0
    _costs: list[float] = field(init=False)
    """Of usd_by_trace, ascending."""

    def __post_init__(self) -> None:
        self._costs = sorted(self.usd_by_trace.values())

    def note(self, trace: str, usd: float, seconds: float | None, calls: int, failed: int) -> None:
        """One state is done. `seconds`: None where all its answers were in the cache."""
        before = self.usd_by_trace.get(trace)
        if before is not None:
            del self._costs[bisect_left(self._costs, before)]
        self.usd_by_trace[trace] = (before or 0.0) + usd
        insort(self._costs, self.usd_by_trace[trace])
        if seconds is not None:
            insort(self.seconds, seconds)
        self.calls += calls
        self.failed += failed

    def tripped(self) -> str | None:
        """Why replay has to stop; None while it may go on."""
        config = self.config
        if len(self.seconds) < config.min_states:
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
                    f"{name} is {unit}{value:.4g} after {len(self.seconds)} states, teachers.kill.{name} is "
                    f"{unit}{limit:g}"
                )
        return None
