"""An auditor that scores answers under the version that they name and under an older one, over loopback."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
from gateway_config import MODEL

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.wire.audit import AuditRequest, ToAuditor
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import Auditor
from inference.engines.local.engine import LocalEngine
from inference.link import GatewayLink
from inference.receiver import Receiver
from orchestrator.gateway.generation import GenerationRecord
from tests.engines.reference import Reference
from tests.inference.publisher import Publisher

SETTINGS = InferenceConfig(
    device="cpu", local=LocalEngineConfig(max_batch=8), heartbeat_s=0.1, lost_after_s=100.0, connect_timeout_s=100.0
)
PATIENT = {"heartbeat_s": 0.1, "lost_after_s": 100.0}


async def sampled(engine: LocalEngine, node: str, prompt: list[int], version: int) -> GenerationRecord:
    """What an engine answers, under the name of `version`, whatever it holds."""
    sampling = Sampling(max_tokens=12, seed=7, ignore_eos=True)
    done = await engine.generate(f"{node}{prompt}", prompt, sampling, node)
    return GenerationRecord(
        session=node,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(done.token_ids, np.int32),
        logprobs=np.array(done.logprobs, np.float32),
        version_spans=(VersionSpan(0, len(done.token_ids), version),),
        finish_reason=done.finish_reason,
        sampling=sampling,
        node_id=node,
        time=0.0,
    )


async def test_an_auditor_in_bfloat16_compares_with_nothing(keys):
    # Its own rounding would make honest answers lean.
    request = AuditRequest(
        audit=1,
        prompt_ids=pack_ints([5]),
        token_ids=pack_ints([6]),
        logprobs=pack_floats([-1.0]),
        parts=[1],
        version_spans=[VersionSpan(0, 1, 0)],
        finish_reason="length",
        sampling=Sampling(max_tokens=1, seed=1),
        tolerance=0.05,
    )
    for dtype, compares in (("auto", True), ("float32", True), ("bfloat16", False)):
        config = SETTINGS.model_copy(update={"dtype": dtype})
        engine = LocalEngine(MODEL, config, 512)
        link = GatewayLink(lambda: None, keys.client("trainer"), 10.0, ToAuditor)
        receiver = Receiver(engine, link, MODEL, 0.05)
        assert Auditor("a", engine, link, receiver, config, chance=lambda: 0.0)._opened(request).in_int8 is compares
        receiver.close()
        link.close()


async def test_old_weights_under_a_new_name_are_told_from_new_ones(open_gateway, keys, store):
    # Both are within the tolerance, so no answer is refused alone. An older version that cannot be had refuses none
    # either, and once its source has it again, an answer that names it is audited.
    publisher = Publisher(store.root, keys, Reference(MODEL, scale=1e-4))
    settings = {"enabled": True, "tolerance": 0.2, "timeout_s": 150.0}
    async with open_gateway(inference=PATIENT, orchestrator={"audit": settings}) as gateway:
        engine, node = LocalEngine(MODEL, SETTINGS, 512), LocalEngine(MODEL, SETTINGS, 512)
        await engine.start()
        await node.start()
        link = GatewayLink(lambda: gateway.audits.endpoint, keys.client("trainer"), 10.0, ToAuditor)
        receiver = Receiver(engine, link, MODEL, 0.05)
        chances = itertools.cycle([0.9, 0.4, 0.5, 0.1])  # nothing, int8, nothing, the oldest version
        checking = Auditor("a", engine, link, receiver, SETTINGS, max_context=512, chance=chances.__next__)
        auditor = asyncio.ensure_future(checking.run())
        try:
            while not gateway.audits.metrics()["audit/auditors"]:
                await asyncio.sleep(0.02)
            for version in (1, 2):
                gateway.publish(publisher.publish(version))
            for name, version in (("old", 1), ("new", 2)):
                await node.load_weights(version, publisher.reference.weights(version))
                for start in range(5, 101, 8):  # Each fourth is compared with the oldest version.
                    gateway.audits.offer(await sampled(node, name, [start, 6, 7], 2), f"{name}{start}")
                    assert await gateway.audits.cleared(f"{name}{start}") is None
            old, new = (gateway.router.nodes.trust[name].suspect_evidence["older"] for name in ("old", "new"))
            assert min(old[:3]) > 3.0 and max(new) == 0.0
            assert gateway.router.nodes.trust["old"].clean == 12

            chunks = {chunk.sha256 for chunk in publisher.manifest(2).chunks}
            away = [path for path in (store.root / "chunks").iterdir() if path.name not in chunks]
            for path in away:
                path.rename(store.root / path.name)
            for number in range(4):
                gateway.audits.offer(await sampled(node, "late", [30, 6, number], 2), f"late{number}")
                assert await gateway.audits.cleared(f"late{number}") is None
            assert gateway.router.nodes.trust["late"].suspect_evidence["older"][0] == 0.0

            for path in away:
                (store.root / path.name).rename(path)
            await node.load_weights(1, publisher.reference.weights(1))
            for number, version in enumerate((1, 2, 2, 2)):
                gateway.audits.offer(await sampled(node, "again", [30, 6, number], version), f"again{number}")
                assert await gateway.audits.cleared(f"again{number}") is None
            assert gateway.router.nodes.trust["again"].clean == 4
            assert gateway.router.nodes.trust["again"].suspect_evidence["older"][0] > 0.0
        finally:
            auditor.cancel()
            await asyncio.gather(auditor, return_exceptions=True)
            await asyncio.gather(engine.close(), node.close())
            await asyncio.to_thread(link.close)
            receiver.close()
