"""What audits tell about one node: the share of its answers that is audited, and when it is quarantined.

    new (all audited, answers wait) --32 clean--> known (share falls to the floor) --evidence--> quarantined
     ^                                                                                                |
     +------------------------------- after a while, all counts at zero ------------------------------+

The share follows a Beta-Bernoulli model of "an audited answer is wrong" (Jøsang and Ismail, The Beta Reputation System,
2002): four times the posterior mean, at least the floor. Evidence is two cumulative sums of log-likelihood ratios, each
held at 0 from below (Page, Continuous Inspection Schemes, 1954): one over tokens, one over whole answers. An honest
node's rounding makes a token wrong about never (`_P_HONEST` is an upper bound); a cheat's tokens are wrong in
2 % of cases or more. No sum falls below 0, so a node cannot buy credit with clean answers.

Weights that are a few versions old, or in int8, differ from the claimed ones by less than bfloat16 rounds. Further sums
find them: of the tokens that the auditor scored under such suspect weights too, how many lean to those? A node's
rounding errs to either side, however large it is. The auditor's own would make honest answers lean, so only auditors in
float32 compare. Suppose that an honest node's token leans with probability at most `_P_LEANS`, whatever came before.
Then exp(sum of ratios) from any answer on is a supermartingale, and passes exp(SUSPECT_BOUND) with probability at most
exp(-SUSPECT_BOUND) (Ville, 1939). With a start at each of N audited answers, and four sums, an honest node is refused
with probability at most 4 N exp(-SUSPECT_BOUND): 3e-4 for 10^5 answers. Rounding is the same each time that a prompt
comes again, so one answer to it counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from composer_prime.wire.audit import PartVerdict, Suspect

_NEW_ANSWERS = 32
"""Clean audited answers after which a node is no longer new."""
_SHARE_OF_DOUBT = 4.0
_P_HONEST = 2e-4
_P_WRONG_TOKEN, _P_WRONG_ANSWER = 0.02, 0.1
BOUND = 14.0
"""Evidence, in nats, that quarantines: three answers, or four tokens close together."""
_P_LEANS = 0.54
"""Share of an honest node's tokens that may lean to suspect weights. Half, and room for systematic rounding."""
_P_SUSPECT_LOGPROB, _P_SUSPECT_DRAW = (0.6, 0.7, 0.95), (0.8,)
"""Shares of a node with suspect weights, one sum each: nearly lost in rounding, visible, plain."""
_MOST_OF_AN_ANSWER = 3.0
"""Nats that one answer may add to such a sum: its tokens share a prompt, and so errors."""
_MAX_PROMPTS = 4096
SUSPECT_BOUND = 21.0
"""Evidence for suspect weights, in nats, that quarantines."""
_LONGEST_QUARANTINE = 2**6
"""Factor on the first quarantine's length."""

_REASONS: dict[Suspect, str] = {
    "older": "old weights: its answers lean to those of an older version",
    "int8": "rounded weights: its answers lean to those of the version in int8",
}

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
    suspect_evidence: dict[Suspect, list[float]] = field(default_factory=lambda: _no_suspect_evidence())
    """Nats, of each share in _P_SUSPECT_LOGPROB and _P_SUSPECT_DRAW."""
    prompts: dict[tuple[Suspect, int], None] = field(default_factory=dict)
    """The last prompts that were counted there, in order."""

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

    def note(self, verdict: PartVerdict, prompt: int) -> str | None:
        """Take in an audit. Return why to quarantine, None for no reason. `prompt` names prompt and version."""
        self.audited += 1
        if is_clean(verdict):
            self.clean += 1
        else:
            self.doubtful += 1
        highest = self._add_tokens(verdict.wrong, verdict.tokens)
        self.answer_evidence = _step(self.answer_evidence, verdict.fault is not None, _P_WRONG_ANSWER)
        if max(highest, self.answer_evidence) >= BOUND:
            return "wrong answers"
        return _REASONS[verdict.suspect] if self._add_suspect(verdict, prompt) else None

    def quarantine(self, now: float, seconds: float) -> float:
        """Start a quarantine, twice as long as the one before, and forget what was good. Return its seconds."""
        length_s = seconds * min(2**self.quarantines, _LONGEST_QUARANTINE)
        self.quarantines += 1
        self.quarantined_until = now + length_s
        self.clean = self.doubtful = 0
        self.token_evidence = self.answer_evidence = 0.0
        self.suspect_evidence = _no_suspect_evidence()
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

    def _add_suspect(self, verdict: PartVerdict, prompt: int) -> bool:
        """Add what speaks for suspect weights. Return whether a sum is above its bound."""
        counted = verdict.suspect, prompt
        if counted in self.prompts or verdict.by_logprob[1] + verdict.by_draw[1] == 0:
            return False
        if len(self.prompts) >= _MAX_PROMPTS:
            del self.prompts[next(iter(self.prompts))]
        self.prompts[counted] = None
        evidence = self.suspect_evidence[verdict.suspect]
        observed = [(p_suspect, verdict.by_logprob) for p_suspect in _P_SUSPECT_LOGPROB]
        observed += [(p_suspect, verdict.by_draw) for p_suspect in _P_SUSPECT_DRAW]
        for number, (p_suspect, (leaning, count)) in enumerate(observed):
            ratio = leaning * math.log(p_suspect / _P_LEANS)
            ratio += (count - leaning) * math.log((1 - p_suspect) / (1 - _P_LEANS))
            evidence[number] = max(0.0, evidence[number] + min(ratio, _MOST_OF_AN_ANSWER))
        return max(evidence) >= SUSPECT_BOUND


def _no_suspect_evidence() -> dict[Suspect, list[float]]:
    return {suspect: [0.0] * len(_P_SUSPECT_LOGPROB + _P_SUSPECT_DRAW) for suspect in _REASONS}


def _step(evidence: float, is_wrong: bool, p_wrong: float) -> float:
    """Return a cumulative sum after one observation."""
    ratio = p_wrong / _P_HONEST if is_wrong else (1 - p_wrong) / (1 - _P_HONEST)
    return max(0.0, evidence + math.log(ratio))


def is_clean(verdict: PartVerdict) -> bool:
    return not verdict.wrong and verdict.fault is None
