"""Every decision on groups and batches: what starts, what is formed, what is dropped; and the groups in flight.

    advance():  sweep   groups of which no future batch trains a token leave the buffer
                form    batch F+1 from the lowest-numbered usable groups, at most one ahead of the step in training
                start   as many groups as the staleness rule has room for

State changes in single steps of the event loop, with its journal entry queued in the same step. Only `form` and
`checkpoint` wait for the disk, and they exclude one another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median_high

import msgspec

from composer_prime.console import COMPOSER, pluralize
from composer_prime.errors import RolloutError, RunMismatchError
from composer_prime.event_loop import end
from composer_prime.monitor.events import event
from composer_prime.run.ledger import left_out
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import StepDone
from orchestrator.batching.batch_metrics import batch_metrics
from orchestrator.batching.batches import Batch, Batches, Buffer, OpenRun, free_slots, oldest_accepted
from orchestrator.durability import (
    Dropped,
    Entry,
    Finished,
    Formed,
    Journal,
    OrchestratorState,
    ResumedRun,
    Started,
    load_state,
    save_state,
    state_path,
    without_left_out,
)
from orchestrator.evals import Evaluator
from orchestrator.file_rows import PairMixer
from orchestrator.hints.redraws import RedrawnPairs
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import (
    MIN_GROUP,
    CompiledRollout,
    FinishedGroup,
    GroupOutcome,
    GroupPlan,
    score_group,
    trained_by_node,
)
from orchestrator.rollouts.rollout import RolloutRunner, finish_rollout
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.tasks import Sources
from orchestrator.workers.pool import TRAIN, RolloutFailure

logger = logging.getLogger(__name__)

_FILTERED_TOO_MANY = (
    "%.0f %% of the groups since the last batch had no advantage%s: the tasks are too easy or too hard, or the policy "
    "has collapsed (then lower trainer.optim.lr); change the task set or add --orchestrator.curriculum "
    "frontier; to look: %s try MODULE -n 32"
)
_MAX_FILTERED_SHARE = 0.9
"""Of the groups since the last batch: warn if more had equal rewards."""
_BATCHES_LEFT_OUT = 5
"""Warn once so many batches of dropped groups are left out, before a batch is formed."""
_MAX_FAILED_GROUPS = 32
"""In a row, of one source: they end the run."""
_DROPPED_WHOLE = 1024
"""Dropped groups held with their texts: they must not fill memory."""
_HACK = "hacks/rollouts"
"""1 where an environment's monitor calls a rollout a hack."""


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Groups in flight: G rollouts each, with retries and deadlines.

        start(plan, on_end) -> group task -> G sibling tasks -> [permit] -> worker -> compile (thread)
                                  |              +-> failed: a fresh try, at most max_retries
                                  +-> all siblings ended -> hints -> advantages, filter (thread) -> on_end(group)

    Groups never wait for one another. An error that is not a rollout's own ends the run.
    """

    run: OpenRun
    runner: RolloutRunner
    failures: FailureLog
    hints: HintStage | None
    redraws: RedrawnPairs | None = None
    """Of hinted turns, for the licence of hints."""
    in_flight: dict[int, GroupPlan] = field(default_factory=dict, init=False)
    _tasks: dict[int, tuple[float, asyncio.Task[None]]] = field(default_factory=dict, init=False)
    """In the order of their starts: monotonic seconds, and the task."""
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="compile"), init=False
    )

    def start(self, plan: GroupPlan, on_end: Callable[[FinishedGroup], None]) -> None:
        """`on_end` gets the group of `plan` once all its rollouts have ended."""
        task = asyncio.create_task(self._run_group(plan, on_end), name=plan.group_id)
        self.in_flight[plan.group] = plan
        self._tasks[plan.group] = time.monotonic(), task

    def oldest_s(self) -> float | None:
        """Return the age in seconds of the group that started first; None without a group in flight."""
        return next((time.monotonic() - since for since, _ in self._tasks.values()), None)

    def metrics(self) -> dict[str, float]:
        return self.redraws.metrics() if self.redraws is not None else {}

    async def close(self) -> None:
        """Cancel all groups without `on_end`."""
        await end(task for _, task in self._tasks.values())
        if self.redraws is not None:
            await self.redraws.close()
        self._threads.shutdown(wait=True)

    async def _run_group(self, plan: GroupPlan, on_end: Callable[[FinishedGroup], None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                siblings = [
                    group.create_task(self._sibling(plan, sibling), name=f"{plan.group_id}-{sibling}")
                    for sibling in range(plan.size)
                ]
            on_end(await self._finish(plan, [sibling.result() for sibling in siblings]))
        except Exception as error:
            self.run.fail(error)
        finally:
            if self.redraws is not None:
                self.redraws.forget(plan)
            del self.in_flight[plan.group], self._tasks[plan.group]

    async def _finish(self, plan: GroupPlan, ended: list[CompiledRollout]) -> FinishedGroup:
        scored = sum(rollout.reward is not None for rollout, _ in ended)
        # A hint that is made now must still be trained on, unless hints are only logged.
        is_due = self.hints is not None and (not self.hints.distil or self.run.batches.sdpo_ahead())
        if self.hints is not None and is_due and scored >= MIN_GROUP:
            ended = await self.hints.attach(ended)
            if self.redraws is not None:
                self.redraws.consider(plan, ended)
        channels = self.run.config.channels
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, score_group, plan, ended, self.run.settings, channels)

    async def _sibling(self, plan: GroupPlan, sibling: int) -> CompiledRollout:
        """Return the first good try, or the last failed one."""
        rollout, samples = await self.runner.play_with_retries(
            partial(self._attempt, plan, sibling),
            source=plan.source,
            failures=self.failures,
            step=lambda: self.run.batches.formed + 1,
            group=plan.group,
        )
        if rollout.metrics.get(_HACK):
            worst = (rollout.verdict.get("findings") or [{}])[0]
            hack = event("hack", where=worst.get("place"), same_as=f"{plan.source}/hack")
            said = "the monitor judged rollout %s of %s a hack, rule %s: %s rollouts RUN --hacks"
            logger.warning(said, rollout.rollout_id, plan.source, worst.get("rule"), COMPOSER, extra=hack)
        return rollout, samples

    async def _attempt(
        self, plan: GroupPlan, sibling: int, attempt: int, earlier: list[RolloutFailure]
    ) -> CompiledRollout:
        request = self.runner.training_request(plan, sibling, attempt)
        reply, records = await self.runner.run(plan.source, request, order=plan.group)
        if self.redraws is not None:
            self.redraws.remember(plan, request.rollout_id, records)
        about = {"seed": request.seed or 0, "earlier": earlier, "with_tokens": self.runner.config.record_tokens}
        finish = partial(finish_rollout, plan, reply, records, sibling=sibling, **about)
        return await asyncio.get_running_loop().run_in_executor(self._threads, finish)


class DroppedGroups:
    """Groups that no batch takes, and how groups ended."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.since_batch: list[FinishedGroup] = []
        """Since the last batch was formed."""
        self._failed_in_row: Counter[str] = Counter()

    def add(self, group: FinishedGroup) -> None:
        self.counters[group.outcome.value] += 1
        if len(self.since_batch) >= _DROPPED_WHOLE:
            rollouts = [msgspec.structs.replace(rollout, turns=[], sessions=[]) for rollout in group.rollouts]
            group = msgspec.structs.replace(group, rollouts=rollouts)
        self.since_batch.append(group)

    def count_failures(self, group: FinishedGroup) -> None:
        """Raise RolloutError when too many groups of a source fail in a row."""
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED, GroupOutcome.FILTERED):
            del self._failed_in_row[group.plan.source]
        elif group.outcome is GroupOutcome.FAILED:
            self._failed_in_row[group.plan.source] += 1
            if (count := self._failed_in_row[group.plan.source]) >= _MAX_FAILED_GROUPS:
                failure = next(rollout.failure for rollout in group.rollouts if rollout.failure is not None)
                raise RolloutError(
                    f"{pluralize(count, 'group')} in a row of source {group.plan.source!r} failed "
                    f"(`{COMPOSER} rollouts RUN --failed` shows them); the last error: {failure.text()}"
                )

    @property
    def num_filtered(self) -> int:
        return sum(group.outcome is GroupOutcome.FILTERED for group in self.since_batch)

    def describe(self) -> list[str]:
        """Say how many were left out since the last batch."""
        filtered, lost = self.num_filtered, len(self.since_batch) - self.num_filtered
        parts = [f"{pluralize(filtered, 'group')} without advantage left out"] if filtered else []
        return parts + ([f"{pluralize(lost, 'group')} failed or stale"] if lost else [])


