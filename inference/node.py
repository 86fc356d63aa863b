"""A node: one engine, one link to the gateway, and the weights that the gateway publishes.

    link           one DEALER socket, the node's end of orchestrator/gateway/link.py; auditors use it too
    receive loop   gateway messages -> requests, cancellations, weight chunks, new manifests; says hello, reconnects
    requests       a task each, and parts of long answers, so that another node can continue them
    heartbeat      Status every heartbeat_s, also while weights load (pulling, hashing and loading run in threads)
    weights task   the newest manifest -> receiver; versions that were replaced meanwhile are skipped

When the connection is lost, the node drops its requests, which the gateway reissues, and reconnects for at most
connect_timeout_s. `run` returns after a drain and raises when the node cannot continue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import (
    BadRequestError,
    ComposerError,
    CorruptWeightsError,
    DeadlineError,
    EngineError,
    LostRunError,
    LostWeightsError,
    PullRefusedError,
    RunMismatchError,
    WireError,
)
from composer_prime.event_loop import end
from composer_prime.run.keys import ClientKeys
from composer_prime.wire.node_messages import (
    CancelGenerate,
    ChunkRequest,
    ComputeDevice,
    Dismissed,
    FromAuditor,
    FromNode,
    Generate,
    GenerateFailed,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    Sampled,
    ToNode,
    WeightPiece,
    cut_text,
)
from composer_prime.wire.sockets import dealer, frames_of
from composer_prime.wire.types import ints
from inference.engines.base import Engine
from inference.receiver import CHUNK_TIMEOUT_S, ChunkSource, Receiver

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 15.0
_LOG_SILENCE_S = 10.0
_LOOK_S = 0.5
_ENOUGH_TOKENS = 64
"""New tokens of a request that are sent at once; fewer wait for _LONGEST_S."""
_LONGEST_S = 2.0
_LAST_WORDS_S = 2.0
_RETRIED_ERRORS = (CorruptWeightsError, DeadlineError, EngineError, OSError)
"""Errors of weights that another pull may fix."""


class GatewayLink(ChunkSource):
    """One CURVE DEALER socket, opened again for each attempt."""

    def __init__(
        self,
        address: Callable[[], str | None],
        keys: ClientKeys,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        messages: Any = ToNode,
    ) -> None:
        """`address` is called for each connection: a restarted orchestrator may bind another port.

        It returns None before one is bound. `messages`: the union of what may arrive.
        """
        self._address = address
        self._keys = keys
        self._chunk_timeout_s = chunk_timeout_s
        self._chunks: dict[tuple[str, int], asyncio.Future[bytes | None]] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self.endpoint: str | None = None
        self.last_heard = time.monotonic()

    def reopen(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self.endpoint = self._address()
        self._socket = dealer(self._context, self.endpoint, self._keys) if self.endpoint is not None else None

    def send(self, message: FromNode | FromAuditor) -> None:
        if self._socket is not None:
            # A DEALER without a high-water mark never blocks, so the returned future is done.
            self._socket.send_multipart(frames_of(self._encoder.encode(message)), flags=zmq.NOBLOCK)

    async def receive(self, timeout_s: float) -> ToNode | None:
        if self._socket is None:
            await asyncio.sleep(timeout_s)
            return None
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if not await self._socket.poll(math.ceil(left_s * 1000)):
                return None
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
                message = self._decoder.decode(frames[0])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.warning("dropped %d bytes that are no message of the gateway: %s", sum(map(len, frames)), error)
                continue
            self.last_heard = time.monotonic()
            if isinstance(message, WeightPiece):
                self._take_piece(message)
            return message
        return None

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError, or PullRefusedError when the gateway gives no more."""
        future = self._chunks[sha256, offset] = asyncio.get_running_loop().create_future()
        self.send(ChunkRequest(sha256=sha256, offset=offset))
        try:
            return await asyncio.wait_for(future, self._chunk_timeout_s)
        except TimeoutError:
            limit = f"{self._chunk_timeout_s:g} s"
            what = f"weight chunk {sha256} at byte {offset} from the gateway at {self.endpoint}"
            raise DeadlineError(f"waited {limit} for {what}") from None
        finally:
            self._chunks.pop((sha256, offset), None)

    def _take_piece(self, piece: WeightPiece) -> None:
        future = self._chunks.get((piece.sha256, piece.offset))
        if future is None or future.done():
            return
        if piece.refusal is not None:
            future.set_exception(PullRefusedError(piece.refusal))
        else:
            future.set_result(piece.data)

    def close(self) -> None:
        self._context.destroy(linger=500)


