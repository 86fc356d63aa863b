"""The orchestrator's side of audits, with an auditor that answers as the test says."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections import defaultdict
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
from orch_peers import PeerAuditor, PeerTrainer, ScriptedPool, make_config

from composer_prime.config.orchestrator import AuditConfig
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.audit import AuditFailed, AuditRequest, AuditVerdict, PartVerdict
from composer_prime.wire.node import Goodbye, Heard, HelloAgain, NodeWelcome, Rejected, Sampling, Status
from composer_prime.wire.types import VersionSpan
from orchestrator.audit.audits import Audits
from orchestrator.audit.trust import NodeTrust
from orchestrator.gateway.chunks import ChunkServer
from orchestrator.gateway.generation import GenerationRecord

DEADLINE_S = 100.0


@pytest.fixture
def audited(tmp_path):
    """`async with audited(settings, chances) as (audits, trust, connect)`."""

    @asynccontextmanager
    async def serve(
        chances: list[float] | None = None,
        max_queued_bytes: int = 1 << 20,
        heartbeat_s: float = 0.05,
        lost_after_s: float = 100.0,
        **settings,
    ):
        keys = RunKeys.create(tmp_path / "keys")
        store = WeightStore(tmp_path / "weights")
        trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
        left = list(chances or [])
        audits = Audits(
            AuditConfig(enabled=True, **settings),
            keys=keys,
            run_id="run-1",
            store=store,
            chunks=ChunkServer(store),
            trust=trust,
            max_context=512,
            heartbeat_s=heartbeat_s,
            lost_after_s=lost_after_s,
            chance=lambda: left.pop(0),
            max_queued_bytes=max_queued_bytes,
        )
        failures: list[BaseException] = []
        audits.start(failures.append)
        peers: list[PeerAuditor] = []

        def connect(role: str = "trainer") -> PeerAuditor:
            peers.append(PeerAuditor(audits.endpoint, keys, role))
            return peers[-1]

        try:
            yield audits, trust, connect
            assert failures == []
        finally:
            for peer in peers:
                peer.close()
            await audits.close()

    return serve


def record(node: str, *parts: tuple[str, int], tokens: int = 8, version: int = 0, prompt: int = 6) -> GenerationRecord:
    return GenerationRecord(
        session="s",
        prompt_ids=np.array([5, prompt], np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_spans=(VersionSpan(0, tokens, version),),
        finish_reason="length",
        sampling=Sampling(max_tokens=tokens, seed=3),
        node_id=node,
        time=0.0,
        sampled_by=parts,
    )


def verdict(request: AuditRequest, wrong: tuple[int, ...] = ()) -> AuditVerdict:
    """`wrong`: positions in the first part."""
    parts = [PartVerdict(tokens=count, wrong=[]) for count in request.parts]
    parts[0] = msgspec.structs.replace(parts[0], wrong=list(wrong))
    return AuditVerdict(audit=request.audit, parts=parts, seconds=0.01)


async def test_a_new_nodes_rollout_waits_for_its_audit(audited):
    # It is cleared only once the auditor has said that the tokens are right; the request has the seed.
    async with audited() as (audits, trust, connect):
        audits.offer(record("n0"), "r1")
        waiting = asyncio.ensure_future(audits.cleared("r1"))
        auditor = connect()
        auditor.hello("a")
        assert (await auditor.next(NodeWelcome)).run_id == "run-1"
        request = await auditor.next(AuditRequest)
        assert request.sampling.seed == 3 and not waiting.done()
        auditor.send(verdict(request))
        assert await waiting is None
        assert trust["n0"].clean == 1 and audits.metrics()["audit/audited"] == 1


async def test_what_waits_for_an_auditor_is_bounded_in_bytes(audited):
    # Two answers of 72 bytes fit into 200; of three, one counts as not audited, at once.
    async with audited(max_queued_bytes=200) as (audits, *_):
        for name in ("r1", "r2", "r3"):
            audits.offer(record("n0"), name)
        clearing = [asyncio.ensure_future(audits.cleared(name)) for name in ("r1", "r2", "r3")]
        [refused], waiting = await asyncio.wait(clearing, return_when=asyncio.FIRST_COMPLETED)
        assert "could not be audited: 3 answers of 0.0 MB wait" in (refused.result() or "")
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/failed"]) == (2, 1)
        for task in waiting:
            task.cancel()


async def test_answers_that_nobody_waits_for_are_not_queued(audited):
    # One rollout waited in vain, another is forgotten: an auditor that comes later gets neither answer.
    async with audited(timeout_s=0.01) as (audits, *_):
        audits.offer(record("n0"), "late")
        assert "waited 0.01 s" in (await audits.cleared("late") or "")
        audits.offer(record("n0"), "forgotten")
        audits.forget("forgotten")
        assert audits.metrics()["audit/queued"] == 0


async def test_an_answer_that_ends_auditors_is_given_up(audited):
    # Two auditors are lost with it; a third one never sees it, and its rollout learns why.
    async with audited() as (audits, _, connect):
        audits.offer(record("n0"), "poison")
        for name in ("a", "b"):
            auditor = connect()
            auditor.hello(name)
            await auditor.next(AuditRequest)
            auditor.send(Goodbye(reason="out of memory"))
        objection = await audits.cleared("poison") or ""
        assert "2 auditors were lost with it, the last one b (said goodbye: out of memory)" in objection
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/failed"]) == (0, 1)


async def test_what_a_caught_node_sampled_without_an_audit_is_tainted(audited):
    # Its rollouts that were let through are dropped, those under way are refused, those of others stay.
    async with audited(chances=[1.0, 1.0, 1.0, 0.0]) as (audits, trust, connect):
        trust["n0"].clean = trust["n1"].clean = 10**6
        for name, node in (("early", "n0"), ("other", "n1"), ("open", "n0"), ("caught", "n0")):
            audits.offer(record(node), name)
        assert await audits.cleared("early") is None and await audits.cleared("other") is None
        assert not audits.is_tainted(["early"])
        auditor = connect()
        auditor.hello("a")
        auditor.send(verdict(await auditor.next(AuditRequest), wrong=(1, 2, 3, 4)))
        while trust["n0"].quarantines == 0:
            await asyncio.sleep(0.01)
        assert audits.is_tainted(["other", "early"]) and not audits.is_tainted(["other"])
        assert "n0 was quarantined" in (await audits.cleared("open") or "")
        assert "4 of 8 tokens" in (await audits.cleared("caught") or "")


async def test_each_node_answers_for_its_own_tokens(audited):
    # One node continued for another: the wrong tokens are those of the first.
    async with audited() as (audits, trust, connect):
        audits.offer(record("n1", ("n0", 4), ("n1", 4)), "r1")
        auditor = connect()
        auditor.hello("a")
        request = await auditor.next(AuditRequest)
        assert request.parts == [4, 4]
        auditor.send(verdict(request, wrong=(0, 1, 2, 3)))
        objection = await audits.cleared("r1") or ""
        assert "node n0: 4 of 4 tokens" in objection and "n1" not in objection
        assert trust["n0"].quarantines == 1 and trust["n1"].quarantines == 0 and trust["n1"].clean == 1


async def test_old_weights_are_found_though_another_node_ends_each_answer(audited):
    # What leans to them counts for the node of that part, so a cheat that hands over its last token gains nothing.
    async with audited() as (audits, trust, connect):
        auditor = connect()
        auditor.hello("a")
        for number in range(8):
            audits.offer(record("n1", ("n0", 40), ("n1", 1), tokens=41, prompt=number), f"r{number}")
            found = verdict(await auditor.next(AuditRequest))
            found.parts[0] = msgspec.structs.replace(found.parts[0], by_logprob=(39, 40))
            auditor.send(found)
            await audits.cleared(f"r{number}")
        assert trust["n0"].quarantines == 1 and trust["n1"].quarantines == 0


async def test_a_version_that_there_never_was_is_the_fault_of_who_names_it(audited):
    # Its position counts in its node's part.
    async with audited(chances=[1.0]) as (audits, trust, _):
        audits.publish(b"", 3)
        one = record("n1", ("n0", 4), ("n1", 4))
        spans = (VersionSpan(0, 6, 3), VersionSpan(6, 8, 7))
        audits.offer(dataclasses.replace(one, version_spans=spans), "r1")
        assert "node n1: 1 of 4 tokens" in (await audits.cleared("r1") or "")
        assert (trust["n0"].doubtful, trust["n1"].doubtful) == (0, 1)


async def asked_beside_another(audits, connect):
    """Return two auditors, and the answer of n0 for r1 that the first one got before the second came."""
    first, second = connect(), connect()
    first.hello("a")
    audits.offer(record("n0"), "r1")
    request = await first.next(AuditRequest)
    second.hello("b")
    await second.next(NodeWelcome)
    return first, second, request


async def test_an_auditor_that_leaves_hands_its_answers_on(audited):
    # A verdict that comes from another one than the answer was given to counts for nothing.
    async with audited() as (audits, trust, connect):
        first, second, request = await asked_beside_another(audits, connect)
        second.send(verdict(request, wrong=(1, 2, 3, 4)))
        second.send(Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None))
        await second.next(Heard)
        first.send(Goodbye(reason="test"))
        second.send(verdict(await second.next(AuditRequest)))
        assert await audits.cleared("r1") is None and trust["n0"].quarantines == 0


async def test_an_answer_that_cannot_be_checked_is_no_proof(audited):
    # A new node's rollout fails with the reason; its trust stays as it was.
    async with audited() as (audits, trust, connect):
        audits.offer(record("n0"), "r1")
        auditor = connect()
        auditor.hello("a")
        request = await auditor.next(AuditRequest)
        auditor.send(AuditFailed(audit=request.audit, error="version 3 is not available"))
        assert "could not be audited: version 3 is not available" in (await audits.cleared("r1") or "")
        assert trust["n0"].audited == 0 and audits.metrics()["audit/failed"] == 1


async def test_what_one_auditor_cannot_check_another_one_may(audited):
    # The disk of the first is full. If the second fails too, or there is none, the answer counts as not audited.
    async with audited() as (audits, _, connect):
        first, second, request = await asked_beside_another(audits, connect)
        first.send(AuditFailed(audit=request.audit, error="no space left", retryable=True))
        second.send(verdict(await second.next(AuditRequest)))
        assert await audits.cleared("r1") is None
        while any(one.paused_until > time.monotonic() for one in audits._auditors.values()):
            await asyncio.sleep(0.01)
        audits.offer(record("n0"), "r2")
        [holder] = [one.name for one in audits._auditors.values() if one.held]
        for auditor in (first, second) if holder == "a" else (second, first):
            request = await auditor.next(AuditRequest)
            auditor.send(AuditFailed(audit=request.audit, error="no space left", retryable=True))
        assert "no space left" in (await audits.cleared("r2") or "")
        second.send(Goodbye(reason="test"))
        while audits.metrics()["audit/auditors"] == 2:
            await asyncio.sleep(0.01)
        audits.offer(record("n0"), "r3")
        request = await first.next(AuditRequest)
        first.send(AuditFailed(audit=request.audit, error="no space left", retryable=True))
        assert "no space left" in (await audits.cleared("r3") or "")


async def test_an_auditor_that_fails_gets_no_more_for_a_while(audited):
    # It says at once that its disk is full. That must not look like an auditor that is fast.
    async with audited(heartbeat_s=100.0) as (audits, _, connect):
        broken, good = connect(), connect()
        broken.hello("a", max_concurrent=8)
        audits.offer(record("n0", prompt=0), "r0")
        request = await broken.next(AuditRequest)
        good.hello("b", max_concurrent=8)
        await good.next(NodeWelcome)
        broken.send(AuditFailed(audit=request.audit, error="no space left", retryable=True))
        good.send(verdict(await good.next(AuditRequest)))
        for number in range(1, 8):
            audits.offer(record("n0", prompt=number), f"r{number}")
            good.send(verdict(await good.next(AuditRequest)))
        for number in range(8):
            assert await audits.cleared(f"r{number}") is None


async def test_a_version_that_there_never_was_is_the_nodes_fault(audited):
    # Without an auditor and whatever share is audited. Versions before the first one that is known may have been.
    async with audited(chances=[1.0, 1.0]) as (audits, trust, _):
        trust["n0"].clean = 10**6
        for version in (3, 5):
            audits.publish(b"", version)
        for version, is_refused in ((2, False), (5, False), (4, True)):
            audits.offer(record("n0", version=version), f"r{version}")
            assert bool(await audits.cleared(f"r{version}")) == is_refused
        assert (trust["n0"].doubtful, trust["n0"].audited, audits.metrics()["audit/wrong"]) == (1, 1, 1)


async def test_a_rollout_of_many_answers_is_remembered_once(audited):
    # Long rollouts push no others out of what is remembered of a node.
    async with audited(chances=[1.0] * 9) as (audits, trust, _):
        trust["n0"].clean = 10**6
        for rollout in ("r1", "r2", "r3"):
            for _ in range(3):
                audits.offer(record("n0"), rollout)
            assert await audits.cleared(rollout) is None
        assert list(audits._recent["n0"]) == ["r1", "r2", "r3"]


async def test_an_auditor_of_another_run_is_rejected(audited):
    # The message names both runs. Started anew it names none, and may return.
    async with audited() as (audits, _, connect):
        auditor = connect()
        auditor.hello("a", run_id="run-0")
        refusal = await auditor.next(Rejected)
        assert "'run-0'" in refusal.reason and "'run-1'" in refusal.reason and refusal.may_return
        assert audits.metrics()["audit/auditors"] == 0


async def test_a_nodes_key_does_not_open_the_audit_listener(audited):
    # A node must not judge others: it gets silence where an auditor gets its welcome.
    async with audited() as (audits, _, connect):
        stranger, auditor = connect("node"), connect()
        stranger.hello("stranger")
        auditor.hello("a")
        await auditor.next(NodeWelcome)
        with pytest.raises(TimeoutError):
            await stranger.next(NodeWelcome, timeout_s=0.3)
        assert audits.metrics()["audit/auditors"] == 1


async def test_an_audit_that_takes_too_long_is_given_up(audited):
    # A hung auditor does not hold the rollouts of a known node, and a new node's fail with what was waited for.
    async with audited(timeout_s=0.2) as (audits, _, connect):
        audits.offer(record("n0"), "r1")
        auditor = connect()
        auditor.hello("a")
        await auditor.next(AuditRequest)
        objection = await audits.cleared("r1") or ""
        assert "orchestrator.audit.timeout_s" in objection


async def test_an_auditor_gets_as_much_as_it_ends_in_time(audited):
    # One answer more than it ended in the last half of timeout_s, nothing for a late verdict, and nothing in the place
    # of an answer that it still has, however late that is.
    async with audited(timeout_s=2.0) as (audits, _, connect):
        for number in range(64):
            audits.offer(record("n0", prompt=number), f"r{number}")
        auditor = connect()
        auditor.hello("a", max_concurrent=64)
        received: list[AuditRequest] = []

        async def receive() -> int:
            with suppress(TimeoutError):
                while True:
                    received.append(await auditor.next(AuditRequest, 0.1))
                    assert received[-1].timeout_s == 2.0
            return len(received)

        assert await receive() == 1
        auditor.send(verdict(received[0]))
        assert await receive() == 3
        for request in received[1:]:
            auditor.send(verdict(request))
        assert await receive() == 7
        await asyncio.sleep(1.2)
        assert await receive() == 7
        auditor.send(verdict(received[3]))
        assert await receive() == 7
        for request in received[4:]:
            auditor.send(verdict(request))
        assert await receive() == 8


async def test_what_a_hanging_auditor_holds_goes_to_another(audited):
    # It sends no verdict. Half of timeout_s later the other one clears the rollout. The first one gets no other answer
    # until it has ended one; its late verdict counts no second time.
    async with audited(timeout_s=2.0) as (audits, trust, connect):
        hanging, working = connect(), connect()
        hanging.hello("h", max_concurrent=4)
        await hanging.next(NodeWelcome)
        audits.offer(record("n0"), "r1")
        request = await hanging.next(AuditRequest)
        working.hello("w")
        working.send(verdict(await working.next(AuditRequest)))
        assert await audits.cleared("r1") is None and trust["n0"].clean == 1
        audits.offer(record("n0", prompt=2), "r2")
        working.send(verdict(await working.next(AuditRequest)))
        hanging.send(verdict(request))
        await asyncio.sleep(0.2)
        for number in (3, 4):
            audits.offer(record("n0", prompt=number), f"r{number}")
        await asyncio.gather(hanging.next(AuditRequest), working.next(AuditRequest))
        assert audits.metrics()["audit/audited"] == 2


async def test_what_the_only_auditor_hangs_with_is_not_audited(audited):
    # It is held for a while, not for ever. A known node's rollout is used, as if its answer had not been chosen.
    async with audited(chances=[0.0], timeout_s=0.2, lost_after_s=0.4) as (audits, trust, connect):
        trust["n0"].clean = 10**6
        hanging = connect()
        hanging.hello("h")
        audits.offer(record("n0"), "r1")
        await hanging.next(AuditRequest)
        while not audits.metrics()["audit/failed"]:
            hanging.send(Status(version=0, running=1, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None))
            await asyncio.sleep(0.05)
        assert audits.metrics()["audit/auditors"] == 1 and await audits.cleared("r1") is None


async def test_a_rollout_is_audited_whole_before_the_next(audited):
    # With too few auditors some rollouts get all their verdicts, not all of them some.
    async with audited() as (audits, _, connect):
        for number in range(30):
            audits.offer(record("n0", prompt=number), f"r{number % 5}")
        rollout_of = {one.request.audit: name for name, answers in audits._open.items() for one in answers}
        auditor = connect()
        auditor.hello("a")
        order = []
        for _ in range(30):
            request = await auditor.next(AuditRequest)
            order.append(rollout_of[request.audit])
            auditor.send(verdict(request))
        assert [len(list(turns)) for _, turns in itertools.groupby(order)] == [6] * 5


async def test_a_slow_auditor_clears_a_steady_share(audited):
    # It has many places, does one answer after another, and half of those that come. The last second clears as well.
    async with audited(timeout_s=1.0) as (audits, trust, connect):
        trust["n0"].clean = -(10**6)
        auditor = connect()
        auditor.hello("a", max_concurrent=128)
        backlog: asyncio.Queue[AuditRequest] = asyncio.Queue()

        async def receive() -> None:
            while True:
                backlog.put_nowait(await auditor.next(AuditRequest))

        async def check() -> None:
            while True:
                request = await backlog.get()
                await asyncio.sleep(0.02)
                auditor.send(verdict(request))

        async def rollout(number: int) -> bool:
            audits.offer(record("n0", prompt=number), f"r{number}")
            return await audits.cleared(f"r{number}") is None

        working = asyncio.gather(receive(), check())
        rollouts = []
        for number in range(300):
            rollouts.append(asyncio.ensure_future(rollout(number)))
            await asyncio.sleep(0.01)
        cleared = await asyncio.gather(*rollouts)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert sum(cleared[200:]) > 20


async def test_a_batch_takes_only_rollouts_that_were_audited(open_run, run_dir, tmp_path):
    # Through the whole orchestrator: a rollout whose audit finds a wrong token fails, and is played again.
    pool = ScriptedPool(lambda request: float(int(request.rollout_id.split("-")[1].split("r")[0]) % 2))
    config = make_config(tmp_path, max_steps=1, audit={"enabled": True, "timeout_s": DEADLINE_S})
    async with open_run(config, pool) as run, PeerTrainer(run_dir, run.step_endpoint) as trainer:
        await trainer.attach(0)
        auditor = PeerAuditor(json.loads(run_dir.endpoints.read_text())["audit"], RunKeys(run_dir.keys))
        refused: list[AuditRequest] = []

        async def answer() -> None:
            auditor.hello("a", max_concurrent=64)
            while True:
                match await auditor.next((AuditRequest, HelloAgain)):
                    case HelloAgain():
                        auditor.hello("a", max_concurrent=64)
                    case request:
                        wrong = () if refused else (0,)
                        refused.extend([request] if wrong else [])
                        auditor.send(verdict(request, wrong))

        async def beat() -> None:
            while True:
                auditor.send(Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None))
                await asyncio.sleep(0.2)

        answering = asyncio.gather(answer(), beat())
        try:
            await trainer.train(1)
            attempts = [line["failed_attempts"] for line in await run.rollouts(1)]
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            auditor.close()
        assert len(refused) == 1
        [failures] = [kinds for kinds in attempts if kinds]
        assert [failure["kind"] for failure in failures] == ["audit"]
        assert run.pipeline.gateway.audits.metrics()["audit/audited"] >= len(attempts) + 1
