"""The orchestrator's side of audits, with an auditor that answers as the test says."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import msgspec
from audit_peers import STATUS, offer, record, verdict
from orch_peers import PeerAuditor, ScriptedPool, make_config

from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, Dismissed, Heard, NodeWelcome
from orchestrator.swarm.trust import NodeTrust
from tests.waiting import until

DEADLINE_S = 100.0


async def test_a_new_nodes_rollout_waits_for_its_audit(audited):
    # It is cleared only once the auditor has said that the tokens are right; the request has the seed.
    async with audited() as (audits, trust, connect):
        offer(audits, record("n0"), "r1")
        waiting = asyncio.ensure_future(audits.cleared("r1"))
        auditor = connect("a")
        assert (await auditor.next(NodeWelcome)).run_id == "run-1"
        request = await auditor.next(AuditRequest)
        assert request.sampling.seed == 3 and not waiting.done()
        auditor.send(verdict(request))
        assert await waiting is None
        assert trust["n0"].clean == 1 and audits.metrics()["audit/audited"] == 1


async def test_what_waits_for_an_auditor_is_bounded_in_bytes(audited, monkeypatch):
    # Two answers of 72 bytes fit into 200; of three, one counts as not audited, at once.
    monkeypatch.setattr("orchestrator.swarm.audits.MAX_QUEUED_BYTES", 200)
    async with audited() as (audits, *_):
        for name in ("r1", "r2", "r3"):
            offer(audits, record("n0"), name)
        clearing = [asyncio.ensure_future(audits.cleared(name)) for name in ("r1", "r2", "r3")]
        [refused], waiting = await asyncio.wait(clearing, return_when=asyncio.FIRST_COMPLETED)
        assert "could not be audited: 3 answers of 0.0 MB wait" in (refused.result() or "")
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/failed"]) == (2, 1)
        for task in waiting:
            task.cancel()


async def test_the_error_of_a_full_queue_counts_what_is_queued(audited):
    # An auditor has taken the first answer, and the second is forgotten: their bytes wait no more.
    async with audited() as (audits, _, connect):
        auditor = connect("a")
        offer(audits, record("n0", tokens=30_000), "taken")
        await auditor.next(AuditRequest)
        offer(audits, record("n0", tokens=30_000), "forgotten")
        audits.forget("forgotten")
        for number in range(4097):
            offer(audits, record("n0"), f"r{number}")
        [error] = [one.outcome.result() for [one] in audits._open.values() if one.outcome.done()]
        assert error == "4097 answers of 0.3 MB wait for an auditor: start more (inference audit)"


async def test_answers_that_nobody_waits_for_are_not_queued(audited):
    # One rollout waited in vain, another is forgotten: an auditor that comes later gets neither answer. The message
    # names the wait, the node and how many auditors are there.
    async with audited(timeout_s=0.01) as (audits, *_):
        offer(audits, record("n0"), "late")
        objection = await audits.cleared("late") or ""
        assert all(part in objection for part in ("waited 0.01 s", "n0", "0 auditors are connected (inference audit)"))
        offer(audits, record("n0"), "forgotten")
        audits.forget("forgotten")
        assert audits.metrics()["audit/queued"] == 0


async def test_what_a_caught_node_sampled_without_an_audit_is_tainted(audited):
    # Its rollouts that were let through are dropped, those under way are refused, those of others stay.
    async with audited(chances=[1.0, 1.0, 1.0, 0.0]) as (audits, trust, connect):
        trust["n0"].clean = trust["n1"].clean = 10**6
        for name, node in (("early", "n0"), ("other", "n1"), ("open", "n0"), ("caught", "n0")):
            offer(audits, record(node), name)
        assert await audits.cleared("early") is None and await audits.cleared("other") is None
        assert not audits.is_tainted(["early"])
        auditor = connect("a")
        auditor.send(verdict(await auditor.next(AuditRequest), wrong=(1, 2, 3, 4)))
        await until(lambda: trust["n0"].quarantines)
        assert audits.is_tainted(["other", "early"]) and not audits.is_tainted(["other"])
        assert "n0 was quarantined" in (await audits.cleared("open") or "")
        assert "4 of 8 tokens" in (await audits.cleared("caught") or "")


async def test_a_verdict_at_the_last_moment_is_in_time(audited):
    # The loop is behind: the deadline has passed, and the verdict is handled right after it.
    async with audited(timeout_s=0.01) as (audits, _, connect):
        auditor = connect("a")
        await auditor.next(NodeWelcome)
        offer(audits, record("n0"), "r1")
        request = await auditor.next(AuditRequest)
        waiting = asyncio.ensure_future(audits.cleared("r1"))
        await asyncio.sleep(0)
        [identity] = audits.auditors.connected
        asyncio.get_running_loop().call_later(
            0.01, audits.auditors.handle, identity, msgspec.msgpack.encode(verdict(request))
        )
        time.sleep(0.1)  # Both are due now, in this order.
        assert await waiting is None


async def test_each_node_answers_for_its_own_tokens(audited):
    # One node continued for another: the wrong tokens are those of the first.
    async with audited() as (audits, trust, connect):
        offer(audits, record("n1", ("n0", 4), ("n1", 4)), "r1")
        auditor = connect("a")
        request = await auditor.next(AuditRequest)
        assert [count for _, count in request.sampled_by] == [4, 4]
        auditor.send(verdict(request, wrong=(0, 1, 2, 3)))
        objection = await audits.cleared("r1") or ""
        assert "node n0: 4 of 4 tokens" in objection and "n1" not in objection
        assert trust["n0"].quarantines == 1 and trust["n1"].quarantines == 0 and trust["n1"].clean == 1


async def test_an_answer_that_cannot_be_checked_is_no_proof(audited):
    # A new node's rollout fails with the reason; its trust stays as it was.
    async with audited() as (audits, trust, connect):
        offer(audits, record("n0"), "r1")
        auditor = connect("a")
        request = await auditor.next(AuditRequest)
        auditor.send(AuditVerdict(audit=request.audit, error="version 3 is not available"))
        assert "could not be audited: auditor a: version 3 is not available" in (await audits.cleared("r1") or "")
        assert trust["n0"] == NodeTrust() and audits.metrics()["audit/failed"] == 1


async def test_a_rollout_of_many_answers_is_remembered_once(audited):
    # Long rollouts push no others out of what is remembered of a node.
    async with audited(chances=[1.0] * 9) as (audits, trust, _):
        trust["n0"].clean = 10**6
        for rollout in ("r1", "r2", "r3"):
            for _ in range(3):
                offer(audits, record("n0"), rollout)
            assert await audits.cleared(rollout) is None
        assert list(audits._recent["n0"]) == ["r1", "r2", "r3"]


async def test_a_verdict_on_too_few_parts_is_no_verdict(audited):
    # The answer counts as not audited. The run goes on.
    async with audited() as (audits, trust, connect):
        confused = connect("a")
        offer(audits, record("n1", ("n0", 4), ("n1", 4)), "r1")
        request = await confused.next(AuditRequest)
        confused.send(msgspec.structs.replace(verdict(request), parts=verdict(request).parts[:1]))
        objection = await audits.cleared("r1") or ""
        assert "its verdict has 1 parts, the answer 2: use one release" in objection
        assert trust["n0"] == trust["n1"] == NodeTrust()


async def test_an_auditor_of_another_run_is_rejected(audited):
    # The message names both runs. Started anew it names none, and may return.
    async with audited() as (audits, _, connect):
        auditor = connect("a", run_id="run-0")
        refusal = await auditor.next(Dismissed)
        assert "'run-0'" in refusal.reason and "'run-1'" in refusal.reason and refusal.may_return
        assert audits.metrics()["audit/auditors"] == 0


async def test_a_rollout_is_audited_whole_before_the_next(audited):
    # With too few auditors some rollouts get all their verdicts, not all of them some.
    async with audited() as (audits, _, connect):
        for number in range(30):
            offer(audits, record("n0", prompt=number), f"r{number % 5}")
        rollout_of = {one.request.audit: name for name, answers in audits._open.items() for one in answers}
        auditor = connect("a")
        order = []
        for _ in range(30):
            request = await auditor.next(AuditRequest)
            order.append(rollout_of[request.audit])
            auditor.send(verdict(request))
        assert [len(list(turns)) for _, turns in itertools.groupby(order)] == [6] * 5


async def test_a_batch_takes_only_rollouts_that_were_audited(open_run, run_dir, tmp_path):
    # Through the whole orchestrator: a rollout whose audit finds a wrong token fails, and is played again.
    pool = ScriptedPool(lambda request: float(int(request.rollout_id.split("-")[1].split("r")[0]) % 2))
    config = make_config(tmp_path, max_steps=1, audit={"enabled": True})
    async with open_run(config, pool) as run, run.trainer(0) as trainer:
        auditor = PeerAuditor(json.loads(run_dir.endpoints.read_text())["node"], RunKeys(run_dir.keys))
        refused: list[AuditRequest] = []

        async def answer() -> None:
            auditor.hello("a", max_concurrent=64)
            while True:
                match await auditor.next((AuditRequest, Heard)):
                    case Heard(known=False):
                        auditor.hello("a", max_concurrent=64)
                    case AuditRequest() as request:
                        wrong = () if refused else (0,)
                        refused.extend([request] if wrong else [])
                        auditor.send(verdict(request, wrong))

        async def beat() -> None:
            while True:
                auditor.send(STATUS)
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
