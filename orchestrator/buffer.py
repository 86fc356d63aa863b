"""Finished groups that wait for a batch.

Taken in order of group number, so that data order depends on which groups are ready and on nothing else. What no future
batch accepts is swept out. Groups without advantage are counted here; those with hinted turns (DISTILLED) wait for a
batch to go along with, all others never enter.
"""

from __future__ import annotations

from collections import deque

from orchestrator.groups import FinishedGroup, Outcome

_SHARE_WINDOW = 64


class Buffer:
    def __init__(self) -> None:
        self._ready: dict[int, FinishedGroup] = {}
        self._recent: deque[bool] = deque(maxlen=_SHARE_WINDOW)

    def __len__(self) -> int:
        """Groups that a batch can be made of; those that only go along are not counted."""
        return sum(group.outcome is Outcome.READY for group in self._ready.values())

    @property
    def group_numbers(self) -> list[int]:
        return sorted(self._ready)

    def add(self, group: FinishedGroup) -> None:
        """Take in a READY or DISTILLED group. Raises ValueError when its number is here already."""
        number = group.plan.group
        if number in self._ready:
            raise ValueError(f"group {number} is in the buffer already")
        self._ready[number] = group

    def note(self, outcome: Outcome) -> None:
        """Count an ended group for `filtered_share`."""
        if outcome in (Outcome.READY, Outcome.FILTERED, Outcome.DISTILLED):
            self._recent.append(outcome is not Outcome.READY)

    @property
    def filtered_share(self) -> float | None:
        """Share of the last 64 scored groups that were filtered out; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def sweep(self, oldest: int) -> list[FinishedGroup]:
        """Remove and return the groups that hold a token older than version `oldest`."""
        stale = [group for group in self._ready.values() if group.version_min < oldest]
        for group in stale:
            del self._ready[group.plan.group]
        return stale

    def usable(self, oldest: int, newest: int, outcome: Outcome = Outcome.READY) -> list[int]:
        """Numbers, ascending, of the groups whose tokens are all of versions `oldest`..`newest`."""
        return [
            number
            for number, group in sorted(self._ready.items())
            if group.outcome is outcome and oldest <= group.version_min and group.version_max <= newest
        ]

    def take(self, count: int, oldest: int, newest: int, *, distilled: bool = True) -> list[FinishedGroup] | None:
        """The `count` lowest-numbered usable groups, removed from here; None while there are fewer.

        With them go at most as many DISTILLED groups, where `distilled`. All in order of group number.
        """
        numbers = self.usable(oldest, newest)[:count]
        if len(numbers) < count:
            return None
        numbers += self.usable(oldest, newest, Outcome.DISTILLED)[: count if distilled else 0]
        return [self._ready.pop(number) for number in sorted(numbers)]
