"""Audits served over loopback, the auditors that a test plays, and their answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from orch_peers import PeerAuditor

from composer_prime.event_loop import end
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, NodeWelcome, PartVerdict, Sampling, Status
from composer_prime.wire.sockets import NodeSocket
from orchestrator.gateway.http import GenerationRecord
from orchestrator.gateway.link import ChunkServer
from orchestrator.swarm.audits import Auditors, Audits
from orchestrator.swarm.trust import NodeTrust
from tests.configs_made import config_of
from tests.records_made import record_of

STATUS = Status(version=0, running=1, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None)


@asynccontextmanager
async def serve_audits(
    folder: Path,
    chances: list[float] | None = None,
    heartbeat_s: float = 0.05,
    lost_after_s: float = 100.0,
    timeout_s: float = 300.0,
    **settings,
):
    """Yield the audits, the nodes' trust, and connect(name, **hello) -> auditor. `settings`: orchestrator.audit."""
    keys = RunKeys.create(folder / "keys")
    store = WeightStore(folder / "weights")
    trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
    left = list(chances or [])
    config = config_of(
        orchestrator={"audit": {"enabled": True, **settings}},
        inference={"heartbeat_s": heartbeat_s, "lost_after_s": lost_after_s},
    )
    welcome = NodeWelcome(
        run_id="run-1", manifest=b"", verify_key=keys.verifier().public_bytes_raw(), heartbeat_s=heartbeat_s
    )
    socket = NodeSocket(keys, 512, frozenset([keys.curve("trainer").public]).__contains__)
    auditors = Auditors(socket, welcome, store, ChunkServer(store).serve)
    audits = Audits(config.orchestrator.audit, auditors, trust, chance=lambda: left.pop(0))
    patch = pytest.MonkeyPatch()
    patch.setattr("orchestrator.swarm.audits.TIMEOUT_S", timeout_s)
    socket.bind("tcp://127.0.0.1:0")

    async def tick() -> None:
        """Do what the gateway does."""
        while True:
            await asyncio.sleep(0.02)
            auditors.tick(lost_after_s)

    async def receive() -> None:
        """Do what the nodes' link does."""
        while True:
            received = await socket.receive()
            auditors.handle(received.identity, received.body)

    serving = [asyncio.create_task(tick()), asyncio.create_task(receive())]
    peers: list[PeerAuditor] = []

    def connect(name: str, **changes) -> PeerAuditor:
        peers.append(PeerAuditor(socket.endpoint, keys))
        peers[-1].hello(name, **changes)
        return peers[-1]

    try:
        yield audits, trust, connect
        assert not any(task.done() for task in serving)
    finally:
        for peer in peers:
            peer.close()
        await end(serving)
        await socket.close()
        patch.undo()


def record(node: str, *parts: tuple[str, int], tokens: int = 8, version: int = 0, prompt: int = 6) -> GenerationRecord:
    sampling, by = Sampling(max_tokens=tokens, seed=3), parts or [(node, tokens)]
    return record_of(
        "s", [5, prompt], range(tokens), version=version, finish="length", sampled_by=by, sampling=sampling
    )


def offer(audits: Audits, record: GenerationRecord, rollout_id: str) -> None:
    audits.offer(rollout_id, record.prompt_ids, record.answer, record.sampling)


def verdict(request: AuditRequest, wrong: tuple[int, ...] = ()) -> AuditVerdict:
    """`wrong`: positions in the first part."""
    parts = [PartVerdict(tokens=count, wrong=[]) for _, count in request.sampled_by]
    parts[0] = msgspec.structs.replace(parts[0], wrong=list(wrong))
    return AuditVerdict(audit=request.audit, parts=parts, seconds=0.01)
