"""The auditors that are connected, and the answers that they check."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from composer_prime.wire.node_messages import AuditRequest, AuditVerdict


@dataclass(slots=True, kw_only=True, eq=False)
class OfferedAnswer:
    """One answer of a node, from its arrival until its rollout ends, or its audit does."""

    parts: tuple[tuple[str, int], ...]
    """Its nodes in order, each with the number of tokens that it sampled; mostly one."""
    rollout_id: str
    quarantines: dict[str, int]
    """Of each of its nodes when the answer came."""
    is_awaited: bool
    """Whether its rollout waits for the audit."""
    rank: float
    """Random, and the same for all answers of a rollout. The highest is audited first."""
    request: AuditRequest | None = None
    """None when it is not audited, or was."""
    verdict: AuditVerdict | None = None
    error: str | None = None
    """Why it could not be audited."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    handed: int = 0
    """Auditors that got it."""
    is_unwanted: bool = False
    """Whether its rollout is given up. Then it is not queued."""

    @property
    def nodes(self) -> str:
        """Its nodes, for messages."""
        return ", ".join(dict.fromkeys(node_id for node_id, _ in self.parts))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its request."""
        one = self.request
        return 0 if one is None else len(one.prompt_ids) + len(one.token_ids) + len(one.logprobs)

    def end(self, verdict: AuditVerdict | None, error: str | None = None) -> None:
        self.verdict, self.error, self.request = verdict, error, None
        self.done.set()


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectedAuditor:
    name: str
    places: int
    last_heard: float
    held: dict[int, tuple[OfferedAnswer, float]] = field(default_factory=dict)
    """What it works on by audit number, and when it got that, monotonic seconds."""
    paused_until: float = -math.inf
    """After it could not check what another one may, monotonic seconds."""

    def has_room(self, now: float, since: float) -> bool:
        """Tell whether it has a free place, holds nothing from before `since`, and is not paused."""
        is_late = any(begun <= since for _, begun in self.held.values())
        return len(self.held) < self.places and now >= self.paused_until and not is_late
