"""rollouts/*.jsonl: one object per rollout, for people and for `composer rollouts`.

A step's file holds its batch and, with another `status`, groups dropped since the batch before. It is written whole, so
a batch that is served again after a crash does not double its lines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.monitor.events import event
from composer_prime.run.run_dir import append_line, write_atomic
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome
from orchestrator.workers.pool import MessageRecord, RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST = 3
_LOGGED_EVERY = 100
_COUNTED = 100
"""Causes counted separately. Others of a kind count as one."""


def group_lines(step: int, group: FinishedGroup) -> list[dict[str, Any]]:
    status = "trained" if group.outcome is GroupOutcome.READY else group.outcome.value
    return [rollout_line(step, group.plan.source, rollout, status, group.plan.group) for rollout in group.rollouts]


def rollout_line(
    step: int, source: str, rollout: FinishedRollout, status: str, group: int | None = None
) -> dict[str, Any]:
    """Return plain JSON values; unknown ones are null."""
    versions = None if rollout.version_min is None else [rollout.version_min, rollout.version_max]
    return {
        "step": step,
        "status": status if rollout.failure is None else "failed",
        "source": source,
        "task_id": rollout.task_id,
        "group": group,
        "rollout_id": rollout.rollout_id,
        "seed": rollout.seed,
        "expected": next((session.expected for session in rollout.sessions if session.trainable), None),
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "parts": rollout.parts,
        "metrics": rollout.metrics,
        "policy_versions": versions,
        "nodes": rollout.nodes,
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "error": _failure(rollout.failure),
        "failed_attempts": [_failure(failure) for failure in rollout.failed_attempts],
        "verdict": rollout.verdict or None,
        "tools": next((session.tools for session in rollout.sessions if session.trainable), []),
        "turns": [_turn(turn) for turn in rollout.turns],
        "cost": {
            "prompt_tokens": rollout.prompt_tokens,
            "sampled_tokens": rollout.sampled_tokens,
            "wall_s": rollout.wall_s,
        },
    }


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace the content of `path`. Raises OSError."""
    write_atomic(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _failure(failure: RolloutFailure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {name: getattr(failure, name) for name in ("kind", "message", "where", "detail")}


def _turn(turn: MessageRecord) -> dict[str, Any]:
    line = msgspec.structs.asdict(turn)
    line["token_count"] = line.pop("num_tokens")
    if not turn.tokens:
        del line["tokens"]
    line["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    return line


@dataclass(slots=True, kw_only=True, eq=False)
class FailureLog:
    """Names failed rollouts at once."""

    path: Path
    _tries: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def note_try(self, source: str, rollout_id: str, failure: RolloutFailure) -> None:
        """Log the first tries of a cause, then every hundredth."""
        cause = failure.cause
        if cause not in self._tries and len(self._tries) >= _COUNTED:
            cause = failure.kind, ""
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
        """Write a rollout that failed for good. A full disk costs only the line."""
        try:
            line = rollout_line(step, source, rollout, "failed", group)
            with self._writing:  # Rollouts end in threads of their own.
                append_line(self.path, msgspec.json.encode({**line, "early": True}))  # The step's file gets it too.
        except OSError as error:
            logger.error("failed rollout %s could not be logged: %s", rollout.rollout_id, error)
