"""An inference node for tests and benchmarks: a real DEALER that speaks wire/node.py and makes up tokens.

Every token is a function of the prompt and its position, so that a test can say what must come back. Runs in the
test's event loop (`PeerNode`) or as a process of its own (`python node_peer.py ...`, used by the benchmark).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from composer_prime.run.keys import ClientKeys
from composer_prime.wire.node_messages import (
    CancelGenerate,
    Dismissed,
    FromNode,
    Generate,
    GenerateFailed,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    Sampled,
    Status,
    ToNode,
)
from composer_prime.wire.sockets import dealer
from composer_prime.wire.types import VersionSpan, ints, pack_floats, pack_ints
from tests.waiting import until

Answer = Callable[[Generate], FromNode | None]


def tokens_for(prompt_ids: Any, count: int, vocab_size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """What a PeerNode samples after `prompt_ids`: int32 [count] and float32 [count]."""
    digest = hashlib.blake2b(np.asarray(prompt_ids, np.int32).tobytes(), digest_size=8).digest()
    draw = np.random.default_rng(int.from_bytes(digest, "little"))
    return draw.integers(3, vocab_size, count).astype(np.int32), -draw.random(count).astype(np.float32) - 0.01


class PeerNode:
    """`async with PeerNode(endpoint, keys, "node-0")`: attached on entry; answers until it is left or `vanish`es."""

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        node_id: str,
        *,
        num_tokens: int = 6,
        delay_s: float = 0.0,
        version: int = 0,
        max_concurrent: int = 64,
        heartbeat_s: float = 0.1,
        answer: Answer | None = None,
        instance: str | None = None,
        engine: str = "peer",
    ) -> None:
        self.endpoint, self.keys, self.node_id = endpoint, keys, node_id
        self.num_tokens, self.delay_s, self.version = num_tokens, delay_s, version
        self.max_concurrent, self.heartbeat_s = max_concurrent, heartbeat_s
        self.engine = engine
        self.instance = instance or secrets.token_hex(8)
        self.answer = answer
        """Replaces the usual answer; returning None answers nothing."""
        self.generates: list[Generate] = []
        self.received: list[ToNode] = []
        """Everything but Generate."""
        self.running: set[str] = set()
        self.status = {"waiting": 0, "kv_used": 0.0}
        self.welcome: NodeWelcome | Dismissed | None = None
        self._context = zmq.asyncio.Context()
        self._decoder = msgspec.msgpack.Decoder(ToNode)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> PeerNode:
        self.connect()
        await self.until(lambda: self.welcome is not None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()

    def connect(self) -> None:
        self.socket = dealer(self._context, self.endpoint, self.keys)
        self.say_hello()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    async def vanish(self) -> None:
        """Go without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._context.destroy(linger=0)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
        await until(condition, f"what {self.node_id} expects", timeout_s)

    def say_hello(self, **changes: Any) -> None:
        hello = NodeHello(
            node_id=self.node_id,
            engine=self.engine,
            run_id=None,
            version=self.version,
            max_concurrent=self.max_concurrent,
            instance=self.instance,
        )
        self.send(msgspec.structs.replace(hello, **changes))

    def send(self, message: FromNode) -> None:
        self.send_raw([msgspec.msgpack.encode(message)])

    def send_raw(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def beat(self) -> None:
        running = len(self.running)
        self.send(Status(version=self.version, running=running, tokens_per_s=0.0, canary_error=None, **self.status))

    def note_welcome(self, message: NodeWelcome | Dismissed) -> None:
        self.welcome = message

    def goodbye(self) -> None:
        """Leave. A later heartbeat would make the gateway ask for a Hello."""
        self.welcome = None
        self.send(Goodbye(reason="test"))

    def usual_answer(self, request: Generate, **changes: Any) -> Sampled:
        ids, logprobs = tokens_for(ints(request.prompt_ids), min(self.num_tokens, request.sampling.max_tokens))
        usual = Sampled(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(ids),
            logprobs=pack_floats(logprobs),
            version_spans=[VersionSpan(0, len(ids), self.version)],
            finish_reason="stop" if len(ids) == self.num_tokens else "length",
        )
        return msgspec.structs.replace(usual, **changes)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if isinstance(self.welcome, NodeWelcome):
                self.beat()

    async def _receive(self) -> None:
        while True:
            message = self._decoder.decode(await self.socket.recv())
            match message:
                case Generate():
                    self._take(message)
                    continue
                case NodeWelcome() | Dismissed(finish_first=False):
                    self.note_welcome(message)
                case Heard(known=False):
                    self.say_hello()
                case CancelGenerate():
                    self.running.discard(message.request_id)
            self.received.append(message)

    def _take(self, message: Generate) -> None:
        self.generates.append(message)
        self.running.add(message.request_id)
        asyncio.get_running_loop().call_later(self.delay_s, self._respond, message)

    def _respond(self, request: Generate) -> None:
        if request.request_id not in self.running or self._context.closed:
            return
        reply = self.answer(request) if self.answer else self.usual_answer(request)
        if reply is not None:
            self.running.discard(request.request_id)
            self.send(reply)


def failed(request: Generate, error: str, *, retryable: bool, tried: bool = True) -> GenerateFailed:
    return GenerateFailed(
        request_id=request.request_id, lease=request.lease, error=error, retryable=retryable, tried=tried
    )


__all__ = ["PeerNode", "failed", "tokens_for"]
