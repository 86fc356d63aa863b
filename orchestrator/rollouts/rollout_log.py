"""rollouts/*.jsonl: one object per rollout, for people and for `composer rollouts`.

A training step's file holds the rollouts of its batch. It also holds, with another `status`, those of groups that were
dropped since the batch before. Files are written whole and atomically: a batch that is served again after a crash does
not double its lines. rollouts/failed.jsonl gets each failed rollout as it ends, also before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import append_line, write_atomic
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome
from orchestrator.workers.protocol import MessageRecord, RolloutFailure


def group_lines(step: int, group: FinishedGroup) -> list[dict[str, Any]]:
    """Return the lines of a group's rollouts."""
    status = "trained" if group.outcome is GroupOutcome.READY else group.outcome.value
    return [rollout_line(step, group.plan.source, rollout, status, group.plan.group) for rollout in group.rollouts]


def rollout_line(
    step: int, source: str, rollout: FinishedRollout, status: str, group: int | None = None
) -> dict[str, Any]:
    """Return one rollout as plain JSON values; unknown values are null."""
    versions = None if rollout.version_min is None else [rollout.version_min, rollout.version_max]
    return {
        "step": step,
        "status": status if rollout.failure is None else "failed",
        "source": source,
        "task_id": rollout.task_id,
        "group": group,
        "rollout_id": rollout.rollout_id,
        "seed": rollout.seed,
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
    """Replace the content of `path` by `lines`. Raises OSError."""
    encoder = msgspec.json.Encoder()
    write_atomic(path, b"".join(encoder.encode(line) + b"\n" for line in lines))


def append(path: Path, line: dict[str, Any]) -> None:
    """Append one line. Raises OSError."""
    append_line(path, msgspec.json.encode(line))


def _failure(failure: RolloutFailure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {name: getattr(failure, name) for name in ("kind", "message", "where", "detail")}


def _turn(turn: MessageRecord) -> dict[str, Any]:
    line = msgspec.structs.asdict(turn)
    line["token_count"] = line.pop("num_tokens")
    line["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    return line
