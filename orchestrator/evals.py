"""Evaluation on held-out tasks, interleaved with training.

    request(step, version) -> nodes serve version or newer -> rollouts (evaluation's permits)
                  -> metrics, rollouts/eval_*.jsonl

One evaluation runs at a time. Of several that are due meanwhile only the newest waits. The first one takes all permits,
to be over before the first weight swap.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from statistics import fmean

from composer_prime.config.orchestrator import EvalConfig, SourceConfig
from composer_prime.console import pluralize
from composer_prime.errors import DeadlineError
from composer_prime.monitor.events import event
from composer_prime.stats.intervals import PASSED, bounded_interval, pass_at_k, scale_of
from orchestrator.batching.batches import OpenRun
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import CompiledRollout, FinishedRollout, turn_error_rate
from orchestrator.rollouts.rollout import EVAL_SHARE, RolloutRunner, finished_rollout
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.workers.pool import EVAL, RolloutFailure

logger = logging.getLogger(__name__)
_VERSION_TIMEOUT_S = 600.0
"""For the nodes to load an evaluation's weights."""


TaskRollouts = list[FinishedRollout]
"""Of one held-out task."""
HeldOutPlace = tuple[str, int, int]
"""Source, task and sample."""


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    run: OpenRun
    runner: RolloutRunner
    failures: FailureLog
    running: int | None = field(default=None, init=False)
    """Step under evaluation; None while idle."""
    _requested: tuple[int, int] | None = field(default=None, init=False)
    """Step and policy version of the next."""
    _progress: str = field(default="", init=False)

    @property
    def sources(self) -> list[SourceConfig]:
        """Return those with held-out tasks; none when evaluation is off."""
        return [
            source for source in self.run.settings.source if source.eval_taskset and self.run.settings.eval.every_steps
        ]

    def due(self, step: int, last_step: int) -> bool:
        """Tell whether to evaluate after `step`: before the first step, every every_steps, after the last."""
        return bool(self.sources) and self.run.settings.eval.due(step, last_step)

    def holds(self, step: int, trained: int, last_step: int) -> bool:
        """Tell whether a batch waits, so that an evaluation is played with its own weights."""
        if self.run.settings.groups_per_step or not self.due(step, last_step):
            return False
        return self.step is not None or any(self.due(each, last_step) for each in range(trained + 1, step))

    def request(self, step: int, version: int) -> None:
        """Evaluate `version`, unless that is done, under way or due."""
        is_done = self.run.run_dir.eval_rollouts(step).exists()
        if is_done or step == self.running or self._requested == (step, version):
            return
        if self._requested is not None:
            skipped = self._requested[0]
            logger.warning("the evaluation of step %d is skipped: that of step %d is due already", skipped, step)
        self._requested = step, version
        self.run.changed.notify()

    def forget_after(self, step: int) -> None:
        """Delete evaluations after `step`: the run went back."""
        for path in self.run.run_dir.eval_rollouts(0).parent.glob("eval_*.jsonl"):
            if int(path.stem.removeprefix("eval_")) > step:
                path.unlink(missing_ok=True)

    @property
    def step(self) -> int | None:
        """Step of the evaluation under way, else of the next; None while idle."""
        return self._requested[0] if self.running is None and self._requested is not None else self.running

    def waiting_for(self) -> str | None:
        if self.step is None:
            return None
        return f"evaluation of step {self.step}: {'about to start' if self.running is None else self._progress}"

    async def serve(self) -> None:
        """Serve until cancelled. Raises DeadlineError when no node gets a version in time."""
        while True:
            while self._requested is None:
                await self.run.changed.wait(3600)
            (step, version), self._requested = self._requested, None
            self.running = step
            try:
                await self._evaluate(step, version)
            finally:
                self.running = None
                self.run.changed.notify()

    async def _evaluate(self, step: int, version: int) -> None:
        places = self._places()
        self._progress = f"the nodes do not have policy version {version} yet"
        await self._await_version(step, version)
        self._progress = f"0 of {pluralize(len(places), 'rollout')}"
        self.runner.permits.eval_share = 1.0 if step == 0 else EVAL_SHARE
        start = time.monotonic()
        played: dict[HeldOutPlace, FinishedRollout] = {}

        async def play(place: HeldOutPlace) -> None:
            played[place] = await self._play(place, step, version)
            self._progress = f"{len(played)} of {pluralize(len(places), 'rollout')}"

        async with asyncio.TaskGroup() as group:
            for place in places:
                group.create_task(play(place))
        rollouts = [(place[0], played[place]) for place in places]
        lines = (rollout_log.rollout_line(step, name, rollout, "evaluated") for name, rollout in rollouts)
        await asyncio.to_thread(rollout_log.write, self.run.run_dir.eval_rollouts(step), lines)
        if failures := [rollout.failure for _, rollout in rollouts if rollout.failure is not None]:
            logger.warning(
                "evaluation of step %d: %d of %d rollouts have no reward after at most %d tries, the first for %s: %s",
                *(step, len(failures), len(rollouts), self.run.settings.max_retries + 1),
                *(failures[0].kind, failures[0].message),
                extra=event("warning", where=failures[0].where),
            )
        figures = {"time/eval_s": time.monotonic() - start}
        for source in self.sources:
            own: dict[str, TaskRollouts] = {}
            for rollout in (rollout for name, rollout in rollouts if name == source.name):
                own.setdefault(rollout.task_id, []).append(rollout)
            figures |= eval_summary(source.name, [*own.values()], self.run.settings.eval)
        await asyncio.to_thread(self.run.metrics.log, step, figures)
        means = [f"{name} {value:.3f}" for name, value in figures.items() if name.endswith("/reward_mean")]
        about = event("evaluation", text=f"evaluation after step {step}: {', '.join(means) or 'no score'}")
        shown = {name: round(value, 4) for name, value in figures.items()}
        logger.info("evaluation of step %d: %s", step, shown, extra=about)

    def _places(self) -> list[HeldOutPlace]:
        config, pools = self.run.settings, self.run.pools
        return [
            (source.name, task, sample)
            for source in config.source
            if source.eval_taskset and source.name in pools
            for task in range(min(config.eval.tasks, pools[source.name].num_tasks(EVAL)))
            for sample in range(config.eval.samples)
        ]

    async def _play(self, place: HeldOutPlace, step: int, version: int) -> FinishedRollout:
        source, task_index, sample = place

        async def attempt(number: int, earlier: list[RolloutFailure]) -> CompiledRollout:
            request = self.runner.eval_request(source, step=step, task_index=task_index, sample=sample, attempt=number)
            reply, records = await self.runner.run(source, request, order=task_index, oldest_version=version)
            seed = request.seed or 0
            return finished_rollout(reply, records, sibling=sample, seed=seed, samples=[], earlier=earlier), []

        tries = self.runner.play_with_retries(attempt, source=source, failures=self.failures, step=lambda: step)
        return (await tries)[0]

    async def _await_version(self, step: int, version: int) -> None:
        deadline = time.monotonic() + _VERSION_TIMEOUT_S
        while (newest := max((node.version for node in self.run.gateway.router.serving()), default=-1)) < version:
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"evaluation of step {step} waited {_VERSION_TIMEOUT_S:.0f} s for nodes with policy version "
                    f"{version}; they serve {'nothing' if newest < 0 else newest}"
                )
            await self.run.changed.wait(0.1)


