"""One rollout: its request, its permit, its deadline, and the result with its token record.

    RequestFactory -> RunRollout -> RolloutRunner.run: [permit] -> worker -> RolloutResult -> finished_rollout

`RolloutRunner` is the only place that opens and takes a gateway record, so no record is left behind, however the
rollout ends. `Permits` bounds concurrency for training and evaluation together:

    hold(taskset, order) -> waits -> granted, lowest order first within its task set -> released

The limit moves with the nodes' load, so the gateway is asked for it at each grant. While both task sets wait,
evaluation gets at most `eval_share` of the limit; one that waits alone may take all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import DeadlineError
from composer_prime.run.retry import backoff_s
from composer_prime.wire.answer import POLICY
from composer_prime.wire.types import Sample
from orchestrator.gateway.generation import GenerationRecord, RolloutRecords
from orchestrator.rollouts.failures import FailureLog
from orchestrator.rollouts.groups import CompiledRollout, FinishedRollout, GroupPlan, derive_seed
from orchestrator.swarm import Audits
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import EVAL, TRAIN, RolloutFailure, RolloutReply, RunRollout

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
        )

    def _request(self, source: str, *, rollout_id: str, task_index: int, taskset: str, seed: int) -> RunRollout:
        settings = next(candidate for candidate in self.config.source if candidate.name == source)
        sampling = self.config.sampling
        return RunRollout(
            rollout_id=rollout_id,
            task_index=task_index,
            model=POLICY,
            gateway_url=self.gateway_url,
            timeout_s=settings.timeout_s,
            taskset=taskset,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )


EVAL_SHARE = 0.25
"""Share of the permits for evaluation while training rollouts wait."""


class Permits:
    """The rollouts that may run at once, by task set: TRAIN or EVAL."""

    def __init__(self, limit: int, eval_share: float = EVAL_SHARE) -> None:
        """`limit`: rollouts that may run at a time. `eval_share` of them may evaluate while others train."""
        self.eval_share = eval_share
        self.running: dict[str, int] = {TRAIN: 0, EVAL: 0}
        self.limit = limit
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {TRAIN: [], EVAL: []}
        """Heaps of (order, ticket, future)."""
        self._ticket = itertools.count()

    @contextlib.asynccontextmanager
    async def hold(self, taskset: str, order: int) -> AsyncIterator[None]:
        """Hold a permit for one rollout; lower `order` goes first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[taskset], (order, next(self._ticket), future))
        self.grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(taskset)
            raise
        try:
            yield
        finally:
            self._release(taskset)

    def _release(self, taskset: str) -> None:
        self.running[taskset] -= 1
        self.grant()

    def waiting(self, taskset: str) -> int:
        return sum(not future.done() for _, _, future in self._waiting[taskset])

    def grant(self) -> None:
        """Grant what the limit allows now."""
        while sum(self.running.values()) < self.limit and (taskset := self._next_taskset()) is not None:
            future = heapq.heappop(self._waiting[taskset])[2]
            self.running[taskset] += 1
            future.set_result(None)

    def _next_taskset(self) -> str | None:
        for waiters in self._waiting.values():
            while waiters and waiters[0][2].done():
                heapq.heappop(waiters)
        train, evaluation = self._waiting[TRAIN], self._waiting[EVAL]
        if train and evaluation:
            return EVAL if self.running[EVAL] < self.eval_share * self.limit else TRAIN
        return TRAIN if train else EVAL if evaluation else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A rollout that ended, with or without success."""

    reply: RolloutReply
    records: Sequence[GenerationRecord]

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None when nothing was sampled."""
        versions = [span.version for record in self.records for span in record.answer.version_spans]
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
        order: int,
        oldest_version: int = 0,
        on_begin: Callable[[], None] = lambda: None,
    ) -> RolloutResult:
        """Run `request` on a worker of `source`. A rollout past its deadline is a failed reply, not an exception.

        Only nodes with `oldest_version` or newer weights answer it. Calls `on_begin` once the rollout holds its permit.
        A rollout whose audits fail is a failed one; it waits for them without its permit.
        Raises EnvironmentWorkerError when no worker is left.
        """
        async with self.permits.hold(request.taskset, order):
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
            reply = request.failed("audit", objection)
        return RolloutResult(reply=reply, records=records)

    async def _within_deadline(self, source: str, request: RunRollout) -> RolloutReply:
        deadline_s, loop = request.timeout_s + self.grace_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                return await self.pools[source].run(
                    request, on_begin=lambda: deadline.reschedule(loop.time() + deadline_s)
                )
        except DeadlineError as error:
            return request.failed("worker", str(error))
        except TimeoutError:
            return request.failed("timeout", f"the worker gave no reply within {deadline_s:.0f} s")


def retry_pause_s(attempt: int) -> float:
    """Return the seconds from the end of failed try number `attempt` (from 0) to the next try."""
    return backoff_s(attempt, first_s=_RETRY_S, longest_s=_LONGEST_RETRY_S)


async def play_with_retries(
    play: Callable[[int, list[RolloutFailure]], Awaitable[CompiledRollout]],
    *,
    source: str,
    max_retries: int,
    failures: FailureLog,
    step: Callable[[], int],
    group: int | None = None,
) -> CompiledRollout:
    """Return the first good try of a rollout, or its last failed one, and tell `failures` how it ended.

    `play` gets the number of the try, from 0, and the failures of those before. `step`: what a failure is filed under.
    """
    earlier: list[RolloutFailure] = []
    while True:
        rollout, samples = await play(len(earlier), earlier)
        if rollout.failure is None:
            return rollout, samples
        failures.note_try(source, rollout.rollout_id, rollout.failure)
        if not rollout.failure.retryable or len(earlier) == max_retries:
            await asyncio.to_thread(failures.note_end, step(), source, rollout, group)
            return rollout, samples
        await asyncio.sleep(retry_pause_s(len(earlier)))
        earlier.append(rollout.failure)


def score_failure(result: RolloutResult) -> RolloutFailure | None:
    """Return why a rollout has no usable reward; None when it has one. A reward of NaN is a failed verifier."""
    reply = result.reply
    if reply.failure is not None:
        return reply.failure
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
    earlier: Sequence[RolloutFailure] = (),
    turn_nodes: Sequence[str] = (),
) -> FinishedRollout:
    """Return the rollout as data. `failure`, from the reply or from compiling its tokens, leaves it without a reward.

    `earlier`: failures of this sibling's tries before this one. `turn_nodes`: the node of each sampled turn.
    """
    versions = result.versions
    nodes = list(dict.fromkeys(record.answer.node_id for record in result.records))
    reply: dict[str, Any] = msgspec.structs.asdict(result.reply) | {"failure": failure}
    if failure is not None:
        reply["reward"] = None
    return FinishedRollout(
        **reply,
        sibling=sibling,
        seed=seed,
        failed_attempts=list(earlier),
        version_min=versions[0] if versions else None,
        version_max=versions[1] if versions else None,
        prompt_tokens=sum(sample.num_tokens - sample.num_trained for sample in samples) if samples else None,
        sampled_tokens=sum(len(record.answer) for record in result.records),
        nodes=nodes,
        turn_nodes=[nodes.index(node_id) for node_id in turn_nodes],
    )
