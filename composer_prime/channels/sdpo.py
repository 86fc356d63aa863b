"""SDPO: self-distillation at error turns, over the tokens of the turns that got a hint.

    L = 1/D sum_d  w_d  min(rho_d, c)  e_d  divergence_d                     rho = pi / mu, detached

D counts the hinted turns' tokens of the whole step. With denominator = turns, a token counts 1 / (its turn's tokens)
and D counts the step's hinted turns. w is the turn's weight; e is the entropy weight exp(-H_teacher / scale) when it is
configured.

The divergence is the distance between student and teacher at each token, from logits:

    D = beta KL(T || M) + (1 - beta) KL(S || M),  M = (1 - beta) S + beta T     SDPO, arXiv 2601.20802; OPSD, 2601.18734

beta = 0 is KL(T || S) and beta = 1 is KL(S || T), exactly. Between the ends D goes not to these but to 0: it is at most
the binary entropy of beta, ln 2 at 1/2. The teacher never has a gradient.

Variants: the whole vocabulary; the student's likeliest K tokens plus one bucket for the rest (never above the whole,
equal to it at K = V - 1); the sampled token alone, an estimate of KL(S || T).

Options: the target moves from the student to the teacher during training (TAID, arXiv 2501.16937 eq. 3). Tokens at
which the target is unsure take KL(T || S), which keeps its modes (entropy-aware on-policy distillation). With both, T
and its entropy are those of the TAID target, until it has arrived at the teacher.

Departures from SDPO (arXiv 2601.20802) and OPSD (arXiv 2601.18734):
1. The mask is the turn's tokens, thinking included. The papers take whole samples; Composer 2.5's blog takes one
   message.
2. The entropy weight e is this project's own.
3. The value of the sampled variant is log S/T, an estimate of the divergence; sources report log S/T * log S. The
   gradient, log S/T * grad log S, is theirs.
4. `skip_endorsed` is this project's own: a turn that the hint makes likelier weighs 0, because it went wrong and there
   the teacher teaches the mistake. It still counts in D.
5. Logits are floored at -1e30 and log-probabilities at -1e4: tokens that a model masks with -inf give neither NaN nor
   an infinite KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.channels.tokens import Sums, bounded_exp, mean_by, sum_by
from composer_prime.config.channels import SdpoConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals

LOG_FLOOR = -1e4
LOGIT_FLOOR = -1e30


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
    turns: int
    """Hinted turns in the micro-batch."""
    teacher_entropy_D: Tensor | None = None
    """float [D], nats; needed where `entropy_weighting` is not none."""
    teacher_logprobs_D: Tensor | None = None
    """float [D]: log-probability of the sampled token with the hint; needed for `skip_endorsed`."""


def sdpo_loss(tokens: SdpoTokens, totals: StepTotals, config: SdpoConfig) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the SDPO loss (scalar, before alpha) and its metric sums.

    Without tokens the loss is a zero that is attached to the graph. Raises ConfigError when a turn has no tokens, or
    when the configured entropy weight lacks its entropy.
    """
    _check(tokens, config)
    weight_D = tokens.weight_D
    importance_D = bounded_exp(tokens.logprobs_D.detach() - tokens.sampler_logprobs_D)
    if config.is_clip is not None:
        weight_D = weight_D * importance_D.clamp(max=config.is_clip)
    if config.entropy_weighting == "confident" and tokens.teacher_entropy_D is not None:
        weight_D = weight_D * torch.exp(-tokens.teacher_entropy_D.detach() / config.entropy_scale)
    if config.skip_endorsed:
        weight_D = weight_D * (_hint_log_ratio(tokens) <= 0)[tokens.turn_D]
    if config.denominator == "turns":
        lengths = sum_by(torch.ones_like(weight_D), tokens.turn_D, tokens.turns)
        scale_D = 1.0 / (lengths[tokens.turn_D] * max(totals.distilled_turns, 1))
    else:
        scale_D = torch.full_like(weight_D, 1.0 / max(totals.distilled_tokens, 1))
    loss = (weight_D * tokens.divergence_D * scale_D).sum()
    return loss, _sums(tokens, importance_D, config)


def _check(tokens: SdpoTokens, config: SdpoConfig) -> None:
    count = tokens.divergence_D.numel()
    if tokens.turns > count:
        raise ConfigError(
            f"SDPO got {tokens.turns} turns, but {count} tokens of them: a turn needs at least one token in its "
            "mask (thinking counts); leave out turns without any"
        )
    if config.entropy_weighting != "none" and tokens.teacher_entropy_D is None:
        raise ConfigError(
            f"channels.sdpo.entropy_weighting is {config.entropy_weighting}, but the tokens came without the teacher's "
            "entropy: set it to none, or compute the entropy"
        )
    if config.skip_endorsed and tokens.teacher_logprobs_D is None:
        raise ConfigError(
            "channels.sdpo.skip_endorsed is true, but the tokens came without the teacher's log-probabilities: set it "
            "to false, or compute them"
        )


