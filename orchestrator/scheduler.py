"""Every decision on groups and batches: what starts, what is formed, what is dropped.

    advance():  sweep   groups of which no future batch trains a token leave the buffer
                form    batch F+1 from the lowest-numbered usable groups, at most one ahead of the step in training
                start   as many groups as the staleness rule has room for

State changes in single steps of the event loop, each with its journal entry queued in the same step. Only `form` and
`checkpoint` wait for the disk, and they exclude one another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_high

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.console import COMPOSER, pluralize
from composer_prime.errors import RolloutError, RunMismatchError
from composer_prime.monitor.events import event
from composer_prime.run.ledger import left_out
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import StepDone
from orchestrator.batching.batch_metrics import batch_metrics
from orchestrator.batching.batches import Batch, Batches, Buffer, free_slots, oldest_accepted
from orchestrator.batching.dispatch import Dispatcher
from orchestrator.durability.journal import Dropped, Entry, Finished, Formed, Journal, Started
from orchestrator.durability.resume import (
    OrchestratorState,
    ResumedRun,
    formed_batches,
    load_state,
    save_state,
    state_path,
    without_left_out,
)
from orchestrator.evals import Evaluator
from orchestrator.event_loop import Notifier
from orchestrator.gateway import Gateway
from orchestrator.preferences import PairCursor, PairMixer
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome, GroupPlan, trained_by_node
from orchestrator.tasks.sources import Sources

logger = logging.getLogger(__name__)

_FILTERED_TOO_MANY = (
    "%.0f %% of the last groups had no advantage (the limit is %.0f %%): the tasks are too easy "
    "or too hard; change the task set or add --orchestrator.curriculum.import_path "
    "frontier; to look: %s try MODULE -n 32"
)
_MAX_FILTERED_SHARE = 0.9
"""Warn if more than this share of the last groups was dropped for equal rewards."""
_MAX_FAILED_GROUPS = 32
"""Groups in a row that may fail for lack of finished rollouts; one more ends the run with the last error."""
_DROPPED_WHOLE = 1024
"""Groups dropped since the last batch that are held with their texts. A batch that never fills must not fill memory."""


@dataclass(slots=True, kw_only=True, eq=False)
class BatchScheduler:
    config: OrchestratorConfig
    run_id: str
    seed: int
    run_dir: RunDir
    sources: Sources
    batches: Batches
    journal: Journal
    dispatcher: Dispatcher
    changed: Notifier
    on_error: Callable[[BaseException], None]
    gateway: Gateway
    """Keeps the accounts of nodes, and knows the rollouts that an audit taints."""
    evaluator: Evaluator
    """May hold a batch until an evaluation is done."""
    pairs: PairMixer | None = None
    log_tokens: bool = False
    """monitor.tokens: whether the rollout log gets the tokens of samples."""
    buffer: Buffer = field(default_factory=Buffer, init=False)
    counters: Counter[str] = field(default_factory=Counter, init=False)
    """Groups by outcome, and batches, over the whole run."""
    last_supplied: float = field(default_factory=time.monotonic, init=False)
    """When a batch was last formed or trained, monotonic seconds."""
    starved_since: float | None = field(default_factory=time.monotonic, init=False)
    """Since when no formed batch waits for the trainer, monotonic seconds; None while one does."""
    _pair_cursor: PairCursor | None = field(default=None, init=False)
    """Where the pairs continue after the newest formed batch; None where no pairs are mixed in."""
    _next_group: int = field(default=0, init=False)
    _redispatch: list[GroupPlan] = field(default_factory=list, init=False)
    """Groups that a crash cut short and that are still to be dispatched again."""
    _dropped: list[FinishedGroup] = field(default_factory=list, init=False)
    """Since the last batch was formed."""
    _unlogged: list[tuple[int, list[FinishedGroup]]] = field(default_factory=list, init=False)
    """(step, groups) of batches whose rollouts are still to be written to the rollout log."""
    _failed_in_row: int = field(default=0, init=False)
    _saved_step: int | None = field(default=None, init=False)
    """Newest checkpoint written here since a trainer attached."""
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def restore(self, state: OrchestratorState, resumed: ResumedRun) -> None:
        """Continue where checkpoint `state` and the journal end."""
        self.batches.demonstrations().check_resume(state.demonstrations)
        self._next_group = resumed.next_group
        self._redispatch = list(resumed.in_flight.values())
        self._dropped = resumed.dropped
        if self.pairs is not None and resumed.pairs is not None:
            self.pairs.restore(resumed.pairs)
            self._pair_cursor = resumed.pairs
        self.counters = Counter(state.counters)
        for group in resumed.ready.values():
            self.buffer.add(group)
        formed = max(resumed.batches, default=state.step)
        versions = self.batches.versions
        self.batches.restore(versions=versions, formed=formed, batches=list(resumed.batches.values()))
        for step, batch in resumed.batches.items():
            if batch.groups and not self.run_dir.rollouts(step).exists():
                self._unlogged.append((step, batch.groups))
        self._note_supply()

    # -- decisions -----------------------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Do all that can be done now. Raises CheckpointError when the journal cannot be written."""
        self._sweep()
        while await self._form():
            self._sweep()
        self._start()
        while self._unlogged:
            step, groups = self._unlogged.pop(0)
            await asyncio.to_thread(_log_rollouts, self.run_dir, step, groups, with_tokens=self.log_tokens)

    @property
    def oldest_version(self) -> int:
        """Oldest version whose tokens the next batch trains."""
        return oldest_accepted(self.batches.formed + 1, self.config.max_staleness, self.batches.versions)

    @property
    def _newest_version(self) -> int:
        """The version that the next batch is trained from, as far as it is known."""
        return self.batches.versions.before(self.batches.formed + 1)

    def _sweep(self) -> None:
        for group in self.buffer.sweep(self.oldest_version):
            was_filtered = group.outcome is GroupOutcome.DISTILLED
            self._drop(group.without_samples(GroupOutcome.FILTERED if was_filtered else GroupOutcome.STALE))

    def _has_tainted(self, group: FinishedGroup) -> bool:
        return self.gateway.is_tainted(rollout.rollout_id for rollout in group.rollouts)

    async def _form(self) -> bool:
        """Form the next batch if its groups are there. Returns whether it did."""
        step = self.batches.formed + 1
        if step > min(self.batches.trained + 2, self.batches.last_step) or self._is_held(step):
            return False
        async with self._disk:
            oldest = self.oldest_version
            taken = self._choose(step)
            if taken is None:
                return False
            dropped, self._dropped = self._dropped, []
            groups = await asyncio.to_thread(_without_stale_tokens, taken, oldest)
            metrics = await asyncio.to_thread(batch_metrics, self._newest_version, groups, dropped, taken)
            metrics |= self._filtered_metrics()
            preferences = []
            if self.pairs is not None:
                draw = await asyncio.to_thread(self.pairs.draw, step)
                preferences = draw.preferences
                self._pair_cursor = draw.cursor
                metrics |= draw.metrics
            batch = Batch(step=step, groups=groups, metrics=metrics, preferences=preferences)
            await self._commit(batch, oldest, dropped)
        if groups or dropped:
            self._unlogged.append((step, [*groups, *dropped]))
        self.changed.notify()
        return True

    def _is_held(self, step: int) -> bool:
        return self.evaluator.holds(step, self.batches.trained, self.batches.last_step)

    def _choose(self, step: int) -> list[FinishedGroup] | None:
        """Take the groups of batch `step` from the buffer; None where they are not there yet."""
        for group in self.buffer.remove(self._has_tainted):
            self._drop(group.without_samples(GroupOutcome.FAILED))
        with_distilled = self.batches.distils(step)
        oldest, newest = self.oldest_version, self._newest_version
        return self.buffer.take(self.config.groups_per_step, oldest, newest, with_distilled=with_distilled)

    def _filtered_metrics(self) -> dict[str, float]:
        """Return the share of the last groups that had no advantage. Warn where it is too large."""
        share, limit = self.buffer.filtered_share, _MAX_FILTERED_SHARE
        if share is None:
            return {}
        if share > limit:
            logger.warning(_FILTERED_TOO_MANY, 100 * share, 100 * limit, COMPOSER, extra=event("groups"))
        return {"groups/filtered_share_recent": share, "groups/filtered_too_many": float(share > limit)}

    async def _commit(self, batch: Batch, oldest: int, dropped: list[FinishedGroup]) -> None:
        """Write the batch to the journal, then let the trainer have it."""
        entry = Formed(
            seq=self.journal.next_seq(),
            step=batch.step,
            oldest_version=oldest,
            groups=batch.group_numbers,
            dropped=[group.plan.group for group in dropped],
            metrics=batch.metrics,
            preferences=batch.preferences,
            pairs=self._pair_cursor,
        )
        await self.journal.append(entry)
        self.batches.add(batch)
        self.counters["batches"] += 1
        self._note_supply()

    def serving_version(self) -> int:
        """Return the policy version that will probably sample a rollout that starts now.

        At least half of the serving nodes have it or a newer one. So a node that lags does not delay the others.
        """
        router = self.gateway.router
        served = [node.version for node in router.serving()]
        return median_high(served) if served else router.oldest_version

    def _start(self) -> None:
        slots = free_slots(
            version=self.serving_version(),
            formed=self.batches.formed,
            under_way=len(self.dispatcher.in_flight) + len(self.buffer),
            groups_per_step=self.config.groups_per_step,
            max_staleness=self.config.max_staleness,
            max_steps=self.batches.last_step,
            versions=self.batches.versions,
        )
        for _ in range(slots):
            if self._redispatch:
                plan = self._redispatch.pop(0)
            else:
                plan = self.sources.plan(self._next_group)
                self._next_group += 1
                self._write(Started(seq=self.journal.next_seq(), plan=plan))
            self.dispatcher.start(plan, self._group_ended)

    # -- events --------------------------------------------------------------------------------------------------

    def _group_ended(self, group: FinishedGroup) -> None:
        """Take in a group from the dispatcher. Raises RolloutError when too many groups fail."""
        self.buffer.note(group.outcome)
        self.sources.observe(group)
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED):
            self.counters[group.outcome.value] += 1
            self.buffer.add(group)
            self._write(Finished(seq=self.journal.next_seq(), group=group))
        else:
            self._drop(group)
        self._count_failures(group)
        self.changed.notify()

    async def step_done(self, message: StepDone) -> None:
        """Take in that a step is taken, or, without sample ids, that a trainer attaches after it.

        Raises RunMismatchError when the message contradicts what was served.
        """
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
        self.gateway.accounts.note_trained(step, trained_by_node(batch.groups))
        self.batches.done(step, message.version, message.last_step)
        self._note_supply()
        self.changed.notify()

    async def _attach(self, message: StepDone) -> None:
        """Accept a trainer that starts after `message.step`.

        Batches of steps that it lost are served again, but for samples that made a step not finite.
        """
        step, versions = message.step, self.batches.versions.after(message.step, message.version)
        self.batches.forget_layouts()
        blamed = left_out(self.run_dir.ledger)  # Not in a thread: a request that follows must find the batches cut.
        self.batches.demonstrations().leave_out(blamed)
        if step < self.batches.trained:
            async with self._disk:
                entries = await self.journal.read()
                batches = await asyncio.to_thread(formed_batches, entries, step, blamed)
            if [batch.step for batch in batches] != list(range(step + 1, self.batches.formed + 1)):
                raise RunMismatchError(
                    f"the trainer starts again after step {step}, the orchestrator stands after step "
                    f"{self.batches.trained} and no longer has all batches in between: start both with --resume"
                )
            logger.warning("the trainer went back from step %d to step %d", self.batches.trained, step)
        else:
            # The trainer may have ended between the line in the ledger and its StepDone.
            batches = [without_left_out(batch, blamed) for batch in self.batches.held() if batch.step > step]
        self.batches.restore(
            versions=versions, formed=self.batches.formed, batches=batches, last_step=message.last_step
        )
        self._saved_step = None
        self._note_supply()
        self.changed.notify()

    # -- state ---------------------------------------------------------------------------------------------------

    async def checkpoint(self, step: int) -> None:
        """Write the orchestrator's part of checkpoint `step`; drop journal segments that no checkpoint needs.

        Do nothing if this checkpoint was written last and its file exists: then the answer was lost, and the trainer
        asks again. If the trainer restarts this checkpoint, the file is gone.

        Raises RunMismatchError when the trainer is at another step, CheckpointError when the disk refuses.
        """
        if step == self._saved_step and await asyncio.to_thread(state_path(self.run_dir, step).exists):
            return
        async with self._disk:
            if step != self.batches.trained:
                raise RunMismatchError(
                    f"checkpoint {step} was asked for, the orchestrator stands after step {self.batches.trained}"
                )
            state = self.state()
            await asyncio.to_thread(save_state, self.run_dir, state)
        oldest = await asyncio.to_thread(self._oldest_state, state)
        groups = {
            *oldest.ready,
            *oldest.dropped,
            *(number for numbers in oldest.batches.values() for number in numbers),
        }
        await self.journal.compact(oldest_seq=oldest.journal_seq, groups=groups, steps=set(oldest.batches))
        self._saved_step = step

    def state(self) -> OrchestratorState:
        """Return the state after step `trained`, at this moment."""
        in_flight = [group.plan for group in self.dispatcher.in_flight.values()]
        return OrchestratorState(
            run_id=self.run_id,
            step=self.batches.trained,
            seed=self.seed,
            journal_seq=self.journal.seq,
            next_group=self._next_group,
            in_flight=sorted([*in_flight, *self._redispatch], key=lambda plan: plan.group),
            ready=self.buffer.group_numbers,
            dropped=[group.plan.group for group in self._dropped],
            batches={batch.step: batch.group_numbers for batch in self.batches.held()},
            curricula=self.sources.state(),
            counters=dict(self.counters),
            pairs=self._pair_cursor,
            demonstrations=self.batches.demonstrations().digest,
            versions=self.batches.versions,
        )

    def waiting_for(self, step: int) -> str:
        """Say in one line what batch `step` lacks."""
        is_next = step == self.batches.formed + 1
        usable = len(self.buffer.usable(self.oldest_version, self._newest_version)) if is_next else 0
        parts = [f"batch {step}: {usable} of {pluralize(self.config.groups_per_step, 'group')}"]
        oldest_s = self.dispatcher.oldest_s()
        if oldest_s is None:
            parts.append("no rollout under way")
        else:
            parts.append(
                f"{pluralize(self.dispatcher.running, 'rollout')} of "
                f"{pluralize(len(self.dispatcher.in_flight), 'group')} running, "
                f"oldest {oldest_s:.0f} s"
            )
        filtered = sum(group.outcome is GroupOutcome.FILTERED for group in self._dropped)
        lost = len(self._dropped) - filtered
        parts += [f"{pluralize(filtered, 'group')} without advantage left out"] if filtered else []
        parts += [f"{pluralize(lost, 'group')} failed or stale"] if lost else []
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return the queues' figures for the orchestrator's own line."""
        return {
            "queue/groups_in_flight": len(self.dispatcher.in_flight),
            "queue/rollouts_running": self.dispatcher.running,
            "queue/groups_ready": len(self.buffer),
            "queue/batches_ahead": self.batches.formed - self.batches.trained,
            **self.dispatcher.metrics(),
            **{f"groups/total/{name}": count for name, count in sorted(self.counters.items())},
        }

    # -- details -------------------------------------------------------------------------------------------------

    def _drop(self, group: FinishedGroup) -> None:
        self.counters[group.outcome.value] += 1
        if len(self._dropped) >= _DROPPED_WHOLE:
            rollouts = [msgspec.structs.replace(rollout, turns=[], sessions=[]) for rollout in group.rollouts]
            group = msgspec.structs.replace(group, rollouts=rollouts)
        self._dropped.append(group)
        self._write(Dropped(seq=self.journal.next_seq(), group=group))

    def _write(self, entry: Entry) -> None:
        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self.on_error(error)

        self.journal.append(entry).add_done_callback(written)

    def _note_supply(self) -> None:
        """Record whether a batch waits for the trainer, for the watchdog's deadlines."""
        self.last_supplied = time.monotonic()
        self.starved_since = self.last_supplied if self.batches.formed == self.batches.trained else None

    def _count_failures(self, group: FinishedGroup) -> None:
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED, GroupOutcome.FILTERED):
            self._failed_in_row = 0
        elif group.outcome is GroupOutcome.FAILED:
            self._failed_in_row += 1
            if self._failed_in_row >= _MAX_FAILED_GROUPS:
                failure = next(rollout.failure for rollout in group.rollouts if rollout.failure is not None)
                raise RolloutError(
                    f"{pluralize(self._failed_in_row, 'group')} in a row failed; "
                    f"the last error, from source {group.plan.source!r}: {failure.text()}"
                )

    def _oldest_state(self, newest: OrchestratorState) -> OrchestratorState:
        """Return the state of the oldest checkpoint that a resume may choose."""
        complete = self.run_dir.complete_checkpoints()
        oldest = min(complete, default=newest.step)
        return newest if oldest >= newest.step else load_state(self.run_dir, oldest, self.run_id)


def _without_stale_tokens(groups: list[FinishedGroup], oldest: int) -> list[FinishedGroup]:
    return [group.without_stale_tokens(oldest) for group in groups]


def _log_rollouts(run_dir: RunDir, step: int, groups: list[FinishedGroup], *, with_tokens: bool) -> None:
    try:
        if with_tokens:
            tokens = (line for group in groups for line in rollout_log.token_lines(group))
            rollout_log.write(run_dir.rollout_tokens(step), tokens)
        lines = [line for group in groups for line in rollout_log.group_lines(step, group)]
        rollout_log.write(run_dir.rollouts(step), lines)
    except OSError as error:
        logger.error("the rollouts of step %d could not be logged: %s", step, error)
