"""Groups in flight: G rollouts each, with retries and a deadline for each rollout.

    start(plan, on_end) -> group task -> G sibling tasks -> [permit] -> worker -> compile (thread)
                              |              +-> failed: a fresh try, at most max_retries
                              +-> all siblings ended -> hints -> advantages, filter (thread) -> on_end(group)

Groups never wait for one another. A rollout continues while policy versions change, so a long one is kept. A sibling
waits at most for a permit and for its rollout's deadline. An error that is not a rollout's own (workers gone for good)
goes to `on_error` and ends the run.

A group without advantage whose error turns were hinted is DISTILLED: it keeps the samples with hinted turns, without a
part in the policy loss. The buffer lets it join a batch whose step has a weight for SDPO, beside the READY groups and
at most as many. It takes none of their places, opens none for dispatch, and counts as filtered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from composer_prime.channels.policy import AdvantageScaling
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import NonFiniteError
from composer_prime.monitor.events import event
from composer_prime.wire.types import Sample
from orchestrator.batching.batches import OpenRun
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.groups import (
    CompiledRollout,
    FinishedGroup,
    GroupOutcome,
    GroupPlan,
    sdpo_only,
    with_advantage,
)
from orchestrator.rollouts.rollout import RolloutRunner, finish_rollout
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.workers.worker import RolloutFailure

logger = logging.getLogger(__name__)

_STD_FLOOR = 1e-4
MIN_GROUP = 2
"""Finished rollouts that a group needs: an advantage compares two."""
_HACK = "hacks/rollouts"
"""Metric of a rollout that is 1 where an environment's monitor calls it a hack."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupInFlight:
    plan: GroupPlan
    task: asyncio.Task[None] | None = None
    siblings: list[asyncio.Task[CompiledRollout]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    running: int = 0
    """Rollouts that hold a permit."""


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    run: OpenRun
    runner: RolloutRunner
    failures: FailureLog
    hints: HintStage | None
    in_flight: dict[int, GroupInFlight] = field(default_factory=dict, init=False)
    """By group number."""
    retries: int = field(default=0, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="compile"), init=False
    )

    @property
    def config(self) -> OrchestratorConfig:
        return self.run.config.orchestrator

    def start(self, plan: GroupPlan, on_end: Callable[[FinishedGroup], None]) -> None:
        """Run the group of `plan`; `on_end` gets it once all its rollouts have ended."""
        group = GroupInFlight(plan=plan)
        self.in_flight[plan.group] = group
        group.task = asyncio.create_task(self._run_group(group, on_end), name=plan.group_id)

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
            **{f"rollouts/failed/{kind}": count for kind, count in sorted(self.failures.counts.items())},
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
            finished = await self._finish(group, ended)
            on_end(finished)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.run.fail(error)
        finally:
            for sibling in group.siblings:
                sibling.cancel()
            self.in_flight.pop(plan.group, None)

    def _next_step(self) -> int:
        """Return the step that rollouts are gathered for."""
        return self.run.batches.formed + 1

    def _wants_hints(self) -> bool:
        """Tell whether a hint made now may still be trained on."""
        is_distilled = self.run.config.channels.sdpo.weight > 0  # Else hints are only logged.
        return not is_distilled or self.run.batches.sdpo_ahead(self.config.max_staleness)

    async def _finish(self, group: GroupInFlight, ended: list[CompiledRollout]) -> FinishedGroup:
        """Add hints and advantages to the rollouts that ended."""
        scored = sum(rollout.reward is not None for rollout, _ in ended)
        if self.hints is not None and self._wants_hints() and scored >= MIN_GROUP:
            ended = await self.hints.attach(ended)
        scaling = self.run.config.channels.policy.advantage_scaling
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, score_group, group.plan, ended, self.config, scaling)

    async def _sibling(self, group: GroupInFlight, sibling: int) -> CompiledRollout:
        """Return the sibling's first good try, or its last failed one."""
        source = group.plan.source
        rollout, samples = await self.runner.play_with_retries(
            partial(self._attempt, group, sibling),
            source=source,
            failures=self.failures,
            step=self._next_step,
            group=group.plan.group,
        )
        if rollout.metrics.get(_HACK):
            hack = event("hack", same_as=f"{source}/hack")
            logger.warning("the monitor judged rollout %s of %s a hack", rollout.rollout_id, source, extra=hack)
        return rollout, samples

    async def _attempt(
        self, group: GroupInFlight, sibling: int, attempt: int, earlier: list[RolloutFailure]
    ) -> CompiledRollout:
        plan = group.plan
        request = self.runner.training_request(plan, sibling, attempt)
        self.retries += attempt > 0
        has_begun = False

        def on_begin() -> None:
            nonlocal has_begun
            has_begun = True
            group.running += 1

        try:
            result = await self.runner.run(plan.source, request, order=plan.group, on_begin=on_begin)
        finally:
            group.running -= has_begun
        finish = partial(finish_rollout, plan, result, sibling=sibling, seed=request.seed or 0, earlier=earlier)
        return await asyncio.get_running_loop().run_in_executor(self._threads, finish)


