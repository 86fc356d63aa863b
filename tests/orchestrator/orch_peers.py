"""The orchestrator's neighbours for tests: a node and a trainer on real sockets, and workers with scripted rollouts.

The node is a DEALER of wire/node.py that makes tokens up from the prompt; the trainer is a DEALER of wire/types.py that
checks every micro-batch; the pool calls the real gateway over HTTP, turn by turn, as an environment worker does.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import zmq.asyncio

from composer_prime.config import Config
from composer_prime.run import ledger
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import Canary, Manifest, WeightStore, open_signed, sign
from composer_prime.wire.node_messages import (
    Dismissed,
    FromAuditor,
    Generate,
    NodeHello,
    NodeWelcome,
    Sampled,
    ToAuditor,
)
from composer_prime.wire.sockets import dealer
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    CheckpointSaved,
    StepDone,
    StepNoted,
    StepReply,
    StepRequest,
    ToTrainer,
    VersionSpan,
    pack_floats,
    pack_ints,
    verify_batch,
)
from orchestrator.workers.pool import EVAL, MessageRecord, RolloutFailure, RolloutReply, RunRollout
from tests.configs_made import config_of
from tests.gateway.node_peer import PeerNode

MODEL = Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy"
RUN_ID = "orch-test"


def make_config(root: Path, *, max_steps: int = 4, resume: bool = False, **orchestrator: Any) -> Config:
    source = {"name": "s", "taskset": {"id": "x"}, "eval_taskset": {"split": "held-out"}, "timeout_s": 20.0}
    values = {
        "source": [source],
        "groups_per_step": 2,
        "group_size": 4,
        "max_concurrent": 32,
        "sampling": {"max_tokens": 32},
        "no_node_timeout_s": 20.0,
        "batch_timeout_s": 20.0,
    }
    return config_of(
        run={"name": "orch-test", "output_dir": str(root), "max_steps": max_steps, "resume": resume, "seed": 7},
        model={"path": str(MODEL)},
        inference={"heartbeat_s": 0.1, "lost_after_s": 1.0},
        orchestrator=values | orchestrator,
    )


def draw(*parts: object) -> float:
    """Return a number in [0, 1) that is a function of `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


class RunNode(PeerNode):
    """A node whose answers follow from prompt and seed; it swaps `swap_s` after a version is announced."""

    def __init__(self, endpoint: str, keys: RunKeys, name: str = "node-0", *, delay_s: float = 0.0, swap_s: float = 0):
        super().__init__(
            endpoint, keys.client("node"), name, delay_s=delay_s, heartbeat_s=0.05, answer=self._sampled, engine="local"
        )
        self._run_keys, self._swap_s = keys, swap_s

    def note_welcome(self, message: NodeWelcome | Dismissed) -> None:
        super().note_welcome(message)
        if isinstance(message, NodeWelcome) and message.manifest:
            asyncio.get_running_loop().call_later(self._swap_s, self._swap, message.manifest)

    def _swap(self, manifest: bytes) -> None:
        self.version = open_signed(manifest, self._run_keys.verifier(), run_id=RUN_ID).version
        if self._tasks:
            self.beat()

    def _sampled(self, request: Generate) -> Sampled:
        random = np.random.default_rng(int(draw(request.prompt_ids, request.sampling.seed) * 2**40))
        count = int(random.integers(2, 9))
        return self.usual_answer(
            request,
            token_ids=pack_ints(random.integers(3, 200, count)),
            logprobs=pack_floats(-random.random(count) - 0.01),
            version_spans=[VersionSpan(0, count, self.version)],
            finish_reason="stop",
        )


Reward = Callable[[RunRollout], float | RolloutFailure]


class ScriptedPool:
    """A source whose rollouts are `turns` requests to the gateway; `reward(request)` decides how they end."""

    restarts = 0
    players: tuple[int, ...] = (1,)

    def __init__(
        self, reward: Reward | None = None, *, turns: int = 2, tasks: int = 16, played: Path | None = None
    ) -> None:
        """`played`: a file that gets the id of every requested rollout."""
        self._played = played
        self._reward = reward or (lambda request: float(draw(request.task_index, request.seed) < 0.5))
        self._turns, self._tasks = turns, tasks
        self.requests: list[RunRollout] = []
        self._record_ids: dict[str, str] = {}
        """The record of each rollout's newest turn."""
        self.pause_s: Callable[[RunRollout], float] = lambda request: 0.0
        self.gates: dict[tuple[str, int], asyncio.Event] = {}
        """By group id and turn: what that turn waits for."""

    async def start(self) -> None:
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._session.close()

    def num_tasks(self, taskset: str = "train") -> int:
        return 5 if taskset == EVAL else self._tasks

    async def run(self, request: RunRollout, on_begin: Callable[[], None] = lambda: None) -> RolloutReply:
        on_begin()
        self.requests.append(request)
        if self._played is not None:
            with self._played.open("a") as file:
                file.write(f"{request.rollout_id} {request.task_index} {request.seed}\n")
        await asyncio.sleep(self.pause_s(request))
        prompt, turns = [1, 10 + request.task_index], []
        for turn in range(self._turns):
            if (gate := self.gates.get((request.rollout_id.split("-")[0], turn))) is not None:
                await gate.wait()
            sampled = await self._generate(request, prompt)
            prompt = [*prompt, *sampled, 2, 50 + turn]
            turns.append(MessageRecord(role="assistant", text=f"turn {turn}", num_tokens=len(sampled), call=turn,
                                       record_id=self._record_ids[request.rollout_id]))  # fmt: skip
            turns.append(MessageRecord(role="tool", text="ok", num_tokens=2, error="bad" if turn == 0 else None))
        ended = self._reward(request)
        failure, reward = (ended, None) if isinstance(ended, RolloutFailure) else (None, ended)
        return RolloutReply(
            rollout_id=request.rollout_id,
            task_id=f"{request.taskset}-{request.task_index}",
            reward=reward,
            parts={} if reward is None else {"correct": reward},
            turns=turns,
            failure=failure,
        )

    async def _generate(self, request: RunRollout, prompt: list[int]) -> list[int]:
        body = {
            "model": request.model,
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 16, "seed": request.seed, "temperature": request.temperature},
        }
        url = request.gateway_url.removesuffix("/v1") + "/inference/v1/generate"
        headers = {"X-Session-ID": request.rollout_id}
        async with self._session.post(url, json=body, headers=headers) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            self._record_ids[request.rollout_id] = answer["request_id"]
            return answer["choices"][0]["token_ids"]


class PeerAuditor:
    """A DEALER with the trainer's key."""

    def __init__(self, endpoint: str, keys: RunKeys) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = dealer(self._context, endpoint, keys.client("trainer"))
        self._decoder = msgspec.msgpack.Decoder(ToAuditor)

    def send(self, message: FromAuditor) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def hello(self, name: str, **changes) -> None:
        hello = NodeHello(node_id=name, engine="local", run_id=None, version=0, max_concurrent=1)
        self.send(msgspec.structs.replace(hello, **changes))

    async def next(self, kind: type | tuple[type, ...], timeout_s: float = 100.0):
        """Return the next message of a kind; others are skipped."""
        while True:
            raw = await asyncio.wait_for(self._socket.recv(), timeout_s)
            message = self._decoder.decode(raw)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)


class PeerTrainer:
    """`world_size` trainer ranks that step together; they check all they get and keep the run's ledger."""

    def __init__(self, run_dir: RunDir, endpoint: str, *, world_size: int = 1, max_staleness: int = 1) -> None:
        self.run_dir, self.world_size, self.max_staleness = run_dir, world_size, max_staleness
        self.keys = RunKeys(run_dir.keys)
        self.store = WeightStore(run_dir.weights)
        self._context = zmq.asyncio.Context()
        client: ClientKeys = self.keys.client("trainer")
        self.sockets = [dealer(self._context, endpoint, client) for _ in range(world_size)]
        self.waits: list[str] = []
        """What BatchNotReady messages said."""
        self.steps: dict[int, list[StepReply]] = {}
        self.session = secrets.token_hex(4)
        self.noted: list[int] = []
        """Steps whose StepDone was answered, as far as `receive` has read."""

    async def __aenter__(self) -> PeerTrainer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=200)

    async def send(self, message: msgspec.Struct, rank: int = 0) -> None:
        await self.sockets[rank].send(msgspec.msgpack.encode(message))

    async def receive(self, rank: int = 0) -> Any:
        async with asyncio.timeout(100):
            while True:
                message = msgspec.msgpack.decode(await self.sockets[rank].recv(), type=ToTrainer)
                if not isinstance(message, StepNoted):
                    return message
                self.noted.append(message.step)

    async def done(self, step: int, sample_ids: list[str]) -> None:
        await self.send(StepDone(run_id=RUN_ID, step=step, version=step, sample_ids=sample_ids, session=self.session))

    def publish(self, version: int) -> None:
        canary = Canary(token_ids=[1, 2], logprobs=[-1.0])
        manifest = Manifest(run_id=RUN_ID, version=version, kind="anchor", dtype="float32", chunks=[],
                            tensors={}, canary=canary)  # fmt: skip
        self.store.put_manifest(version, sign(manifest, self.keys.signer()))

    async def attach(self, step: int) -> None:
        self.publish(step)
        await self.done(step, [])

    async def ask(self, step: int, rank: int, max_tokens: int = 512) -> Any:
        """Ask until the answer is not BatchNotReady, and return it: StepReply, RunFinished or StepRefused."""
        while True:
            world = self.world_size
            await self.send(
                StepRequest(run_id=RUN_ID, step=step, rank=rank, world_size=world, max_tokens=max_tokens), rank
            )
            answer = await self.receive(rank)
            if not isinstance(answer, BatchNotReady):
                return answer
            self.waits.append(answer.waiting_for)

    async def train(self, step: int, *, work_s: float = 0.0) -> list[StepReply]:
        """Take one optimizer step."""
        replies = await self.fetch(step)
        await asyncio.sleep(work_s)
        await self.finish(step)
        return replies

    async def fetch(self, step: int) -> list[StepReply]:
        """Fetch the batch of a step on all ranks, and check it."""
        replies = await asyncio.gather(*(self.ask(step, rank) for rank in range(self.world_size)))
        for rank, reply in enumerate(replies):
            assert isinstance(reply, StepReply), reply
            for batch in reply.micro_batches:
                oldest = max(0, step - 1 - self.max_staleness)
                verify_batch(batch, run_id=RUN_ID, step=step, rank=rank, versions=(oldest, step - 1))
        self.steps[step] = replies
        return replies

    async def finish(self, step: int) -> None:
        """Publish the version of a step, note the step in the ledger, and send StepDone."""
        ids = sorted(sample_ids(self.steps[step]))
        self.publish(step)
        ledger.append_step(self.run_dir.ledger, step, ids)
        await self.done(step, ids)

    async def checkpoint(self, step: int) -> CheckpointSaved:
        await self.send(CheckpointRequest(run_id=RUN_ID, step=step))
        saved = await self.receive()
        assert isinstance(saved, CheckpointSaved), saved
        if saved.error is None:
            (self.run_dir.checkpoint(step) / "COMPLETE").touch()
        return saved


def sample_ids(replies: list[StepReply]) -> list[str]:
    return [sample_id for reply in replies for batch in reply.micro_batches for sample_id in batch.sample_ids]
