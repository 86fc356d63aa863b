"""Auditors that are slow, hang, fail or leave, as the test plays them: other auditors get what they held."""

from __future__ import annotations

import asyncio
import time

from audit_peers import STATUS, Clock, asked_beside_another, offer, record, requests_until_now, vanish, verdict

from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, Goodbye, NodeWelcome


async def test_an_answer_that_ends_auditors_is_given_up(audited):
    # Two auditors are lost with it; a third one never sees it, and its rollout learns why.
    async with audited() as (audits, _, connect):
        offer(audits, record("n0"), "poison")
        for name in ("a", "b"):
            auditor = connect()
            auditor.hello(name)
            await auditor.next(AuditRequest)
            auditor.send(Goodbye(reason="out of memory"))
        objection = await audits.cleared("poison") or ""
        assert "2 auditors were lost with it, the last one b (said goodbye: out of memory)" in objection
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/failed"]) == (0, 1)


async def test_an_auditor_that_had_vanished_was_not_lost_with_an_answer(audited):
    # The answer never reached it. So one more may be lost, and the third clears the rollout.
    async with audited() as (audits, _, connect):
        vanished, lost, last = connect(), connect(), connect()
        vanished.hello("v")
        await vanished.next(NodeWelcome)
        await vanish(audits, vanished, "v")
        offer(audits, record("n0"), "r1")
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/auditors"]) == (1, 0)
        lost.hello("l")
        await lost.next(AuditRequest)
        lost.send(Goodbye(reason="out of memory"))
        while audits.metrics()["audit/auditors"]:
            await asyncio.sleep(0.01)
        last.hello("a")
        [request] = await requests_until_now(last)
        last.send(verdict(request))
        assert await audits.cleared("r1") is None


async def test_an_auditor_that_leaves_hands_its_answers_on(audited):
    # A verdict that comes from another one than the answer was given to counts for nothing.
    async with audited() as (audits, trust, connect):
        first, second, request = await asked_beside_another(audits, connect)
        second.send(verdict(request, wrong=(1, 2, 3, 4)))
        assert await requests_until_now(second) == []
        first.send(Goodbye(reason="test"))
        second.send(verdict(await second.next(AuditRequest)))
        assert await audits.cleared("r1") is None and trust["n0"].quarantines == 0


async def test_what_one_auditor_cannot_check_another_one_may(audited):
    # The disk of the first is full. If the second fails too, or there is none, the answer counts as not audited.
    async with audited() as (audits, _, connect):
        first, second, request = await asked_beside_another(audits, connect)
        first.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        second.send(verdict(await second.next(AuditRequest)))
        assert await audits.cleared("r1") is None
        while any(one.paused_until > time.monotonic() for one in audits.auditors._connected.values()):
            await asyncio.sleep(0.01)
        offer(audits, record("n0"), "r2")
        [holder] = [one.name for one in audits.auditors._connected.values() if one.held]
        for auditor in (first, second) if holder == "a" else (second, first):
            request = await auditor.next(AuditRequest)
            auditor.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        assert "no space left" in (await audits.cleared("r2") or "")
        second.send(Goodbye(reason="test"))
        while audits.metrics()["audit/auditors"] == 2:
            await asyncio.sleep(0.01)
        offer(audits, record("n0"), "r3")
        request = await first.next(AuditRequest)
        first.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        assert "no space left" in (await audits.cleared("r3") or "")


async def test_what_is_forgotten_meanwhile_goes_to_no_other_auditor(audited):
    # One cannot check it where another one might, but nobody waits for it any more.
    async with audited() as (audits, _, connect):
        first, second, request = await asked_beside_another(audits, connect)
        audits.forget("r1")
        first.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        assert await requests_until_now(first) == []
        assert await requests_until_now(second) == [] and audits.metrics()["audit/queued"] == 0


async def test_an_auditor_that_fails_gets_no_more_for_a_while(audited):
    # It says at once that its disk is full. That must not look like an auditor that is fast.
    async with audited(heartbeat_s=100.0, lost_after_s=300.0) as (audits, _, connect):
        broken, good = connect(), connect()
        broken.hello("a", max_concurrent=8)
        offer(audits, record("n0", prompt=0), "r0")
        request = await broken.next(AuditRequest)
        good.hello("b", max_concurrent=8)
        await good.next(NodeWelcome)
        broken.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        good.send(verdict(await good.next(AuditRequest)))
        for number in range(1, 8):
            offer(audits, record("n0", prompt=number), f"r{number}")
            good.send(verdict(await good.next(AuditRequest)))
        for number in range(8):
            assert await audits.cleared(f"r{number}") is None


async def test_an_audit_that_takes_too_long_is_given_up(audited):
    # A hung auditor does not hold the rollouts of a known node, and a new node's fail with what was waited for.
    async with audited(timeout_s=0.2) as (audits, _, connect):
        offer(audits, record("n0"), "r1")
        auditor = connect()
        auditor.hello("a")
        await auditor.next(AuditRequest)
        objection = await audits.cleared("r1") or ""
        assert "waited 0.2 s" in objection


async def test_a_hanging_auditor_gets_no_more(audited):
    # It sends no verdict for half of timeout_s. What comes then goes to the other one.
    clock = Clock()
    async with audited(timeout_s=1000.0, lost_after_s=10_000.0, clock=clock) as (audits, _, connect):
        hanging, working, _ = await asked_beside_another(audits, connect)
        clock.now += 501.0
        for number in range(2, 5):
            offer(audits, record("n0", prompt=number), f"r{number}")
            working.send(verdict(await working.next(AuditRequest)))
            assert await audits.cleared(f"r{number}") is None
        assert await requests_until_now(hanging) == []


async def test_what_the_only_auditor_hangs_with_is_not_audited(audited):
    # It is held for a while, not for ever. A known node's rollout is used, as if its answer had not been chosen.
    clock = Clock()
    async with audited(chances=[0.0], timeout_s=1000.0, lost_after_s=1000.0, clock=clock) as (audits, trust, connect):
        trust["n0"].clean = 10**6
        hanging = connect()
        hanging.hello("h")
        offer(audits, record("n0"), "r1")
        await hanging.next(AuditRequest)
        for clock.now in (900.0, 1800.0, 2100.0):
            assert audits.metrics()["audit/failed"] == 0
            assert await requests_until_now(hanging) == []
        while not audits.metrics()["audit/failed"]:
            await asyncio.sleep(0.01)
        assert audits.metrics()["audit/auditors"] == 1 and await audits.cleared("r1") is None


async def test_no_auditor_is_lost_while_the_orchestrator_stands_still(audited):
    # What auditors sent meanwhile waits in the socket. It is read before any of them counts as silent.
    clock = Clock()
    async with audited(lost_after_s=400.0, clock=clock) as (audits, _, connect):
        auditor = connect()
        auditor.hello("a")
        assert await requests_until_now(auditor) == []
        clock.now += 401.0
        times_read = clock.times_read
        while clock.times_read == times_read:
            await asyncio.sleep(0)
        [identity] = audits.auditors._connected
        audits.auditors._handle(identity, STATUS)
        await clock.look()
        clock.now += 399.0
        await clock.look()
        assert audits.metrics()["audit/auditors"] == 1
        clock.now += 2.0
        while audits.metrics()["audit/auditors"]:
            await asyncio.sleep(0.01)
