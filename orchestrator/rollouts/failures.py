"""Failed rollouts: named on the screen and written to disk at once; they end a run that cannot work.

dispatch, evaluation --note_try--> log, counts, a line of metrics.jsonl that the launcher shows
                     --note_end--> rollouts/failed.jsonl
                     --note_group--> RolloutError when the first groups of a source fail alike
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from composer_prime.errors import RolloutError
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedRollout
from orchestrator.workers.protocol import RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST = 3
_LOGGED_EVERY = 100
_SHOWN = 5
"""Causes that the screen names; `composer rollouts RUN --failed` has all."""
_COUNTED = 100
"""Causes that are told apart. Any further ones of a kind count as one."""
_GROUPS_ALIKE = 2
_MAY_PASS = ("provider", "interception", "sandbox", "timeout", "worker", "cancelled", "context_overflow")
"""Kinds that may be gone at the next try, or that depend on what the model wrote."""


@dataclass(slots=True, kw_only=True, eq=False)
class FailureLog:
    path: Path
    """rollouts/failed.jsonl of the run."""
    show: Callable[[str], None]
    """Gets a line for the user when a new cause appears."""
    counts: dict[str, int] = field(default_factory=dict, init=False)
    """Failed tries by kind."""
    _tries: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    """Failed tries by cause."""
    _rewarded: set[str] = field(default_factory=set, init=False)
    """Sources of which a rollout got a reward."""
    _groups_alike: dict[tuple[str, str, str], int] = field(default_factory=dict, init=False)
    """By source and cause: groups whose every try failed by it."""

    def note_try(self, source: str, rollout_id: str, failure: RolloutFailure) -> None:
        """Count a failed try. The log gets the first ones of a cause, then every hundredth; counts include all."""
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
        cause = failure.cause if failure.cause in self._tries or len(self._tries) < _COUNTED else (failure.kind, "")
        self._tries[cause] = count = self._tries.get(cause, 0) + 1
        if count <= _LOGGED_FIRST or count % _LOGGED_EVERY == 0:
            logger.warning("rollout %s failed (number %d of its cause): %s", rollout_id, count, failure.text())
        if count == 1 and len(self._tries) <= _SHOWN:
            self.show(f"a rollout of {source!r} failed: {failure.text()}")

    def note_reward(self, source: str) -> None:
        """Record that the environment of `source` can give a reward."""
        self._rewarded.add(source)

    def note_end(self, step: int, source: str, rollout: FinishedRollout, group: int | None = None) -> None:
        """Write a rollout that failed for good to disk. A full disk costs only the line."""
        try:
            line = rollout_log.rollout_line(step, source, rollout, "failed", group)
            rollout_log.append(self.path, {**line, "early": True})  # The step's file gets it too.
        except OSError as error:
            logger.error("failed rollout %s could not be logged: %s", rollout.rollout_id, error)

    def note_group(self, source: str, rollouts: list[FinishedRollout]) -> None:
        """Take in a group, or the rollouts of one held-out task, whose rollouts have all ended.

        Raises RolloutError when every try of the source's first groups failed by one cause.
        """
        failures = [failure for rollout in rollouts for failure in [*rollout.failed_attempts, rollout.failure]]
        first = next((failure for failure in failures if failure is not None), None)
        if first is None or first.kind in _MAY_PASS or source in self._rewarded:
            return
        if any(failure is None or failure.cause != first.cause for failure in failures):
            return
        key = (source, *first.cause)
        self._groups_alike[key] = count = self._groups_alike.get(key, 0) + 1
        if count >= _GROUPS_ALIKE:
            raise RolloutError(
                f"source {source!r} has given no reward yet, and every try of {count} groups failed alike. Correct "
                f"the environment (`composer rollouts {self.path.parent.parent} --failed` shows them). "
                f"The cause: {first.text()}"
            )
