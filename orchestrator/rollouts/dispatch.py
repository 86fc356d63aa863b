"""Groups under way: G rollouts each, with retries, a deadline a rollout, and cancellation of what became too old.

    start(plan) -> group task -> G sibling tasks -> [permit] -> worker -> compile (thread)
                       |              +-> failed: a fresh try, at most max_retries
                       +-> all siblings ended -> hints -> advantages, filter (thread) -> on_end(group)

Groups never wait for one another; a sibling waits for a permit and for its rollout's deadline at most. An error that is
not a rollout's own (workers gone for good) goes to `on_error` and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.policy import AdvantageScaling
from composer_prime.errors import RolloutError
from composer_prime.wire.types import Sample
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.behaviour import Behaviour
from orchestrator.rollouts.group_scoring import finish_group, finished_rollout, score_failure, worth_hinting
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.rollouts.rollout import Lane, RequestFactory, RolloutResult, RolloutRunner, retry_pause_s
from orchestrator.rollouts.samples import compile_rollout, numbered_turns
from orchestrator.workers.protocol import RolloutFailure

logger = logging.getLogger(__name__)

_LOGGED_FIRST, _LOGGED_EVERY = 20, 100


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A group under way."""

    plan: GroupPlan
    task: asyncio.Task[None] | None = None
    siblings: list[asyncio.Task[tuple[FinishedRollout, list[Sample]]]] = field(default_factory=list)
    version: int | None = None
    """Policy version that the nodes served when its first rollout began; None while none has."""
    since: float = field(default_factory=time.monotonic)
    running: int = 0
    """Rollouts that hold a permit."""
    stale: bool = False


