"""One rollout: its request, its permit, its deadline, and the result with its token record.

    RequestFactory -> RunRollout -> RolloutRunner.run: [permit] -> worker -> RolloutResult -> finished_rollout

`RolloutRunner` is the only place that opens and takes a gateway record, so no record is left behind, however the
rollout ends. `Permits` bounds concurrency for training and evaluation together:

    hold(lane, order) -> waits -> granted, lowest order first within its lane -> released

The limit moves with the nodes' load, so the gateway is asked for it at each grant. While both lanes wait, evaluation
gets at most `eval_share` of the limit; a lane that waits alone may take all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import DeadlineError
from composer_prime.run.retry import backoff_s
from composer_prime.wire.types import Sample
from orchestrator.audit.audits import Audits
from orchestrator.gateway.generation import GenerationRecord, RolloutRecords
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import EVAL, TRAIN, RolloutFailure, RolloutReply, RunRollout

MODEL_NAME = "policy"
_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    """Builds what a worker is asked to do: sampling settings, seeds and deadlines."""

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
        self.eval_share = eval_share
        self.running = {lane: 0 for lane in Lane}
        self.shared_s = 0.0
        """How long rollouts of both lanes have run at the same time."""
        self._counted_at = 0.0
        self._limit = limit
        self._waiting: dict[Lane, list[tuple[int, int, asyncio.Future[None]]]] = {lane: [] for lane in Lane}
        """Heaps of (order, ticket, future)."""
        self._ticket = itertools.count()

    @contextlib.asynccontextmanager
    async def hold(self, lane: Lane, order: int) -> AsyncIterator[None]:
        """Hold a permit for one rollout; lower `order` goes first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[lane], (order, next(self._ticket), future))
        self.grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(lane)
            raise
        try:
            yield
        finally:
            self._release(lane)

    def _release(self, lane: Lane) -> None:
        self._count(lane, -1)
        self.grant()

    def _count(self, lane: Lane, change: int) -> None:
        now = time.monotonic()
        if all(self.running.values()):
            self.shared_s += now - self._counted_at
        self._counted_at = now
        self.running[lane] += change

    def waiting(self, lane: Lane) -> int:
        return sum(not future.done() for _, _, future in self._waiting[lane])

    def grant(self) -> None:
        """Grant what the limit allows now. Called at each release; call it also when the limit may have risen."""
        limit = max(1, self._limit())
        while sum(self.running.values()) < limit and (lane := self._next_lane(limit)) is not None:
            future = heapq.heappop(self._waiting[lane])[2]
            self._count(lane, 1)
            future.set_result(None)

    def _next_lane(self, limit: int) -> Lane | None:
        for waiters in self._waiting.values():
            while waiters and waiters[0][2].done():
                heapq.heappop(waiters)
        train, evaluation = self._waiting[Lane.TRAIN], self._waiting[Lane.EVAL]
        if train and evaluation:
            return Lane.EVAL if self.running[Lane.EVAL] < self.eval_share * limit else Lane.TRAIN
        return Lane.TRAIN if train else Lane.EVAL if evaluation else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A rollout that ended, with or without success."""

    reply: RolloutReply
    records: Sequence[GenerationRecord]

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None when nothing was sampled."""
        versions = [span.version for record in self.records for span in record.version_spans]
        return (min(versions), max(versions)) if versions else None


