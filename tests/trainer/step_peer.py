"""A small orchestrator for trainer tests: a real step server on loopback that serves packed batches.

    with StepPeer(run, samples_of, max_steps=5) as peer: run.train(ranks=2)

It lives in its own thread; `done`, `requests` and `checkpoints` record what the ranks sent.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import msgspec

from composer_prime.packing.pack import pack, totals, without_hints
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, read_run_id, write_atomic
from composer_prime.wire.sockets import bind_router
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    FromTrainer,
    RunFinished,
    Sample,
    StepDone,
    StepNoted,
    StepRefused,
    StepReply,
    StepRequest,
    TermUnit,
)


class StepPeer:
    def __init__(
        self,
        run_dir: RunDir,
        samples_of: Callable[[int], list[Sample]],
        *,
        max_steps: int,
        pairs_of: Callable[[int], list[TermUnit]] | None = None,
        distil: bool = True,
        answer: Callable[[StepPeer, StepRequest], bytes | None] | None = None,
    ) -> None:
        """`pairs_of` gives a step's preference pairs; `distil` packs teacher documents.

        `answer` may give other bytes than the honest reply to a request; None gives the honest one."""
        self.run_dir, self.run_id = run_dir, read_run_id(run_dir)
        self.samples_of, self.max_steps, self.answer = samples_of, max_steps, answer
        self.pairs_of, self.distil = pairs_of or (lambda step: []), distil
        self.requests: list[StepRequest] = []
        self.done: list[StepDone] = []
        self.checkpoints: list[int] = []
        self.refuse_checkpoint: str | None = None
        self.not_ready_first: set[int] = set()
        """Steps that are answered with NotReady once."""
        self.lost_first: set[int] = set()
        """Steps whose first StepDone is lost on the way."""
        self.quiet_from: int | None = None
        """Requests for this step and later ones are not answered before `release`."""
        self._held: dict[bytes, StepRequest] = {}
        self.quiet_checkpoints = False
        """Requests for a checkpoint are never answered."""

    def __enter__(self) -> StepPeer:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(200)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def release(self) -> None:
        """Answer the requests that are held back, and all later ones."""
        self.quiet_from = None
        self._loop.call_soon_threadsafe(self._released.set)

    async def _serve(self, started: threading.Event) -> None:
        keys = RunKeys(self.run_dir.keys)
        server = bind_router("tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("trainer").public])
        self._loop, self._stop, self._released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        write_atomic(self.run_dir.endpoints, json.dumps({"step": server.endpoint}).encode())
        tasks = [
            asyncio.create_task(self._receive(server.socket)),
            asyncio.create_task(self._answer_held(server.socket)),
        ]
        started.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()

    async def _receive(self, socket) -> None:
        decoder = msgspec.msgpack.Decoder(FromTrainer)
        while True:
            identity, payload = await socket.recv_multipart()
            reply = self._handle(identity, decoder.decode(payload))
            if reply is not None:
                await socket.send_multipart([identity, reply])

    async def _answer_held(self, socket) -> None:
        await self._released.wait()
        for identity, request in self._held.items():
            await socket.send_multipart([identity, msgspec.msgpack.encode(self.honest(request))])

    def _handle(self, identity: bytes, message: FromTrainer) -> bytes | None:
        if isinstance(message, StepDone):
            if message.step in self.lost_first:
                self.lost_first.remove(message.step)
                return None
            self.done.append(message)
            return msgspec.msgpack.encode(StepNoted(step=message.step))
        if isinstance(message, CheckpointRequest):
            if self.quiet_checkpoints:
                return None
            return msgspec.msgpack.encode(self._save(message.step))
        self.requests.append(message)
        if self.quiet_from is not None and message.step >= self.quiet_from:
            self._held[identity] = message
            return None
        lie = self.answer(self, message) if self.answer else None
        return lie if lie is not None else msgspec.msgpack.encode(self.honest(message))

    def _save(self, step: int) -> CheckpointSaved:
        if self.refuse_checkpoint is None:
            write_atomic(self.run_dir.checkpoint(step) / "orchestrator" / "state.json", b"{}")
            self.checkpoints.append(step)
        return CheckpointSaved(step=step, error=self.refuse_checkpoint)

    def honest(self, request: StepRequest) -> StepReply | BatchNotReady | RunFinished | StepRefused:
        if request.run_id != self.run_id:
            return StepRefused(error=f"this is run {self.run_id}")
        if request.step > self.max_steps:
            return RunFinished(reason="all steps are done", failed=False)
        if request.step in self.not_ready_first:
            self.not_ready_first.remove(request.step)
            return BatchNotReady(step=request.step, waiting_for="3 of 8 groups")
        samples, units = self.samples_of(request.step), self.pairs_of(request.step)
        samples = samples if self.distil else without_hints(samples)
        ranks = pack(samples, units, run_id=self.run_id, step=request.step, world_size=request.world_size,
                     max_tokens=request.max_tokens)  # fmt: skip
        trained = sum(1 in row.loss_mask for own in ranks for row in own)
        counts = totals(samples, units, micro_batches=trained)
        return StepReply(step=request.step, rank=request.rank, totals=counts, micro_batches=ranks[request.rank],
                         metrics={"reward/mean": 0.5})  # fmt: skip
