"""The gateway: the only way from environments to inference nodes.

    environment worker --HTTP, loopback--> http.py -> routing.py -> link.py --CURVE ZMQ--> node
                                              |           ^             <-- answer, heartbeat --
                                           records        |
    orchestrator: records.open(rollout) ... take    tick task: lost nodes, deadlines

A request waits for a node (orchestrator.no_node_timeout_s), and for its answer (the longest source's timeout_s).
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.address import is_loopback
from composer_prime.config import Config
from composer_prime.event_loop import end, watched
from composer_prime.model_source import vocabulary_size
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore, open_signed
from composer_prime.wire.node_messages import Dismissed, Heard, NodeWelcome
from composer_prime.wire.sockets import NodeSocket
from orchestrator.gateway.http import HttpServer, RolloutRecords
from orchestrator.gateway.link import ChunkServer, NodeLink
from orchestrator.gateway.node_control import NodeControl
from orchestrator.gateway.nodes import ServedPolicy
from orchestrator.gateway.routing import Router, Waits
from orchestrator.swarm import Admission, Auditors, Audits

logger = logging.getLogger(__name__)

_BEHIND_FACTOR = 4
"""For so many lost_after_s heartbeats may wait behind messages of many frames."""
_STALL_SHARE = 0.25
"""Of the longest rollout's time: a node that holds requests for so long without a token loses them, while they have
time for another. A weight swap and a long prefill must fit in."""


class Gateway:
    def __init__(
        self,
        config: Config,
        keys: RunKeys,
        run_id: str,
        weight_store: WeightStore,
        *,
        model_dir: Path,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Connect the parts; needs a running event loop. `fail` gets what ends it. Raises ModelNotFoundError."""
        admission = Admission(config, keys, run_id, model_dir)
        node_socket = NodeSocket(keys, config.model.max_context, admission.is_admitted)
        self.router = Router(
            node_socket.send,
            policy=ServedPolicy(vocabulary_size(model_dir)),
            suspend_s=config.inference.lost_after_s,
            request_timeout_s=max((source.timeout_s for source in config.orchestrator.source), default=0.0),
        )
        self.router.policy.published.update(weight_store.versions())
        join_hint = _join_hint(config, keys.folder.parent)
        self.waits = Waits(self.router, config.orchestrator.no_node_timeout_s, join_hint)
        welcome = NodeWelcome(
            run_id=run_id,
            manifest=b"",
            verify_key=keys.verifier().public_bytes_raw(),
            heartbeat_s=config.inference.heartbeat_s,
            sources=config.orchestrator.weights.sources,
        )
        chunks = ChunkServer(weight_store, admission.model)
        self.control = NodeControl(self.router, keys)
        auditors = self.audits = None
        if config.orchestrator.audit.enabled:
            for_auditors = msgspec.structs.replace(welcome, sources=[])
            auditors = Auditors(node_socket, for_auditors, weight_store, chunks.serve)
            self.audits = Audits(
                config.orchestrator.audit, auditors, self.router.trust, self.router.reclaim_quarantined
            )
        self.link = NodeLink(node_socket, self.router, chunks, admission, config, welcome, auditors)
        self.records = RolloutRecords(self.router.placing, self.audits)
        self._config = config
        self._http = HttpServer(
            self.router,
            self.records,
            config.model,
            model_dir,
            run_id=run_id,
            operator_token=keys.operator_token(),
            others=self.control.routes(run_id),
        )
        self._on_failure = fail
        self._tasks: list[asyncio.Task[None]] = []
        self._counted_tokens = (0, time.monotonic())

    async def start(self) -> None:
        """Bind both sides and serve. Raises PortInUseError and ConfigError."""
        self.link.start()
        try:
            await self._http.start()
        except BaseException:
            await self.close()
            raise
        self._tasks = [watched(each, self._fail) for each in (self.link.receive(), self._tick())]

    async def close(self, *, finished: bool = False) -> None:
        """Free both addresses. With `finished`, nodes learn that the run is over."""
        if finished:
            self.link.tell_all(Dismissed(reason="the run is finished", finish_first=True))
        self.control.close()
        self.router.close("the orchestrator is stopping: try again once it runs")
        await self._http.close()
        await end(self._tasks)
        self._tasks = []
        await self.link.close()

    def _fail(self, error: BaseException) -> None:
        logger.error("the gateway failed: %s", error)
        if self._on_failure is not None:
            self._on_failure(error)

    @property
    def http_url(self) -> str:
        """`http://127.0.0.1:PORT`; OpenAI clients add `/v1`."""
        return self._http.url

    @property
    def node_endpoint(self) -> str:
        """Return the address for nodes, `tcp://host:port`."""
        return self.link.endpoint

    # -- policy versions and nodes -------------------------------------------------------------------------------

    def publish(self, signed: bytes) -> int:
        """Send this run's signed manifest to all nodes; return its version. Else raises WireError or SignatureError."""
        welcome = self.link.welcome
        verifier = Ed25519PublicKey.from_public_bytes(welcome.verify_key)
        manifest = open_signed(signed, verifier, run_id=welcome.run_id)
        self.router.policy.publish(manifest.version)
        for node in self.router.nodes.values():
            node.record.forget_version(manifest.version)
        self.link.publish(signed, manifest)
        return manifest.version

    @property
    def version(self) -> int | None:
        """The newest published one; None before the first `publish`."""
        return self.router.policy.newest if self.link.welcome.manifest else None

    def require_version(self, oldest: int) -> None:
        """Give nodes with weights older than `oldest` no new request until they have caught up."""
        self.router.policy.oldest = oldest
        self.router.place()

    def versions(self) -> dict[str, int]:
        return {node.node_id: node.version for node in self.router.attached()}

    # -- upkeep --------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """End silent nodes and overdue requests, every half heartbeat."""
        inference = self._config.inference
        interval_s = min(inference.heartbeat_s / 2, 1.0)
        last = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            # After a stall of this process, heartbeats wait in the socket: read them first.
            stalled, last = now - last > inference.lost_after_s / 2, now
            if stalled:
                logger.warning("the event loop stood still; lost nodes are looked for in the next round")
                continue
            router = self.router
            self.link.end_revoked()
            limit_s = inference.lost_after_s
            if self.link.is_behind:
                self.link.tell_all(Heard())  # Else nodes drop their requests.
                limit_s *= _BEHIND_FACTOR
            router.lose_silent(limit_s)
            router.reclaim_stalled(max(inference.lost_after_s, _STALL_SHARE * self.router.request_timeout_s))
            if (error := self.waits.enforce()) is not None:
                self._fail(error)
            self.control.tick()
            if self.audits is not None:
                self.audits.auditors.tick(limit_s)

    def metrics(self) -> dict[str, float | None]:
        """Return the numbers for metrics.jsonl, rates since the last call."""
        counters, now = self.router.counters, time.monotonic()
        tokens, since = self._counted_tokens
        self._counted_tokens = (counters["tokens"], now)
        versions = list(self.versions().values())
        return {
            "gateway/nodes": len(versions),
            "gateway/tokens_per_s": (counters["tokens"] - tokens) / max(now - since, 1e-9),
            "gateway/queued": len(self.router.queue),
            "gateway/in_flight": len(self.router.open) - len(self.router.queue),
            **{f"gateway/{name}": count for name, count in counters.items()},
            "gateway/warm_share": self.router.placing.warm_tokens / max(1, self.router.placing.prompt_tokens),
            "gateway/records_bytes": self.records.num_bytes,
            "gateway/version_min": min(versions, default=None),
            **(self.audits.metrics() if self.audits is not None else {}),
        }


def _join_hint(config: Config, run_folder: Path) -> str:
    command = f"run `{shlex.join(['orchestrator', 'invite', str(run_folder)])}` here and what it prints elsewhere"
    if is_loopback(urlsplit(config.orchestrator.node_address).hostname or ""):
        command += " (that needs orchestrator.node_address on a public interface)"
    return command
