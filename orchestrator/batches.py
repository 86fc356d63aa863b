"""Formed batches: which groups each optimizer step trains, from their formation until the trainer has taken the step.

A batch never changes once it is formed and journaled. Its micro-batches are packed and encoded once for each layout
(world size, row length), in a thread, and kept for the ranks that ask later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from composer_prime.errors import RunMismatchError
from composer_prime.packing import pack, totals
from composer_prime.wire.step import StepReply
from composer_prime.wire.types import Preference, Sample
from orchestrator.groups import FinishedGroup
from orchestrator.staleness import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    step: int
    groups: list[FinishedGroup]
    """In order of group number."""
    metrics: dict[str, float]
    """For the trainer's line of this step."""
    preferences: list[Preference] = field(default_factory=list)
    """Channel 3's pairs."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def group_numbers(self) -> list[int]:
        return [group.plan.group for group in self.groups]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the ranks of one step must agree on."""

    world_size: int
    max_tokens: int


class Batches:
    def __init__(
        self,
        run_id: str,
        *,
        flops_per_token: float = 1.0,
        flops_per_pair: float = 0.0,
        distils: Callable[[int], bool] = lambda step: False,
        steps_per_version: int = 1,
    ) -> None:
        """`distils(step)`: whether channel 2 has a weight at that step, so that teacher documents are needed."""
        self.versions = Versions(period=steps_per_version)
        self._run_id, self._flops, self.distils = run_id, (flops_per_token, flops_per_pair), distils
        self._batches: dict[int, Batch] = {}
        self._packed: dict[int, tuple[Layout, asyncio.Task[list[bytes]]]] = {}
        self._asked: dict[int, Layout] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._last_layout: Layout | None = None
        self.formed = 0
        """Newest batch that has its groups."""

    @property
    def trained(self) -> int:
        """Newest step that the trainer has taken; batches up to it are no longer held."""
        return self.versions.trained

    def restore(self, *, versions: Versions, formed: int, batches: list[Batch]) -> None:
        """Take up after step `versions.trained` with the batches from the next one to `formed`."""
        self.versions, self.formed = versions, formed
        self._batches = {batch.step: batch for batch in batches}
        self.forget_layouts()

    def add(self, batch: Batch) -> None:
        """The next batch. Its packing starts at once when the layout is known from the step before."""
        assert batch.step == self.formed + 1, f"batch {batch.step} after batch {self.formed}"
        self._batches[batch.step] = batch
        self.formed = batch.step
        if self._last_layout is not None:
            self._pack(batch, self._last_layout)

    def held(self) -> list[Batch]:
        """Batches that are not trained yet, by step."""
        return [self._batches[step] for step in sorted(self._batches)]

    def get(self, step: int) -> Batch | None:
        return self._batches.get(step)

    def done(self, step: int, version: int) -> None:
        """The trainer took `step` and stands at `version`: nothing asks for batches up to it any more."""
        self.versions = self.versions.after(step, version)
        for old in [held for held in self._batches if held <= step]:
            del self._batches[old]
            self._packed.pop(old, None)
            self._asked.pop(old, None)

    def forget_layouts(self) -> None:
        """A trainer attached anew, perhaps with another number of ranks."""
        self._packed.clear()
        self._asked.clear()
        self._last_layout = None

    async def reply(self, step: int, rank: int, layout: Layout) -> bytes:
        """The encoded StepReply of `rank`. The first rank that asks fixes the step's layout.

        Raises RunMismatchError when another rank named another layout, ConfigError when a sample does not fit a row.
        """
        fixed = self._asked.setdefault(step, layout)
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

    def _pack(self, batch: Batch, layout: Layout) -> asyncio.Task[list[bytes]]:
        async def in_thread() -> list[bytes]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, batch, layout)

        task = asyncio.create_task(in_thread(), name=f"pack-{batch.step}")
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._packed[batch.step] = (layout, task)
        return task

    def _encode(self, batch: Batch, layout: Layout) -> list[bytes]:
        samples, distil = batch.samples, self.distils(batch.step)
        ranks = pack(
            samples,
            batch.preferences,
            distil=distil,
            run_id=self._run_id,
            step=batch.step,
            world_size=layout.world_size,
            max_tokens=layout.max_tokens,
            flops_per_token=self._flops[0],
            flops_per_pair=self._flops[1],
        )
        trained = sum(1 in row.loss_mask for own in ranks for row in own)
        shared = totals(samples, batch.preferences, distil=distil, micro_batches=trained)
        return [
            msgspec.msgpack.encode(
                StepReply(step=batch.step, rank=rank, totals=shared, micro_batches=own, metrics=batch.metrics)
            )
            for rank, own in enumerate(ranks)
        ]
