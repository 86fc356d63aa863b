"""The staleness rule as arithmetic, in one place.

    version v     weights after v optimizer steps; in a joint run ([diloco]) the global model after v full sweeps
    batch N       is trained on the newest version after step N-1, call it n: a token of version v is n-v versions old;
                  accepted: v >= n-max_staleness

A rollout that starts while the nodes serve version V can therefore go into batches up to V+1+max_staleness; where a
version stands for several steps, into all of theirs. `places` lets exactly so many groups be under way that all of them
fit into those batches; with max_staleness 0 batch N is made of groups that began on version N-1, and nothing starts
between that batch's last group and the next version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What is known of policy versions once step `trained` is taken, and what is planned."""

    trained: int = 0
    newest: int = 0
    """Published version."""
    since: int = 0
    """The step that it was published after."""
    period: int = 1
    """Steps from one version to the next, as planned: 1, or diloco.sync_every."""

    def after(self, step: int, version: int) -> Versions:
        """Once `step` is taken and `version` is the newest."""
        return replace(self, trained=step, newest=version, since=self.since if version == self.newest else step)

    def at(self, step: int, saved: Versions | None) -> Versions:
        """As a checkpoint of `step` has them; None where version = step."""
        known = saved or Versions(trained=step, newest=step, since=step)
        return replace(known, period=self.period)

    def before(self, batch: int) -> int:
        """Newest version when `batch` (from trained + 1) begins; one that is overdue is not counted on."""
        return self.newest + self._planned(batch - 1) - self._planned(self.trained)

    def last_batch(self, version: int) -> int:
        """Last batch that begins with `version` or an older one as the newest."""
        periods = version - self.newest + self._planned(self.trained)
        return self.since + (periods + 1) * self.period

    def _planned(self, step: int) -> int:
        return (step - self.since) // self.period


EVERY_STEP = Versions()
"""A run of its own: version v after step v."""


def oldest_accepted(step: int, max_staleness: int, versions: Versions = EVERY_STEP) -> int:
    """Oldest policy version that batch `step` may hold."""
    return max(0, versions.before(step) - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int, versions: Versions = EVERY_STEP) -> int:
    """Last batch that a rollout begun on `version` may go into."""
    return min(versions.last_batch(version + max_staleness), max_steps)


def places(
    *,
    version: int,
    formed: int,
    under_way: int,
    groups_per_step: int,
    max_staleness: int,
    max_steps: int,
    versions: Versions = EVERY_STEP,
) -> int:
    """How many more groups may start now (>= 0).

    `version`: what the nodes serve; `formed`: the newest batch that has its groups; `under_way`: groups in flight or in
    the buffer that are not part of a batch yet.
    """
    batches = last_batch(version, max_staleness, max_steps, versions) - formed
    return max(0, batches * groups_per_step - under_way)
