"""SDPO: self-distillation at error turns, over the tokens of the turns that got a hint.

    L = 1/D sum_d  w_d  min(rho_d, c)  e_d  divergence_d                     rho = pi / mu, detached

D counts the hinted turns' tokens of the whole step. With denominator = turns, a token counts 1 / (its turn's tokens)
and D counts the step's hinted turns. w is the turn's weight; e is the entropy weight exp(-H_teacher / scale) when it is
configured.

Departures from SDPO (arXiv 2601.20802) and OPSD (arXiv 2601.18734):
1. The mask is the turn's tokens, thinking included. The papers take whole samples; Composer 2.5's blog takes one
   message.
2. The entropy weight e is this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.channels.tokens import Sums, bounded_exp, lengths_of, mean_by
from composer_prime.config.channels import SdpoConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpoTokens:
    """The tokens of the hinted turns of one micro-batch, laid end to end; D may be 0."""

    divergence_D: Tensor
    """float [D], with gradient: divergence.divergence of each token."""
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
    if config.denominator == "turns":
        lengths = lengths_of(tokens.turn_D, tokens.turns, weight_D.dtype)
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


@torch.no_grad()
def _sums(tokens: SdpoTokens, importance_D: Tensor, config: SdpoConfig) -> Sums:
    divergence_D = tokens.divergence_D.detach()
    clip = float("inf") if config.is_clip is None else config.is_clip
    sums = {
        "tokens": torch.ones_like(divergence_D).sum(),
        "turns": torch.full_like(divergence_D.sum(), float(tokens.turns)),
        "jsd": divergence_D.sum(),
        "turn_jsd": mean_by(divergence_D, tokens.turn_D, tokens.turns).sum(),
        "is_clipped": (importance_D > clip).to(divergence_D.dtype).sum(),
    }
    if tokens.teacher_entropy_D is not None:
        sums["teacher_entropy"] = tokens.teacher_entropy_D.sum()
    return sums


def sdpo_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics: sdpo/turns and sdpo/tokens always, means only with tokens.

    sdpo/jsd is the mean of the tokens, sdpo/turn_jsd the mean of the turns' means.
    """
    metrics = {"sdpo/turns": sums["turns"], "sdpo/tokens": sums["tokens"]}
    if sums["tokens"] == 0:
        return metrics
    metrics |= {
        "sdpo/jsd": sums["jsd"] / sums["tokens"],
        "sdpo/turn_jsd": sums["turn_jsd"] / sums["turns"],
        "sdpo/is_clip_fraction": sums["is_clipped"] / sums["tokens"],
    }
    if "teacher_entropy" in sums:
        metrics["sdpo/teacher_entropy"] = sums["teacher_entropy"] / sums["tokens"]
    return metrics