@dataclass(frozen=True, slots=True)
class RolloutRunner:
    pools: Mapping[str, WorkerPool]
    """Environment workers by source."""
    records: RolloutRecords
    permits: Permits
    audits: Audits | None = None
    """None where answers are not audited."""
    grace_s: float = 5.0
    """What a worker gets beyond a rollout's own limit to report that the limit was reached."""

    async def run(
        self,
        source: str,
        request: RunRollout,
        *,
        lane: Lane,
        order: int,
        oldest_version: int = 0,
        on_begin: Callable[[], None] = lambda: None,
    ) -> RolloutResult:
        """Run `request` on a worker of `source`. A rollout past its deadline is a failed reply, not an exception.

        Only nodes with `oldest_version` or newer weights answer it. Calls `on_begin` once the rollout holds its permit.
        A rollout whose audits fail is a failed one; it waits for them without its permit.
        Raises EnvironmentWorkerError when no worker is left.
        """
        async with self.permits.hold(lane, order):
            on_begin()
            self.records.open(request.rollout_id, oldest_version)
            try:
                reply = await self._within_deadline(source, request)
            except BaseException:
                if self.audits is not None:
                    self.audits.forget(request.rollout_id)
                raise
            finally:
                records = self.records.take(request.rollout_id)
        objection = await self.audits.cleared(request.rollout_id) if self.audits is not None else None
        if objection is not None:
            reply = _failed(request, "audit", objection)
        return RolloutResult(reply=reply, records=records)

    async def _within_deadline(self, source: str, request: RunRollout) -> RolloutReply:
        deadline_s, loop = request.timeout_s + self.grace_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                return await self.pools[source].run(
                    request, on_begin=lambda: deadline.reschedule(loop.time() + deadline_s)
                )
        except DeadlineError as error:
            return _failed(request, "worker", str(error))
        except TimeoutError:
            return _failed(request, "timeout", f"the worker gave no reply within {deadline_s:.0f} s")


def _failed(request: RunRollout, kind: str, message: str) -> RolloutReply:
    return RolloutReply(
        rollout_id=request.rollout_id,
        task_id=f"task-{request.task_index}",
        reward=None,
        error=RolloutFailure(kind=kind, message=message, retryable=True),
    )


def retry_pause_s(attempt: int) -> float:
    """Return the seconds from the end of failed try number `attempt` (from 0) to the next try."""
    return backoff_s(attempt, first_s=_RETRY_S, longest_s=_LONGEST_RETRY_S)


def score_failure(result: RolloutResult) -> RolloutFailure | None:
    """Return why a rollout has no usable reward; None when it has one. A reward of NaN is a failed verifier."""
    reply = result.reply
    if reply.error is not None:
        return reply.error
    if reply.reward is None or not math.isfinite(reply.reward):
        message = f"the environment gave the reward {reply.reward}; a finite number is needed"
        return RolloutFailure(kind="no_reward", message=message, retryable=True)
    return None


def finished_rollout(
    result: RolloutResult,
    *,
    sibling: int,
    seed: int,
    samples: list[Sample],
    failure: RolloutFailure | None,
    earlier: list[RolloutFailure],
    turn_nodes: Sequence[str] = (),
) -> FinishedRollout:
    """Return the rollout as data. `failure`, from the reply or from compiling its tokens, leaves it without a reward.

    `earlier`: failures of this sibling's tries before this one. `turn_nodes`: the node of each sampled turn.
    """
    reply, versions = result.reply, result.versions
    nodes = list(dict.fromkeys(record.node_id for record in result.records))
    return FinishedRollout(
        rollout_id=reply.rollout_id,
        sibling=sibling,
        task_id=reply.task_id,
        seed=seed,
        reward=None if failure is not None else reply.reward,
        parts=reply.parts,
        metrics=reply.metrics,
        turns=reply.turns,
        sessions=reply.sessions,
        stop_reason=reply.stop_reason,
        truncated=reply.truncated,
        failure=failure,
        failed_attempts=list(earlier),
        verdict=reply.verdict,
        version_min=versions[0] if versions else None,
        version_max=versions[1] if versions else None,
        prompt_tokens=sum(sample.num_tokens - sample.num_trained for sample in samples) if samples else None,
        sampled_tokens=sum(len(record.completion_ids) for record in result.records),
        cpu_s=reply.cpu_s,
        wall_s=reply.wall_s,
        nodes=nodes,
        turn_nodes=[nodes.index(node_id) for node_id in turn_nodes],
    )
