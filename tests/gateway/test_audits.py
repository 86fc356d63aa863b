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
from inference.node import InferenceNode
from tests.inference.live_node import live_node
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


def joined(gateway, name: str, engine: Any, keys, role: type[InferenceNode] = InferenceNode):
    """A node or an auditor of the gateway."""
    link = {"messages": ToAuditor if role is Auditor else ToNode}
    address = lambda: gateway.node_endpoint
    client = keys.client("trainer" if role is Auditor else "node")
    return live_node(name, engine, MODEL, SETTINGS, address, client, role=role, link=link, max_context=CONTEXT)


@asynccontextmanager
async def fleet(gateway, keys, **engines: type[LocalEngine]) -> AsyncIterator[None]:
    """An auditor, and a node for each of `engines`, attached."""
    async with AsyncExitStack() as stack:
        for name, make in {"auditor": LocalEngine, **engines}.items():
            role = InferenceNode if name in engines else Auditor
            one = joined(gateway, name, make(MODEL, SETTINGS, CONTEXT), keys, role)
            _, ended = await stack.enter_async_context(one)
            stack.callback(lambda ended=ended: ended.done() and ended.result())
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
        joined(gateway, "n", LocalEngine(MODEL, SETTINGS, CONTEXT), keys),
    ):
        await until(lambda: len(gateway.versions()) == 1, "the node")
        playing = asyncio.ensure_future(play(gateway, "r1", [5, 6, 7]))
        dying = LocalEngine(MODEL, SETTINGS, CONTEXT, computer=DyingComputer)
        async with joined(gateway, "dying", dying, keys, Auditor) as (_, ended):
            await until(lambda: gateway.audits.metrics()["audit/auditors"], "the auditor")
            await until(lambda: not gateway.audits.metrics()["audit/auditors"] and ended.done(), "its end")
            assert "illegal memory access" in str(ended.exception())
        assert "auditor dying" in ((await playing)[1] or "")
        async with joined(gateway, "healthy", LocalEngine(MODEL, SETTINGS, CONTEXT), keys, Auditor):
            assert await play(gateway, "r2", [5, 6, 7]) == ("n", None)


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
