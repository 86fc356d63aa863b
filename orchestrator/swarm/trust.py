"""What audits tell about one node: the share of its answers to audit, and when it is quarantined.

    new (all audited, answers wait) --32 clean--> known (share falls to the floor) --evidence--> quarantined
     ^                                                                                                |
     +------------------------------- after a while, all counts at zero ------------------------------+

The share follows a Beta-Bernoulli model of "an audited answer is wrong" (Jøsang and Ismail, The Beta Reputation System,
2002): four times the posterior mean, at least the floor.

Evidence is one sequential test, on tokens and on whole answers: a cumulative sum of log-likelihood ratios, held at 0
from below (Page, Continuous Inspection Schemes, 1954). A seed fixes each draw, so other weights differ from rounding
(docs/explanation/security.md): an honest node's token is wrong about never (`_P_HONEST` is an upper bound), a cheat's
in 2 % of cases or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_prime.wire.node_messages import PartVerdict

_NEW_ANSWERS = 32
"""Clean audits after which a node is not new."""
_SHARE_OF_DOUBT = 4.0
_P_HONEST = 2e-4
_P_WRONG_TOKEN, _P_WRONG_ANSWER = 0.02, 0.1
BOUND = 14.0
"""Evidence, in nats, that quarantines: three answers, or four tokens close together."""
_LONGEST_QUARANTINE = 2**6
"""On the first quarantine's length."""


@dataclass(slots=True)
class SequentialTest:
    """Page's test of "wrong with probability p_wrong" against _P_HONEST."""

    p_wrong: float
    evidence: float = 0.0

    def add(self, wrong: Sequence[int], count: int) -> bool:
        """Add `count` observations, those at `wrong` wrong. Return whether the bound was passed."""
        right, highest, position = math.log((1 - self.p_wrong) / (1 - _P_HONEST)), 0.0, 0
        for index in wrong:
            self.evidence = max(0.0, self.evidence + right * (index - position))
            self.evidence += math.log(self.p_wrong / _P_HONEST)
            highest, position = max(highest, self.evidence), index + 1
        self.evidence = max(0.0, self.evidence + right * (count - position))
        return highest >= BOUND


@dataclass(slots=True)
class NodeTrust:
    """Times are monotonic seconds."""

    clean: int = 0
    """Audits without a fault since it was admitted, or admitted again."""
    doubtful: int = 0
    """Audits with a fault since then."""
    quarantines: int = 0
    quarantined_until: float = -math.inf
    tokens: SequentialTest = field(default_factory=lambda: SequentialTest(_P_WRONG_TOKEN))
    answers: SequentialTest = field(default_factory=lambda: SequentialTest(_P_WRONG_ANSWER))

    def expectation(self, now: float) -> float | None:
        """Return the expected share of right answers: 0 in quarantine, None before the first audit."""
        if now < self.quarantined_until:
            return 0.0
        is_audited = self.clean or self.doubtful or self.quarantines
        return (1 + self.clean) / (2 + self.clean + self.doubtful) if is_audited else None

    @property
    def is_new(self) -> bool:
        """Tell whether its answers wait for their audit."""
        return self.clean < _NEW_ANSWERS

    def share(self, floor: float) -> float:
        """Return the share of its answers to audit, in [floor, 1]."""
        if self.is_new:
            return 1.0
        wrong = (1 + self.doubtful) / (2 + self.doubtful + self.clean)
        return min(1.0, max(floor, _SHARE_OF_DOUBT * wrong))

    def note(self, verdict: PartVerdict) -> bool:
        """Take in an audit. Return whether the node must be quarantined."""
        if is_clean(verdict):
            self.clean += 1
        else:
            self.doubtful += 1
        tokens_are_wrong = self.tokens.add(verdict.wrong, verdict.tokens)
        return self.answers.add([] if verdict.fault is None else [0], 1) or tokens_are_wrong

    def quarantine(self, now: float, seconds: float) -> float:
        """Double the last quarantine, and forget what was good. Return its seconds."""
        length_s = seconds * min(2**self.quarantines, _LONGEST_QUARANTINE)
        self.quarantines += 1
        self.quarantined_until = now + length_s
        self.clean = self.doubtful = 0
        self.tokens.evidence = self.answers.evidence = 0.0
        return length_s


def is_clean(verdict: PartVerdict) -> bool:
    return not verdict.wrong and verdict.fault is None
