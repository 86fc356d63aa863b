"""The distance between student and teacher at each token, from logits.

    D = beta KL(T || M) + (1 - beta) KL(S || M),  M = (1 - beta) S + beta T     SDPO, arXiv 2601.20802; OPSD, 2601.18734

beta = 0 is KL(T || S) and beta = 1 is KL(S || T), exactly. Between the ends D goes not to these but to 0: it is at most
the binary entropy of beta, ln 2 at 1/2. The teacher never has a gradient.

Variants: the whole vocabulary; the student's likeliest K tokens plus one bucket for the rest (never above the whole,
equal to it at K = V - 1); the sampled token alone, an estimate of KL(S || T).

Options: the target moves from the student to the teacher during training (TAID, arXiv 2501.16937 eq. 3). Tokens at
which the target is unsure take KL(T || S), which keeps its modes (entropy-aware on-policy distillation). With both, T
and its entropy are those of the TAID target, until it has arrived at the teacher.

Departures:
1. The value of the sampled variant is log S/T, an estimate of the divergence; sources report log S/T * log S. The
   gradient, log S/T * grad log S, is theirs.
2. Logits are floored at -1e30 and log-probabilities at -1e4: tokens that a model masks with -inf give neither NaN nor
   an infinite KL.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer_prime.config.channels import SdpoConfig

LOG_FLOOR = -1e4
LOGIT_FLOOR = -1e30


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
