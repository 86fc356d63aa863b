"""Expected pass rates of unplayed tasks, from estimates of their difficulty and from what was played lately.

    logit p(d) = a + b (1/2 - d)          d in [0, 1] is a task's estimate, a and b are what the policy can do now

a and b are the most probable values under a ~ N(0, 2^2), b ~ N(4, 2^2), given the groups so far. Older groups fade,
since the policy changes. With one difficulty played, the prior of b still says that harder tasks pass less often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUCKETS = 20
_MEMORY = 0.98
"""What is left of a group's weight after the next one: about the last fifty groups count."""
_GROUP_WEIGHT = 4.0
"""Rollouts that a group counts as: its siblings share one task, so they say less than as many tasks."""
_PRIOR_MEAN = (0.0, 4.0)
_PRIOR_PRECISION = (1 / 4, 1 / 4)
_NEWTON_STEPS = 12
_SMALL = 1e-9


@dataclass(slots=True, eq=False)
class DifficultyModel:
    """The pass rate as a function of difficulty. Its counts are its whole state, so a loaded one continues exactly."""

    played: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    """Weight of groups by bucket of difficulty."""
    passed: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    _fitted: tuple[float, float] | None = field(default=None, init=False)

    def observe(self, difficulty: float, rate: float) -> None:
        """Take in a group's pass rate."""
        self.played = [weight * _MEMORY for weight in self.played]
        self.passed = [weight * _MEMORY for weight in self.passed]
        bucket = min(int(difficulty * BUCKETS), BUCKETS - 1)
        self.played[bucket] += _GROUP_WEIGHT
        self.passed[bucket] += _GROUP_WEIGHT * rate
        self._fitted = None

    def pass_rate(self, difficulty: float) -> float:
        """Return the expected pass rate of a task."""
        if self._fitted is None:
            self._fitted = self._fit()
        level, slope = self._fitted
        return _logistic(level + slope * (0.5 - difficulty))

    def _fit(self) -> tuple[float, float]:
        """Return a and b, by Newton's method from the prior's mean. The objective is strictly concave."""
        level, slope = _PRIOR_MEAN
        for _ in range(_NEWTON_STEPS):
            gradient = [
                -_PRIOR_PRECISION[0] * (level - _PRIOR_MEAN[0]),
                -_PRIOR_PRECISION[1] * (slope - _PRIOR_MEAN[1]),
            ]
            hessian = [_PRIOR_PRECISION[0], 0.0, _PRIOR_PRECISION[1]]
            for bucket, (played, passed) in enumerate(zip(self.played, self.passed, strict=True)):
                if not played:
                    continue
                x = 0.5 - (bucket + 0.5) / BUCKETS
                rate = _logistic(level + slope * x)
                error, spread = passed - played * rate, played * rate * (1 - rate)
                gradient[0] += error
                gradient[1] += error * x
                hessian[0] += spread
                hessian[1] += spread * x
                hessian[2] += spread * x * x
            determinant = hessian[0] * hessian[2] - hessian[1] ** 2
            step = (
                (hessian[2] * gradient[0] - hessian[1] * gradient[1]) / determinant,
                (hessian[0] * gradient[1] - hessian[1] * gradient[0]) / determinant,
            )
            longest = max(map(abs, step))
            scale = min(1.0, 2.0 / longest) if longest > 0 else 0.0
            level, slope = level + scale * step[0], slope + scale * step[1]
            if longest < _SMALL:
                break
        return level, slope


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
