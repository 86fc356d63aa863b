"""Finished groups that wait for a batch, and the staleness rule as arithmetic.

Groups are taken in order of group number: data order depends on which groups are ready and on nothing else. Groups that
no future batch accepts are swept out. Groups without advantage are counted here. Those with hinted turns (DISTILLED)
wait for a batch to join; all others never enter.

The staleness rule:

    version v     weights after v optimizer steps; in a joint run ([diloco]) the global model after v full sweeps
    batch N       is trained on the newest version after step N-1, call it n: a token of version v is n-v versions old;
                  accepted: v >= n-max_staleness

A rollout that starts while the nodes serve version V can therefore go into batches up to V+1+max_staleness. When a
version covers several steps, the rollout can go into the batches of all these steps. `free_slots` lets exactly as many
groups run as fit into the batches that accept them. With max_staleness 0, batch N holds groups that began on version
N-1, and nothing starts between that batch's last group and the next version.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome

_SHARE_WINDOW = 64
"""Scored groups that `filtered_share` looks back on."""


class Buffer:
    def __init__(self) -> None:
        self._ready: dict[int, FinishedGroup] = {}
        self._recent: deque[bool] = deque(maxlen=_SHARE_WINDOW)

    def __len__(self) -> int:
        """Return the number of groups that a batch can be made of; DISTILLED groups do not count."""
        return sum(group.outcome is GroupOutcome.READY for group in self._ready.values())

    @property
    def group_numbers(self) -> list[int]:
        return sorted(self._ready)

    def add(self, group: FinishedGroup) -> None:
        """Take in a READY or DISTILLED group. Raises ValueError when its number is here already."""
        number = group.plan.group
        if number in self._ready:
            raise ValueError(f"group {number} is in the buffer already")
        self._ready[number] = group

    def note(self, outcome: GroupOutcome) -> None:
        """Count an ended group for `filtered_share`."""
        if outcome in (GroupOutcome.READY, GroupOutcome.FILTERED, GroupOutcome.DISTILLED):
            self._recent.append(outcome is not GroupOutcome.READY)

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

    def usable(self, oldest: int, newest: int, outcome: GroupOutcome = GroupOutcome.READY) -> list[int]:
        """Return the numbers, ascending, of the groups whose tokens are all of versions `oldest` to `newest`."""
        return [
            number
            for number, group in sorted(self._ready.items())
            if group.outcome is outcome and oldest <= group.version_min and group.version_max <= newest
        ]

    def take(self, count: int, oldest: int, newest: int, *, with_distilled: bool = True) -> list[FinishedGroup] | None:
        """Remove and return the `count` lowest-numbered usable groups; None while there are fewer.

        With them go at most as many DISTILLED groups if `with_distilled`. All are in order of group number.
        """
        numbers = self.usable(oldest, newest)[:count]
        if len(numbers) < count:
            return None
        numbers += self.usable(oldest, newest, GroupOutcome.DISTILLED)[: count if with_distilled else 0]
        return [self._ready.pop(number) for number in sorted(numbers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The policy versions known once step `trained` is taken, and those planned."""

    trained: int = 0
    newest: int = 0
    """Published version."""
    since: int = 0
    """The step that it was published after."""
    period: int = 1
    """Planned steps from one version to the next: 1, or diloco.sync_every."""

    def after(self, step: int, version: int) -> Versions:
        """Return the versions once `step` is taken and `version` is the newest."""
        return replace(self, trained=step, newest=version, since=self.since if version == self.newest else step)

    def at(self, step: int, saved: Versions | None) -> Versions:
        """Return the versions of a checkpoint of `step`; `saved` is None where version = step."""
        versions = saved or Versions(trained=step, newest=step, since=step)
        return replace(versions, period=self.period)

    def before(self, batch: int) -> int:
        """Return the newest version when `batch` (from trained + 1) begins; an overdue version does not count."""
        return self.newest + self._planned(batch - 1) - self._planned(self.trained)

    def last_batch(self, version: int) -> int:
        """Return the last batch that begins with `version` or an older one as the newest."""
        periods = version - self.newest + self._planned(self.trained)
        return self.since + (periods + 1) * self.period

    def _planned(self, step: int) -> int:
        return (step - self.since) // self.period


EVERY_STEP = Versions()
"""A run without [diloco]: version v after step v."""


def oldest_accepted(step: int, max_staleness: int, versions: Versions = EVERY_STEP) -> int:
    """Return the oldest policy version that batch `step` may hold."""
    return max(0, versions.before(step) - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int, versions: Versions = EVERY_STEP) -> int:
    """Return the last batch that a rollout begun on `version` may go into."""
    return min(versions.last_batch(version + max_staleness), max_steps)


def free_slots(
    *,
    version: int,
    formed: int,
    under_way: int,
    groups_per_step: int,
    max_staleness: int,
    max_steps: int,
    versions: Versions = EVERY_STEP,
) -> int:
    """Return how many more groups may start now, at least 0.

    `version`: what the nodes serve. `formed`: the newest batch that has its groups. `under_way`: groups in flight or in
    the buffer that are not part of a batch yet.
    """
    batches = last_batch(version, max_staleness, max_steps, versions) - formed
    return max(0, batches * groups_per_step - under_way)
