"""Formed batches: which groups each optimizer step trains, from formation until the trainer has taken the step.

A batch never changes once it is formed and journaled. Its micro-batches are packed and encoded once for each layout
(world size, row length), in a thread, and kept for the ranks that ask later.

`batch_metrics` computes a batch's figures for the trainer's line in metrics.jsonl. Rewards are those of every rollout
that ended since the batch before, filtered groups included. In those all siblings passed or all failed: a mean without
them would hide both.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

import msgspec

from composer_prime.config import Config
from composer_prime.errors import RunMismatchError
from composer_prime.packing.pack import model_flops, pack, totals
from composer_prime.wire.types import Preference, Sample, StepReply
from orchestrator.batching.buffer import Versions, last_batch
from orchestrator.rollouts.groups import BEHAVIOR_PART, FinishedGroup, FinishedRollout, GroupOutcome, turn_error_rate

logger = logging.getLogger(__name__)


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


class Batches:
    def __init__(
        self,
        run_id: str,
        *,
        flops_per_token: float = 1.0,
        flops_per_pair: float = 0.0,
        sdpo_active: Callable[[int], bool] = lambda step: False,
        steps_per_version: int = 1,
    ) -> None:
        """`sdpo_active(step)`: whether SDPO has a weight at that step, so that teacher documents are needed."""
        self.versions = Versions(period=steps_per_version)
        self.sdpo_active = sdpo_active
        self.formed = 0
        """Newest batch that has its groups."""
        self._run_id = run_id
        self._flops_per_token = flops_per_token
        self._flops_per_pair = flops_per_pair
        self._batches: dict[int, Batch] = {}
        self._packed: dict[int, tuple[BatchLayout, asyncio.Task[list[bytes]]]] = {}
        self._layouts: dict[int, BatchLayout] = {}
        """By step: the layout that its first request named."""
        self._last_layout: BatchLayout | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pack")

    @property
    def trained(self) -> int:
        """Newest step that the trainer has taken; batches up to it are no longer held."""
        return self.versions.trained

    def restore(self, *, versions: Versions, formed: int, batches: list[Batch]) -> None:
        """Continue after step `versions.trained` with the batches from the next one to `formed`."""
        self.versions = versions
        self.formed = formed
        self._batches = {batch.step: batch for batch in batches}
        self.forget_layouts()

    def add(self, batch: Batch) -> None:
        """Take in the next batch. Its packing starts at once when the layout is known from the step before."""
        assert batch.step == self.formed + 1, f"batch {batch.step} after batch {self.formed}"
        self._batches[batch.step] = batch
        self.formed = batch.step
        if self._last_layout is not None:
            self._pack(batch, self._last_layout)

    def held(self) -> list[Batch]:
        """Return the batches that are not trained yet, by step."""
        return [self._batches[step] for step in sorted(self._batches)]

    def get(self, step: int) -> Batch | None:
        return self._batches.get(step)

    def done(self, step: int, version: int) -> None:
        """Drop the batches up to `step`: the trainer took it, and `version` is its newest policy version."""
        self.versions = self.versions.after(step, version)
        for old in [held for held in self._batches if held <= step]:
            del self._batches[old]
            self._packed.pop(old, None)
            self._layouts.pop(old, None)

    def sdpo_ahead(self, max_staleness: int, max_steps: int) -> bool:
        """Whether SDPO has a weight at a step that a group ending now may be trained in."""
        first = self.formed + 1
        last = max(first, last_batch(self.versions.newest, max_staleness, max_steps, self.versions))
        return any(self.sdpo_active(step) for step in range(first, last + 1))

    def forget_layouts(self) -> None:
        """Forget how batches were packed: a trainer attached anew, perhaps with another number of ranks."""
        self._packed.clear()
        self._layouts.clear()
        self._last_layout = None

    async def reply(self, step: int, rank: int, layout: BatchLayout) -> bytes:
        """Return the encoded StepReply of `rank`. The first rank that asks fixes the step's layout.

        Raises RunMismatchError when another rank named another layout, ConfigError when a sample does not fit a row.
        """
        fixed = self._layouts.setdefault(step, layout)
        if fixed != layout:
            raise RunMismatchError(
                f"rank {rank} asks for step {step} as one of {layout.world_size} ranks with {layout.max_tokens} tokens "
                f"a row, another rank of this step said {fixed.world_size} ranks and {fixed.max_tokens} tokens: "
                "start all ranks with the same configuration"
            )
        self._last_layout = layout
        packed = self._packed.get(step)
        task = packed[1] if packed and packed[0] == layout else self._pack(self._batches[step], layout)
        return (await asyncio.shield(task))[rank]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _pack(self, batch: Batch, layout: BatchLayout) -> asyncio.Task[list[bytes]]:
        async def in_thread() -> list[bytes]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, batch, layout)

        task = asyncio.create_task(in_thread(), name=f"pack-{batch.step}")
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._packed[batch.step] = (layout, task)
        return task

    def _encode(self, batch: Batch, layout: BatchLayout) -> list[bytes]:
        samples, sdpo = batch.samples, self.sdpo_active(batch.step)
        rows_by_rank = pack(
            samples,
            batch.preferences,
            distil=sdpo,
            run_id=self._run_id,
            step=batch.step,
            world_size=layout.world_size,
            max_tokens=layout.max_tokens,
            flops_per_token=self._flops_per_token,
            flops_per_pair=self._flops_per_pair,
        )
        trained_rows = sum(1 in row.loss_mask for rows in rows_by_rank for row in rows)
        step_totals = totals(samples, batch.preferences, distil=sdpo, micro_batches=trained_rows)
        return [
            msgspec.msgpack.encode(
                StepReply(step=batch.step, rank=rank, totals=step_totals, micro_batches=rows, metrics=batch.metrics)
            )
            for rank, rows in enumerate(rows_by_rank)
        ]


def build_batches(config: Config, run_id: str, model_dir: Path) -> Batches:
    per_token, per_pair = _flops(model_dir)
    return Batches(
        run_id,
        flops_per_token=per_token,
        flops_per_pair=per_pair,
        sdpo_active=lambda step: config.channels.sdpo.weight_at(step) > 0,
        steps_per_version=config.diloco.sync_every if config.diloco else 1,
    )


def _flops(model_dir: Path) -> tuple[float, float]:
    """Return what packing balances by. Every token weighs the same where config.json lacks the usual keys."""
    values = json.loads((model_dir / "config.json").read_text())
    try:
        return model_flops(values.get("text_config") or values)
    except KeyError as error:
        logger.warning("%s/config.json has no %s: packing balances tokens, not FLOPs", model_dir, error)
        return 1.0, 0.0


def batch_metrics(version: int, groups: Sequence[FinishedGroup], dropped: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return the figures of a batch that is trained from policy version `version` on.

    `groups` are trained, some perhaps for SDPO alone; `dropped` ended otherwise since the batch before.
    """
    scored = [*groups, *(group for group in dropped if group.outcome is GroupOutcome.FILTERED)]
    everything = [*groups, *dropped]
    rollouts = [rollout for group in scored for rollout in group.rollouts if rollout.failure is None]
    metrics = _rewards(scored)
    metrics |= _staleness(version, groups)
    metrics |= _shapes(groups, rollouts)
    metrics |= _tools(rollouts)
    metrics |= _hints(rollout for group in everything for rollout in group.rollouts)
    filtered = sum(group.outcome in (GroupOutcome.FILTERED, GroupOutcome.DISTILLED) for group in everything)
    metrics["groups/filtered"] = float(filtered)
    metrics["groups/distilled"] = float(sum(group.outcome is GroupOutcome.DISTILLED for group in groups))
    metrics["groups/filtered_share"] = filtered / max(1, len(scored))
    metrics["groups/stale"] = float(sum(group.outcome is GroupOutcome.STALE for group in dropped))
    metrics["groups/failed"] = float(sum(group.outcome is GroupOutcome.FAILED for group in dropped))
    return metrics | _failures(rollout for group in everything for rollout in group.rollouts)


