"""When which fragment is prepared and completed: H inner steps, P fragments, delay tau (arXiv 2501.18512).

    inner step   1 ........ H/P - tau ........ H/P | 1 ...
                            prepare            complete         fragment = outer step mod P

An outer step is one completed fragment; a sweep is P of them. Only one fragment is under way at a time.
"""

from __future__ import annotations

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
        return cls(
            interval=config.sync_every // config.fragments, fragments=config.fragments, delay=config.delay
        )

    def fragment(self, outer_step: int) -> int:
        """Which fragment outer step `outer_step` (from 0) synchronises."""
        return outer_step % self.fragments

    def prepares(self, inner_step: int) -> bool:
        """Whether the delta is due after `inner_step` steps since the last completion."""
        return inner_step >= self.interval - self.delay