# -- the end of a group: pure functions that run in a thread -------------------------------------------------------


def score_group(
    plan: GroupPlan, ended: list[CompiledRollout], config: OrchestratorConfig, scaling: AdvantageScaling
) -> FinishedGroup:
    """Return the group as READY with its samples, FAILED (too few finished), FILTERED or DISTILLED (no advantage).

    A DISTILLED group keeps the samples with hinted turns, with mask 0 everywhere: the policy loss neither trains on
    them nor counts them. With `config.train_truncated` off the same holds for rollouts that were cut short; their
    rewards still count in the group's advantages.
    """
    rewards = [rollout.reward for rollout, _ in ended if rollout.reward is not None]
    if len(rewards) < MIN_GROUP:
        return FinishedGroup(plan=plan, outcome=GroupOutcome.FAILED, rollouts=[rollout for rollout, _ in ended])
    advantages_G = group_advantages(rewards, scaling)
    ended = _with_advantages(ended, advantages_G, config.train_truncated)
    rollouts = sorted((rollout for rollout, _ in ended), key=lambda rollout: rollout.sibling)
    samples = [sample for _, rollout_samples in ended for sample in rollout_samples]
    signal = has_signal(advantages_G) or not config.filter_zero_advantage
    if signal and any(sample.num_trained for sample in samples):
        return FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=rollouts, samples=samples)
    hinted = _hinted_only(samples)
    outcome = GroupOutcome.DISTILLED if hinted else GroupOutcome.FILTERED
    return FinishedGroup(plan=plan, outcome=outcome, rollouts=rollouts, samples=hinted)


def _with_advantages(
    ended: list[CompiledRollout], advantages_G: list[float], train_truncated: bool
) -> list[CompiledRollout]:
    """Return the rollouts, those with a reward with the next of `advantages_G`; failed ones have no samples."""
    following = iter(advantages_G)
    result: list[CompiledRollout] = []
    for rollout, samples in ended:
        if rollout.reward is None:
            result.append((rollout, []))
            continue
        advantage = next(following)
        if rollout.truncated and not train_truncated:
            samples = _hinted_only(samples)
        else:
            samples = [with_advantage(sample, advantage) for sample in samples]
        result.append((msgspec.structs.replace(rollout, advantage=advantage), samples))
    return result


def group_advantages(rewards_G: Sequence[float], scaling: AdvantageScaling) -> list[float]:
    """Return the advantage of each rollout of one group, [G]. A group of one has advantage 0.

        none  A_G = r_G - mean(r)                          Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
        std   A_G = (r_G - mean(r)) / (std(r) + 1e-4)      GRPO, arXiv 2402.03300; std with Bessel's correction, as TRL

    Raises NonFiniteError when a reward is NaN or infinite: a failed verifier must be recorded as failed, not scored.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"a group has rewards {list(rewards_G)}: mark failed rollouts as failed, do not score them"
        )
    if rewards.size < 2 or rewards.min() == rewards.max():  # a mean of equal numbers may be off by a last bit
        return [0.0] * rewards.size
    centered = rewards - rewards.mean()
    if scaling == "std":
        centered = centered / (rewards.std(ddof=1) + _STD_FLOOR)
    return centered.tolist()


def has_signal(advantages_G: Sequence[float]) -> bool:
    """Tell whether a group moves the policy: equal rewards give only zeros."""
    return any(abs(value) > 1e-12 for value in advantages_G)


def _hinted_only(samples: list[Sample]) -> list[Sample]:
    """Return the samples with hinted turns, without a part in the policy loss."""
    return [sdpo_only(sample) for sample in samples if sample.distillations]
