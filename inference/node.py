"""A node: one engine, one link to the gateway, and the weights that the gateway publishes.

    receive loop   gateway messages -> requests, cancellations, weight chunks, new manifests; says hello, reconnects
    progress       what long answers have so far (partial_answers.py): another node can continue them
    request task   one per lease: engine.generate -> wait until the weights are proven -> Sampled | GenerateFailed
    heartbeat      Status every heartbeat_s, also while weights load (pulling, hashing and loading run in threads)
    weights task   the newest manifest -> receiver; versions that were replaced meanwhile are skipped

When the connection is lost, the node drops its running requests, and the gateway reissues them. The node reconnects for
at most connect_timeout_s. `run` returns after a drain and raises when the node cannot continue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import (
    BadRequestError,
    ComposerError,
    CorruptWeightsError,
    DeadlineError,
    EngineError,
    LostRunError,
    LostWeightsError,
    RunMismatchError,
    WireError,
)
from composer_prime.wire.node_messages import (
    CancelGenerate,
    ComputeDevice,
    Drain,
    Generate,
    GenerateFailed,
    Goodbye,
    Heard,
    NewVersion,
    NodeHello,
    NodeWelcome,
    Rejected,
    Sampled,
    Status,
    ToNode,
    cut_text,
)
from composer_prime.wire.types import ints
from inference.engines.base import Engine
from inference.gateway_link import GatewayLink
from inference.partial_answers import ProgressStreams
from inference.receiver import Receiver
from inference.weight_sources import WeightSources

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long a stopping node waits for its running requests."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 15.0
_LOG_SILENCE_S = 10.0
_LAST_WORDS_S = 2.0
"""How long a draining node waits for the tokens that unfinished requests have so far."""
_RETRIED_ERRORS = (CorruptWeightsError, DeadlineError, EngineError, OSError)
"""Errors of weights that another pull may fix. After a wrong signature or a failed canary, wait for a new version."""


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
        sources: WeightSources | None = None,
    ) -> None:
        """`max_context`: the most tokens of prompt and answer that `engine` can hold; None to report no limit.

        `sources`: the receiver's sources, to which this node adds those that the gateway names; None to add none.
        """
        self._max_context = max_context
        self._device = device
        self._id = node_id
        self._engine = engine
        self._link = link
        self._receiver = receiver
        self._sources = sources
        self._config = config
        self._instance = secrets.token_hex(8)
        self._heartbeat_s = config.heartbeat_s
        self._welcome: NodeWelcome | None = None
        self._streams = ProgressStreams(engine, receiver, link.send)
        self._attached = False
        self._hello_at = 0.0
        self._requests: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._manifest = b""
        self._new_manifest = asyncio.Event()
        self._weight_error: str | None = None
        self._stop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def drain(self, reason: str) -> None:
        """Finish running requests (at most DRAIN_S), say goodbye, and let `run` return."""
        if not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    def stop(self, reason: str) -> None:
        """Drain; a second call drops the requests that still run."""
        if not self._stop_reason.done():
            self.drain(reason)
        else:
            self._drop_requests()

    def _drop_requests(self) -> None:
        for task in self._requests.values():
            task.cancel()

    async def run(self) -> None:
        """Serve. Raises LostRunError (no gateway), RunMismatchError (refused), WireError (refused for now) or
        EngineError (the engine died).
        """
        loops = (self._receive, self._send_heartbeats, self._follow_weights, self._streams.run)
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
            for task in [*tasks, *self._requests.values()]:
                task.cancel()
            await asyncio.gather(*tasks, *self._requests.values(), return_exceptions=True)

    async def _drain(self, reason: str) -> None:
        requests, limit = list(self._requests.values()), DRAIN_S
        logger.info("draining (%s): %d requests run", reason, len(requests))
        if self._attached and requests:
            drained = asyncio.gather(self._engine.drain(), *requests, return_exceptions=True)
            if not (await asyncio.wait([drained], timeout=limit))[0]:
                logger.warning("%d requests did not end within %g s; other nodes take over",
                               sum(not request.done() for request in requests), limit)  # fmt: skip
                with suppress(EngineError, TimeoutError):
                    await asyncio.wait_for(self._streams.flush(), _LAST_WORDS_S)
                drained.cancel()
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
        """Serve one connection until no more messages come. Return when the last one came, None if none did.

        `patience_s` bounds the wait for the first answer; later waits are bounded by lost_after_s.
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
        self._link.send(
            NodeHello(
                node_id=self._id,
                engine=self._config.engine.replace(":", ".")[-40:],
                run_id=self._welcome.run_id if self._welcome else None,
                version=self._receiver.version,
                max_concurrent=self._config.max_concurrent,
                instance=self._instance,
                max_context=self._max_context,
                device=self._device,
                usd_per_hour=self._config.usd_per_hour,
            )
        )

    def _detach(self) -> None:
        """Drop all requests: the gateway reissues what this node holds."""
        self._attached = False
        self._drop_requests()

    def _handle(self, message: ToNode) -> None:
        match message:
            case Generate():
                self._accept(message)
            case CancelGenerate(request_id=request_id, lease=lease):
                if task := self._requests.get((request_id, lease)):
                    task.cancel()
            case NewVersion():
                self._learn(message)
            case NodeWelcome():
                self._attach(message)
            case Heard(known=False):
                self._repeat_hello()
            case Rejected(reason=reason, may_return=may_return):
                if self._stop_reason.done():  # By Drain. A Hello was on its way.
                    return
                refusal = f"the gateway at {self._link.endpoint} turned this node away: {reason}"
                raise RunMismatchError(refusal) if not may_return else WireError(refusal)
            case Drain(reason=reason):
                self.drain(reason)

    def _repeat_hello(self) -> None:
        """Say hello again, once: the gateway may answer several messages that it cannot attribute."""
        if self._attached or time.monotonic() - self._hello_at > 1.0:
            self._detach()
            self._say_hello()

    def _attach(self, welcome: NodeWelcome) -> None:
        self._detach()
        logger.info("attached to run %s at %s as %s", welcome.run_id, self._link.endpoint, self._id)
        self._welcome, self._attached = welcome, True
        self._heartbeat_s = min(welcome.heartbeat_s, self._config.heartbeat_s)
        self._report()
        self._learn(welcome)

    def _report(self) -> None:
        stats = self._engine.stats()
        self._link.send(
            Status(
                version=self._receiver.version,
                running=stats.running,
                waiting=stats.waiting,
                kv_used=stats.kv_used,
                kv_tokens=stats.kv_tokens,
                tokens_per_s=stats.tokens_per_s,
                canary_error=self._receiver.canary_error,
                weight_error=self._weight_error,
                weight_bytes=self._receiver.bytes_pulled,
            )
        )

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._attached:
                self._report()

    # -- requests ------------------------------------------------------------------------------------------------

    def _accept(self, message: Generate) -> None:
        key = (message.request_id, message.lease)
        if key in self._requests:
            return
        if self._stop_reason.done():
            self._return_untried(message, "it is draining")
            return
        task = asyncio.create_task(self._answer(message))
        self._requests[key] = task
        task.add_done_callback(lambda _: self._requests.pop(key, None))

    async def _answer(self, message: Generate) -> None:
        request_id, lease = message.request_id, message.lease
        engine_id = f"{request_id}/{lease}"
        self._streams.begin(engine_id, message)
        try:
            rollbacks = self._receiver.rollbacks
            prompt = ints(message.prompt_ids).tolist()
            done = await self._engine.generate(engine_id, prompt, message.sampling, message.session)
            await self._receiver.settled.wait()
            if self._receiver.rollbacks != rollbacks:
                raise EngineError("weights that were refused were in use while this request ran")
        except Exception as error:  # An engine of one's own may raise anything.
            retryable = not isinstance(error, ValueError | BadRequestError)
            if retryable and self._stop_reason.done():
                self._return_untried(message, str(error))
                return
            self._link.send(
                GenerateFailed(request_id=request_id, lease=lease, error=cut_text(error), retryable=retryable)
            )
            if retryable:
                await self._check_engine(error)
            return
        finally:
            self._streams.end(engine_id)
        self._link.send(Sampled(request_id=request_id, lease=lease, **msgspec.structs.asdict(done)))

    def _return_untried(self, message: Generate, why: str) -> None:
        """Return a request that this node cannot finish because it is draining. Not a failed attempt."""
        self._link.send(
            GenerateFailed(
                request_id=message.request_id, lease=message.lease, error=cut_text(why), retryable=True, tried=False
            )
        )

    async def _check_engine(self, error: Exception) -> None:
        """End the node when its engine cannot score two tokens, so that the launcher may start it again."""
        try:
            await self._engine.score([0, 0])
        except ComposerError as dead:  # Also no answer in time.
            if not self._stop_reason.done():
                self._stop_reason.set_exception(EngineError(f"the {self._config.engine} engine died: {dead}"))
        else:
            logger.warning("a request failed, but the engine still works: %s", error)

    # -- weights -------------------------------------------------------------------------------------------------

    def _learn(self, message: NodeWelcome | NewVersion) -> None:
        """Note where weights are available, and trigger the installation of the newest manifest."""
        if self._sources is not None:
            host = urlsplit(self._link.endpoint or "").netloc.rpartition(":")[0]
            self._sources.learn(message.sources, host)
        if message.manifest:
            self._manifest = message.manifest
            self._new_manifest.set()

    async def _follow_weights(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            await self._new_manifest.wait()
            self._new_manifest.clear()
            manifest, welcome = self._manifest, self._welcome
            if welcome is None:
                continue
            try:
                await self._receiver.install(manifest, welcome.verify_key, welcome.run_id)
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
