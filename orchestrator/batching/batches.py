"""The staleness rule, finished groups that wait for a batch, and formed batches until the trainer has them.

    version v     weights after v optimizer steps; in a joint run ([diloco]) the global model after v full sweeps
    batch N       is trained on the newest version after step N-1, call it n: a token of version v is n-v versions old;
                  trained: v >= n-max_staleness

The rule applies to tokens: older ones of a rollout are context in the batch that trains its newer ones. A group is
dropped when no token is left to train, so long rollouts are not dropped first. `verify_batch` checks in the trainer.

A rollout that starts while nodes serve version V can go into batches up to V+1+max_staleness, or where a version covers
several steps, into those of all these steps. `free_slots` lets as many groups run as fit into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import zmq

from composer_prime.config import Config
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ComposerError, RunMismatchError, WireError
from composer_prime.event_loop import Notifier, end, watched
from composer_prime.model_source import text_settings
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.packing.pack import TOKENS_ALONE, FlopCost, model_flops, pack, totals, without_hints
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.sockets import SecureServer
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    FromTrainer,
    RunFinished,
    Sample,
    StepDone,
    StepNoted,
    StepPart,
    StepRefused,
    StepReply,
    StepRequest,
    TermUnit,
)
from orchestrator.file_rows import NO_ROWS, DemonstrationRows
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from orchestrator.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

POLL_S = 1.5
"""A request waits so long for its batch; the protocol allows 2 s."""
PART_BYTES = 4 << 20
_CLOSE_S = 10.0
_PAST_S = 20.0
"""A rank waits so long for rank 0 to announce a restart."""
_DECODER = msgspec.msgpack.Decoder(FromTrainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions known once step `trained` is taken, and those planned."""

    trained: int = 0
    newest: int = 0
    """Published version."""
    since: int = 0
    """The step that `newest` was published after."""
    period: int = 1
    """Planned steps a version: 1, or diloco.sync_every."""

    def after(self, step: int, version: int) -> Versions:
        return replace(self, trained=step, newest=version, since=self.since if version == self.newest else step)

    def before(self, batch: int) -> int:
        """Return the newest version when `batch` begins; an overdue one does not count."""
        return self.newest + self._planned(batch - 1) - self._planned(self.trained)

    def last_batch(self, version: int) -> int:
        """Return the last batch that begins with at most `version`."""
        periods = version - self.newest + self._planned(self.trained)
        return self.since + (periods + 1) * self.period

    def _planned(self, step: int) -> int:
        return (step - self.since) // self.period


def oldest_accepted(step: int, max_staleness: int, versions: Versions) -> int:
    """Return the oldest policy version whose tokens batch `step` may train."""
    return max(0, versions.before(step) - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int, versions: Versions) -> int:
    """Return the last batch that may use a rollout that began on `version`."""
    return min(versions.last_batch(version + max_staleness), max_steps)


def free_slots(batches: int, under_way: int, groups_per_step: int) -> int:
    """Return how many more groups may start now, for `batches` without groups, with `under_way` started or ready."""
    return max(0, batches * groups_per_step - under_way)


class Buffer:
    """Groups are taken in order of group number: data order depends on which groups are ready and on nothing else."""

    def __init__(self) -> None:
        self._ready: dict[int, FinishedGroup] = {}

    def __len__(self) -> int:
        """Count READY groups; DISTILLED ones make no batch."""
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
        """Remove and return `count` usable groups, with at most as many DISTILLED ones; None while there are fewer."""
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
    preferences: list[TermUnit] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def group_numbers(self) -> list[int]:
        return [group.plan.group for group in self.groups]


Layout = tuple[int, int]
"""What the ranks of one step must agree on: how many they are, and the token budget of one row."""


