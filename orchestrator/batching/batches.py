"""The staleness rule, finished groups that wait for a batch, and formed batches until the trainer has them.

    version v     weights after v optimizer steps; in a joint run ([diloco]) the global model after v full sweeps
    batch N       is trained on the newest version after step N-1, call it n: a token of version v is n-v versions old;
                  trained: v >= n-max_staleness

The rule applies to tokens. Rollouts continue while versions change, and their older tokens are context in the batch
that trains the newer ones. A group is dropped when no token is left to train, so long rollouts are not dropped first.
`verify_batch` checks again in the trainer.

A rollout that starts while the nodes serve version V can therefore go into batches up to V+1+max_staleness, or where a
version covers several steps, into those of all these steps. `free_slots` lets as many groups run as fit into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import zmq

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.config import Config
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ComposerError, RunMismatchError, WireError
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
    Preference,
    RunFinished,
    Sample,
    StepDone,
    StepNoted,
    StepPart,
    StepRefused,
    StepReply,
    StepRequest,
)
from orchestrator.event_loop import Notifier, end, watched
from orchestrator.file_rows import NO_ROWS, DemonstrationRows
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from orchestrator.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

POLL_S = 1.5
"""How long a request waits here for its batch before BatchNotReady; the protocol allows 2 s."""
PART_BYTES = 4 << 20
"""Of a StepReply that is sent in parts."""
_CLOSE_S = 10.0
_PAST_S = 20.0
"""How long a rank waits for rank 0 to announce a restart."""
_DECODER = msgspec.msgpack.Decoder(FromTrainer)


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


def oldest_accepted(step: int, max_staleness: int, versions: Versions) -> int:
    """Return the oldest policy version whose tokens batch `step` may train."""
    return max(0, versions.before(step) - max_staleness)


def last_batch(version: int, max_staleness: int, max_steps: int, versions: Versions) -> int:
    """Return the last batch that may use a rollout that began on `version`."""
    return min(versions.last_batch(version + max_staleness), max_steps)


def free_slots(batches: int, under_way: int, groups_per_step: int) -> int:
    """Return how many more groups may start now, at least 0.

    `batches`: those without groups that may use what starts now. `under_way`: groups in flight or in the buffer.
    """
    return max(0, batches * groups_per_step - under_way)


class Buffer:
    """Groups are taken in order of group number: data order depends on which groups are ready and on nothing else."""

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

        With them go at most as many DISTILLED groups if `with_distilled`. All keep tokens of versions before `oldest`.
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


Layout = tuple[int, int]
"""What the ranks of one step must agree on: how many they are, and the token budget of one row."""


@dataclass(slots=True, eq=False)
class Batches:
    """Which groups each optimizer step trains, from formation until the trainer has taken the step.

    A batch never changes once it is formed and journaled. It is packed and encoded once for each layout, in a thread,
    and kept for later ranks.
    """

    run_id: str
    config: Config
    cost: FlopCost = TOKENS_ALONE
    """FLOPs a token and a token pair, by which packing balances."""
    demonstrations: Callable[[], DemonstrationRows] = lambda: NO_ROWS
    """SFT's rows, once they are loaded."""
    versions: Versions = field(init=False)
    formed: int = field(default=0, init=False)
    """Newest batch that has its groups."""
    last_step: int = field(init=False)
    """The step that ends the run, by the trainer's last word."""
    _batches: dict[int, Batch] = field(default_factory=dict, init=False)
    _packed: dict[int, tuple[Layout, asyncio.Future[list[bytes]]]] = field(default_factory=dict, init=False)
    """By step: the messages of the ranks."""
    _layouts: dict[int, Layout] = field(default_factory=dict, init=False)
    """By step: the layout that its first request named."""
    _last_layout: Layout | None = field(default=None, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="pack"), init=False
    )

    def __post_init__(self) -> None:
        self.last_step = self.config.run.max_steps
        self.versions = Versions(period=self.config.diloco.sync_every if self.config.diloco else 1)

    @property
    def trained(self) -> int:
        """Newest step that the trainer has taken; batches up to it are no longer held."""
        return self.versions.trained

    @property
    def all_trained(self) -> bool:
        return self.trained >= self.last_step

    def restore(self, *, versions: Versions, formed: int, batches: list[Batch], last_step: int | None = None) -> None:
        """Continue after step `versions.trained` with the batches from the next one to `formed`."""
        self.last_step = self.config.run.max_steps if last_step is None else last_step
        self.versions = versions
        self.formed = formed
        self._batches = {batch.step: batch for batch in batches}
        self.forget_layouts()

    def forget_layouts(self) -> None:
        """Forget what is packed: a trainer has attached, perhaps with another number of ranks."""
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
        """Return the batches that are not trained yet, by step."""
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
        """Return the step of the whole joint run; `step` itself elsewhere."""
        return step + self.config.run.max_steps - self.last_step

    def last_using(self, version: int) -> int:
        """Return the last batch that may use a rollout that begins now, on `version`."""
        return last_batch(version, self.config.orchestrator.max_staleness, self.last_step, self.versions)

    def sdpo_ahead(self) -> bool:
        """Tell whether SDPO has a weight at a step that a group ending now may be trained in."""
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
        units = [pair_unit(pair) for pair in batch.preferences]
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
    """Return what packing balances for a model: FLOPs, or tokens."""
    try:
        return model_flops(text_settings(model_dir))
    except KeyError as error:
        logger.warning("%s/config.json has no %s: packing balances tokens, not FLOPs", model_dir, error)
        return TOKENS_ALONE


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

    @property
    def settings(self) -> OrchestratorConfig:
        return self.config.orchestrator


