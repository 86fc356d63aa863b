"""Audits served over loopback, the auditors that a test plays, and their answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from orch_peers import PeerAuditor

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import (
    AuditRequest,
    AuditVerdict,
    Heard,
    NodeWelcome,
    PartVerdict,
    Sampling,
    Status,
)
from orchestrator.gateway.http import GenerationRecord
from orchestrator.gateway.link import ChunkServer
from orchestrator.swarm.audits import Auditors, Audits
from orchestrator.swarm.trust import NodeTrust
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
    """Yield the audits, the nodes' trust, and a function that connects an auditor. `settings`: orchestrator.audit."""
    keys = RunKeys.create(folder / "keys")
    store = WeightStore(folder / "weights")
    trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
    left = list(chances or [])
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "tiny", "max_context": 512},
            "orchestrator": {
                "source": [{"name": "s", "taskset": {"id": "t"}}],
                "sampling": {"max_tokens": 64},
                "audit": {"enabled": True, **settings},
            },
            "inference": {"heartbeat_s": heartbeat_s, "lost_after_s": lost_after_s},
        }
    )
    welcome = NodeWelcome(
        run_id="run-1", manifest=b"", verify_key=keys.verifier().public_bytes_raw(), heartbeat_s=heartbeat_s
    )
    serve_chunk = ChunkServer(store).serve
    auditors = Auditors(config, keys, welcome, store, serve_chunk)
    audits = Audits(config.orchestrator.audit, auditors, trust, chance=lambda: left.pop(0))
    patch = pytest.MonkeyPatch()
    patch.setattr("orchestrator.swarm.audits.TIMEOUT_S", timeout_s)
    failures: list[BaseException] = []
    auditors.start(failures.append)

    async def tick() -> None:
        """Do what the gateway does."""
        while True:
            await asyncio.sleep(0.02)
            auditors.tick()

    ticking = asyncio.create_task(tick())
    peers: list[PeerAuditor] = []

    def connect(role: str = "trainer") -> PeerAuditor:
        peers.append(PeerAuditor(auditors.endpoint, keys, role))
        return peers[-1]

    try:
        yield audits, trust, connect
        assert failures == []
    finally:
        for peer in peers:
            peer.close()
        ticking.cancel()
        await auditors.close()
        patch.undo()


def record(node: str, *parts: tuple[str, int], tokens: int = 8, version: int = 0, prompt: int = 6) -> GenerationRecord:
    return record_of(
        "s",
        [5, prompt],
        range(tokens),
        version=version,
        finish="length",
        sampled_by=parts or [(node, tokens)],
        sampling=Sampling(max_tokens=tokens, seed=3),
    )


def offer(audits: Audits, record: GenerationRecord, rollout_id: str) -> None:
    audits.offer(rollout_id, record.prompt_ids, record.answer, record.sampling)


def verdict(request: AuditRequest, wrong: tuple[int, ...] = ()) -> AuditVerdict:
    """`wrong`: positions in the first part."""
    parts = [PartVerdict(tokens=count, wrong=[]) for _, count in request.sampled_by]
    parts[0] = msgspec.structs.replace(parts[0], wrong=list(wrong))
    return AuditVerdict(audit=request.audit, parts=parts, seconds=0.01)


async def asked_beside_another(audits, connect):
    """Return two auditors, and the answer of n0 for r1 that the first one got before the second came."""
    first, second = connect(), connect()
    first.hello("a")
    offer(audits, record("n0"), "r1")
    request = await first.next(AuditRequest)
    second.hello("b")
    await second.next(NodeWelcome)
    return first, second, request


async def requests_until_now(auditor: PeerAuditor) -> list[AuditRequest]:
    """Return what an auditor was asked and did not read, once all that it sent is handled."""
    auditor.send(STATUS)
    found: list[AuditRequest] = []
    while not isinstance(message := await auditor.next((AuditRequest, Heard)), Heard):
        found.append(message)
    return found


async def vanish(audits: Audits, auditor: PeerAuditor, name: str) -> None:
    """End an auditor's connection without a word. The audits have yet to notice."""
    [identity] = [identity for identity, one in audits.auditors.connected.items() if one.name == name]
    auditor.close()
    while audits.auditors._socket.send(identity, Heard()):
        await asyncio.sleep(0.01)
