"""What audits tell about one node: the share of its answers that is audited, and when it is quarantined.

    new (all audited, answers wait) --32 clean--> known (share falls to the floor) --evidence--> quarantined
     ^                                                                                                |
     +------------------------------- after a while, all counts at zero ------------------------------+

The share follows a Beta-Bernoulli model of "an audited answer is wrong" (Jøsang and Ismail, The Beta Reputation System,
2002): four times the posterior mean, at least the floor. Evidence is two cumulative sums of log-likelihood ratios, each
held at 0 from below (Page, Continuous Inspection Schemes, 1954): one over tokens, one over whole answers. An honest
node's rounding makes a token wrong about never (`_P_HONEST` is an upper bound); a cheat's tokens are wrong in 2 % of
cases or more. No sum falls below 0, so a node cannot buy credit with clean answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from composer_prime.wire.audit import AuditVerdict

_NEW_ANSWERS = 32
"""Clean audited answers after which a node is no longer new."""
_SHARE_OF_DOUBT = 4.0
_P_HONEST = 2e-4
_P_WRONG_TOKEN, _P_WRONG_ANSWER = 0.02, 0.1
BOUND = 14.0
"""Evidence, in nats, that quarantines: three answers, or four tokens close together."""
_LONGEST_QUARANTINE = 2**6
"""Factor on the first quarantine's length."""

State = Literal["new", "known", "quarantined"]


@dataclass(slots=True)
class NodeTrust:
    """What is known of one node. Times are monotonic seconds."""

    clean: int = 0
    """Answers audited without a fault since it was admitted, or admitted again."""
    doubtful: int = 0
    """Answers audited with a fault since then."""
    audited: int = 0
    """Answers audited over its whole life."""
    quarantines: int = 0
    quarantined_until: float = -math.inf
    token_evidence: float = 0.0
    """Nats."""
    answer_evidence: float = 0.0

    def state(self, now: float) -> State:
        if now < self.quarantined_until:
            return "quarantined"
        return "new" if self.is_new else "known"

    def expectation(self, now: float) -> float | None:
        """Return the expected share of right answers: 0 in quarantine, None before the first audit."""
        if now < self.quarantined_until:
            return 0.0
        return (1 + self.clean) / (2 + self.clean + self.doubtful) if self.audited else None

    @property
    def is_new(self) -> bool:
        """Whether its answers wait for their audit."""
        return self.clean < _NEW_ANSWERS

    def share(self, floor: float) -> float:
        """Return the share of its answers to audit, in [floor, 1]."""
        if self.is_new:
            return 1.0
        wrong = (1 + self.doubtful) / (2 + self.doubtful + self.clean)
        return min(1.0, max(floor, _SHARE_OF_DOUBT * wrong))

    def note(self, verdict: AuditVerdict) -> bool:
        """Take in an audit. Return whether the evidence is now above the bound."""
        self.audited += 1
        if is_clean(verdict):
            self.clean += 1
        else:
            self.doubtful += 1
        highest = self._add_tokens(verdict.wrong, verdict.tokens)
        self.answer_evidence = _step(self.answer_evidence, verdict.fault is not None, _P_WRONG_ANSWER)
        return max(highest, self.answer_evidence) >= BOUND

    def quarantine(self, now: float, seconds: float) -> float:
        """Start a quarantine, twice as long as the one before, and forget what was good. Return its seconds."""
        length_s = seconds * min(2**self.quarantines, _LONGEST_QUARANTINE)
        self.quarantines += 1
        self.quarantined_until = now + length_s
        self.clean = self.doubtful = 0
        self.token_evidence = self.answer_evidence = 0.0
        return length_s

    def _add_tokens(self, wrong: list[int], tokens: int) -> float:
        """Add an answer's tokens in order. Return the highest sum on the way."""
        clean_token = math.log((1 - _P_WRONG_TOKEN) / (1 - _P_HONEST))
        highest, position = 0.0, 0
        for index in wrong:
            self.token_evidence = max(0.0, self.token_evidence + clean_token * (index - position))
            self.token_evidence += math.log(_P_WRONG_TOKEN / _P_HONEST)
            highest, position = max(highest, self.token_evidence), index + 1
        self.token_evidence = max(0.0, self.token_evidence + clean_token * (tokens - position))
        return highest


def _step(evidence: float, is_wrong: bool, p_wrong: float) -> float:
    """Return a cumulative sum after one observation."""
    ratio = p_wrong / _P_HONEST if is_wrong else (1 - p_wrong) / (1 - _P_HONEST)
    return max(0.0, evidence + math.log(ratio))


def is_clean(verdict: AuditVerdict) -> bool:
    return not verdict.wrong and verdict.fault is None
