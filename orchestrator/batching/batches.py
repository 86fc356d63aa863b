"""The staleness rule, finished groups that wait for a batch, and formed batches; `OpenRun` holds what parts share.

The staleness rule:

    version v     weights after v optimizer steps; in a joint run ([diloco]) the global model after v full sweeps
    batch N       is trained on the newest version after step N-1, call it n: a token of version v is n-v versions old;
                  trained: v >= n-max_staleness

The rule applies to tokens. Rollouts continue while versions change, and their older tokens are context in the batch
that trains the newer ones. A group is dropped when no token is left to train, so long rollouts are not dropped first.

A rollout that starts while the nodes serve version V can therefore go into batches up to V+1+max_staleness. When a
version covers several steps, the rollout can go into the batches of all these steps. `free_slots` lets exactly as many
groups run as fit into the batches that accept them. With max_staleness 0, batch N holds groups that began on version
N-1, and nothing starts between that batch's last group and the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.config import Config
from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.orchestrator import EvalConfig
from composer_prime.errors import RunMismatchError
from composer_prime.model_source import text_settings
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.packing.pack import TOKENS_ALONE, FlopCost, model_flops, pack, totals, without_hints
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import Preference, Sample, StepReply
from orchestrator.event_loop import Notifier
from orchestrator.file_rows import NO_ROWS, DemonstrationRows
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from orchestrator.workers.pool import WorkerPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The policy versions known once step `trained` is taken, and those planned."""

    trained: int = 0
    newest: int = 0
    """Published version."""
    since: int = 0
    """The step that it was published after."""
    period: int = 1
    """Planned steps from one version to the next: 1, or diloco.sync_every."""

    def after(self, step: int, version: int) -> Versions:
        """Return the versions once `step` is taken and `version` is the newest."""
        return replace(self, trained=step, newest=version, since=self.since if version == self.newest else step)

    def before(self, batch: int) -> int:
        """Return the newest version when `batch` (from trained + 1) begins; an overdue version does not count."""
        return self.newest + self._planned(batch - 1) - self._planned(self.trained)

    def last_batch(self, version: int) -> int:
        """Return the last batch that begins with `version` or an older one as the newest."""
        periods = version - self.newest + self._planned(self.trained)
        return self.since + (periods + 1) * self.period

    def _planned(self, step: int) -> int:
        return (step - self.since) // self.period


EVERY_STEP = Versions()
"""A run without [diloco]: version v after step v."""


def oldest_accepted(step: int, max_staleness: int, versions: Versions = EVERY_STEP) -> int:
    """Return the oldest policy version whose tokens batch `step` may train."""
    return max(0, versions.before(step) - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int, versions: Versions = EVERY_STEP) -> int:
    """Return the last batch that may use a rollout that began on `version`."""
    return min(versions.last_batch(version + max_staleness), max_steps)


def free_slots(
    *,
    version: int,
    formed: int,
    under_way: int,
    groups_per_step: int,
    max_staleness: int,
    max_steps: int,
    versions: Versions = EVERY_STEP,
) -> int:
    """Return how many more groups may start now, at least 0.

    `version`: what the nodes serve. `formed`: the newest batch that has its groups. `under_way`: groups in flight or in
    the buffer that are not part of a batch yet.
    """
    batches = last_batch(version, max_staleness, max_steps, versions) - formed
    return max(0, batches * groups_per_step - under_way)


