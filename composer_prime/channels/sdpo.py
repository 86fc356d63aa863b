"""SDPO: self-distillation at error turns, over the tokens of the turns that got a hint.

    L = sum_d  w_d  min(rho_d, 2)  divergence_d / D_d                        rho = pi / mu, detached

A token is divided by the same D as in the policy loss: B x max_length with dr_grpo, its sample's tokens times B with
grpo, and so on (channels.policy.denominator). So alpha is a weight per token beside an advantage of 1, and the term
shrinks as errors get rare. w is the turn's weight.

The divergence is the distance between student and teacher at each token, from logits:

    D = beta KL(T || M) + (1 - beta) KL(S || M),  M = (1 - beta) S + beta T     SDPO, arXiv 2601.20802; OPSD, 2601.18734

beta = 0 is KL(T || S) and beta = 1 is KL(S || T), exactly. Between the ends D goes not to these but to 0: it is at most
the binary entropy of beta, ln 2 at 1/2. The teacher never has a gradient.

Variants: the whole vocabulary; the student's likeliest K tokens plus one bucket for the rest (never above the whole,
equal to it at K = V - 1); the sampled token alone, an estimate of KL(S || T).

Departures from SDPO (arXiv 2601.20802) and OPSD (arXiv 2601.18734):
1. The mask is the turn's tokens, thinking included, as in Composer 2.5's blog. The papers' samples have one turn.
2. The value of the sampled variant is log S/T, an estimate of the divergence; sources report log S/T * log S. The
   gradient, log S/T * grad log S, is theirs.
3. `skip_endorsed` is this project's own.
4. Logits are floored at -1e30 and log-probabilities at -1e4: tokens that a model masks with -inf give neither NaN nor
   an infinite KL.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.channels.term import ScheduledTermConfig, Sums, Term, TermRows, TermTokens
from composer_prime.channels.tokens import bounded_exp, sum_by, torch, without_gradient
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import Row, joined
from composer_prime.wire.types import StepTotals

if TYPE_CHECKING:
    from torch import Tensor

    from composer_prime.channels.policy import PolicyTerm

IMPORTANCE_CAP = 2.0
"""The cap of a token's detached importance weight pi / mu, in every group."""
LOG_FLOOR = -1e4
LOGIT_FLOOR = -1e30


class SelfTeacherConfig(BaseConfig):
    """The weights of the teacher, which sees the hint."""

    kind: Literal["live", "ema", "frozen"] = "live"
    """The trained weights, their moving average, or the initial weights."""
    rate: float = Field(default=0.05, gt=0, le=1)
    """ema: share of the trained weights added to the average at each step."""


class SdpoConfig(ScheduledTermConfig):
    """SDPO: the policy with a hint teaches the policy without it, at the turn where the error happened."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """Divergence: 0 is KL(teacher || student), 1 is KL(student || teacher). Between them it is the generalized JSD,
    which vanishes toward both ends: use 0, 1, or 0.05..0.95.
    """
    kind: Literal["full", "top_k", "sampled"] = "full"
    """Compare the full vocabulary, the student's most likely tokens plus a tail, or only the sampled token (needs beta
    = 1).
    """
    top_k: int = Field(default=100, ge=1)
    """top_k: number of the student's tokens to compare one by one."""
    clip: float | None = Field(default=None, gt=0)
    """Most that a word adds to a token's divergence, in nats (OPSD). The student moves away from a clipped word."""
    route: Literal["add", "failed"] = "add"
    """add: the policy loss trains hinted rollouts as well. failed: it does not train those that failed (SRPO, arXiv
    2604.02288). For SDPO alone set channels.policy.weight = 0.
    """
    skip_endorsed: bool = False
    """Give weight 0 to error turns that the hint makes more likely, where the teacher would teach the mistake."""
    teacher: SelfTeacherConfig = SelfTeacherConfig()
    """The self-teacher."""

    def term(self, policy: PolicyTerm) -> SdpoTerm:
        return SdpoTerm(self, policy)

    @model_validator(mode="after")
    def _sampled_is_reverse(self) -> SdpoConfig:
        if self.kind == "sampled" and self.beta != 1.0:
            raise ValueError(
                f"channels.sdpo.beta is {self.beta}, but kind = sampled estimates KL(student || teacher) from the "
                "student's own tokens: set beta = 1, or kind = full or top_k"
            )
        return self


