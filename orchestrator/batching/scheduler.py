"""What starts, what is formed, what is dropped: every decision on groups and batches, and the state they leave.

    advance():  sweep   what no future batch accepts leaves buffer and flight
                form    batch F+1 from the lowest-numbered usable groups, at most one ahead of the step in training
                start   as many groups as the staleness rule has places for

All state changes in single steps of the event loop, each with its journal entry queued in the same step; only `form`
and `checkpoint` wait (for the disk), and they exclude one another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import RolloutError, RunMismatchError
from composer_prime.run.run_dir import RunDir
from orchestrator.batching.batches import Batch, Batches, batch_metrics
from orchestrator.batching.buffer import Buffer, free_slots, last_batch, oldest_accepted
from orchestrator.durability import checkpoint
from orchestrator.durability.checkpoint import OrchestratorState
from orchestrator.durability.journal import Dropped, Entry, Finished, Formed, Journal, Started
from orchestrator.durability.resume import Resumed, formed_batches
from orchestrator.event_loop import Notifier
from orchestrator.preferences.mixer import PairMixer
from orchestrator.preferences.order import Cursor
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.dispatch import Dispatcher
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome, GroupPlan
from orchestrator.tasks.sources import Sources

logger = logging.getLogger(__name__)


_DROPPED_WHOLE = 1024
"""Groups dropped since the last batch that are held with their texts; a batch that never fills must not fill memory."""


class BatchScheduler:
    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        run_id: str,
        seed: int,
        max_steps: int,
        run_dir: RunDir,
        sources: Sources,
        batches: Batches,
        journal: Journal,
        changed: Notifier,
        serving_version: Callable[[], int],
        on_error: Callable[[BaseException], None],
        pairs: PairMixer | None = None,
    ) -> None:
        """`serving_version`: oldest policy version that a rollout begun now may be sampled with."""
        self._pairs = pairs
        self._cursor: Cursor | None = None
        """Where the pairs go on after the newest formed batch."""
        self._config, self._run_id, self._seed, self._max_steps = config, run_id, seed, max_steps
        self._run_dir, self._sources, self._journal = run_dir, sources, journal
        self._changed, self._serving_version, self._on_error = changed, serving_version, on_error
        self.batches, self.buffer = batches, Buffer()
        self.dispatcher: Dispatcher | None = None
        """Set once by the pipeline, which wires `group_ended` into it."""
        self._next_group = 0
        self._again: list[GroupPlan] = []
        """Groups of the run before a crash that are still to be dispatched again."""
        self._dropped: list[FinishedGroup] = []
        """Since the last batch was formed."""
        self._unlogged: list[tuple[int, list[FinishedGroup]]] = []
        self._failed_in_row = 0
        self._saved: int | None = None
        """Newest checkpoint written here since a trainer attached."""
        self._disk = asyncio.Lock()
        self.counters: Counter[str] = Counter()
        """Groups by outcome and batches, over the whole run."""
        self.starved_since: float | None = time.monotonic()
        """Since when no formed batch waits for the trainer, monotonic seconds; None while one does."""
        self.last_supplied = self.starved_since
        """When a batch was last formed or trained, monotonic seconds."""

    def restore(self, state: OrchestratorState, resumed: Resumed) -> None:
        """Take up where checkpoint `state` and the journal left off."""
        self._next_group = resumed.next_group
        self._again = list(resumed.in_flight.values())
        self._dropped = resumed.dropped
        if self._pairs is not None and resumed.pairs is not None:
            self._pairs.restore(resumed.pairs)
            self._cursor = resumed.pairs
        self.counters = Counter(state.counters)
        for group in resumed.ready.values():
            self.buffer.add(group)
        formed = max(resumed.batches, default=state.step)
        versions = self.batches.versions
        self.batches.restore(versions=versions, formed=formed, batches=list(resumed.batches.values()))
        for step, batch in resumed.batches.items():
            if not self._run_dir.rollouts(step).exists():
                self._unlogged.append((step, batch.groups))
        self._note_hunger()

    # -- decisions -----------------------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Do all that can be done now. Raises CheckpointError when the journal cannot be written."""
        self._sweep()
        while await self._form():
            self._sweep()
        self._start()
        while self._unlogged:
            step, groups = self._unlogged.pop(0)
            await asyncio.to_thread(_log_rollouts, self._run_dir, step, groups)

    @property
    def oldest_version(self) -> int:
        """Oldest version that the next batch accepts."""
        return oldest_accepted(self.batches.formed + 1, self._config.max_staleness, self.batches.versions)

    @property
    def _newest_version(self) -> int:
        """What the next batch is trained from, as far as it is known."""
        return self.batches.versions.before(self.batches.formed + 1)

    def distils_soon(self) -> bool:
        """Whether channel 2 has a weight at a step that a group ending now may be trained in."""
        first = self.batches.formed + 1
        versions, staleness = self.batches.versions, self._config.max_staleness
        last = max(first, last_batch(versions.newest, staleness, self._max_steps, versions))
        return any(self.batches.distils(step) for step in range(first, last + 1))

    def _sweep(self) -> None:
        for group in self.buffer.sweep(self.oldest_version):
            filtered = group.outcome is GroupOutcome.DISTILLED
            self._drop(group.without_samples(GroupOutcome.FILTERED if filtered else GroupOutcome.STALE))
        for number in self.dispatcher.cancel_stale(self.oldest_version):
            logger.info("group %d is cancelled: it began before version %d", number, self.oldest_version)

    async def _form(self) -> bool:
        step = self.batches.formed + 1
        if step > min(self.batches.trained + 2, self._max_steps):
            return False
        async with self._disk:
            distilled = self.batches.distils(step)
            groups = self.buffer.take(
                self._config.groups_per_step, self.oldest_version, self._newest_version, distilled=distilled
            )
            if groups is None:
                return False
            dropped, self._dropped = self._dropped, []
            metrics = await asyncio.to_thread(batch_metrics, self._newest_version, groups, dropped)
            if (share := self.buffer.filtered_share) is not None:
                metrics["groups/filtered_share_recent"] = share
                metrics["groups/filtered_too_many"] = float(share > self._config.max_filtered_share)
            preferences = []
            if self._pairs is not None:
                drawn = await asyncio.to_thread(self._pairs.draw, step)
                preferences, self._cursor = drawn.preferences, drawn.cursor
                metrics |= drawn.metrics
            batch = Batch(step=step, groups=groups, metrics=metrics, preferences=preferences)
            entry = Formed(
                seq=self._journal.next_seq(),
                step=step,
                groups=batch.group_numbers,
                dropped=[group.plan.group for group in dropped],
                metrics=metrics,
                preferences=preferences,
                pairs=self._cursor,
            )
            await self._journal.append(entry)
            self.batches.add(batch)
        self.counters["batches"] += 1
        self._note_hunger()
        self._warn_filtered(metrics)
        self._unlogged.append((step, [*groups, *dropped]))
        self._changed.notify()
        return True

    def _start(self) -> None:
        under_way = len(self.dispatcher.flights) + len(self.buffer)
        room = free_slots(
            version=self._serving_version(),
            formed=self.batches.formed,
            under_way=under_way,
            groups_per_step=self._config.groups_per_step,
            max_staleness=self._config.max_staleness,
            max_steps=self._max_steps,
            versions=self.batches.versions,
        )
        for _ in range(room):
            if self._again:
                plan = self._again.pop(0)
            else:
                plan = self._sources.plan(self._next_group)
                self._next_group += 1
                self._write(Started(seq=self._journal.next_seq(), plan=plan))
            self.dispatcher.start(plan)

    # -- events --------------------------------------------------------------------------------------------------

    async def group_ended(self, group: FinishedGroup) -> None:
        """From the dispatcher: `group` is READY, DISTILLED, FILTERED, FAILED or STALE.

        Raises RolloutError when too many fail.
        """
        self.buffer.note(group.outcome)
        self._sources.observe(group)
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED):
            self.counters[group.outcome.value] += 1
            self.buffer.add(group)
            self._write(Finished(seq=self._journal.next_seq(), group=group))
        else:
            self._drop(group)
        self._count_failures(group)
        self._changed.notify()

    async def step_done(self, step: int, version: int, sample_ids: list[str]) -> None:
        """The trainer took `step`, or (no sample ids) says at attach that it stands there; `version` is its newest.

        Raises RunMismatchError when that contradicts what was served.
        """
        if not sample_ids and step <= self.batches.trained:
            await self._attach(step, version)
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
        self.batches.done(step, version)
        self._note_hunger()
        self._changed.notify()

    async def _attach(self, step: int, version: int) -> None:
        """A trainer starts after `step`. Batches that it lost with its steps are served again as they were."""
        self.batches.forget_layouts()
        if step < self.batches.trained:
            async with self._disk:
                batches = formed_batches(await self._journal.read(), after=step)
            if [batch.step for batch in batches] != list(range(step + 1, self.batches.formed + 1)):
                raise RunMismatchError(
                    f"the trainer starts again after step {step}, the orchestrator stands after step "
                    f"{self.batches.trained} and no longer has all batches in between: start both with --resume"
                )
            logger.warning("the trainer went back from step %d to step %d", self.batches.trained, step)
            versions = self.batches.versions.after(step, version)
            self.batches.restore(versions=versions, formed=self.batches.formed, batches=batches)
        else:
            self.batches.done(step, version)
        self._saved = None
        self._note_hunger()
        self._changed.notify()

    async def checkpoint(self, step: int) -> None:
        """Write the orchestrator's part of checkpoint `step`, and drop journal segments that no checkpoint needs.

        Asked again for the checkpoint it wrote last (the answer was lost), it has nothing to do.

        Raises RunMismatchError when the trainer is at another step, CheckpointError when the disk refuses.
        """
        if step == self._saved:
            return
        async with self._disk:
            if step != self.batches.trained:
                raise RunMismatchError(
                    f"checkpoint {step} was asked for, the orchestrator stands after step {self.batches.trained}"
                )
            state = self.state()
            await asyncio.to_thread(checkpoint.save_state, self._run_dir, state)
        kept = await asyncio.to_thread(self._oldest_state, state)
        groups = {*kept.ready, *kept.dropped, *(number for numbers in kept.batches.values() for number in numbers)}
        await self._journal.compact(oldest_seq=kept.journal_seq, groups=groups, steps=set(kept.batches))
        self._saved = step

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> OrchestratorState:
        """After step `trained`, in this very moment."""
        flights = [flight.plan for flight in self.dispatcher.flights.values()]
        return OrchestratorState(
            run_id=self._run_id,
            step=self.batches.trained,
            seed=self._seed,
            journal_seq=self._journal.seq,
            next_group=self._next_group,
            in_flight=sorted([*flights, *self._again], key=lambda plan: plan.group),
            ready=self.buffer.group_numbers,
            dropped=[group.plan.group for group in self._dropped],
            batches={batch.step: batch.group_numbers for batch in self.batches.held()},
            curricula=self._sources.state(),
            counters=dict(self.counters),
            pairs=self._cursor,
            versions=self.batches.versions,
        )

    def waiting_for(self, step: int) -> str:
        """What batch `step` lacks, in one line."""
        wanted = self._config.groups_per_step
        following = step == self.batches.formed + 1
        usable = len(self.buffer.usable(self.oldest_version, self._newest_version)) if following else 0
        parts = [f"batch {step}: {usable} of {wanted} groups"]
        oldest_s = self.dispatcher.oldest_s()
        if oldest_s is None:
            parts.append("no rollout under way")
        else:
            parts.append(
                f"{self.dispatcher.running} rollouts of {len(self.dispatcher.flights)} groups running, "
                f"oldest {oldest_s:.0f} s"
            )
        filtered = sum(group.outcome is GroupOutcome.FILTERED for group in self._dropped)
        lost = len(self._dropped) - filtered
        parts += [f"{filtered} groups without advantage left out"] if filtered else []
        parts += [f"{lost} groups failed or stale"] if lost else []
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """The queues, for the orchestrator's own line."""
        return {
            "queue/groups_in_flight": len(self.dispatcher.flights),
            "queue/rollouts_running": self.dispatcher.running,
            "queue/groups_ready": len(self.buffer),
            "queue/batches_ahead": self.batches.formed - self.batches.trained,
            "rollouts/retries": self.dispatcher.retries,
            **self.dispatcher.hint_metrics(),
            **{f"rollouts/failed/{kind}": count for kind, count in sorted(self.dispatcher.failures.items())},
            **{f"groups/total/{name}": count for name, count in sorted(self.counters.items())},
        }

    # -- details -------------------------------------------------------------------------------------------------

    def _drop(self, group: FinishedGroup) -> None:
        self.counters[group.outcome.value] += 1
        if len(self._dropped) >= _DROPPED_WHOLE:
            group = without_text(group)
        self._dropped.append(group)
        self._write(Dropped(seq=self._journal.next_seq(), group=group))

    def _write(self, entry: Entry) -> None:
        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._on_error(error)

        self._journal.append(entry).add_done_callback(written)

    def _note_hunger(self) -> None:
        self.last_supplied = time.monotonic()
        self.starved_since = self.last_supplied if self.batches.formed == self.batches.trained else None

    def _count_failures(self, group: FinishedGroup) -> None:
        if group.outcome in (GroupOutcome.READY, GroupOutcome.DISTILLED, GroupOutcome.FILTERED):
            self._failed_in_row = 0
        elif group.outcome is GroupOutcome.FAILED:
            self._failed_in_row += 1
            if self._failed_in_row >= self._config.max_failed_groups:
                failure = next(rollout.failure for rollout in group.rollouts if rollout.failure is not None)
                raise RolloutError(
                    f"{self._failed_in_row} groups in a row failed (orchestrator.max_failed_groups); the last error, "
                    f"from source {group.plan.source!r}: {failure.kind}: {failure.message}"
                )

    def _warn_filtered(self, metrics: dict[str, float]) -> None:
        if metrics.get("groups/filtered_too_many"):
            logger.warning(
                "%.0f %% of the last groups had no advantage (orchestrator.max_filtered_share is %.0f %%): the tasks "
                "are too easy or too hard; change the task set or use orchestrator.tasks.curriculum:Frontier",
                100 * metrics["groups/filtered_share_recent"], 100 * self._config.max_filtered_share,
            )  # fmt: skip

    def _oldest_state(self, newest: OrchestratorState) -> OrchestratorState:
        """Of the checkpoints that a resume may choose, the oldest one's state."""
        complete = self._run_dir.complete_checkpoints()
        oldest = min(complete, default=newest.step)
        return newest if oldest >= newest.step else checkpoint.load_state(self._run_dir, oldest, self._run_id)


def without_text(group: FinishedGroup) -> FinishedGroup:
    """`group` with its figures only."""
    return msgspec.structs.replace(
        group, rollouts=[msgspec.structs.replace(rollout, turns=[], sessions=[]) for rollout in group.rollouts]
    )


def _log_rollouts(run_dir: RunDir, step: int, groups: list[FinishedGroup]) -> None:
    try:
        lines = [line for group in groups for line in rollout_log.group_lines(step, group)]
        rollout_log.write(run_dir.rollouts(step), lines)
    except OSError as error:
        logger.error("the rollouts of step %d could not be logged: %s", step, error)
