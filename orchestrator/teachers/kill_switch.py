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
    order: nothing is sorted anew.

    States on which no call was made (refused, from the cache, no money left) tell nothing of what calls cost, and count
    nowhere: with them among the traces, any mean would be low."""

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
        """One state is done. Where it is `broken`, all its calls count as failed, and one where it made none."""
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
        """Why replay has to stop; None while it may go on."""
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