class SdpoTerm(Term):
    """Reads the hinted turns of a row. Their tokens were sampled, whether or not the policy loss trains them."""

    name = "sdpo"
    is_taught = True

    def __init__(self, config: SdpoConfig, policy: PolicyTerm) -> None:
        super().__init__(config)
        self._policy = policy

    def rows(self, row: Row) -> TermRows:
        turns = row.batch.turns
        counts = np.array([turn.count for turn in turns], dtype=np.int64)
        hinted = joined(np.arange(turn.student, turn.student + turn.count) for turn in turns)
        turn_D = np.repeat(np.arange(len(turns)), counts)
        sample_R = row.document_of(np.union1d(row.trained, hinted))
        arrays = {
            "sampler_logprobs": row.sampler_logprobs[hinted],
            "weight": np.array([turn.weight for turn in turns], dtype=np.float32)[turn_D],
            "turn": turn_D,
            "kind": np.array([_code(turn.kind) for turn in turns], dtype=np.int64)[turn_D],
            "sample_tokens": np.bincount(sample_R, minlength=1)[row.document_of(hinted)],
        }
        return TermRows(positions=hinted, arrays=arrays, counts={"turns": len(turns), "row_tokens": len(sample_R)})

    def inputs(self, tokens: TermTokens) -> SdpoTokens:
        taught, empty = tokens.taught, tokens.logprobs[:0]
        return SdpoTokens(
            divergence_D=taught.divergence if taught else empty,
            logprobs_D=tokens.logprobs,
            sampler_logprobs_D=tokens.arrays["sampler_logprobs"],
            weight_D=tokens.arrays["weight"],
            turn_D=tokens.arrays["turn"],
            kind_D=tokens.arrays["kind"],
            turns=tokens.counts["turns"],
            row_tokens=tokens.counts["row_tokens"],
            sample_tokens_D=tokens.arrays["sample_tokens"],
            teacher_entropy_D=taught.teacher_entropy if taught else empty.detach(),
            teacher_logprobs_D=taught.teacher_logprobs if taught else empty.detach(),
        )

    def loss(self, inputs: SdpoTokens, totals: StepTotals) -> tuple[Tensor, Sums]:
        divisor = self._policy.divisor(totals, inputs.row_tokens, inputs.sample_tokens_D)
        loss, sums = sdpo_loss(inputs, divisor, self._config)
        return loss, sums | _sums_by_kind(inputs, totals.hint_kinds)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return sdpo_metrics(sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpoTokens:
    """The tokens of the hinted turns of one micro-batch, laid end to end; D may be 0."""

    divergence_D: Tensor
    """float [D], with gradient: `divergence` of each token."""
    logprobs_D: Tensor
    """float [D]: log pi of the sampled token without the hint."""
    sampler_logprobs_D: Tensor
    """float [D]: log mu, what the inference engine recorded."""
    weight_D: Tensor
    """float [D]: weight of the token's turn; 0 drops the token."""
    turn_D: Tensor
    """int64 [D]: the token's turn within the micro-batch."""
    kind_D: Tensor
    """int64 [D]: the code of its turn's kind of error."""
    turns: int
    """Hinted turns in the micro-batch."""
    row_tokens: int
    """Tokens of the micro-batch that are trained or distilled."""
    sample_tokens_D: Tensor
    """int64 [D]: tokens of the token's sample that are trained or distilled."""
    teacher_entropy_D: Tensor
    """float [D], nats; for the metrics."""
    teacher_logprobs_D: Tensor
    """float [D]: log-probability of the sampled token with the hint."""


def sdpo_loss(tokens: SdpoTokens, divisor: Tensor | float, config: SdpoConfig) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the SDPO loss (scalar, before alpha) and its metric sums.

    `divisor`: what the divergence of a token is divided by, one number or [D]; `PolicyTerm.divisor` gives it. Without
    tokens the loss is a zero that is attached to the graph. Raises ConfigError when a turn has no tokens.
    """
    count = tokens.divergence_D.numel()
    if tokens.turns > count:
        raise ConfigError(
            f"SDPO got {tokens.turns} turns, but {count} tokens of them: a turn needs at least one token in its "
            "mask (thinking counts); leave out turns without any"
        )
    importance_D = bounded_exp(tokens.logprobs_D.detach() - tokens.sampler_logprobs_D)
    weight_D = tokens.weight_D * importance_D.clamp(max=IMPORTANCE_CAP)
    if config.skip_endorsed:
        weight_D = weight_D * (_hint_log_ratio(tokens) <= 0)[tokens.turn_D]
    loss = (weight_D * tokens.divergence_D / divisor).sum()
    return loss, _sums(tokens, importance_D)


@without_gradient
def _hint_log_ratio(tokens: SdpoTokens) -> Tensor:
    """Return log T(turn) - log S(turn) of each turn, in nats: above 0, the hint makes the turn likelier."""
    return sum_by(tokens.teacher_logprobs_D - tokens.logprobs_D, tokens.turn_D, tokens.turns)


@without_gradient
def _sums(tokens: SdpoTokens, importance_D: Tensor) -> Sums:
    divergence_D = tokens.divergence_D.detach()
    ratio = _hint_log_ratio(tokens)
    return {
        "tokens": torch.ones_like(divergence_D).sum(),
        "turns": torch.full_like(divergence_D.sum(), float(tokens.turns)),
        "jsd": divergence_D.sum(),
        "is_clip_fraction": (importance_D > IMPORTANCE_CAP).to(divergence_D.dtype).sum(),
        "teacher_entropy": tokens.teacher_entropy_D.sum(),
        "hint_log_ratio": ratio.sum(),
        "endorsed": (ratio > 0).to(ratio.dtype).sum(),
    }


def _code(kind: str) -> int:
    """Return a number for a kind of error, the same on every rank."""
    return zlib.crc32(kind.encode())


@without_gradient
def _sums_by_kind(tokens: SdpoTokens, kinds: Sequence[str]) -> Sums:
    """Return the divergence and the number of the tokens of each kind of error in the step."""
    divergence_D = tokens.divergence_D.detach()
    sums = {}
    for kind in kinds:
        is_kind_D = (tokens.kind_D == _code(kind)).to(divergence_D.dtype)
        sums |= {f"jsd/{kind}": (divergence_D * is_kind_D).sum(), f"tokens/{kind}": is_kind_D.sum()}
    return sums


_COUNTS = ("turns", "tokens")
_OVER_TURNS = ("hint_log_ratio", "endorsed")
"""Sums that are means over turns; all others are means over tokens."""


def sdpo_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics: sdpo/turns and sdpo/tokens always, means only with tokens.

    sdpo/jsd is the mean divergence of a token, and sdpo/jsd/<kind> that of the hints for one kind of error.
    sdpo/hint_log_ratio is the mean of log T(turn) - log S(turn), and sdpo/endorsed the share of turns with one above 0.
    """
    counts = {"sdpo/turns": sums["turns"], "sdpo/tokens": sums["tokens"]}
    if sums["tokens"] == 0:
        return counts
    means = {name: sums["turns" if name in _OVER_TURNS else "tokens"] for name in sums if not name.startswith(_COUNTS)}
    means |= {name: sums[name.replace("jsd", "tokens", 1)] for name in sums if name.startswith("jsd/")}
    return counts | {f"sdpo/{name}": sums[name] / divisor for name, divisor in means.items() if divisor}


def divergence(student_logits_CV: Tensor, teacher_logits_CV: Tensor, config: SdpoConfig, targets_C: Tensor) -> Tensor:
    """Return the divergence of each token [C] in nats, differentiable in the student.

    Logits [C, V] are already divided by the temperature. `targets_C` int64 [C] are the sampled tokens.
    """
    student_CV = student_logits_CV.clamp(min=LOGIT_FLOOR)
    teacher_CV = teacher_logits_CV.detach().clamp(min=LOGIT_FLOOR)
    if config.kind == "sampled":
        return _sampled(student_CV, teacher_CV, targets_C)
    if config.kind == "top_k" and config.top_k < student_CV.shape[-1] - 1:
        likeliest_CK = student_CV.detach().topk(config.top_k, dim=-1).indices
        log_student, log_teacher = _with_tail(student_CV, likeliest_CK), _with_tail(teacher_CV, likeliest_CK)
    else:
        log_student, log_teacher = _log_softmax(student_CV), _log_softmax(teacher_CV)
    return generalized_jsd(log_student, log_teacher, config.beta, config.clip)


def generalized_jsd(log_student: Tensor, log_teacher: Tensor, beta: float, clip: float | None = None) -> Tensor:
    """Return D [...] in nats from log-probabilities [..., V]; each entry adds at most `clip` to it."""
    if beta in (0.0, 1.0):
        entries = _kl(log_student, log_teacher) if beta else _kl(log_teacher, log_student)
    else:
        log_mixture = torch.logaddexp(log_student + math.log1p(-beta), log_teacher + math.log(beta))
        entries = beta * _kl(log_teacher, log_mixture) + (1.0 - beta) * _kl(log_student, log_mixture)
    return (entries if clip is None else entries.clamp(max=clip)).sum(-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_p.exp() * (log_p - log_q)


def _log_softmax(logits_CV: Tensor) -> Tensor:
    return logits_CV.log_softmax(-1).clamp(min=LOG_FLOOR)


def _with_tail(logits_CV: Tensor, likeliest_CK: Tensor) -> Tensor:
    """Return log-probabilities [C, K + 1] of the chosen tokens and of all others together."""
    total_C1 = logits_CV.logsumexp(-1, keepdim=True)
    rest_C1 = logits_CV.scatter(-1, likeliest_CK, -math.inf).logsumexp(-1, keepdim=True)
    return (torch.cat([logits_CV.gather(-1, likeliest_CK), rest_C1], dim=-1) - total_C1).clamp(min=LOG_FLOOR)


def _sampled(student_CV: Tensor, teacher_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Return log S/T at the sampled token, with the gradient of KL(S || T)'s score-function estimate."""
    logprob_C = _log_softmax(student_CV).gather(-1, targets_C[:, None]).squeeze(-1)
    log_ratio_C = logprob_C.detach() - _log_softmax(teacher_CV).gather(-1, targets_C[:, None]).squeeze(-1)
    return log_ratio_C + log_ratio_C * (logprob_C - logprob_C.detach())
