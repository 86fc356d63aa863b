"""Groups in flight: G rollouts each, with retries, a deadline for each rollout, and cancellation of stale groups.

    start(plan, on_end) -> group task -> G sibling tasks -> [permit] -> worker -> compile (thread)
                              |              +-> failed: a fresh try, at most max_retries
                              +-> all siblings ended -> hints -> advantages, filter (thread) -> on_end(group)

Groups never wait for one another. A sibling waits at most for a permit and for its rollout's deadline. An error that is
not a rollout's own (workers gone for good) goes to `on_error` and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.policy import AdvantageScaling
from composer_prime.errors import RolloutError
from composer_prime.wire.types import Sample
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.behavior import BehaviorRewards
from orchestrator.rollouts.group_scoring import score_group, worth_hinting
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.rollouts.rollout import (
    Lane,
    RequestFactory,
    RolloutResult,
    RolloutRunner,
    finished_rollout,
    retry_pause_s,
    score_failure,
)
from orchestrator.rollouts.samples import compile_rollout, numbered_turns
from orchestrator.workers.protocol import RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST = 20
_LOGGED_EVERY = 100


@dataclass(slots=True, kw_only=True, eq=False)
class GroupInFlight:
    plan: GroupPlan
    task: asyncio.Task[None] | None = None
    siblings: list[asyncio.Task[tuple[FinishedRollout, list[Sample]]]] = field(default_factory=list)
    version: int | None = None
    """Policy version that the nodes served when the first rollout began; None before that."""
    since: float = field(default_factory=time.monotonic)
    running: int = 0
    """Rollouts that hold a permit."""
    stale: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    config: OrchestratorConfig
    scaling: AdvantageScaling
    runner: RolloutRunner
    requests: RequestFactory
    serving_version: Callable[[], int]
    """Returns the oldest policy version that a rollout begun now may be sampled with."""
    on_error: Callable[[BaseException], None]
    behavior: BehaviorRewards | None = None
    hints: HintStage | None = None
    wants_hints: Callable[[], bool] = lambda: True
    """Returns whether a hint made now may still be trained on."""
    in_flight: dict[int, GroupInFlight] = field(default_factory=dict, init=False)
    """By group number."""
    retries: int = field(default=0, init=False)
    failures: dict[str, int] = field(default_factory=dict, init=False)
    """Failed tries by kind."""
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="compile"), init=False
    )

    def start(self, plan: GroupPlan, on_end: Callable[[FinishedGroup], None]) -> None:
        """Run the group of `plan`; `on_end` gets it once all its rollouts have ended."""
        group = GroupInFlight(plan=plan)
        self.in_flight[plan.group] = group
        group.task = asyncio.create_task(self._run_group(group, on_end), name=plan.group_id)

    def cancel_stale(self, oldest: int) -> list[int]:
        """Cancel the groups that began on a version older than `oldest` and return their numbers.

        They reach their `on_end` as STALE.
        """
        stale = [
            group
            for group in self.in_flight.values()
            if group.version is not None and group.version < oldest and not group.stale
        ]
        for group in stale:
            group.stale = True
            for sibling in group.siblings:
                sibling.cancel()
        return [group.plan.group for group in stale]

    @property
    def running(self) -> int:
        """Rollouts that hold a permit."""
        return sum(group.running for group in self.in_flight.values())

    def oldest_s(self) -> float | None:
        """Return the age in seconds of the group that started first; None without a group in flight."""
        return max((time.monotonic() - group.since for group in self.in_flight.values()), default=None)

    def metrics(self) -> dict[str, float]:
        """Return retries, what hints cost so far, and failed tries by kind."""
        return {
            "rollouts/retries": self.retries,
            **(self.hints.metrics() if self.hints is not None else {}),
            **{f"rollouts/failed/{kind}": count for kind, count in sorted(self.failures.items())},
        }

    async def close(self) -> None:
        """Cancel all groups; no `on_end` is called any more."""
        tasks = [group.task for group in self.in_flight.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.in_flight.clear()
        self._threads.shutdown(wait=True)

    async def _run_group(self, group: GroupInFlight, on_end: Callable[[FinishedGroup], None]) -> None:
        plan = group.plan
        group.siblings = [
            asyncio.create_task(self._sibling(group, sibling), name=f"{plan.group_id}-{sibling}")
            for sibling in range(plan.size)
        ]
        try:
            results = await asyncio.gather(*group.siblings, return_exceptions=True)
            errors = [error for error in results if isinstance(error, BaseException)]
            fatal = next((error for error in errors if not isinstance(error, asyncio.CancelledError)), None)
            if fatal is not None:
                raise fatal
            ended = [result for result in results if not isinstance(result, BaseException)]
            on_end(await self._finish(group, ended))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.on_error(error)
        finally:
            for sibling in group.siblings:
                sibling.cancel()
            self.in_flight.pop(plan.group, None)

    async def _finish(self, group: GroupInFlight, ended: list[tuple[FinishedRollout, list[Sample]]]) -> FinishedGroup:
        """Add hints and advantages to the rollouts that ended."""
        if group.stale:
            rollouts = [rollout for rollout, _ in ended]
            return FinishedGroup(plan=group.plan, outcome=GroupOutcome.STALE, rollouts=rollouts)
        if self.hints is not None and self.wants_hints() and worth_hinting(ended, self.config, self.scaling):
            ended = await self.hints.attach(ended)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, score_group, group.plan, ended, self.config, self.scaling)

    async def _sibling(self, group: GroupInFlight, sibling: int) -> tuple[FinishedRollout, list[Sample]]:
        """Return the sibling's first good try, or its last failed one."""
        earlier: list[RolloutFailure] = []
        for attempt in range(self.config.max_retries + 1):
            rollout, samples = await self._attempt(group, sibling, attempt, earlier)
            if rollout.failure is None:
                break
            self._count(rollout.rollout_id, rollout.failure)
            if not rollout.failure.retryable or attempt == self.config.max_retries:
                break
            earlier.append(rollout.failure)
            self.retries += 1
            await asyncio.sleep(retry_pause_s(attempt))
        return rollout, samples

    def _count(self, rollout_id: str, failure: RolloutFailure) -> None:
        """Count a failed try. The log gets the first ones of a kind, then every hundredth; metrics get all."""
        self.failures[failure.kind] = count = self.failures.get(failure.kind, 0) + 1
        if count <= _LOGGED_FIRST or count % _LOGGED_EVERY == 0:
            logger.warning("rollout %s failed (%s, number %d): %s", rollout_id, failure.kind, count, failure.message)

    async def _attempt(
        self, group: GroupInFlight, sibling: int, attempt: int, earlier: list[RolloutFailure]
    ) -> tuple[FinishedRollout, list[Sample]]:
        plan = group.plan
        request = self.requests.training(plan, sibling, attempt)
        has_begun = False

        def on_begin() -> None:
            nonlocal has_begun
            has_begun = True
            group.running += 1
            if group.version is None:
                group.version = self.serving_version()

        try:
            result = await self.runner.run(plan.source, request, lane=Lane.TRAIN, order=plan.group, on_begin=on_begin)
        finally:
            group.running -= has_begun
        loop = asyncio.get_running_loop()
        result, samples, failure = await loop.run_in_executor(self._threads, self._compile, plan, result)
        rollout = finished_rollout(
            result, sibling=sibling, seed=request.seed or 0, samples=samples, failure=failure, earlier=earlier
        )
        return rollout, samples

    def _compile(
        self, plan: GroupPlan, result: RolloutResult
    ) -> tuple[RolloutResult, list[Sample], RolloutFailure | None]:
        """Return the rollout with its final reward and numbered turns, its samples, or why it has none."""
        failure = score_failure(result)
        if failure is not None:
            return result, [], failure
        if self.behavior is not None:
            try:
                result = replace(result, reply=self.behavior.add_to(result.reply))
            except RolloutError as error:
                return result, [], RolloutFailure(kind="no_reward", message=str(error), retryable=True)
            if (failure := score_failure(result)) is not None:
                return result, [], failure
        try:
            reply = msgspec.structs.replace(result.reply, turns=numbered_turns(result.reply, result.records))
            return replace(result, reply=reply), compile_rollout(plan, reply, result.records), None
        except RolloutError as error:
            return result, [], RolloutFailure(kind="tokens", message=str(error), retryable=True)
