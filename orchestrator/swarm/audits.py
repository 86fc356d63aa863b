"""Answers that wait for an audit: which are audited, and what a verdict does to nodes and rollouts.

    gateway: offer(answer) --chosen by the node's trust--> auditors.py: queue, AuditRequest, AuditVerdict --> trust
                  |                                                                                            |
    rollout ends: cleared(rollout) waits for the audits of new nodes' answers         evidence -> quarantine --+
                                                                    (its unaudited recent rollouts are tainted)

Which answers are audited is drawn after they came, by the operating system's randomness: a node cannot know. A rollout
waits at most five minutes. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from composer_prime.config.orchestrator import AuditConfig
from composer_prime.monitor.events import event
from composer_prime.wire.node_messages import Answer, AuditRequest, AuditVerdict, PartVerdict, Sampling
from composer_prime.wire.types import pack_ints
from orchestrator.swarm.auditors import TIMEOUT_S, Auditors, OfferedAnswer
from orchestrator.swarm.trust import NodeTrust, is_clean

logger = logging.getLogger(__name__)

_QUARANTINE_S = 600.0
"""How long a node gets no requests after a failed audit; doubles each time."""
_MAX_RECENT = 1024
"""Unaudited rollouts of a node that are remembered, for the case that it is quarantined."""
_MAX_TAINTED = 1 << 16


class Audits:
    """Serves auditors from `start` to `close`."""

    def __init__(
        self,
        config: AuditConfig,
        auditors: Auditors,
        trust: Mapping[str, NodeTrust],
        on_quarantine: Callable[[str, str], None] = lambda node_id, reason: None,
        chance: Callable[[], float] = random.SystemRandom().random,
    ) -> None:
        """`trust` holds every node's, by id. `chance()` returns a number in [0, 1) that no node can know."""
        self.counters: Counter[str] = Counter()
        self._seconds = 0.0
        self._config = config
        self.auditors = auditors
        self._trust = trust
        self._on_quarantine = on_quarantine
        self._chance = chance
        self._open: dict[str, list[OfferedAnswer]] = {}
        """By rollout that has not ended."""
        self._recent: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_MAX_RECENT))
        """Rollouts with an answer that was not audited, by node."""
        self._tainted: OrderedDict[str, None] = OrderedDict()

    @property
    def endpoint(self) -> str:
        """Return the auditors' address as it is bound."""
        return self.auditors.endpoint

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        """Raise PortInUseError when another process holds the address, ConfigError when a key is missing."""
        self.auditors.start(self._config.address, self._note, on_error)

    async def close(self, *, finished: bool = False) -> None:
        """Stop serving. With `finished`, auditors learn that the run is over and leave."""
        await self.auditors.close(finished=finished)

    def publish(self, signed: bytes) -> None:
        """Tell the auditors of a new version."""
        self.auditors.publish(signed)

    # -- answers -------------------------------------------------------------------------------------------------

    def offer(self, rollout_id: str, prompt_ids: Any, answer: Answer, sampling: Sampling) -> None:
        """Take note of an answer that was recorded for an open rollout, and have it audited if it is chosen."""
        parts = tuple(answer.sampled_by)
        nodes = {node_id: self._trust[node_id] for node_id, _ in parts}
        others = self._open.setdefault(rollout_id, [])
        offered = OfferedAnswer(
            parts=parts,
            quarantines={node_id: trust.quarantines for node_id, trust in nodes.items()},
            is_awaited=any(trust.is_new for trust in nodes.values()),
            rank=others[0].rank if others else random.random(),
        )
        others.append(offered)
        self.counters["answers"] += 1
        share = max(trust.share(self._config.floor) for trust in nodes.values())
        if share < 1.0 and self._chance() >= share:
            return
        self.counters["chosen"] += 1
        offered.request = AuditRequest(
            audit=self.counters["chosen"],
            prompt_ids=pack_ints(prompt_ids),
            sampling=sampling,
            tolerance=self._config.tolerance,
            timeout_s=TIMEOUT_S,
            **msgspec.structs.asdict(answer),
        )
        self.auditors.check(offered)

    async def cleared(self, rollout_id: str) -> str | None:
        """Return why a rollout that has ended must not be used; None when nothing speaks against it.

        Waits for the audits of new nodes' answers, at most TIMEOUT_S.
        """
        answers = self._open.pop(rollout_id, [])
        if late := await self._wait([answer for answer in answers if answer.is_awaited]):
            return self._too_late(late)
        if objection := next(filter(None, map(self._objection, answers)), None):
            return objection
        for node_id in {name for answer in answers if answer.verdict is None for name in answer.quarantines}:
            self._recent[node_id].append(rollout_id)
        return None

    async def _wait(self, answers: list[OfferedAnswer]) -> list[OfferedAnswer]:
        """Wait for audits. Return the answers that got none in time; they are given up, also when this is cancelled."""
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    for answer in answers:
                        await answer.done.wait()
            finally:
                self.auditors.give_up(answer for answer in answers if not answer.done.is_set())
        return [answer for answer in answers if not answer.done.is_set()]

    def forget(self, rollout_id: str) -> None:
        """Forget a rollout whose answers will not be used."""
        self.auditors.give_up(self._open.pop(rollout_id, []))

    def is_tainted(self, rollout_ids: Iterable[str]) -> bool:
        """Tell whether a node that is now quarantined sampled one of these rollouts, and it was not audited."""
        return bool(self._tainted) and any(name in self._tainted for name in rollout_ids)

    def _too_late(self, answers: list[OfferedAnswer]) -> str:
        nodes = sorted({node_id for answer in answers for node_id in answer.quarantines})
        return (
            f"waited {TIMEOUT_S:g} s for the audit of {len(answers)} answers of new nodes ({', '.join(nodes[:5])}); "
            f"{self.auditors.connected} auditors are connected (inference audit), {self.auditors.queued} answers "
            "are queued"
        )

    def _objection(self, answer: OfferedAnswer) -> str | None:
        if answer.verdict is not None:
            found = zip(answer.parts, answer.verdict.parts, strict=True)
            faults = [f"node {node_id}: {_describe(part)}" for (node_id, _), part in found if not is_clean(part)]
            return "; ".join(faults) or None
        for node_id, quarantines in answer.quarantines.items():
            if self._trust[node_id].quarantines != quarantines:
                return f"node {node_id} was quarantined, and this answer of it was not audited"
        if answer.is_awaited and answer.error is not None:
            return f"an answer of a new node ({answer.nodes}) could not be audited: {answer.error}"
        return None

    def _note(self, answer: OfferedAnswer, verdict: AuditVerdict) -> None:
        answer.end(verdict)
        self._seconds += verdict.seconds
        self.counters["audited"] += 1
        self.counters["tokens"] += sum(part.tokens for part in verdict.parts)
        self.counters["wrong"] += not all(map(is_clean, verdict.parts))
        for (node_id, _), part in zip(answer.parts, verdict.parts, strict=True):
            trust = self._trust[node_id]
            if answer.quarantines[node_id] == trust.quarantines and trust.note(part):
                self._quarantine(node_id, trust, f"wrong answers; in its last one {_describe(part)}")

    def _quarantine(self, node_id: str, trust: NodeTrust, why: str) -> None:
        length_s = trust.quarantine(time.monotonic(), _QUARANTINE_S)
        self.counters["quarantines"] += 1
        rollouts = set(self._recent.pop(node_id, ()))
        for name in rollouts:
            self._tainted[name] = None
        while len(self._tainted) > _MAX_TAINTED:
            self._tainted.popitem(last=False)
        reason = f"quarantined for {length_s:.0f} s: {why}"
        logger.warning(
            "node %s is %s; its %d unaudited rollouts are dropped unless a batch has them",
            node_id,
            reason,
            len(rollouts),
            extra=event("node", text=f"node {node_id} is {reason}"),
        )
        self._on_quarantine(node_id, reason)

    # -- state ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.jsonl; counts and seconds are over the whole run."""
        now = time.monotonic()
        states = Counter(trust.state(now) for trust in self._trust.values())
        names = ("answers", "chosen", "audited", "wrong", "quarantines", "tokens")
        return {
            **{f"audit/{name}": self.counters[name] for name in names},
            "audit/seconds": self._seconds,
            "audit/failed": self.auditors.failed,
            "audit/queued": self.auditors.queued,
            "audit/auditors": self.auditors.connected,
            "audit/nodes_new": states["new"],
            "audit/nodes_quarantined": states["quarantined"],
        }


def _describe(verdict: PartVerdict) -> str:
    parts = [f"{len(verdict.wrong)} of {verdict.tokens} tokens are not what its seed draws"] if verdict.wrong else []
    parts += [verdict.fault] if verdict.fault is not None else []
    return f"{'; '.join(parts) or 'no fault'} (logprobs off by {verdict.gap_mean:.2g} nats on average)"
