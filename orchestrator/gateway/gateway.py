"""The gateway: the one way from environments to inference nodes, and the record of what was sampled.

    environment worker --HTTP, loopback--> http.py -> generation.py -> routing.py -> link.py --CURVE ZMQ--> node
                                                          |                ^             <-- answer, heartbeat --
                                                     records.py            |
    orchestrator: open(rollout) ... take(rollout)     tick task: lost nodes, deadlines, adaptive limit

Three tasks run besides aiohttp's: the link's receiver, the tick, and weight chunks being read in threads. A request
waits for a node (orchestrator.no_node_timeout_s), for a place and for its answer (the longest source's timeout_s).

What somebody has to type so that a node joins this run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from composer_prime.config import Config
from composer_prime.errors import DeadlineError, ModelNotFoundError
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore, open_signed
from composer_prime.wire.node import Drain, NewVersion, ToNode
from orchestrator.event_loop import LoopLag
from orchestrator.gateway.adaptive import AdaptiveLimit, GatewayLoad, Overdue
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import POLICY, Generator, ModelLimits
from orchestrator.gateway.http import HttpServer
from orchestrator.gateway.link import ChunkServer, NodeLink
from orchestrator.gateway.nodes import AttachedNode
from orchestrator.gateway.records import GenerationRecord, RolloutRecords
from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)


_ANY = ("0.0.0.0", "::", "*")
"""A bound interface that is no address to connect to."""


def how_to_join(endpoint: str, model: str, token: Path) -> str:
    """The whole `inference join` command, and where it works.

    `endpoint`: tcp://HOST:PORT as bound; `model`: model.path; `token`: the file that holds the run's join token.
    """
    bound = urlsplit(endpoint)
    host = socket.gethostname() if bound.hostname in _ANY else bound.hostname or ""
    address = f"tcp://[{host}]:{bound.port}" if ":" in host else f"tcp://{host}:{bound.port}"
    command = shlex.join(["inference", "join", address, "--model", model, "--token-file", str(token)])
    if host == "127.0.0.1":
        return f"run `{command}` on this machine (others need orchestrator.node_address on a public interface)"
    return f"run `{command}` on a machine that has a copy of that file"


TOKEN_VARIABLE = "COMPOSER_GATEWAY_TOKEN"
_LOOPBACK = "127.0.0.1"
_IDLE_FACTOR = 3
"""A node that reports no work for so many lost_after_s has lost what we think it holds. Generous: an answer that waits
for a weight swap to be proven is in no engine's count."""


