"""Stops a replay that costs too much, takes too long or fails too often, and says why."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from composer_prime.config.teachers import KillSwitchConfig


def percentile(values: Collection[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed (nearest rank); 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


@dataclass(slots=True)
class KillSwitch:
    """Fed after each state, those of earlier runs first."""

    config: KillSwitchConfig
    seconds: list[float] = field(default_factory=list)
    """Of each state that made a call."""
    usd_by_trace: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    failed: int = 0

    def note(self, trace: str, usd: float, seconds: float | None, calls: int, failed: int) -> None:
        """One state is done. `seconds`: None where all its answers were in the cache."""
        self.usd_by_trace[trace] = self.usd_by_trace.get(trace, 0.0) + usd
        if seconds is not None:
            self.seconds.append(seconds)
        self.calls += calls
        self.failed += failed

    def tripped(self) -> str | None:
        """Why replay has to stop; None while it may go on."""
        config = self.config
        if len(self.seconds) < config.min_states:
            return None
        costs: Sequence[float] = list(self.usd_by_trace.values())
        limits = (
            ("mean_usd_per_trace", sum(costs) / max(len(costs), 1), config.mean_usd_per_trace, "$"),
            ("p95_usd_per_trace", percentile(costs, 0.95), config.p95_usd_per_trace, "$"),
            ("p95_s_per_step", percentile(self.seconds, 0.95), config.p95_s_per_step, ""),
            ("error_rate", self.failed / max(self.calls, 1), config.error_rate, ""),
        )
        for name, value, limit, unit in limits:
            if value > limit:
                return (
                    f"{name} is {unit}{value:.4g} after {len(self.seconds)} states, teachers.kill.{name} is "
                    f"{unit}{limit:g}"
                )
        return None