class Dispatcher:
    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        scaling: AdvantageScaling,
        runner: RolloutRunner,
        requests: RequestFactory,
        serving_version: Callable[[], int],
        on_end: Callable[[FinishedGroup], Awaitable[None]],
        on_error: Callable[[BaseException], None],
        behaviour: Behaviour | None = None,
        hints: HintStage | None = None,
        wants_hints: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wants_hints()`: whether what is hinted now may still be learned from."""
        self._config, self._scaling, self._runner, self._requests = config, scaling, runner, requests
        self._behaviour, self._hints, self._wants_hints = behaviour, hints, wants_hints
        self._serving_version, self._on_end, self._on_error = serving_version, on_end, on_error
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="compile")
        self.flights: dict[int, Flight] = {}
        """Groups under way, by number."""
        self.retries = 0
        self.failures: dict[str, int] = {}
        """Failed tries by kind."""

    def start(self, plan: GroupPlan) -> None:
        flight = Flight(plan=plan)
        self.flights[plan.group] = flight
        flight.task = asyncio.create_task(self._play(flight), name=plan.group_id)

    def cancel_stale(self, oldest: int) -> list[int]:
        """End the groups that began on a version older than `oldest`; their numbers. They reach on_end as STALE."""
        stale = [
            flight
            for flight in self.flights.values()
            if flight.version is not None and flight.version < oldest and not flight.stale
        ]
        for flight in stale:
            flight.stale = True
            for sibling in flight.siblings:
                sibling.cancel()
        return [flight.plan.group for flight in stale]

    def hint_metrics(self) -> dict[str, float]:
        """What hints cost so far; empty where none are looked for."""
        return {} if self._hints is None else self._hints.metrics()

    @property
    def running(self) -> int:
        """Rollouts that hold a permit."""
        return sum(flight.running for flight in self.flights.values())

    def oldest_s(self) -> float | None:
        """Age in seconds of the group under way longest; None without one."""
        return max((time.monotonic() - flight.since for flight in self.flights.values()), default=None)

    async def close(self) -> None:
        """Cancel everything under way; nothing reaches on_end any more."""
        tasks = [flight.task for flight in self.flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.flights.clear()
        self._threads.shutdown(wait=True)

    async def _play(self, flight: Flight) -> None:
        plan = flight.plan
        flight.siblings = [
            asyncio.create_task(self._sibling(flight, sibling), name=f"{plan.group_id}-{sibling}")
            for sibling in range(plan.size)
        ]
        try:
            ended = await asyncio.gather(*flight.siblings, return_exceptions=True)
            errors = [error for error in ended if isinstance(error, BaseException)]
            fatal = next((error for error in errors if not isinstance(error, asyncio.CancelledError)), None)
            if fatal is not None:
                raise fatal
            finished = [pair for pair in ended if not isinstance(pair, BaseException)]
            await self._on_end(await self._group(flight, finished))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._on_error(error)
        finally:
            for sibling in flight.siblings:
                sibling.cancel()
            self.flights.pop(plan.group, None)

    async def _group(self, flight: Flight, finished: list[tuple[FinishedRollout, list[Sample]]]) -> FinishedGroup:
        if flight.stale:
            rollouts = [rollout for rollout, _ in finished]
            return FinishedGroup(plan=flight.plan, outcome=GroupOutcome.STALE, rollouts=rollouts)
        if self._hints is not None and self._wants_hints() and worth_hinting(finished, self._config, self._scaling):
            finished = await self._hints.attach(finished)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, finish_group, flight.plan, finished, self._config, self._scaling
        )

    async def _sibling(self, flight: Flight, sibling: int) -> tuple[FinishedRollout, list[Sample]]:
        """The sibling's first good try, or its last failed one."""
        failures: list[RolloutFailure] = []
        for attempt in range(self._config.max_retries + 1):
            rollout, samples = await self._attempt(flight, sibling, attempt, failures)
            if rollout.failure is None:
                break
            self._count(rollout.rollout_id, rollout.failure)
            if not rollout.failure.retryable or attempt == self._config.max_retries:
                break
            failures.append(rollout.failure)
            self.retries += 1
            await asyncio.sleep(retry_pause_s(attempt))
        return rollout, samples

    def _count(self, rollout_id: str, failure: RolloutFailure) -> None:
        """Every failure is in metrics and rollout log; the process log gets the first ones of a kind, then samples."""
        self.failures[failure.kind] = count = self.failures.get(failure.kind, 0) + 1
        if count <= _LOGGED_FIRST or count % _LOGGED_EVERY == 0:
            logger.warning("rollout %s failed (%s, number %d): %s", rollout_id, failure.kind, count, failure.message)

    async def _attempt(
        self, flight: Flight, sibling: int, attempt: int, failures: list[RolloutFailure]
    ) -> tuple[FinishedRollout, list[Sample]]:
        plan = flight.plan
        request = self._requests.training(plan, sibling, attempt)

        begun = False

        def on_begin() -> None:
            nonlocal begun
            begun = True
            flight.running += 1
            if flight.version is None:
                flight.version = self._serving_version()

        try:
            played = await self._runner.run(plan.source, request, lane=Lane.TRAIN, order=plan.group, on_begin=on_begin)
        finally:
            flight.running -= begun
        loop = asyncio.get_running_loop()
        played, samples, failure = await loop.run_in_executor(self._threads, self._compile, plan, played)
        rollout = finished_rollout(
            played, sibling=sibling, seed=request.seed or 0, samples=samples, failure=failure, earlier=failures
        )
        return rollout, samples

    def _compile(
        self, plan: GroupPlan, played: RolloutResult
    ) -> tuple[RolloutResult, list[Sample], RolloutFailure | None]:
        """The rollout with its final reward and its turns numbered, its samples, or why it has none."""
        failure = score_failure(played)
        if failure is not None:
            return played, [], failure
        if self._behaviour is not None:
            try:
                played = replace(played, reply=self._behaviour.shaped(played.reply))
            except RolloutError as error:
                return played, [], RolloutFailure(kind="no_reward", message=str(error), retryable=True)
            if (failure := score_failure(played)) is not None:
                return played, [], failure
        try:
            reply = msgspec.structs.replace(played.reply, turns=numbered_turns(played.reply, played.records))
            return replace(played, reply=reply), compile_rollout(plan, reply, played.records), None
        except RolloutError as error:
            return played, [], RolloutFailure(kind="tokens", message=str(error), retryable=True)
