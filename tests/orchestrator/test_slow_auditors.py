"""Auditors that are slow, hang, fail or leave, as the test plays them: what they held is not audited."""

from audit_peers import STATUS, offer, record, verdict
from orch_peers import PeerAuditor

from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, Goodbye, Heard, NodeWelcome
from orchestrator.swarm.audits import Audits
from tests.waiting import until


async def asked_beside_another(audits, connect):
    """Return two auditors, and the answer of n0 for r1 that the first one got before the second came."""
    first = connect("a")
    offer(audits, record("n0"), "r1")
    request = await first.next(AuditRequest)
    second = connect("b")
    await second.next(NodeWelcome)
    return first, second, request


async def vanish(audits: Audits, auditor: PeerAuditor, name: str) -> None:
    """End an auditor's connection without a word. The audits have yet to notice."""
    [identity] = [identity for identity, one in audits.auditors.connected.items() if one.name == name]
    auditor.close()
    await until(lambda: not audits.auditors._socket.send(identity, Heard()))


async def requests_until_now(auditor: PeerAuditor) -> list[AuditRequest]:
    """Return what an auditor was asked and did not read, once all that it sent is handled."""
    auditor.send(STATUS)
    found: list[AuditRequest] = []
    while not isinstance(message := await auditor.next((AuditRequest, Heard)), Heard):
        found.append(message)
    return found


async def test_what_an_auditor_is_lost_with_is_not_audited(audited):
    # It may be what ended it: no other auditor sees it, and its rollout learns why.
    async with audited() as (audits, _, connect):
        first, second, _ = await asked_beside_another(audits, connect)
        first.send(Goodbye(reason="out of memory"))
        objection = await audits.cleared("r1") or ""
        assert "auditor a was lost with it (said goodbye: out of memory)" in objection
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/failed"]) == (0, 1)
        assert await requests_until_now(second) == []


async def test_an_auditor_that_had_vanished_was_not_lost_with_an_answer(audited):
    # The answer never reached it. Another one clears the rollout.
    async with audited() as (audits, _, connect):
        vanished = connect("v")
        await vanished.next(NodeWelcome)
        await vanish(audits, vanished, "v")
        offer(audits, record("n0"), "r1")
        assert (audits.metrics()["audit/queued"], audits.metrics()["audit/auditors"]) == (1, 0)
        last = connect("a")
        last.send(verdict(await last.next(AuditRequest)))
        assert await audits.cleared("r1") is None


async def test_a_verdict_of_another_auditor_counts_for_nothing(audited):
    # Only the one that was given the answer may judge it.
    async with audited() as (audits, trust, connect):
        first, second, request = await asked_beside_another(audits, connect)
        second.send(verdict(request, wrong=(1, 2, 3, 4)))
        assert await requests_until_now(second) == []
        first.send(verdict(request))
        assert await audits.cleared("r1") is None and trust["n0"].quarantines == 0


async def test_an_auditor_that_fails_gets_no_more_for_a_while(audited):
    # It says at once that its disk is full. That must not look like an auditor that is fast.
    async with audited(heartbeat_s=100.0, lost_after_s=300.0) as (audits, _, connect):
        broken = connect("a", max_concurrent=8)
        offer(audits, record("n0", prompt=0), "r0")
        request = await broken.next(AuditRequest)
        good = connect("b", max_concurrent=8)
        await good.next(NodeWelcome)
        broken.send(AuditVerdict(audit=request.audit, error="no space left", retryable=True))
        assert "a new node (n0) could not be audited: auditor a: no space left" in (await audits.cleared("r0") or "")
        for number in range(1, 8):
            offer(audits, record("n0", prompt=number), f"r{number}")
            good.send(verdict(await good.next(AuditRequest)))
            assert await audits.cleared(f"r{number}") is None


async def test_an_audit_that_takes_too_long_is_given_up(audited):
    # A hung auditor does not hold the rollouts of a known node, and a new node's fail with what was waited for.
    async with audited(timeout_s=0.2) as (audits, _, connect):
        offer(audits, record("n0"), "r1")
        auditor = connect("a")
        await auditor.next(AuditRequest)
        objection = await audits.cleared("r1") or ""
        assert "waited 0.2 s" in objection


async def test_a_hanging_auditor_gets_no_more(audited):
    # It sends no verdict for half of timeout_s. What comes then goes to the other one.
    async with audited(timeout_s=1000.0, lost_after_s=10_000.0) as (audits, _, connect):
        hanging, working, _ = await asked_beside_another(audits, connect)
        [held] = [one.held for one in audits.auditors.connected.values() if one.held]
        held.update({number: (answer, since - 501.0) for number, (answer, since) in held.items()})
        for number in range(2, 5):
            offer(audits, record("n0", prompt=number), f"r{number}")
            working.send(verdict(await working.next(AuditRequest)))
            assert await audits.cleared(f"r{number}") is None
        assert await requests_until_now(hanging) == []


async def test_a_silent_auditor_is_lost(audited):
    # One that was heard within lost_after_s stays.
    async with audited(lost_after_s=400.0) as (audits, _, connect):
        auditor = connect("a")
        assert await requests_until_now(auditor) == []
        [one] = audits.auditors.connected.values()
        for silent_s, connected in ((300.0, 1), (101.0, 0)):
            one.last_heard -= silent_s
            audits.auditors.tick(400.0)
            assert audits.metrics()["audit/auditors"] == connected