class Buffer:
    """Groups are taken in order of group number: data order depends on which groups are ready and on nothing else.

    Groups that no future batch accepts are swept out. Groups without advantage but with hinted turns (DISTILLED) wait
    for a batch to join.
    """

    def __init__(self) -> None:
        self._ready: dict[int, FinishedGroup] = {}

    def __len__(self) -> int:
        """Return the number of groups that a batch can be made of; DISTILLED groups do not count."""
        return sum(group.outcome is GroupOutcome.READY for group in self._ready.values())

    @property
    def group_numbers(self) -> list[int]:
        return sorted(self._ready)

    def add(self, group: FinishedGroup) -> None:
        """Take in a READY or DISTILLED group. Raises ValueError when its number is here already."""
        number = group.plan.group
        if number in self._ready:
            raise ValueError(f"group {number} is in the buffer already")
        self._ready[number] = group

    def sweep(self, oldest: int) -> list[FinishedGroup]:
        """Remove and return the groups without a token of version `oldest` or newer to train."""
        return self.remove(lambda group: not group.trains_since(oldest))

    def remove(self, unwanted: Callable[[FinishedGroup], bool]) -> list[FinishedGroup]:
        """Remove and return the groups that are `unwanted`."""
        removed = [group for group in self._ready.values() if unwanted(group)]
        for group in removed:
            del self._ready[group.plan.group]
        return removed

    def usable(self, oldest: int, newest: int, outcome: GroupOutcome = GroupOutcome.READY) -> list[int]:
        """Return the numbers, ascending, of the groups with tokens since `oldest` and none newer than `newest`."""
        return [
            number
            for number, group in sorted(self._ready.items())
            if group.outcome is outcome and group.version_max <= newest and group.trains_since(oldest)
        ]

    def take(self, count: int, oldest: int, newest: int, *, with_distilled: bool = True) -> list[FinishedGroup] | None:
        """Remove and return the `count` lowest-numbered usable groups; None while there are fewer.

        With them go at most as many DISTILLED groups if `with_distilled`. All are in order of group number, and whole:
        to cut out tokens of versions before `oldest` copies them, which is a thread's work.
        """
        numbers = self.usable(oldest, newest)[:count]
        if len(numbers) < count:
            return None
        numbers += self.usable(oldest, newest, GroupOutcome.DISTILLED)[: count if with_distilled else 0]
        return [self._ready.pop(number) for number in sorted(numbers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    step: int
    groups: list[FinishedGroup]
    """In order of group number."""
    metrics: dict[str, float]
    """For the trainer's line of this step."""
    preferences: list[Preference] = field(default_factory=list)
    """Pairs for replay-DPO."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def group_numbers(self) -> list[int]:
        return [group.plan.group for group in self.groups]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """What the ranks of one step must agree on."""

    world_size: int
    max_tokens: int
    """Token budget of one row."""


class PackedBatches:
    """Batches as their ranks' messages: packed and encoded once for each layout, in a thread, kept for later ranks."""

    def __init__(self, encode: Callable[[Batch, BatchLayout], list[bytes]]) -> None:
        self._encode = encode
        self._tasks: dict[int, tuple[BatchLayout, asyncio.Task[list[bytes]]]] = {}
        """By step."""
        self._layouts: dict[int, BatchLayout] = {}
        """By step: the layout that its first request named."""
        self._last_layout: BatchLayout | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pack")

    def add(self, batch: Batch) -> None:
        """Pack `batch` at once when the layout is known from the step before."""
        if self._last_layout is not None:
            self._pack(batch, self._last_layout)

    async def of_rank(self, batch: Batch, rank: int, layout: BatchLayout) -> bytes:
        """Return the message of `rank`. The first rank that asks fixes the batch's layout.

        Raises RunMismatchError when another rank named another layout, ConfigError when a sample does not fit a row.
        """
        fixed = self._layouts.setdefault(batch.step, layout)
        if fixed != layout:
            raise RunMismatchError(
                f"rank {rank} asks for step {batch.step} as one of {layout.world_size} ranks with {layout.max_tokens} "
                f"tokens a row, another rank of this step said {fixed.world_size} ranks and {fixed.max_tokens} tokens: "
                "start all ranks with the same configuration"
            )
        self._last_layout = layout
        packed = self._tasks.get(batch.step)
        task = packed[1] if packed and packed[0] == layout else self._pack(batch, layout)
        return (await asyncio.shield(task))[rank]

    def drop(self, step: int) -> None:
        self._tasks.pop(step, None)
        self._layouts.pop(step, None)

    def forget(self) -> None:
        """Forget all layouts: a trainer has attached, perhaps with another number of ranks."""
        self._tasks.clear()
        self._layouts.clear()
        self._last_layout = None

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _pack(self, batch: Batch, layout: BatchLayout) -> asyncio.Task[list[bytes]]:
        async def in_thread() -> list[bytes]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, batch, layout)

        task = asyncio.create_task(in_thread(), name=f"pack-{batch.step}")
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._tasks[batch.step] = (layout, task)
        return task


@dataclass(slots=True, eq=False)
class Batches:
    """Which groups each optimizer step trains, from formation until the trainer has taken the step.

    A batch never changes once it is formed and journaled.
    """

    run_id: str
    max_steps: int
    cost: FlopCost = TOKENS_ALONE
    """FLOPs a token and a token pair, by which packing balances."""
    channels: ChannelsConfig = field(default_factory=ChannelsConfig)
    """Which terms have a weight at a step, and so need their documents."""
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    versions: Versions = EVERY_STEP
    demonstrations: Callable[[], DemonstrationRows] = lambda: NO_ROWS
    """SFT's rows, once they are loaded."""
    formed: int = field(default=0, init=False)
    """Newest batch that has its groups."""
    last_step: int = field(init=False)
    """The step that ends the run, by the trainer's last word."""
    _batches: dict[int, Batch] = field(default_factory=dict, init=False)
    packed: PackedBatches = field(init=False)

    def __post_init__(self) -> None:
        self.last_step = self.max_steps
        self.packed = PackedBatches(self._encode)

    @property
    def trained(self) -> int:
        """Newest step that the trainer has taken; batches up to it are no longer held."""
        return self.versions.trained

    @property
    def all_trained(self) -> bool:
        return self.trained >= self.last_step

    def restore(self, *, versions: Versions, formed: int, batches: list[Batch], last_step: int | None = None) -> None:
        """Continue after step `versions.trained` with the batches from the next one to `formed`.

        `last_step`: as in StepDone.
        """
        self.last_step = self.max_steps if last_step is None else last_step
        self.versions = versions
        self.formed = formed
        self._batches = {batch.step: batch for batch in batches}
        self.packed.forget()

    def add(self, batch: Batch) -> None:
        """Take in the next batch."""
        assert batch.step == self.formed + 1, f"batch {batch.step} after batch {self.formed}"
        self._batches[batch.step] = batch
        self.formed = batch.step
        self.packed.add(batch)

    def held(self) -> list[Batch]:
        """Return the batches that are not trained yet, by step."""
        return [self._batches[step] for step in sorted(self._batches)]

    def get(self, step: int) -> Batch | None:
        return self._batches.get(step)

    def done(self, step: int, version: int, last_step: int | None = None) -> None:
        """Drop the batches up to `step`: the trainer took it, and `version` is its newest policy version.

        `last_step`: as in StepDone.
        """
        self.last_step = self.max_steps if last_step is None else last_step
        self.versions = self.versions.after(step, version)
        for old in [held for held in self._batches if held <= step]:
            del self._batches[old]
            self.packed.drop(old)

    def distils(self, step: int) -> bool:
        """Tell whether SDPO has a weight at `step`. In a joint run its schedule counts the steps of the whole run."""
        return self.channels.sdpo.weight_at(self._run_step(step)) > 0

    def _run_step(self, step: int) -> int:
        """Return the step of the whole joint run; `step` itself elsewhere."""
        return step + self.max_steps - self.last_step

    def sdpo_ahead(self, max_staleness: int) -> bool:
        """Tell whether SDPO has a weight at a step that a group ending now may be trained in."""
        first = self.formed + 1
        last = max(first, last_batch(self.versions.newest, max_staleness, self.last_step, self.versions))
        return any(self.distils(step) for step in range(first, last + 1))

    def _encode(self, batch: Batch, layout: BatchLayout) -> list[bytes]:
        step = batch.step
        samples = batch.samples if self.distils(step) else without_hints(batch.samples)
        rows, metrics, held_out = self.demonstrations(), batch.metrics, [[] for _ in range(layout.world_size)]
        units = [pair_unit(pair) for pair in batch.preferences]
        if self.channels.sft.weight_at(self._run_step(step)) > 0:
            units, metrics = units + rows.of_step(step), metrics | rows.metrics(step)
        packed = partial(
            pack,
            run_id=self.run_id,
            step=step,
            world_size=layout.world_size,
            max_tokens=layout.max_tokens,
            cost=self.cost,
        )
        rows_by_rank = packed(samples, units)
        if rows.held_out and (step == 1 or self.evaluation.due(step, self.last_step)):
            held_out = packed([], rows.held_out)
        trained_rows = sum(1 in row.loss_mask for rows in rows_by_rank for row in rows)
        step_totals = totals(samples, units, micro_batches=trained_rows)
        return [
            msgspec.msgpack.encode(
                StepReply(
                    step=step,
                    rank=rank,
                    totals=step_totals,
                    micro_batches=rows,
                    metrics=metrics,
                    held_out=held_out[rank],
                )
            )
            for rank, rows in enumerate(rows_by_rank)
        ]


def build_batches(
    config: Config, run_id: str, model_dir: Path, demonstrations: Callable[[], DemonstrationRows] = lambda: NO_ROWS
) -> Batches:
    """Return the batches of a run. `demonstrations` gives its rows once a trainer asks for a batch."""
    try:
        cost = model_flops(text_settings(model_dir))
    except KeyError as error:
        logger.warning("%s/config.json has no %s: packing balances tokens, not FLOPs", model_dir, error)
        cost = TOKENS_ALONE
    return Batches(
        run_id,
        max_steps=config.run.max_steps,
        cost=cost,
        channels=config.channels,
        evaluation=config.orchestrator.eval,
        demonstrations=demonstrations,
        versions=Versions(period=config.diloco.sync_every if config.diloco else 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a run has before its environments are loaded: handed to the parts that are built afterwards."""

    config: Config
    run_dir: RunDir
    run_id: str
    model_dir: Path
    """Folder with the policy's tokenizer and chat template."""
    gateway: Gateway
    """Has the nodes, their accounts, and the rollouts that an audit taints."""
    pools: dict[str, WorkerPool]
    """Environment workers by source."""
    batches: Batches
    metrics: MetricsFile
    changed: Notifier
    fail: Callable[[BaseException], None]
    """Ends the run with an error."""