@dataclass(slots=True, eq=False)
class Batches:
    """Which groups each optimizer step trains, until the trainer has taken it.

    A batch never changes once it is journaled. It is packed once for each layout, in a thread.
    """

    run_id: str
    config: Config
    cost: FlopCost = TOKENS_ALONE
    """FLOPs a token and a token pair, by which packing balances."""
    demonstrations: Callable[[], DemonstrationRows] = lambda: NO_ROWS
    versions: Versions = field(init=False)
    formed: int = field(default=0, init=False)
    """Newest batch with groups."""
    last_step: int = field(init=False)
    """The step that ends the run, by the trainer's last word."""
    _batches: dict[int, Batch] = field(default_factory=dict, init=False)
    _packed: dict[int, tuple[Layout, asyncio.Future[list[bytes]]]] = field(default_factory=dict, init=False)
    """By step: messages of the ranks."""
    _layouts: dict[int, Layout] = field(default_factory=dict, init=False)
    """By step, of its first request."""
    _last_layout: Layout | None = field(default=None, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="pack"), init=False
    )

    def __post_init__(self) -> None:
        self.last_step = self.config.run.max_steps
        self.versions = Versions(period=self.config.diloco.sync_every if self.config.diloco else 1)

    @property
    def trained(self) -> int:
        """Newest step that the trainer has taken."""
        return self.versions.trained

    @property
    def all_trained(self) -> bool:
        return self.trained >= self.last_step

    def restore(self, *, versions: Versions, formed: int, batches: list[Batch], last_step: int | None = None) -> None:
        """Continue after `versions.trained` with the batches up to `formed`."""
        self.last_step = self.config.run.max_steps if last_step is None else last_step
        self.versions = versions
        self.formed = formed
        self._batches = {batch.step: batch for batch in batches}
        self.forget_layouts()

    def forget_layouts(self) -> None:
        """Forget what is packed: a trainer has attached, perhaps with other ranks."""
        self._packed.clear()
        self._layouts.clear()
        self._last_layout = None

    def add(self, batch: Batch) -> None:
        """Take in the next batch. Pack it at once when the layout is known from the step before."""
        assert batch.step == self.formed + 1, f"batch {batch.step} after batch {self.formed}"
        self._batches[batch.step] = batch
        self.formed = batch.step
        if self._last_layout is not None:
            self._pack(batch, self._last_layout)

    def held(self) -> list[Batch]:
        """Return the batches that are not trained, by step."""
        return [self._batches[step] for step in sorted(self._batches)]

    def get(self, step: int) -> Batch | None:
        return self._batches.get(step)

    def done(self, step: int, version: int, last_step: int | None = None) -> None:
        """Drop the batches up to `step`: the trainer took it, and `version` is its newest policy version."""
        self.last_step = self.config.run.max_steps if last_step is None else last_step
        self.versions = self.versions.after(step, version)
        for old in [held for held in self._batches if held <= step]:
            for held in (self._batches, self._packed, self._layouts):
                held.pop(old, None)

    def distils(self, step: int) -> bool:
        """Tell whether SDPO has a weight at `step`."""
        return self.config.channels.sdpo.weight_at(self._run_step(step)) > 0

    def _run_step(self, step: int) -> int:
        """Return the step of the whole joint run, or `step`."""
        return step + self.config.run.max_steps - self.last_step

    def last_using(self, version: int) -> int:
        """Return the last batch that may use a rollout which begins on `version`."""
        return last_batch(version, self.config.orchestrator.max_staleness, self.last_step, self.versions)

    def sdpo_ahead(self) -> bool:
        """Tell whether SDPO has a weight at a step that may train a group ending now."""
        first = self.formed + 1
        return any(map(self.distils, range(first, max(first, self.last_using(self.versions.newest)) + 1)))

    async def of_rank(self, batch: Batch, rank: int, layout: Layout) -> bytes:
        """Return the message of `rank`. The first rank that asks fixes the batch's layout.

        Raises RunMismatchError when another rank named another layout, ConfigError when a sample does not fit a row.
        """
        fixed = self._layouts.setdefault(batch.step, layout)
        if fixed != layout:
            raise RunMismatchError(
                f"rank {rank} asks for step {batch.step} as one of {layout[0]} ranks with {layout[1]} tokens a row, "
                f"another rank of this step said {fixed[0]} ranks and {fixed[1]} tokens: start all ranks with the same "
                "configuration"
            )
        self._last_layout = layout
        packed = self._packed.get(batch.step)
        task = packed[1] if packed and packed[0] == layout else self._pack(batch, layout)
        return (await asyncio.shield(task))[rank]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _pack(self, batch: Batch, layout: Layout) -> asyncio.Future[list[bytes]]:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(loop.run_in_executor(self._threads, self._encode, batch, layout))
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._packed[batch.step] = (layout, task)
        return task

    def _encode(self, batch: Batch, layout: Layout) -> list[bytes]:
        step, (world_size, max_tokens) = batch.step, layout
        samples = batch.samples if self.distils(step) else without_hints(batch.samples)
        rows, metrics, held_out = self.demonstrations(), batch.metrics, [[] for _ in range(world_size)]
        units = batch.preferences
        if self.config.channels.sft.weight_at(self._run_step(step)) > 0:
            units, metrics = units + rows.of_step(step), metrics | rows.metrics(step)
        packed = partial(
            pack, run_id=self.run_id, step=step, world_size=world_size, max_tokens=max_tokens, cost=self.cost
        )
        rows_by_rank = packed(samples, units)
        if rows.held_out and (step == 1 or self.config.orchestrator.eval.due(step, self.last_step)):
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


