"""The staleness rule as arithmetic, in one place.

    version v     weights after v optimizer steps
    batch N       is trained on weights N-1: a token of version v is N-1-v steps old; accepted: v >= N-1-max_staleness

A rollout that starts while the nodes serve version V can therefore go into batches up to V+1+max_staleness. `places`
lets exactly so many groups be under way that all of them fit into those batches; with max_staleness 0 batch N is made
of groups that began on version N-1, and nothing starts between that batch's last group and the next version.
"""

from __future__ import annotations


def oldest_accepted(step: int, max_staleness: int) -> int:
    """Oldest policy version that batch `step` may hold."""
    return max(0, step - 1 - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int) -> int:
    """Last batch that a rollout begun on `version` may go into."""
    return min(version + 1 + max_staleness, max_steps)


def places(
    *, version: int, formed: int, under_way: int, groups_per_step: int, max_staleness: int, max_steps: int
) -> int:
    """How many more groups may start now (>= 0).

    `version`: what the nodes serve; `formed`: the newest batch that has its groups; `under_way`: groups in flight or in
    the buffer that are not part of a batch yet.
    """
    batches = last_batch(version, max_staleness, max_steps) - formed
    return max(0, batches * groups_per_step - under_way)