class InferenceNode:
    """Serves one gateway until it is drained, refused, or without a gateway for too long. Use once."""

    def __init__(
        self,
        node_id: str,
        engine: Engine,
        link: GatewayLink,
        receiver: Receiver,
        config: InferenceConfig,
        *,
        max_context: int | None = None,
        device: ComputeDevice | None = None,
    ) -> None:
        self._hello = NodeHello(
            node_id=node_id,
            engine=config.engine.name.replace(":", ".")[-40:],
            run_id=None,
            version=0,
            max_concurrent=config.max_concurrent,
            instance=secrets.token_hex(8),
            max_context=max_context,
            device=device,
            usd_per_hour=config.usd_per_hour,
        )
        self._engine = engine
        self._link = link
        self._receiver = receiver
        self._config = config
        self._welcome: NodeWelcome | None = None
        """With the newest manifest."""
        self._attached = False
        self._hello_at = 0.0
        self._new_manifest = asyncio.Event()
        self._weight_error: str | None = None
        self._stop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers = RunningAnswers(engine, receiver, link.send, self._stop_reason)

    @property
    def _heartbeat_s(self) -> float:
        longest = self._config.heartbeat_s
        return longest if self._welcome is None else min(self._welcome.heartbeat_s, longest)

    def drain(self, reason: str) -> None:
        """Finish running requests (at most DRAIN_S), say goodbye, and let `run` return."""
        if not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    def stop(self, reason: str) -> None:
        """Drain; a second call drops the requests that still run."""
        if self._stop_reason.done():
            self._drop_requests()
        self.drain(reason)

    def _drop_requests(self) -> None:
        self._answers.drop()

    async def run(self) -> None:
        """Serve. Raises LostRunError, RunMismatchError, WireError (refused for now) or EngineError."""
        loops = (self._receive, self._send_heartbeats, self._follow_weights, self._answers.stream)
        tasks = [asyncio.create_task(loop()) for loop in loops]
        try:
            await asyncio.wait([*tasks, self._stop_reason], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await self._drain(self._stop_reason.result())
        except ComposerError as error:
            self._link.send(Goodbye(reason=cut_text(error)))
            raise
        finally:
            await end([*tasks, *self._answers.tasks])

    async def _drain(self, reason: str) -> None:
        logger.info("draining (%s): %d requests run", reason, len(self._answers))
        if self._attached:
            await self._answers.drain(DRAIN_S)
        self._link.send(Goodbye(reason=reason))

    # -- the gateway ---------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        attempt, alone_since, log_at = 0, time.monotonic(), time.monotonic() + _LOG_SILENCE_S
        while True:
            self._link.reopen()
            self._say_hello()
            heard = await self._converse(min(2.0 * 1.5**attempt, _LONGEST_RETRY_S))
            if heard is not None:
                attempt, alone_since, log_at = 0, heard, heard + _LOG_SILENCE_S
            alone_s = time.monotonic() - alone_since
            where = self._link.endpoint or "an address that it has not written to the run directory yet"
            if alone_s > self._config.connect_timeout_s:
                raise LostRunError(
                    f"waited {alone_s:.0f} s (inference.connect_timeout_s) for the gateway at {where}: check that the "
                    "orchestrator runs, its address, and that this node's keys are of this run"
                )
            if time.monotonic() > log_at:
                log_at = time.monotonic() + _LOG_SILENCE_S
                logger.info(
                    "no answer from the gateway at %s for %.0f s (inference.connect_timeout_s is %g): is the run still "
                    "alive, and can this machine reach its port?", where, alone_s, self._config.connect_timeout_s,
                )  # fmt: skip
            attempt += 1
            await asyncio.sleep(random.uniform(0.05, 0.3) * min(attempt, 5))

    async def _converse(self, patience_s: float) -> float | None:
        """Serve one connection until no more messages come. Return when the last came, if any did.

        `patience_s` bounds the wait for the first answer.
        """
        opened = time.monotonic()
        while True:
            message = await self._link.receive(self._heartbeat_s)
            if message is not None:
                self._handle(message)
            spoke = self._link.last_heard > opened
            silent_s = time.monotonic() - max(opened, self._link.last_heard)
            if silent_s > (self._config.lost_after_s if spoke else patience_s):
                if spoke:
                    logger.warning("the gateway at %s is silent for %.1f s: connecting again", self._link.endpoint,
                                   silent_s)  # fmt: skip
                self._detach()
                return self._link.last_heard if spoke else None

    def _say_hello(self) -> None:
        self._hello_at = time.monotonic()
        run_id = self._welcome.run_id if self._welcome else None
        self._link.send(msgspec.structs.replace(self._hello, run_id=run_id, version=self._receiver.version))

    def _detach(self) -> None:
        self._attached = False
        self._drop_requests()

    def _handle(self, message: ToNode) -> None:
        match message:
            case Generate():
                self._answers.accept(message)
            case CancelGenerate(request_id=request_id, lease=lease):
                self._answers.cancel(request_id, lease)
            case NodeWelcome(is_news=True):
                self._learn(message)
            case NodeWelcome():
                self._attach(message)
            case Heard(known=False):
                self._repeat_hello()
            case Dismissed(reason=reason, finish_first=True):
                self.drain(reason)
            case Dismissed(reason=reason, may_return=may_return):
                if self._stop_reason.done():  # It drains. A Hello was on its way.
                    return
                refusal = f"the gateway at {self._link.endpoint} turned this node away: {reason}"
                raise RunMismatchError(refusal) if not may_return else WireError(refusal)

    def _repeat_hello(self) -> None:
        """Say hello again, once for several messages."""
        if self._attached or time.monotonic() - self._hello_at > 1.0:
            self._detach()
            self._say_hello()

    def _attach(self, welcome: NodeWelcome) -> None:
        self._detach()
        logger.info("attached to run %s at %s as %s", welcome.run_id, self._link.endpoint, self._hello.node_id)
        self._welcome, self._attached = welcome, True
        self._report()
        self._learn(welcome)

    def _report(self) -> None:
        status = msgspec.structs.replace(
            self._engine.stats(),
            version=self._receiver.version,
            canary_error=self._receiver.canary_error,
            weight_error=self._weight_error,
            weight_bytes=self._receiver.versions.bytes_pulled,
        )
        self._link.send(status)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._attached:
                self._report()

    # -- weights -------------------------------------------------------------------------------------------------

    def _learn(self, message: NodeWelcome) -> None:
        host = urlsplit(self._link.endpoint or "").netloc.rpartition(":")[0]
        self._receiver.versions.source.learn(message.sources, host)
        if message.manifest and self._welcome is not None:
            self._welcome = msgspec.structs.replace(self._welcome, manifest=message.manifest)
            self._new_manifest.set()

    async def _follow_weights(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            await self._new_manifest.wait()
            self._new_manifest.clear()
            welcome = self._welcome
            if welcome is None or not welcome.manifest:
                continue
            try:
                await self._receiver.install(welcome.manifest, welcome.verify_key, welcome.run_id)
            except LostWeightsError:
                raise
            except (ComposerError, OSError) as error:
                self._weight_error = cut_text(error)
                logger.error("still serving weights v%d: %s", self._receiver.version, error)
                if isinstance(error, _RETRIED_ERRORS):
                    asyncio.get_running_loop().call_later(retry_s, self._new_manifest.set)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                self._weight_error, retry_s = None, _FIRST_RETRY_S
            if self._attached:
                self._report()


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    message: Generate
    task: asyncio.Task[None]
    rollbacks: int
    sent_at: float
    sent: int = 0
    """Tokens."""


class RunningAnswers:
    """The requests of one node, a task each, and the parts of long answers.

        accept   Generate -> engine.generate -> wait until weights are proven -> Sampled | GenerateFailed
        stream   every _LOOK_S: engine.progress -> requests with enough new tokens, or none for a while -> Sampled

    Only tokens of proven weights leave.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        send: Callable[[Sampled | GenerateFailed], None],
        ending: asyncio.Future[str],
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._send = send
        self._ending = ending
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [running.task for running in self._running.values()]

    def accept(self, message: Generate) -> None:
        name = f"{message.request_id}/{message.lease}"
        if name in self._running:
            return
        if self._ending.done():
            self._return_untried(message, "it is draining")
            return
        task = asyncio.create_task(self._answer(name, message))
        self._running[name] = _Running(message, task, self._receiver.rollbacks, time.monotonic())
        task.add_done_callback(lambda _: self._running.pop(name, None))

    def cancel(self, request_id: str, lease: int) -> None:
        if running := self._running.get(f"{request_id}/{lease}"):
            running.task.cancel()

    def drop(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def drain(self, limit_s: float) -> None:
        if not self._running:
            return
        _, unfinished = await asyncio.wait(self.tasks, timeout=limit_s)
        if unfinished:
            logger.warning("%d requests did not end within %g s; other nodes take over", len(unfinished), limit_s)
            with suppress(EngineError, TimeoutError):
                await asyncio.wait_for(self.flush(), _LAST_WORDS_S)

    async def _answer(self, name: str, message: Generate) -> None:
        request_id, lease = message.request_id, message.lease
        try:
            rollbacks = self._receiver.rollbacks
            prompt = ints(message.prompt_ids).tolist()
            done = await self._engine.generate(name, prompt, message.sampling, message.session)
            await self._receiver.settled.wait()
            if self._receiver.rollbacks != rollbacks:
                raise EngineError("weights that were refused were in use while this request ran")
        except Exception as error:  # An engine of one's own may raise anything.
            retryable = not isinstance(error, ValueError | BadRequestError)
            if retryable and self._ending.done():
                self._return_untried(message, str(error))
                return
            self._send(GenerateFailed(request_id=request_id, lease=lease, error=cut_text(error), retryable=retryable))
            if retryable:
                await self._check_engine(error)
            return
        self._send(Sampled(request_id=request_id, lease=lease, **msgspec.structs.asdict(done)))

    def _return_untried(self, message: Generate, why: str) -> None:
        """Return a request that this node, which drains, cannot finish."""
        self._send(
            GenerateFailed(
                request_id=message.request_id, lease=message.lease, error=cut_text(why), retryable=True, tried=False
            )
        )

    async def _check_engine(self, error: Exception) -> None:
        """End the node when its engine cannot score two tokens."""
        try:
            await self._engine.score([0, 0])
        except ComposerError as dead:  # Also no answer in time.
            if not self._ending.done():
                self._ending.set_exception(EngineError(f"the engine died: {dead}"))
        else:
            logger.warning("a request failed, but the engine still works: %s", error)

    async def stream(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.flush(_ENOUGH_TOKENS)
            except EngineError as error:
                logger.debug("no progress is streamed: %s", error)

    async def flush(self, enough: int = 1) -> None:
        """Send what requests with `enough` new tokens have, or with any after _LONGEST_S."""
        receiver, rollbacks = self._receiver, self._receiver.rollbacks
        sent = {name: one.sent for name, one in self._running.items() if one.rollbacks == rollbacks}
        if not sent or not receiver.settled.is_set():
            return
        parts = await self._engine.progress(sent)
        if not receiver.settled.is_set() or receiver.rollbacks != rollbacks:
            return
        now = time.monotonic()
        for name, part in parts.items():
            running = self._running.get(name)
            if running is None or running.task.done() or running.sent != sent[name]:
                continue
            if len(part) < enough and now - running.sent_at < _LONGEST_S:
                continue
            message, start = running.message, running.sent
            running.sent, running.sent_at = start + len(part), now
            fields = msgspec.structs.asdict(part)
            self._send(Sampled(request_id=message.request_id, lease=message.lease, start=start, **fields))
