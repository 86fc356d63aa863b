"""Failed rollouts: named on the screen and written to disk at once; they end a run that cannot work.

dispatch, evaluation --note_try--> log, counts, an event that the launcher shows
                     --note_end--> rollouts/failed.jsonl
dispatch             --note_group--> RolloutError when the first training groups of a source all fail alike
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from composer_prime.console import COMPOSER
from composer_prime.errors import RolloutError
from composer_prime.monitor.events import event
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan
from orchestrator.workers.protocol import RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST = 3
_LOGGED_EVERY = 100
_COUNTED = 100
"""Causes that are counted separately. All others of a kind count as one."""
_TASKS_ALIKE = 2
"""Tasks that must fail by one cause before it may lie in the whole environment."""
_MAY_PASS = ("provider", "interception", "sandbox", "timeout", "worker", "cancelled", "context_overflow", "quarantine")
"""Kinds that may be gone at the next try, or that depend on what the model wrote."""


@dataclass(slots=True)
class _Suspicion:
    """A source of which nothing but one cause of failure is known lately."""

    failure: RolloutFailure
    tasks: set[int] = field(default_factory=set)
    groups: int = 0
    awaited: set[int] | None = None
    """Groups that were open when enough tasks had failed; None until then."""


@dataclass(slots=True, kw_only=True, eq=False)
class FailureLog:
    path: Path
    """rollouts/failed.jsonl of the run."""
    counts: dict[str, int] = field(default_factory=dict, init=False)
    """Failed tries by kind."""
    _tries: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    """Failed tries by cause."""
    _rewarded: set[str] = field(default_factory=set, init=False)
    """Sources of which a rollout got a reward."""
    _suspicions: dict[str, _Suspicion] = field(default_factory=dict, init=False)
    """By source."""
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def note_try(self, source: str, rollout_id: str, failure: RolloutFailure) -> None:
        """Count a failed try. The log gets the first ones of a cause, then every hundredth; counts include all."""
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
        cause = failure.cause if failure.cause in self._tries or len(self._tries) < _COUNTED else (failure.kind, "")
        self._tries[cause] = count = self._tries.get(cause, 0) + 1
        if count <= _LOGGED_FIRST or count % _LOGGED_EVERY == 0:
            about = event(
                "failure",
                where=failure.where,
                cause=failure.message,
                same_as=f"{source}/{'/'.join(cause)}",
                text=f"a rollout of {source!r} failed: {failure.text()}",
                count=count,
            )
            logger.warning(
                "rollout %s failed (number %d of its cause): %s", rollout_id, count, failure.text(), extra=about
            )

    def note_reward(self, source: str) -> None:
        """Record that the environment of `source` can give a reward."""
        self._rewarded.add(source)

    def note_end(self, step: int, source: str, rollout: FinishedRollout, group: int | None = None) -> None:
        """Write a rollout that failed for good to disk. A full disk costs only the line."""
        try:
            line = rollout_log.rollout_line(step, source, rollout, "failed", group)
            with self._writing:  # Rollouts end in threads of their own.
                rollout_log.append(self.path, {**line, "early": True})  # The step's file gets it too.
        except OSError as error:
            logger.error("failed rollout %s could not be logged: %s", rollout.rollout_id, error)

    def note_group(self, plan: GroupPlan, rollouts: Sequence[FinishedRollout], open_groups: Set[int]) -> None:
        """Take in a training group whose rollouts have all ended; `open_groups` of its source have not.

        A few broken tasks may fail long before the first healthy rollout ends. So when the groups of two tasks failed
        alike, the groups then open decide: any that ends otherwise clears the source.
        Raises RolloutError once all of them failed by the same cause too.
        """
        failure = _only_failure(rollouts)
        if failure is None or plan.source in self._rewarded:
            self._suspicions.pop(plan.source, None)
            return
        suspicion = self._suspicions.get(plan.source)
        if suspicion is None or suspicion.failure.cause != failure.cause:
            suspicion = self._suspicions[plan.source] = _Suspicion(failure)
        suspicion.tasks.add(plan.task_index)
        suspicion.groups += 1
        if len(suspicion.tasks) < _TASKS_ALIKE:
            return
        if suspicion.awaited is None:
            suspicion.awaited = set(open_groups)
        suspicion.awaited.discard(plan.group)
        if not suspicion.awaited:
            raise RolloutError(
                f"source {plan.source!r} has given no reward yet, and every try of its last {suspicion.groups} groups "
                f"({len(suspicion.tasks)} tasks) failed alike. Correct the environment "
                f"(`{COMPOSER} rollouts {self.path.parent.parent} --failed` shows them). "
                f"The cause: {suspicion.failure.text()}"
            )


def _only_failure(rollouts: Sequence[FinishedRollout]) -> RolloutFailure | None:
    """Return the failure that all tries share; None where they differ or where it may pass."""
    failures = [failure for rollout in rollouts for failure in [*rollout.failed_attempts, rollout.failure]]
    first = failures[0] if failures else None
    if first is None or first.kind in _MAY_PASS:
        return None
    return first if all(failure is not None and failure.cause == first.cause for failure in failures) else None