def flop_cost(model_dir: Path) -> FlopCost:
    """Return FLOPs, or tokens where the model's are not known."""
    try:
        return model_flops(text_settings(model_dir))
    except KeyError as error:
        logger.warning("%s/config.json has no %s: packing balances tokens, not FLOPs", model_dir, error)
        return TOKENS_ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a run has before its environments are loaded."""

    config: Config
    run_dir: RunDir
    run_id: str
    model_dir: Path
    """Has tokenizer and chat template."""
    gateway: Gateway
    pools: dict[str, WorkerPool]
    """By source."""
    batches: Batches
    metrics: MetricsFile
    changed: Notifier
    fail: Callable[[BaseException], None]
    """Ends the run with an error."""

    @property
    def settings(self) -> OrchestratorConfig:
        return self.config.orchestrator


# -- serving them to the trainer --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    poll: asyncio.Task[None] | None = None
    """Answers its newest StepRequest."""
    past_since: float | None = None
    """Asks for trained steps since then, monotonic seconds."""
    reply: tuple[int, zmq.MessageTracker] | None = None
    """Step of its newest StepReply, and whether that left."""


class StepServer:
    """Serves batches to the trainer: one ROUTER socket (CURVE), the protocol of composer_prime/wire/types.py.

        rank --StepRequest--> poll task: batch there?  yes -> StepReply in parts (packed once, in a thread)
                                                       no  -> waits at most POLL_S -> BatchNotReady{waiting_for}
        rank 0 --StepDone / CheckpointRequest--> handled one after another, in order of arrival; a repeated one once

    A rank's newer request replaces its older one; repeated ones are ignored while the reply leaves.
    """

    def __init__(
        self,
        run: OpenRun,
        socket: SecureServer,
        *,
        on_step_done: Callable[[StepDone], Awaitable[None]],
        on_checkpoint: Callable[[int], Awaitable[None]],
        waiting_for: Callable[[int], str],
    ) -> None:
        """Answer at `socket` from now on; needs a running event loop. `close` closes the socket too."""
        self.last_heard: float | None = None
        """Of any rank, monotonic seconds."""
        self._run = run
        self._server = socket
        self._on_step_done = on_step_done
        self._on_checkpoint = on_checkpoint
        self._waiting_for = waiting_for
        self._ranks: defaultdict[bytes, _Rank] = defaultdict(_Rank)
        self._orders: asyncio.Queue[tuple[bytes, StepDone | CheckpointRequest]] = asyncio.Queue()
        """Of rank 0, in order: a checkpoint sees the step before it."""
        self._last_done: tuple[str, int] | None = None
        """Session and step of the newest StepDone."""
        self._finished: RunFinished | None = None
        """Answers every StepRequest once the run is over."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._receive())
        self._spawn(self._in_order())

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    def finish(self, reason: str, *, failed: bool) -> None:
        """Answer every StepRequest with RunFinished."""
        self._finished = RunFinished(reason=reason, failed=failed)
        self._run.changed.notify()

    async def close(self) -> None:
        """Answer the orders received, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._orders.join()
        await end(self._tasks)
        await asyncio.to_thread(self._server.close)

    def _spawn(self, work) -> asyncio.Task[None]:
        task = watched(work, self._run.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _receive(self) -> None:
        while True:
            received = await self._server.receive()
            identity, payload = received.identity, received.body
            try:
                message = _DECODER.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                logger.warning("step server: dropped %d bytes that are not a message: %s", len(payload), error)
                continue
            if message.run_id != (run_id := self._run.batches.run_id):
                await self._refuse(identity, f"this is run {run_id!r}, the message is for run {message.run_id!r}")
                continue
            self.last_heard = time.monotonic()
            if isinstance(message, StepRequest):
                self._poll(identity, message)
            else:
                self._orders.put_nowait((identity, message))

    def _poll(self, identity: bytes, request: StepRequest) -> None:
        rank = self._ranks[identity]
        if rank.reply is not None and rank.reply[0] == request.step and not rank.reply[1].done:
            return
        if rank.poll is not None:
            rank.poll.cancel()
        rank.poll = self._spawn(self._answer(identity, request))

    async def _answer(self, identity: bytes, request: StepRequest) -> None:
        if not 0 <= request.rank < request.world_size:
            ranks = f"rank {request.rank} of {request.world_size} ranks"
            await self._refuse(identity, f"{ranks}: ranks count from 0 to world_size - 1")
            return
        if await self._is_past(identity, request.step):
            return
        # StepDone travels on its own: it may be behind this request, and a joint run's last step may still grow.
        is_noted = self._run.batches.trained >= request.step - 1
        if request.step > self._run.batches.last_step and is_noted and self._finished is None:
            finished = RunFinished(reason=f"all {self._run.batches.last_step} steps are done", failed=False)
            await self._send(identity, finished)
            return
        await self._run.changed.wait_for(lambda: self._run.batches.get(request.step) or self._finished, POLL_S)
        if self._finished is not None:
            await self._send(identity, self._finished)
        elif (batch := self._run.batches.get(request.step)) is None:
            await self._send(identity, BatchNotReady(step=request.step, waiting_for=self._waiting_for(request.step)))
        else:
            layout = request.world_size, request.max_tokens
            try:
                payload = await self._run.batches.of_rank(batch, request.rank, layout)
            except ComposerError as error:
                await self._refuse(identity, str(error))
                return
            await self._send_reply(identity, request.step, memoryview(payload))

    async def _is_past(self, identity: bytes, step: int) -> bool:
        """Tell whether `step` is trained, and answer: rank 0 may restart."""
        rank = self._ranks[identity]
        if step > self._run.batches.trained:
            rank.past_since = None
            return False
        if rank.past_since is None:
            rank.past_since = time.monotonic()
        if await self._run.changed.wait_for(lambda: step > self._run.batches.trained, POLL_S):
            return False
        text = (
            f"steps up to {self._run.batches.trained} are trained; rank 0 has not said that it restarts before {step}"
        )
        if time.monotonic() - (rank.past_since or 0.0) < _PAST_S:
            await self._send(identity, BatchNotReady(step=step, waiting_for=text))
        else:
            await self._refuse(identity, f"step {step} was asked for, but {text}")
        return True

    async def _in_order(self) -> None:
        while True:
            identity, order = await self._orders.get()
            try:
                await self._send(identity, await self._follow(order))
            except WireError as error:
                await self._refuse(identity, str(error))
            finally:
                self._orders.task_done()

    async def _follow(self, order: StepDone | CheckpointRequest) -> StepNoted | CheckpointSaved:
        """Raise WireError for an order that does not fit."""
        if isinstance(order, StepDone):
            last = self._last_done
            if last is None or last[0] != order.session:  # A host that is gone takes no reply any more.
                for rank in self._ranks.values():
                    rank.reply = None
            if last is None or last[0] != order.session or order.step > last[1]:  # Else its answer was lost.
                await self._on_step_done(order)
                self._last_done = (order.session, order.step)
            return StepNoted(step=order.step)
        try:
            await self._on_checkpoint(order.step)
        except (ComposerError, OSError) as error:
            logger.error("checkpoint of step %d failed: %s", order.step, error)
            return CheckpointSaved(step=order.step, error=str(error))
        return CheckpointSaved(step=order.step)

    async def _refuse(self, identity: bytes, reason: str) -> None:
        logger.warning("step server: refused a request: %s", reason)
        await self._send(identity, StepRefused(error=reason))

    async def _send_reply(self, identity: bytes, step: int, payload: memoryview) -> None:
        for at in range(0, len(payload), PART_BYTES):
            frames = [payload]
            if len(payload) > PART_BYTES:
                part = StepPart(step=step, at=at, size=len(payload))
                frames = [msgspec.msgpack.encode(part), payload[at : at + PART_BYTES]]
            if (sent := await self._send_frames(identity, *frames)) is not None:
                self._ranks[identity].reply = step, sent

    async def _send(self, identity: bytes, message: msgspec.Struct) -> None:
        await self._send_frames(identity, msgspec.msgpack.encode(message))

    async def _send_frames(self, identity: bytes, *frames: bytes | memoryview) -> zmq.MessageTracker | None:
        """Return a tracker of the message; None when the rank is gone."""
        try:
            return await self._server.socket.send_multipart([identity, *frames], copy=False, track=True)
        except zmq.ZMQError as error:
            logger.warning("step server: a rank is gone, its answer is dropped: %s", error)
            return None