def eval_summary(source: str, tasks: list[TaskRollouts], config: EvalConfig) -> dict[str, float]:
    """Return eval/<source>/…: means over tasks, with 95 % intervals where measured."""
    rollouts = [*itertools.chain(*tasks)]
    by_task = [[rollout.reward for rollout in task if rollout.reward is not None] for task in tasks]
    scored = [*filter(None, by_task)]
    figures: dict[str, float] = {
        "tasks": len(scored),
        "rollouts": sum(map(len, scored)),
        "failed": sum(rollout.failure is not None for rollout in rollouts),
        **_estimate("reward_mean", [fmean(rewards) for rewards in scored]),
    }
    for k in config.pass_k:
        figures |= _estimate(f"pass@{k}", _chances(scored, k))
    figures |= _estimate("turn_error_rate", [rate for rate in map(turn_error_rate, tasks) if rate is not None])
    if versions := [rollout.version_min for rollout in rollouts if rollout.version_min is not None]:
        figures["version_min"] = min(versions)
        figures["version_max"] = max(rollout.version_max or 0 for rollout in rollouts)
    return {f"eval/{source}/{name}": value for name, value in figures.items()}


def _chances(scored: list[list[float]], k: int) -> list[float]:
    enough = [rewards for rewards in scored if len(rewards) >= k]
    return [pass_at_k(len(rewards), sum(reward >= PASSED for reward in rewards), k) for rewards in enough]


def _estimate(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    least, most = scale_of(values)
    figures = {name: fmean(values)}
    if interval := bounded_interval(values, least=least, most=most):
        figures |= {f"{name}_low": interval[0], f"{name}_high": interval[1]}
    return figures
