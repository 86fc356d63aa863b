"""Messages between an auditor (DEALER, connects outwards) and the orchestrator's audit listener (ROUTER).

    auditor --NodeHello--> orchestrator --NodeWelcome|Rejected, NewVersion for each kept version--> auditor
    orchestrator --AuditRequest|NewVersion|Drain--> auditor --AuditVerdict|AuditFailed--> orchestrator
    auditor --Status|ChunkRequest--> orchestrator --Heard|WeightPiece--> auditor

The listener admits the trainer's key only, which nodes do not have. AuditRequest, AuditVerdict and AuditFailed are
below. The other messages are those of a node (node_messages.py), with the same meaning.
"""

from __future__ import annotations

import math

import msgspec

from composer_prime.wire.answer import Answer
from composer_prime.wire.node_messages import (
    ChunkRequest,
    Drain,
    Goodbye,
    Heard,
    NewVersion,
    NodeHello,
    NodeWelcome,
    Rejected,
    Sampling,
    Status,
    WeightPiece,
)


class AuditRequest(Answer, frozen=True, kw_only=True, tag="audit"):
    """An answer whose tokens an auditor must score again, as the nodes sent it."""

    audit: int
    """Numbers the request."""
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    """As the node got it, with the seed."""
    tolerance: float
    """How far a draw may lie outside of its CDF interval, as a probability."""
    timeout_s: float = math.inf
    """How long after its arrival the auditor may begin a pass with it. Then it fails."""


class PartVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one node did."""

    tokens: int
    """Tokens that were checked."""
    wrong: list[int]
    """Positions in the part, ascending, of tokens that are not the draw of the seed, or whose logprob is far off."""
    fault: str | None = None
    """What is wrong with the part as a whole: its end, or the mean error of its logprobs. None for nothing."""
    gap_mean: float = 0.0
    """Mean |claimed - own logprob|, nats."""
    gap_max: float = 0.0


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    audit: int
    parts: list[PartVerdict]
    """Of the tokens of each node that sampled the answer, in order."""
    seconds: float
    """What the check took."""


class AuditFailed(msgspec.Struct, frozen=True, kw_only=True, tag="audit_failed"):
    """The answer cannot be checked: its version is gone, or the auditor's context is too small."""

    audit: int
    error: str
    retryable: bool = False
    """Whether another auditor may be able to: the fault is this one's, such as a full disk."""


FromAuditor = NodeHello | AuditVerdict | AuditFailed | Status | ChunkRequest | Goodbye
ToAuditor = NodeWelcome | Rejected | AuditRequest | NewVersion | Drain | Heard | WeightPiece
