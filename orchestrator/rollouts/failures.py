"""Failed rollouts: named on the screen and written to disk at once.

dispatch, evaluation --note_try--> log, counts, an event that the launcher shows
                     --note_end--> rollouts/failed.jsonl
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from composer_prime.monitor.events import event
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedRollout
from orchestrator.workers.protocol import RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST = 3
_LOGGED_EVERY = 100
_COUNTED = 100
"""Causes that are counted separately. All others of a kind count as one."""


@dataclass(slots=True, kw_only=True, eq=False)
class FailureLog:
    path: Path
    """rollouts/failed.jsonl of the run."""
    counts: dict[str, int] = field(default_factory=dict, init=False)
    """Failed tries by kind."""
    _tries: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    """Failed tries by cause."""
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

    def note_end(self, step: int, source: str, rollout: FinishedRollout, group: int | None = None) -> None:
        """Write a rollout that failed for good to disk. A full disk costs only the line."""
        try:
            line = rollout_log.rollout_line(step, source, rollout, "failed", group)
            with self._writing:  # Rollouts end in threads of their own.
                rollout_log.append(self.path, {**line, "early": True})  # The step's file gets it too.
        except OSError as error:
            logger.error("failed rollout %s could not be logged: %s", rollout.rollout_id, error)