# -- serving them to the trainer --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    poll: asyncio.Task[None] | None = None
    """The task that answers its newest StepRequest."""
    past_since: float | None = None
    """Since when it asks for trained steps, monotonic seconds."""
    reply: tuple[int, zmq.MessageTracker] | None = None
    """The step of its newest StepReply, and whether all of that left."""


class StepServer:
    """Serves batches to the trainer: one ROUTER socket (CURVE) with the protocol of composer_prime/wire/types.py.

        rank --StepRequest--> poll task: batch there?  yes -> StepReply in parts (packed once, in a thread)
                                                       no  -> waits at most POLL_S -> BatchNotReady{waiting_for}
        rank 0 --StepDone / CheckpointRequest--> handled one after another, in order of arrival; a repeated one once

    A rank's newer request replaces its older one. While the reply to one leaves, its repetitions are ignored.
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
        """Answer at `socket` from now on; needs a running event loop. `close` closes the socket too.

        `waiting_for(step)`: what the batch of `step` still lacks. `run.changed` notifies when a batch is formed.
        """
        self.counts: Counter[str] = Counter(garbage=0, refused=0)
        """Dropped messages that are not of the protocol, and refused requests."""
        self.last_heard: float | None = None
        """Monotonic seconds of the last valid message of any rank; None before the first."""
        self._run = run
        self._server = socket
        self._on_step_done = on_step_done
        self._on_checkpoint = on_checkpoint
        self._waiting_for = waiting_for
        self._ranks: defaultdict[bytes, _Rank] = defaultdict(_Rank)
        self._orders: asyncio.Queue[tuple[bytes, StepDone | CheckpointRequest]] = asyncio.Queue()
        """What rank 0 wants done, with its identity: a checkpoint sees the step before it."""
        self._last_done: tuple[str, int] | None = None
        """Session and step of the newest StepDone that was acted on; None before the first."""
        self._finished: RunFinished | None = None
        """The answer to every StepRequest once the run is over; None before that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._receive())
        self._spawn(self._in_order())

    @property
    def endpoint(self) -> str:
        """The address really bound, with its port."""
        return self._server.endpoint

    def finish(self, reason: str, *, failed: bool) -> None:
        """Answer every StepRequest with RunFinished from now on."""
        self._finished = RunFinished(reason=reason, failed=failed)
        self._run.changed.notify()

    async def close(self) -> None:
        """Answer the orders received, such as a checkpoint that is being saved, then stop."""
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
                self.counts["garbage"] += 1
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
        """Tell whether `step` is trained already, and answer: rank 0 may restart."""
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
        """Act on an order and return the answer. Raises WireError."""
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
        self.counts["refused"] += 1
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
        """Queue a message. Return a tracker that is done once it left, None when the rank is gone."""
        try:
            return await self._server.socket.send_multipart([identity, *frames], copy=False, track=True)
        except zmq.ZMQError as error:
            logger.warning("step server: a rank is gone, its answer is dropped: %s", error)
            return None