def _rewards(scored: Sequence[FinishedGroup]) -> dict[str, float]:
    rewards = [reward for group in scored for reward in group.rewards]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        spreads = [pstdev(group.rewards) for group in scored if group.rewards]
        metrics["reward/group_std"] = fmean(spreads)
    by_source: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for group in scored:
        by_source[group.plan.source] += group.rewards
        for rollout in group.rollouts:
            for name, value in rollout.parts.items() if rollout.failure is None else ():
                parts[name].append(value)
    if any(name.startswith(BEHAVIOR_PART) for name in parts):
        metrics["reward/task_mean"] = fmean(reward for group in scored for reward in group.task_rewards)
    metrics |= {f"reward/{source}/mean": fmean(values) for source, values in by_source.items() if values}
    return metrics | {f"reward/part/{name}": fmean(values) for name, values in parts.items()}


def _staleness(version: int, groups: Sequence[FinishedGroup]) -> dict[str, float]:
    spans = [span for group in groups for sample in group.samples for span in sample.version_spans]
    tokens = sum(span.end - span.start for span in spans)
    if not tokens:
        return {}
    ages = sum((version - span.version) * (span.end - span.start) for span in spans)
    return {
        "policy/staleness_max": float(max(version - span.version for span in spans)),
        "policy/staleness_mean": ages / tokens,
    }