class Gateway:
    """Lives in the orchestrator's event loop from `start` to `close`."""

    def __init__(
        self, config: Config, keys: RunKeys, run_id: str, weight_store: WeightStore, *, model_dir: Path | None = None
    ) -> None:
        """`model_dir`: the model's folder; None resolves model.path at start."""
        self._config, self._keys, self._run_id = config, keys, run_id
        self._model_dir = model_dir
        self._chunks = ChunkServer(weight_store)
        self._link = NodeLink(keys, run_id, self._chunks, heartbeat_s=config.inference.heartbeat_s)
        self._router: Router | None = None
        self._overdue: Overdue | None = None
        self._http: HttpServer | None = None
        self._chat: ChatFormat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] | None = None
        self._counted = (0, time.monotonic())
        self.lag = LoopLag()
        self.records = RolloutRecords(on_taken=self._forget)
        orchestrator = config.orchestrator
        self.adaptive = AdaptiveLimit(floor=orchestrator.group_size, ceiling=orchestrator.max_concurrent)
        self.version: int | None = None
        """Newest published policy version; None before the first `publish`."""

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind both sides. Raises PortInUseError naming the address, ModelNotFoundError, ConfigError (missing keys)."""
        config = self._config
        if self._model_dir is None:
            from composer_prime.model_source import resolve_model

            self._model_dir = await asyncio.to_thread(resolve_model, config.model.path)
        limits = ModelLimits(
            names=(POLICY, config.model.path),
            vocab_size=read_vocab_size(self._model_dir),
            max_context=config.model.max_context,
        )
        self._failure = asyncio.get_running_loop().create_future()
        self._link.bind(config.orchestrator.node_address)
        self._router = Router(
            self._send,
            vocab_size=limits.vocab_size,
            suspend_s=config.inference.lost_after_s,
            how_to_join=how_to_join(self._link.endpoint, config.model.path, self._keys.folder / "node.token"),
        )
        self._overdue = Overdue(
            self._router,
            no_node_timeout_s=config.orchestrator.no_node_timeout_s,
            request_timeout_s=max(source.timeout_s for source in config.orchestrator.source),
        )
        self._chat = ChatFormat(self._model_dir, config.model.renderer)
        self._http = HttpServer(
            Generator(self._router, self.records, limits),
            self._chat,
            token=os.environ.get(TOKEN_VARIABLE),
            health=self._health,
            metrics=self.state,
        )
        try:
            await self._http.start(_LOOPBACK, config.orchestrator.gateway_port)
        except BaseException:
            await self.close()
            raise
        self._tasks = [self._watched(self._link.receive(self._router)), self._watched(self._tick())]
        self.lag.start()

    async def close(self, *, finished: bool = False) -> None:
        """Stop serving and free both addresses. With `finished` nodes learn that the run is over and leave."""
        if finished and self._router is not None:
            for node in self._router.nodes.attached():
                self._link.send(node.identity, Drain(reason="the run is finished"))
        self.lag.stop()
        if self._router is not None:
            self._router.close("the orchestrator is stopping: try again once it runs")
        if self._http is not None:
            await self._http.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._chunks.close()
        if self._chat is not None:
            self._chat.close()
        await self._link.close()
        failure = self._failure
        if failure is not None and not failure.cancel() and not failure.cancelled():
            # Whoever watched has it; nobody need have watched.
            failure.exception()

    async def watch(self) -> None:
        """Runs until the gateway cannot go on. Raises DeadlineError when requests waited for a node in vain."""
        assert self._failure is not None, "start() comes first"
        await asyncio.shield(self._failure)

    def _watched(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        task.add_done_callback(ended)
        return task

    def _fail(self, error: BaseException) -> None:
        logger.error("the gateway cannot go on: %s", error)
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # -- addresses -----------------------------------------------------------------------------------------------

    @property
    def http_url(self) -> str:
        """`http://127.0.0.1:PORT`; OpenAI clients add `/v1`."""
        assert self._http is not None, "start() comes first"
        return self._http.url

    @property
    def node_endpoint(self) -> str:
        """`tcp://host:port` where nodes connect."""
        return self._link.endpoint

    # -- rollouts ------------------------------------------------------------------------------------------------

    def open(self, rollout_id: str) -> None:
        """Record this rollout's generations from now on."""
        self.records.open(rollout_id)

    def take(self, rollout_id: str) -> list[GenerationRecord]:
        """The rollout's generations in the order they began; it is no longer recorded."""
        return self.records.take(rollout_id)

    def _forget(self, session: str) -> None:
        if self._router is not None:
            self._router.forget(session)

    # -- policy versions and nodes -------------------------------------------------------------------------------

    def publish(self, signed: bytes) -> int:
        """Tell every node about a new signed manifest, and those that attach later. Returns its policy version.

        Raises WireError or SignatureError when it is not a manifest of this run.
        """
        manifest = open_signed(signed, self._keys.verifier(), run_id=self._run_id)
        self.version = self.router.newest_version = manifest.version
        self.router.oldest_version = min(self.router.oldest_version, manifest.version)
        self._link.newest_manifest = signed
        for node in self.router.nodes.attached():
            self._send(node, NewVersion(manifest=signed))
        return manifest.version

    def require_version(self, oldest: int) -> None:
        """Nodes with weights older than `oldest` get no new request until they have caught up."""
        self.router.oldest_version = oldest
        self.router.place()

    def versions(self) -> dict[str, int]:
        """Policy version of every attached node."""
        return {node.node_id: node.version for node in self.router.nodes.attached()}

    async def wait_for_node(self, timeout_s: float) -> None:
        """Returns once a node can serve. Raises DeadlineError that says which nodes there are and what they lack."""
        if not await self.router.changed.wait_for(lambda: bool(self.router.serving()), timeout_s):
            raise DeadlineError(f"waited {timeout_s:.1f} s for an inference node: {self.router.why_no_node()}")

    def drain(self, node_id: str, reason: str) -> bool:
        """Give a node no more requests and let it finish those it has. False when it is not attached."""
        node = self.router.nodes.get(node_id)
        if node is None or not node.attached:
            return False
        node.draining = True
        return self._send(node, Drain(reason=reason))

    @property
    def router(self) -> Router:
        assert self._router is not None, "start() comes first"
        return self._router

    @property
    def overdue(self) -> Overdue:
        assert self._overdue is not None, "start() comes first"
        return self._overdue

    def _send(self, node: AttachedNode, message: ToNode) -> bool:
        return self._link.send(node.identity, message)

    # -- upkeep --------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Every half heartbeat: give up silent nodes, end overdue requests; every heartbeat: move the limit."""
        inference = self._config.inference
        interval_s = min(inference.heartbeat_s / 2, 1.0)
        last = next_observation = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            # After a stall of this process, heartbeats wait in the socket: read them before calling anyone lost.
            stalled, last = now - last > inference.lost_after_s / 2, now
            if stalled:
                logger.warning("the event loop stood still; lost nodes are looked for in the next round")
                continue
            router = self.router
            router.nodes.lose_silent(inference.lost_after_s)
            router.reclaim_lost(_IDLE_FACTOR * inference.lost_after_s)
            error = self.overdue.end_overdue()
            if error is not None:
                self._fail(error)
            if now >= next_observation:
                next_observation = now + inference.heartbeat_s
                self.adaptive.observe(GatewayLoad.of(router.serving(), router.queued), in_use=len(self.records))

    # -- state ---------------------------------------------------------------------------------------------------

    def _health(self) -> tuple[int, dict[str, Any]]:
        serving = len(self.router.serving())
        if serving:
            return 200, {"status": "ok", "serving_nodes": serving, "version": self.version}
        since_s = self.overdue.no_node_s()
        return 503, {"status": "waiting for a node", "since_s": since_s, "why": self.router.why_no_node()}

    def state(self) -> dict[str, Any]:
        """Everything /metrics shows: nodes, queue, who waits for what."""
        router = self.router
        return {
            "run_id": self._run_id,
            "version": self.version,
            "oldest_version": router.oldest_version,
            "no_node_since_s": self.overdue.no_node_s(),
            "nodes": router.nodes.snapshot(router.oldest_version, router.newest_version),
            "requests": router.snapshot(),
            "records": {"open_rollouts": len(self.records), "bytes": self.records.num_bytes},
            "link": {
                "garbage": self._link.garbage,
                "chunk_bytes_sent": self._chunks.bytes_sent,
                "chunk_requests_dropped": self._chunks.dropped,
            },
            "concurrency": {"limit": self.adaptive.limit(), "decreases": self.adaptive.decreases},
            "loop_lag": self.lag.window(reset=False).metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Numbers for metrics.jsonl; rates and lag are over the time since the last call."""
        counters, now = self.router.counters, time.monotonic()
        tokens, since = self._counted
        self._counted = (counters.tokens, now)
        versions = list(self.versions().values())
        oldest = {"gateway/version_min": min(versions)} if versions else {}
        return {
            "gateway/nodes": len(versions),
            "gateway/tokens_per_s": (counters.tokens - tokens) / max(now - since, 1e-9),
            "gateway/queued": self.router.queued,
            "gateway/in_flight": self.router.in_flight,
            "gateway/requests": counters.requests,
            "gateway/answered": counters.answered,
            "gateway/failed": counters.failed,
            "gateway/reissued": counters.reissued,
            "gateway/late_answers": counters.late_answers,
            "gateway/bad_answers": counters.bad_answers,
            "gateway/tokens": counters.tokens,
            "gateway/limit": self.adaptive.limit(),
            "gateway/records_bytes": self.records.num_bytes,
            **oldest,
            **self.lag.window().metrics(),
        }


def read_vocab_size(model_dir: Path) -> int:
    """Rows of the model's token embedding. Raises ModelNotFoundError."""
    path = model_dir / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read ({error}): give the folder of a Hugging Face model") from None
    size = values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelNotFoundError(f"{path} has vocab_size {size!r}: give the folder of a Hugging Face language model")
    return size
