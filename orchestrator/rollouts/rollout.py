"""One rollout from request to reply: its permit, its deadline, its token record.

The one place that opens and takes a gateway record, so that none is left behind however the rollout ends.

What a worker is asked to play, in training and in evaluation: sampling settings, seeds, deadlines in one place.

Bounded concurrency of rollouts, shared by training and evaluation.

    acquire(lane, order) -> waits -> granted lowest order first within its lane -> release

The limit moves (the gateway raises and lowers it with the nodes' load), so it is asked for at each grant. While both
lanes wait, evaluation gets at most `eval_share` of the limit; a lane that waits alone may take all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import DeadlineError
from orchestrator.rollouts.groups import GroupPlan, derive_seed
from orchestrator.rollouts.samples import Generation
from orchestrator.workers.protocol import EVAL, TRAIN, RolloutFailure, RolloutReply, RunRollout

MODEL_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    config: OrchestratorConfig
    gateway_url: str
    """http://host:port/v1"""
    seed: int
    """run.seed."""

    def training(self, plan: GroupPlan, sibling: int, attempt: int) -> RunRollout:
        return self._request(
            plan.source,
            rollout_id=plan.rollout_id(sibling, attempt),
            task_index=plan.task_index,
            taskset=TRAIN,
            seed=plan.rollout_seed(sibling, attempt),
            temperature=self.config.sampling.temperature,
        )

    def evaluation(self, source: str, *, step: int, task_index: int, sample: int, attempt: int) -> RunRollout:
        """The seed does not depend on the step: evaluations differ by their weights alone."""
        name = f"eval{step}-{source}-{task_index}-{sample}" + (f"r{attempt}" if attempt else "")
        return self._request(
            source,
            rollout_id=name,
            task_index=task_index,
            taskset=EVAL,
            seed=derive_seed(self.seed, "eval", source, task_index, sample, attempt),
            temperature=self.config.eval.temperature,
        )

    def _request(
        self, source: str, *, rollout_id: str, task_index: int, taskset: str, seed: int, temperature: float
    ) -> RunRollout:
        settings = next(candidate for candidate in self.config.source if candidate.name == source)
        sampling = self.config.sampling
        return RunRollout(
            rollout_id=rollout_id,
            task_index=task_index,
            model=MODEL_NAME,
            gateway_url=self.gateway_url,
            timeout_s=settings.timeout_s,
            taskset=taskset,
            seed=seed,
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )


class Lane(Enum):
    TRAIN = "train"
    EVAL = "eval"


class Permits:
    def __init__(self, limit: Callable[[], int], eval_share: float) -> None:
        self._limit = limit
        self.eval_share = eval_share
        self.running = {lane: 0 for lane in Lane}
        self._waiting: dict[Lane, list[tuple[int, int, asyncio.Future[None]]]] = {lane: [] for lane in Lane}
        self._ticket = itertools.count()

    @contextlib.asynccontextmanager
    async def hold(self, lane: Lane, order: int) -> AsyncIterator[None]:
        """A place for one rollout; lower `order` goes first."""
        await self._acquire(lane, order)
        try:
            yield
        finally:
            self.running[lane] -= 1
            self.grant()

    def waiting(self, lane: Lane) -> int:
        return sum(not future.done() for _, _, future in self._waiting[lane])

    def grant(self) -> None:
        """Hand out what the limit allows now. Called at each release; call it also when the limit may have risen."""
        limit = max(1, self._limit())
        while sum(self.running.values()) < limit and (lane := self._next_lane(limit)) is not None:
            future = heapq.heappop(self._waiting[lane])[2]
            self.running[lane] += 1
            future.set_result(None)

    async def _acquire(self, lane: Lane, order: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[lane], (order, next(self._ticket), future))
        self.grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.running[lane] -= 1
                self.grant()
            raise

    def _next_lane(self, limit: int) -> Lane | None:
        for waiters in self._waiting.values():
            while waiters and waiters[0][2].done():
                heapq.heappop(waiters)
        train, evaluation = self._waiting[Lane.TRAIN], self._waiting[Lane.EVAL]
        if train and evaluation:
            return Lane.EVAL if self.running[Lane.EVAL] < self.eval_share * limit else Lane.TRAIN
        return Lane.TRAIN if train else Lane.EVAL if evaluation else None


_GRACE_S = 5.0
"""What a worker gets on top of a rollout's own limit to report that the limit was reached."""
_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0


class Pool(Protocol):
    """What is needed of a source's workers (orchestrator/workers/pool.py)."""

    async def run(self, request: RunRollout) -> RolloutReply:
        """Cancelling the awaiting task cancels the rollout. Raises EnvironmentWorkerError when no worker is left."""
        ...


class RecordSource(Protocol):
    """What is needed of the gateway's records (orchestrator/gateway/records.py)."""

    def open(self, rollout_id: str) -> None: ...
    def take(self, rollout_id: str) -> Sequence[Generation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A rollout that came to an end, well or not."""

    reply: RolloutReply
    records: Sequence[Generation]

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None when nothing was sampled."""
        found = [span.version for record in self.records for span in record.version_spans]
        return (min(found), max(found)) if found else None


class RolloutRunner:
    def __init__(self, pools: Mapping[str, Pool], records: RecordSource, permits: Permits) -> None:
        self._pools, self._records, self._permits = pools, records, permits

    async def run(
        self,
        source: str,
        request: RunRollout,
        *,
        lane: Lane,
        order: int,
        on_begin: Callable[[], None] = lambda: None,
    ) -> RolloutResult:
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
        return RolloutResult(reply=reply, records=records)

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