def _shapes(groups: Sequence[FinishedGroup], rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    metrics = {
        "batch/groups": float(sum(group.outcome is GroupOutcome.READY for group in groups)),
        "batch/samples": float(len(samples)),
        "batch/tokens": float(sum(sample.num_tokens for sample in samples)),
    }
    if rollouts:
        turns = [sum(turn.role == "assistant" for turn in rollout.turns) for rollout in rollouts]
        metrics["rollout/turns_mean"] = fmean(turns)
        metrics["rollout/sampled_tokens_mean"] = fmean(rollout.sampled_tokens for rollout in rollouts)
        metrics["rollout/truncated_share"] = fmean(rollout.truncated for rollout in rollouts)
        walls_s = [rollout.wall_s for rollout in rollouts if rollout.wall_s is not None]
        if walls_s:
            metrics["rollout/wall_s_mean"] = fmean(walls_s)
            metrics["rollout/wall_s_max"] = max(walls_s)
    return metrics


def _tools(rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
    """Return the share of tool messages and of assistant turns with an error, which hints should lower."""
    metrics: dict[str, float] = {}
    tool_messages = [turn for rollout in rollouts for turn in rollout.turns if turn.role == "tool"]
    if tool_messages:
        metrics["rollout/tool_error_rate"] = fmean(turn.error is not None for turn in tool_messages)
    if (rate := turn_error_rate(rollouts)) is not None:
        metrics["rollout/turn_error_rate"] = rate
    return metrics


def _hints(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """Return hints/found, hints/hinted, hints/skipped/<reason>, hints/kind/<error>, hints/layer/<generator>."""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(rollout.hints)
    if counts:
        counts.update({"found": 0, "hinted": 0})
    return {f"hints/{name}": float(count) for name, count in sorted(counts.items())}


def _failures(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """Count failed tries by kind, retried ones included."""
    counts: dict[str, int] = defaultdict(int)
    for rollout in rollouts:
        for failure in [*rollout.failed_attempts, *([rollout.failure] if rollout.failure else [])]:
            counts[failure.kind] += 1
    return {"rollout/failed": float(sum(counts.values()))} | {
        f"rollout/failed/{kind}": float(count) for kind, count in sorted(counts.items())
    }
