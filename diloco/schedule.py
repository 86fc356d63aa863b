"""When which fragment is prepared and completed: H inner steps, P fragments, delay tau (arXiv 2501.18512).

    inner step   1 ........ H/P - tau ........ H/P | 1 ...
                            prepare            complete         fragment = outer step mod P

An outer step is one completed fragment; a sweep is P of them. Only one fragment is under way at a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from composer_prime.config.diloco import DilocoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    interval: int
    """H / P: inner steps from one completion to the next."""
    fragments: int
    delay: int

    @classmethod
    def of(cls, config: DilocoConfig) -> Schedule:
        return cls(interval=config.sync_every // config.fragments, fragments=config.fragments, delay=config.delay)

    def fragment(self, outer_step: int) -> int:
        """Which fragment outer step `outer_step` (from 0) synchronises."""
        return outer_step % self.fragments

    def prepares(self, inner_step: int) -> bool:
        """Whether the delta is due after `inner_step` steps since the last completion."""
        return inner_step >= self.interval - self.delay


class StepPace:
    """How long an inner step takes, for a peer that must not miss a deadline by one."""

    def __init__(self, margin_s: float) -> None:
        """`margin_s`: what may pass before a beat tells of a deadline."""
        self._margin_s, self._step_s, self._since = margin_s, 0.0, time.monotonic()

    def restart(self) -> None:
        """What passed since the last step, such as the wait for an outcome, is not the next one's."""
        self._since = time.monotonic()

    def stepped(self) -> None:
        """An inner step has ended."""
        now = time.monotonic()
        self._step_s, self._since = now - self._since, now

    def would_miss(self, left_s: float | None) -> bool:
        """Whether another step may take longer than `left_s`; None: nothing is due."""
        return left_s is not None and left_s < 1.5 * self._step_s + self._margin_s
