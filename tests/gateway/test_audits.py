"""Audits behind a real gateway: real nodes and an auditor with the shipped tiny model, over loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from gateway_made import MODEL, generate_body, post
from node_peer import PeerNode

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.wire.node_messages import Answer, AuditVerdict, Sampling, ToAuditor, ToNode
from inference.audit import Auditor
from inference.engines.local.local_engine import Computer, LocalEngine
from inference.node import GatewayLink, InferenceNode
from inference.receiver import Receiver
from tests.waiting import until

CONTEXT = 512
SETTINGS = InferenceConfig(
    device="cpu", local=LocalEngineConfig(max_batch=8), heartbeat_s=0.1, lost_after_s=100.0, connect_timeout_s=100.0
)
PATIENT = {"heartbeat_s": 0.1, "lost_after_s": 100.0}
AUDITED = {"enabled": True, "tolerance": 0.002}


class GreedyEngine(LocalEngine):
    """Takes the likeliest token, and reports its true logprob at the temperature that was asked for."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str, **rest: Any):
        greedy = msgspec.structs.replace(sampling, temperature=0.0)
        done: Answer = await super().generate(request_id, prompt_ids, greedy, session, **rest)
        return done


class DyingComputer(Computer):
    """Ends at the first check of draws."""

    def check_draws(self, *_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@asynccontextmanager
async def process(role: type[InferenceNode], engine: Any, name: str, endpoint: str, keys, messages: Any):
    """A node or an auditor, as inference/main.py builds it. Gives its task."""
    await engine.start()
    link = GatewayLink(lambda: endpoint, keys, 10.0, messages)
    receiver = Receiver(engine, link, MODEL, 0.05)
    serving = role(name, engine, link, receiver, SETTINGS, max_context=CONTEXT)
    task = asyncio.ensure_future(serving.run())
    try:
        yield task
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        await asyncio.to_thread(link.close)
        receiver.close()


@asynccontextmanager
async def fleet(gateway, keys, **engines: type[LocalEngine]) -> AsyncIterator[None]:
    """An auditor, and a node for each of `engines`, attached."""
    auditor, address = LocalEngine(MODEL, SETTINGS, CONTEXT), gateway.node_endpoint
    async with AsyncExitStack() as stack:
        auditing = process(Auditor, auditor, "auditor", address, keys.client("trainer"), ToAuditor)
        await stack.enter_async_context(auditing)
        for name, make in engines.items():
            engine = make(MODEL, SETTINGS, CONTEXT)
            node = process(InferenceNode, engine, name, gateway.node_endpoint, keys.client("node"), ToNode)
            await stack.enter_async_context(node)
        await until(lambda: len(gateway.versions()) == len(engines), "the nodes")
        yield


async def play(gateway, name: str, prompt: list[int]) -> tuple[str, str | None]:
    """Play a rollout of one turn. Returns the node that sampled it, and what its audit objects to."""
    gateway.records.open(name)
    status, _ = await post(gateway.http_url, generate_body(*prompt, max_tokens=40, ignore_eos=True), X_Session_ID=name)
    assert status == 200
    [record] = gateway.records.take(name)
    return record.answer.node_id, await gateway.audits.cleared(name)


async def test_a_node_that_takes_the_likeliest_token_is_quarantined(open_gateway, keys):
    """Answers of new nodes wait for their audit: none of the cheat's comes through, all of the honest node's do."""
    async with (
        open_gateway(inference=PATIENT, orchestrator={"audit": AUDITED}) as gateway,
        fleet(gateway, keys, honest=LocalEngine, greedy=GreedyEngine),
    ):
        ended: list[tuple[str, str | None]] = []
        greedy = gateway.router.trust["greedy"]
        while not greedy.quarantines:
            names = [f"r{len(ended) + index}" for index in range(8)]
            ended += await asyncio.gather(*(play(gateway, name, [5, 6, 7 + i]) for i, name in enumerate(names)))
            assert len(ended) < 400
        assert [objection for node, objection in ended if node == "honest" and objection is not None] == []
        assert all(objection is not None for node, objection in ended if node == "greedy")
        figures = gateway.metrics()
        assert figures["audit/quarantines"] == 1 and figures["audit/failed"] == 0
        assert figures["audit/answers"] == figures["audit/audited"] == len(ended)
        rows = {row.name: row for row in gateway.control.rows()}
        assert "quarantined" in rows["greedy"].why and rows["greedy"].trust == 0.0
        assert [(await play(gateway, f"s{i}", [9, 9, 9 + i]))[0] for i in range(2)] == ["honest"] * 2
        assert rows["honest"].trust > 0.5 or not any(node == "honest" for node, _ in ended)


async def test_an_auditor_whose_engine_died_ends(open_gateway, keys):
    """Its process ends with the reason. What it held is not audited, and the next auditor clears the next rollout."""
    async with (
        open_gateway(inference=PATIENT, orchestrator={"audit": AUDITED}) as gateway,
        process(InferenceNode, LocalEngine(MODEL, SETTINGS, CONTEXT), "n", gateway.node_endpoint, keys.client("node"),
                ToNode),
    ):  # fmt: skip
        await until(lambda: len(gateway.versions()) == 1, "the node")
        playing = asyncio.ensure_future(play(gateway, "r1", [5, 6, 7]))
        link = gateway.node_endpoint, keys.client("trainer"), ToAuditor
        dying = LocalEngine(MODEL, SETTINGS, CONTEXT, computer=DyingComputer)
        with pytest.raises(AssertionError, match="illegal memory access"):
            async with process(Auditor, dying, "dying", *link) as serving:
                await until(lambda: gateway.audits.metrics()["audit/auditors"], "the auditor")
                await until(lambda: not gateway.audits.metrics()["audit/auditors"] and serving.done(), "its end")
        assert "auditor dying" in ((await playing)[1] or "")
        async with process(Auditor, LocalEngine(MODEL, SETTINGS, CONTEXT), "healthy", *link):
            assert await play(gateway, "r2", [5, 6, 7]) == ("n", None)


async def test_without_an_auditor_new_nodes_answers_are_refused_after_the_deadline(
    open_gateway, node_keys, monkeypatch
):
    """The message names the wait, the node and how many auditors are there."""
    monkeypatch.setattr("orchestrator.swarm.audits.TIMEOUT_S", 0.2)
    async with (
        open_gateway(inference=PATIENT, orchestrator={"audit": AUDITED}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0", engine="local"),
    ):
        _, objection = await play(gateway, "r1", [5, 6])
    assert objection is not None
    assert "waited 0.2 s" in objection and "n0" in objection
    assert "0 auditors are connected (inference audit)" in objection


async def test_the_key_alone_says_who_judges(open_gateway, keys, node_keys):
    """A verdict under a node's key is garbage, the trainer's key makes no node, and without audits it opens nothing."""
    async with (
        open_gateway(inference=PATIENT, orchestrator={"audit": AUDITED}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        PeerNode(gateway.node_endpoint, keys.client("trainer"), "judge"),
    ):
        assert list(gateway.versions()) == ["n0"] and gateway.metrics()["audit/auditors"] == 1
        node.send(AuditVerdict(audit=1, error="no space left"))
        await until(lambda: gateway.link.conduct.garbage == 1, "the verdict")
        assert list(gateway.versions()) == ["n0"] and gateway.metrics()["audit/auditors"] == 1
    async with open_gateway(inference=PATIENT) as gateway:
        judge = PeerNode(gateway.node_endpoint, keys.client("trainer"), "judge")
        judge.connect()
        with pytest.raises(AssertionError):
            await judge.until(lambda: judge.welcome is not None, timeout_s=0.5)
        await judge.vanish()


async def test_the_seed_that_a_request_lacks_is_the_gateways(open_gateway, node_keys):
    """A node cannot choose what it draws: every request has a seed, and equal requests have different ones."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        gateway.records.open("r1")
        for _ in range(2):
            await post(gateway.http_url, generate_body(5), X_Session_ID="r1")
            await post(gateway.http_url, generate_body(5))
        seeds = [request.sampling.seed for request in node.generates]
        assert None not in seeds and len(set(seeds)) == 4
        assert [record.sampling.seed for record in gateway.records.take("r1")] == seeds[::2]
