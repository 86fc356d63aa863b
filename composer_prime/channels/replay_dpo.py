"""Replay-DPO: direct preference optimization on pairs of answers to replayed states (this project's own term).

With z = beta [(lp_c - ref_c) - (lp_r - ref_r)], z_norm the same with each answer's part divided by its length, and eps
the probability that the pair's label is wrong:

    cdpo          -(1 - eps) log s(z) - eps log s(-z)                          DPO with smoothed labels
    sigmoid       -log s(z)                                                    DPO, arXiv 2305.18290 eq. 7
    robust        [-(1 - eps) log s(z) + eps log s(-z)] / (1 - 2 eps)          robust DPO, arXiv 2403.00409
    ipo           (z_norm / beta - 1 / (2 beta))^2                             IPO, arXiv 2310.12036 eq. 17
    sigmoid_norm  -log s(z_norm)
    simpo         -log s(beta [lp_c / |c| - lp_r / |r|] - gamma)               SimPO, arXiv 2405.14734; no reference

    L = 1/P sum_p [ loss_p - nll_weight * lp_c / |c| ]                         chosen-NLL term as in arXiv 2404.19733

P counts the pairs of the whole step.

Departures:
1. robust's epsilon is capped at 0.45, where its factor is 10; at 0.5 it would be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from composer_prime.channels.term import ScheduledTermConfig, Sums, Term, TermRows, TermTokens
from composer_prime.channels.tokens import sum_by, torch, without_gradient
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import Row, joined, span_positions
from composer_prime.wire.types import StepTotals, TermUnit, ints, pack_flags

if TYPE_CHECKING:
    from torch import Tensor

    from composer_prime.channels.policy import PolicyTerm

NAME = "replay_dpo"
SIMPO_MARGIN = 0.5
"""SimPO's gamma, the target margin of the chosen answer's reward."""
ROBUST_EPSILON_MAX = 0.45


class ReplayDpoConfig(ScheduledTermConfig):
    """Replay-DPO: direct preference optimization on pairs of answers to a recorded state (this project's own)."""

    loss: Literal["cdpo", "sigmoid", "robust", "ipo", "sigmoid_norm", "simpo"] = "cdpo"
    """Loss function of a pair's margin; cdpo and robust use the pair's epsilon. simpo has no reference: no initial
    weights are kept, and dpo/displacement is not reported.
    """
    temperature: float = Field(default=0.1, gt=0)
    """beta of DPO: scale of the log-ratio to the reference (ipo: tau). The default for simpo is 2.0, because its margin
    is a mean per token; 0.1 would hardly separate answers.
    """
    nll_weight: float = Field(default=0.05, ge=0)
    """Factor of the chosen answer's negative log-likelihood per token, which keeps its probability from falling."""

    def term(self, policy: PolicyTerm) -> ReplayDpoTerm:
        return ReplayDpoTerm(self)

    @model_validator(mode="before")
    @classmethod
    def _default_of_simpo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss") == "simpo":
            return {"temperature": 2.0} | values  # SimPO, arXiv 2405.14734: beta of 2.0 to 2.5
        return values


class ReplayDpoTerm(Term):
    """Reads the pairs of a row: units of two documents, the chosen side and the rejected one."""

    name = NAME
    prefix = "dpo"
    is_scored = True

    def rows(self, row: Row) -> TermRows:
        pairs = row.units(NAME)
        lengths = np.array([end - start for pair in pairs for ((start, end),) in pair.spans], dtype=np.int64)
        arrays = {
            "side": np.repeat(np.arange(len(lengths)), lengths),
            "length": lengths.astype(np.float32),
            "epsilon": np.array([pair.value for pair in pairs], dtype=np.float32),
        }
        return TermRows(positions=joined(map(span_positions, pairs)), arrays=arrays)

    def inputs(self, tokens: TermTokens) -> PairTokens:
        length_S, reference_S = tokens.arrays["length"], tokens.reference
        sums_S = sum_by(tokens.logprobs, tokens.arrays["side"], len(length_S))
        return PairTokens(
            chosen_logprobs_P=sums_S[0::2],
            rejected_logprobs_P=sums_S[1::2],
            chosen_length_P=length_S[0::2],
            rejected_length_P=length_S[1::2],
            reference_chosen_P=None if reference_S is None else reference_S[0::2],
            reference_rejected_P=None if reference_S is None else reference_S[1::2],
            epsilon_P=tokens.arrays["epsilon"],
        )

    def loss(self, inputs: PairTokens, totals: StepTotals) -> tuple[Tensor, Sums]:
        return replay_dpo_loss(inputs, totals.units.get(NAME, 0), self._config)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return replay_dpo_metrics(sums)


def pair_unit(*, pair_id: str, chosen_ids: bytes, rejected_ids: bytes, context: int, epsilon: float) -> TermUnit:
    """Return a pair whose sides, int32 [T], begin with the same `context` tokens; the rest are the answers."""
    sides = [chosen_ids, rejected_ids]
    masks = [pack_flags(np.arange(len(ints(side))) >= context) for side in sides]
    return TermUnit(term=NAME, name=f"pair {pair_id}", documents=sides, masks=masks, value=epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokens:
    """The preference pairs of one micro-batch; P may be 0. Log-probabilities are sums over the answer's tokens."""

    chosen_logprobs_P: Tensor
    """float [P], with gradient."""
    rejected_logprobs_P: Tensor
    """float [P], with gradient."""
    chosen_length_P: Tensor
    """Tokens of the chosen answer, [P]; at least 1."""
    rejected_length_P: Tensor
    """Tokens of the rejected answer, [P]; at least 1."""
    epsilon_P: Tensor
    """float [P]: probability that the label is wrong, in [0, 0.5]."""
    reference_chosen_P: Tensor | None = None
    """float [P], under the frozen base; simpo needs none."""
    reference_rejected_P: Tensor | None = None
    """float [P], under the frozen base."""


def replay_dpo_loss(pairs: PairTokens, count: int, config: ReplayDpoConfig) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the replay-DPO loss (scalar, before its weight) and its metric sums.

    `count`: pairs of the whole step. Without pairs the loss is a zero that is attached to the graph. Raises ConfigError
    when the loss needs a reference and the pairs have none.
    """
    margin_P = _margin(pairs, config)
    pair_loss_P = _pair_loss(margin_P, pairs.epsilon_P, config)
    if config.nll_weight > 0:
        pair_loss_P = pair_loss_P - config.nll_weight * pairs.chosen_logprobs_P / pairs.chosen_length_P
    return (pair_loss_P / max(count, 1)).sum(), _sums(pairs, margin_P)


def _margin(pairs: PairTokens, config: ReplayDpoConfig) -> Tensor:
    """Return z [P] in the form that the loss takes; positive where the policy prefers the chosen answer."""
    chosen_P, rejected_P = pairs.chosen_logprobs_P, pairs.rejected_logprobs_P
    if config.loss != "simpo":
        if pairs.reference_chosen_P is None or pairs.reference_rejected_P is None:
            raise ConfigError(
                f"channels.replay_dpo.loss is {config.loss}, but the pairs came without reference log-probabilities: "
                "compute them, or set loss = simpo"
            )
        chosen_P, rejected_P = chosen_P - pairs.reference_chosen_P, rejected_P - pairs.reference_rejected_P
    if config.loss in ("ipo", "sigmoid_norm", "simpo"):
        chosen_P, rejected_P = chosen_P / pairs.chosen_length_P, rejected_P / pairs.rejected_length_P
    return config.temperature * (chosen_P - rejected_P)


def _pair_loss(z_P: Tensor, epsilon_P: Tensor, config: ReplayDpoConfig) -> Tensor:
    logsigmoid = torch.nn.functional.logsigmoid
    match config.loss:
        case "cdpo":
            return -(1 - epsilon_P) * logsigmoid(z_P) - epsilon_P * logsigmoid(-z_P)
        case "robust":
            noise_P = epsilon_P.clamp(max=ROBUST_EPSILON_MAX)
            return (-(1 - noise_P) * logsigmoid(z_P) + noise_P * logsigmoid(-z_P)) / (1 - 2 * noise_P)
        case "ipo":
            return (z_P / config.temperature - 1 / (2 * config.temperature)).square()
        case "simpo":
            return -logsigmoid(z_P - SIMPO_MARGIN)
        case "sigmoid" | "sigmoid_norm":
            return -logsigmoid(z_P)


@without_gradient
def _sums(pairs: PairTokens, margin_P: Tensor) -> Sums:
    sums = {
        "pairs": torch.ones_like(margin_P).sum(),
        "accuracy": (margin_P > 0).to(margin_P.dtype).sum(),
        "margin": margin_P.sum(),
        "chosen_nll": -(pairs.chosen_logprobs_P / pairs.chosen_length_P).sum(),
    }
    if pairs.reference_chosen_P is None or pairs.reference_rejected_P is None:
        return sums
    moved_P = (pairs.chosen_logprobs_P - pairs.reference_chosen_P) / pairs.chosen_length_P
    moved_rejected_P = (pairs.rejected_logprobs_P - pairs.reference_rejected_P) / pairs.rejected_length_P
    return sums | {
        "displacement": moved_P.sum(),
        "displacement_rejected": moved_rejected_P.sum(),
        "displaced_fraction": (moved_P < 0).to(margin_P.dtype).sum(),
    }


def replay_dpo_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics: dpo/pairs always, means only with pairs.

    dpo/accuracy is the share of pairs with a positive margin z, dpo/margin its mean. dpo/displacement is the chosen
    answers' mean change against the reference, nats a token; dpo/displaced_fraction is the share of pairs in which it
    is below 0 (the chosen answer became less likely); both need a reference.
    """
    count = sums["pairs"]
    means = {f"dpo/{name}": value / count for name, value in sums.items() if name != "pairs"} if count else {}
    return {"dpo/pairs": count} | means