@dataclass(slots=True, kw_only=True, eq=False)
class BatchScheduler:
    run: OpenRun
    sources: Sources
    journal: Journal
    dispatcher: Dispatcher
    evaluator: Evaluator
    """May hold a batch."""
    pairs: PairMixer | None
    buffer: Buffer = field(default_factory=Buffer, init=False)
    dropped: DroppedGroups = field(default_factory=DroppedGroups, init=False)
    changed_at: float = field(default_factory=time.monotonic, init=False)
    """When a batch was formed or trained last, monotonic seconds."""
    _unlogged: list[tuple[int, list[FinishedGroup]]] = field(default_factory=list, init=False)
    """(step, groups) that are still to be written to the rollout log."""
    _saved_step: int | None = field(default=None, init=False)
    """Newest one since a trainer attached."""
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def batches(self) -> Batches:
        return self.run.batches

    @property
    def starved_since(self) -> float | None:
        """Since when the trainer has taken every formed batch."""
        return self.changed_at if self.batches.formed == self.batches.trained else None

    def restore(self, state: OrchestratorState, resumed: ResumedRun) -> None:
        """Continue where `state` and the journal end."""
        self.batches.demonstrations().check_resume(state.demonstrations)
        self.sources.next_group = resumed.next_group
        self.sources.again = resumed.in_flight
        self.dropped.since_batch = resumed.dropped
        self.dropped.counters = Counter(state.counters)
        if self.pairs is not None and resumed.pairs is not None:
            self.pairs.restore(resumed.pairs)
        for group in resumed.ready:
            self.buffer.add(group)
        formed = state.step + len(resumed.batches)
        self.batches.restore(versions=self.batches.versions, formed=formed, batches=resumed.batches)
        for batch in resumed.batches:
            if batch.groups and not self.run.run_dir.rollouts(batch.step).exists():
                self._unlogged.append((batch.step, batch.groups))
        self.changed_at = time.monotonic()

    # -- decisions -----------------------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Do all that can be done now. Raises CheckpointError when the journal cannot be written."""
        self._sweep()
        while await self._form():
            self._sweep()
        self._start()
        while self._unlogged:
            step, groups = self._unlogged.pop(0)
            await asyncio.to_thread(_log_rollouts, self.run.run_dir, step, groups)

    @property
    def oldest_version(self) -> int:
        """Oldest version whose tokens the next batch trains."""
        return oldest_accepted(self.batches.formed + 1, self.run.settings.max_staleness, self.batches.versions)

    @property
    def _newest_version(self) -> int:
        """That the next batch is trained from, as far as known."""
        return self.batches.versions.before(self.batches.formed + 1)

    def _sweep(self) -> None:
        for group in self.buffer.sweep(self.oldest_version):
            was_filtered = group.outcome is GroupOutcome.DISTILLED
            self._drop(group.without_samples(GroupOutcome.FILTERED if was_filtered else GroupOutcome.STALE))

    def _has_tainted(self, group: FinishedGroup) -> bool:
        audits = self.run.gateway.audits
        return audits is not None and audits.is_tainted(rollout.rollout_id for rollout in group.rollouts)

    async def _form(self) -> bool:
        step = self.batches.formed + 1
        trained, last_step = self.batches.trained, self.batches.last_step
        if step > min(trained + 2, last_step) or self.evaluator.holds(step, trained, last_step):
            return False
        async with self._disk:
            oldest = self.oldest_version
            taken = self._choose(step)
            if taken is None:
                return False
            dropped, self.dropped.since_batch = self.dropped.since_batch, []
            groups = await asyncio.to_thread(lambda: [group.without_stale_tokens(oldest) for group in taken])
            metrics = await asyncio.to_thread(batch_metrics, self._newest_version, groups, dropped)
            _warn_of_filtered(metrics["groups/filtered_share"], [*groups, *dropped])
            preferences = []
            if self.pairs is not None:
                preferences = await asyncio.to_thread(self.pairs.draw, step)
                metrics |= self.pairs.metrics
            batch = Batch(step=step, groups=groups, metrics=metrics, preferences=preferences)
            await self.journal.append(
                Formed(
                    seq=self.journal.next_seq(),
                    step=step,
                    oldest_version=oldest,
                    groups=batch.group_numbers,
                    dropped=[group.plan.group for group in dropped],
                    metrics=metrics,
                    units=preferences,
                    pairs=self.pairs.cursor if self.pairs is not None else None,
                )
            )
            self.batches.add(batch)  # Only now may the trainer have it.
            self.dropped.counters["batches"] += 1
            self.changed_at = time.monotonic()
        if groups or dropped:
            self._unlogged.append((step, [*groups, *dropped]))
        self.run.changed.notify()
        return True

    def _choose(self, step: int) -> list[FinishedGroup] | None:
        for group in self.buffer.remove(self._has_tainted):
            self._drop(group.without_samples(GroupOutcome.FAILED))
        with_distilled = self.batches.distils(step)
        oldest, newest = self.oldest_version, self._newest_version
        return self.buffer.take(self.run.settings.groups_per_step, oldest, newest, with_distilled=with_distilled)

    def serving_version(self) -> int:
        """Return the version that will probably sample what starts now: half of the nodes have it or a newer one."""
        router = self.run.gateway.router
        served = [node.version for node in router.serving()]
        return median_high(served) if served else router.policy.oldest

    def _start(self) -> None:
        unfilled = self.batches.last_using(self.serving_version()) - self.batches.formed
        under_way = len(self.dispatcher.in_flight) + len(self.buffer)
        for _ in range(free_slots(unfilled, under_way, self.run.settings.groups_per_step)):
            plan, is_new = self.sources.next()
            if is_new:
                self._write(Started(seq=self.journal.next_seq(), plan=plan))
            self.dispatcher.start(plan, self._group_ended)

    # -- events --------------------------------------------------------------------------------------------------

    def _group_ended(self, group: FinishedGroup) -> None:
        """Raise RolloutError when too many groups fail."""
        self.sources.observe(group)
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED):
            self.dropped.counters[group.outcome.value] += 1
            self.buffer.add(group)
            self._write(Finished(seq=self.journal.next_seq(), group=group))
        else:
            self._drop(group)
        self.dropped.count_failures(group)
        self.run.changed.notify()

    async def step_done(self, message: StepDone) -> None:
        """A step is taken, or, without sample ids, a trainer attaches after it."""
        step, sample_ids = message.step, message.sample_ids
        if not sample_ids and step <= self.batches.trained:
            await self._attach(message)
            return
        batch = self.batches.get(step)
        if step != self.batches.trained + 1 or batch is None:
            raise RunMismatchError(
                f"the trainer reports step {step} done, the orchestrator stands after step {self.batches.trained} with "
                f"batches up to {self.batches.formed}: start both from the same checkpoint (--resume)"
            )
        served = {sample.sample_id for sample in batch.samples}
        if set(sample_ids) != served:
            raise RunMismatchError(
                f"step {step} trained {len(sample_ids)} samples, its batch has {len(served)}; "
                f"differing: {sorted(served ^ set(sample_ids))[:4]}"
            )
        self.run.gateway.control.note_trained(step, trained_by_node(batch.groups))
        self.batches.done(step, message.version, message.last_step)
        if (redraws := self.dispatcher.redraws) is not None:
            redraws.licence.note_step(step, message.divergence)
        self.changed_at = time.monotonic()
        self.run.changed.notify()

    async def _attach(self, message: StepDone) -> None:
        """Serve batches that the trainer lost again, but for samples that made a step not finite."""
        step, versions = message.step, self.batches.versions.after(message.step, message.version)
        self.batches.forget_layouts()
        blamed = left_out(self.run.run_dir.ledger)  # Not in a thread: a request that follows must find the batches cut.
        self.batches.demonstrations().leave_out(blamed)
        if step < self.batches.trained:
            async with self._disk:
                batches = await self.journal.formed_batches(step, blamed)
            if [batch.step for batch in batches] != list(range(step + 1, self.batches.formed + 1)):
                raise RunMismatchError(
                    f"the trainer starts again after step {step}, the orchestrator stands after step "
                    f"{self.batches.trained} and no longer has all batches in between: start both with --resume"
                )
            logger.warning("the trainer went back from step %d to step %d", self.batches.trained, step)
            if self.dispatcher.redraws is not None:
                self.dispatcher.redraws.licence.resume(step)
        else:
            # The trainer may have ended between the line in the ledger and its StepDone.
            batches = [without_left_out(batch, blamed) for batch in self.batches.held() if batch.step > step]
        self.batches.restore(
            versions=versions, formed=self.batches.formed, batches=batches, last_step=message.last_step
        )
        self._saved_step = None
        self.changed_at = time.monotonic()
        self.run.changed.notify()

    # -- state ---------------------------------------------------------------------------------------------------

    async def checkpoint(self, step: int) -> None:
        """Write the orchestrator's part of checkpoint `step`; drop journal segments that no checkpoint needs.

        Does nothing if it was written last and exists: the trainer asks again, as the answer was lost. Raises
        RunMismatchError when the trainer is at another step, and CheckpointError.
        """
        if step == self._saved_step and await asyncio.to_thread(state_path(self.run.run_dir, step).exists):
            return
        async with self._disk:
            if step != self.batches.trained:
                raise RunMismatchError(
                    f"checkpoint {step} was asked for, the orchestrator stands after step {self.batches.trained}"
                )
            state = self.state()
            await asyncio.to_thread(save_state, self.run.run_dir, state)
        first = min(self.run.run_dir.complete_checkpoints(), default=step)  # The first that a resume may choose.
        of_first = self.run.run_dir, first, self.run.run_id
        oldest = state if first >= step else await asyncio.to_thread(load_state, *of_first)
        groups = {*oldest.ready, *oldest.dropped}.union(*oldest.batches.values())
        await self.journal.compact(oldest_seq=oldest.journal_seq, groups=groups, steps=set(oldest.batches))
        self._saved_step = step

    def state(self) -> OrchestratorState:
        """Return the state after step `trained`."""
        plans = [*self.dispatcher.in_flight.values(), *self.sources.again]
        return OrchestratorState(
            run_id=self.run.run_id,
            step=self.batches.trained,
            journal_seq=self.journal.seq,
            next_group=self.sources.next_group,
            in_flight=sorted(plans, key=lambda plan: plan.group),
            ready=self.buffer.group_numbers,
            dropped=[group.plan.group for group in self.dropped.since_batch],
            batches={batch.step: batch.group_numbers for batch in self.batches.held()},
            curricula=self.sources.state(),
            counters=dict(self.dropped.counters),
            pairs=self.pairs.cursor if self.pairs is not None else None,
            demonstrations=self.batches.demonstrations().digest,
            versions=self.batches.versions,
        )

    def waiting_for(self, step: int) -> str:
        """Say what batch `step` lacks."""
        is_next = step == self.batches.formed + 1
        usable = len(self.buffer.usable(self.oldest_version, self._newest_version)) if is_next else 0
        parts = [f"batch {step}: {usable} of {pluralize(self.run.settings.groups_per_step, 'group')}"]
        if (oldest_s := self.dispatcher.oldest_s()) is None:
            parts.append("no rollout under way")
        else:
            rollouts = pluralize(self.dispatcher.runner.permits.running[TRAIN], "rollout")
            groups = pluralize(len(self.dispatcher.in_flight), "group")
            parts.append(f"{rollouts} of {groups} running, oldest {oldest_s:.0f} s")
        return "; ".join([*parts, *self.dropped.describe()])

    def metrics(self) -> dict[str, float]:
        permits = self.dispatcher.runner.permits
        return {
            "queue/groups_in_flight": len(self.dispatcher.in_flight),
            "queue/rollouts_running": permits.running[TRAIN],
            "queue/rollouts_waiting": permits.waiting(TRAIN),
            "queue/groups_ready": len(self.buffer),
            "queue/batches_ahead": self.batches.formed - self.batches.trained,
            **self.dispatcher.metrics(),
            **{f"groups/total/{name}": count for name, count in sorted(self.dropped.counters.items())},
        }

    def _drop(self, group: FinishedGroup) -> None:
        self.dropped.add(group)
        self._write(Dropped(seq=self.journal.next_seq(), group=self.dropped.since_batch[-1]))
        dropped = len(self.dropped.since_batch)
        # The batch that would tell may never form.
        if dropped == _BATCHES_LEFT_OUT * self.run.settings.groups_per_step:
            _warn_of_filtered(self.dropped.num_filtered / (dropped + len(self.buffer)), self.dropped.since_batch)

    def _write(self, entry: Entry) -> None:
        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self.run.fail(error)

        self.journal.append(entry).add_done_callback(written)


def _warn_of_filtered(share: float, groups: Sequence[FinishedGroup]) -> None:
    if share > _MAX_FILTERED_SHARE:
        rewards = {reward for group in groups for reward in group.rewards}
        equal = f" and every reward was {rewards.pop():g}" if len(rewards) == 1 else ""
        if fmean(rollout.truncated for group in groups for rollout in group.rollouts) > _MAX_FILTERED_SHARE:
            equal += ", nearly all rollouts were cut (raise orchestrator.sampling.max_tokens or model.max_context)"
        logger.warning(_FILTERED_TOO_MANY, 100 * share, equal, COMPOSER, extra=event("groups"))


def _log_rollouts(run_dir: RunDir, step: int, groups: list[FinishedGroup]) -> None:
    try:
        lines = [line for group in groups for line in rollout_log.group_lines(step, group)]
        rollout_log.write(run_dir.rollouts(step), lines)
    except OSError as error:
        logger.error("the rollouts of step %d could not be logged: %s", step, error)