@torch.no_grad()
def _hint_log_ratio(tokens: SdpoTokens) -> Tensor:
    """Return log T(turn) - log S(turn) of each turn, in nats: above 0, the hint makes the turn likelier."""
    assert tokens.teacher_logprobs_D is not None
    return sum_by(tokens.teacher_logprobs_D - tokens.logprobs_D, tokens.turn_D, tokens.turns)


@torch.no_grad()
def _sums(tokens: SdpoTokens, importance_D: Tensor, config: SdpoConfig) -> Sums:
    divergence_D = tokens.divergence_D.detach()
    clip = float("inf") if config.is_clip is None else config.is_clip
    sums = {
        "tokens": torch.ones_like(divergence_D).sum(),
        "turns": torch.full_like(divergence_D.sum(), float(tokens.turns)),
        "jsd": divergence_D.sum(),
        "turn_jsd": mean_by(divergence_D, tokens.turn_D, tokens.turns).sum(),
        "is_clip_fraction": (importance_D > clip).to(divergence_D.dtype).sum(),
    }
    if tokens.teacher_entropy_D is not None:
        sums["teacher_entropy"] = tokens.teacher_entropy_D.sum()
    if tokens.teacher_logprobs_D is not None:
        ratio = _hint_log_ratio(tokens)
        sums |= {"hint_log_ratio": ratio.sum(), "endorsed": (ratio > 0).to(ratio.dtype).sum()}
    return sums


_COUNTS = ("turns", "tokens")
_OVER_TURNS = ("turn_jsd", "hint_log_ratio", "endorsed")
"""Sums that are means over turns; all others are means over tokens."""


def sdpo_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics: sdpo/turns and sdpo/tokens always, means only with tokens.

    sdpo/jsd is the mean of the tokens, sdpo/turn_jsd the mean of the turns' means. sdpo/hint_log_ratio is the mean of
    log T(turn) - log S(turn), and sdpo/endorsed the share of turns where it is above 0.
    """
    counts = {"sdpo/turns": sums["turns"], "sdpo/tokens": sums["tokens"]}
    if sums["tokens"] == 0:
        return counts
    divisors = {name: sums["turns" if name in _OVER_TURNS else "tokens"] for name in sums if name not in _COUNTS}
    return counts | {f"sdpo/{name}": sums[name] / divisor for name, divisor in divisors.items()}


def divergence(
    student_logits_CV: Tensor,
    teacher_logits_CV: Tensor,
    config: SdpoConfig,
    targets_C: Tensor,
    *,
    step: int | None = None,
) -> Tensor:
    """Return the divergence of each token [C] in nats, differentiable in the student.

    Logits [C, V] are already divided by the temperature. `targets_C` int64 [C] are the sampled tokens. `step` (from 1)
    sets the TAID target; None takes the teacher itself.
    """
    student_CV = student_logits_CV.clamp(min=LOGIT_FLOOR)
    teacher_CV = teacher_logits_CV.detach().clamp(min=LOGIT_FLOOR)
    share = 1.0 if step is None else config.teacher_share(step)
    if share < 1.0:
        teacher_CV = torch.lerp(student_CV.detach(), teacher_CV, share)
    if config.kind == "sampled":
        return _sampled(student_CV, teacher_CV, targets_C)
    if config.kind == "top_k" and config.top_k < student_CV.shape[-1] - 1:
        likeliest_CK = student_CV.detach().topk(config.top_k, dim=-1).indices
        log_student, log_teacher = _with_tail(student_CV, likeliest_CK), _with_tail(teacher_CV, likeliest_CK)
    else:
        log_student, log_teacher = _log_softmax(student_CV), _log_softmax(teacher_CV)
    divergence_C = generalized_jsd(log_student, log_teacher, config.beta)
    if config.forward_above_entropy is not None:
        unsure_C = entropy(teacher_CV) > config.forward_above_entropy
        divergence_C = torch.where(unsure_C, _kl(log_teacher, log_student), divergence_C)
    return divergence_C


def generalized_jsd(log_student: Tensor, log_teacher: Tensor, beta: float) -> Tensor:
    """Return D [...] in nats from log-probabilities [..., V]."""
    if beta == 0.0:
        return _kl(log_teacher, log_student)
    if beta == 1.0:
        return _kl(log_student, log_teacher)
    log_mixture = torch.logaddexp(log_student + math.log1p(-beta), log_teacher + math.log(beta))
    return beta * _kl(log_teacher, log_mixture) + (1.0 - beta) * _kl(log_student, log_mixture)


def entropy(logits_CV: Tensor) -> Tensor:
    """Return the entropy [C] of softmax(logits), nats; differentiable."""
    logprobs_CV = _log_softmax(logits_CV)
    return -(logprobs_CV.exp() * logprobs_CV).sum(-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


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
