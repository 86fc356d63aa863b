"""One rollout from request to reply: its permit, its deadline, its token record.

The one place that opens and takes a gateway record, so that none is left behind however the rollout ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from composer_prime.errors import DeadlineError
from orchestrator.compile import Generation
from orchestrator.permits import Lane, Permits
from orchestrator.workers.protocol import RolloutFailure, RolloutReply, RunRollout

_GRACE_S = 5.0
"""What a worker gets on top of a rollout's own limit to report that the limit was reached."""
_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0


class Pool(Protocol):
    """What is needed of a source's workers (orchestrator/workers/pool.py)."""

    async def run(self, request: RunRollout) -> RolloutReply:
        """Cancelling the awaiting task cancels the rollout. Raises EnvironmentWorkerError when no worker is left."""
        ...


class Records(Protocol):
    """What is needed of the gateway's records (orchestrator/gateway/records.py)."""

    def open(self, rollout_id: str) -> None: ...
    def take(self, rollout_id: str) -> Sequence[Generation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A rollout that came to an end, well or not."""

    reply: RolloutReply
    records: Sequence[Generation]

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None when nothing was sampled."""
        found = [span.version for record in self.records for span in record.version_spans]
        return (min(found), max(found)) if found else None


class RolloutRunner:
    def __init__(self, pools: Mapping[str, Pool], records: Records, permits: Permits) -> None:
        self._pools, self._records, self._permits = pools, records, permits

    async def run(
        self,
        source: str,
        request: RunRollout,
        *,
        lane: Lane,
        order: int,
        on_begin: Callable[[], None] = lambda: None,
    ) -> Played:
        """Play `request` on a worker of `source`. A rollout past its deadline is a failed reply, not an exception.

        `on_begin` is called once the rollout has its place among the running ones. Raises EnvironmentWorkerError.
        """
        async with self._permits.hold(lane, order):
            on_begin()
            self._records.open(request.rollout_id)
            try:
                reply = await self._within_deadline(source, request)
            finally:
                records = self._records.take(request.rollout_id)
        return Played(reply=reply, records=records)

    async def _within_deadline(self, source: str, request: RunRollout) -> RolloutReply:
        deadline_s = request.timeout_s + _GRACE_S
        try:
            async with asyncio.timeout(deadline_s):
                return await self._pools[source].run(request)
        except DeadlineError as error:
            return _failed(request, "worker", str(error))
        except TimeoutError:
            return _failed(request, "timeout", f"the worker gave no reply within {deadline_s:.0f} s")


def retry_pause_s(attempt: int) -> float:
    """Seconds from the end of failed try number `attempt` (from 0) to the next: what broke may need them to mend."""
    return min(_RETRY_S * 2**attempt, _LONGEST_RETRY_S)


def _failed(request: RunRollout, kind: str, message: str) -> RolloutReply:
    return RolloutReply(
        rollout_id=request.rollout_id,
        task_id=f"task-{request.task_index}",
        reward=None,
        error=RolloutFailure(kind=kind, message=message, retryable=True),
    )
