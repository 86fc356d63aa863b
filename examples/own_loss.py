r"""A policy objective of your own, in one file and one import path:

    trainer @ configs/a1.toml --run.import_from '["examples"]' --channels.policy.loss.name own_loss:tapered_loss \
        --channels.policy.loss.settings '{"negative_share": 0.25}'
    python examples/own_loss.py [--steps 30]                        in the loop of grpo_in_one_file.py

`tapered_loss` follows TOPR (arXiv 2503.14286): good rollouts are imitated as they are, bad ones are unlearned with an
importance weight that is cut at 1, so a token that the policy already avoids is left alone. It has the signature of
composer_prime.channels.policy.policy_loss: pure, over the trained tokens of a micro-batch, with the counts of the whole
step as denominators. Shares of micro-batches and ranks therefore add up. `config` is [channels.policy]; this loss needs
none of it. `negative_share` comes from its settings. Each of its sums becomes a metric: `tapered` is the mean
`policy/tapered` over tokens.

Departures from the paper: weights are a token's, not a rollout's, and bad rollouts count by `negative_share`.
"""

from __future__ import annotations

import grpo_in_one_file
import torch
from torch import Tensor

from composer_prime.channels.policy import PolicyConfig
from composer_prime.channels.term import Sums
from composer_prime.channels.tokens import PolicyTokens, bounded_exp
from composer_prime.wire.types import StepTotals

NEGATIVE_SHARE = 0.5


def tapered_loss(
    tokens: PolicyTokens,
    totals: StepTotals,
    config: PolicyConfig,
    max_length: int,
    negative_share: float = NEGATIVE_SHARE,
) -> tuple[Tensor, Sums]:
    """Return the micro-batch's share of the step's loss, and sums for metrics."""
    ratio_T = bounded_exp(tokens.logprobs_T.detach() - tokens.sampler_logprobs_T)
    bad_T = tokens.advantages_T < 0
    weight_T = torch.where(bad_T, negative_share * ratio_T.clamp(max=1.0), 1.0)
    token_loss_T = -weight_T * tokens.advantages_T * tokens.logprobs_T
    loss = token_loss_T.sum() / (max(totals.samples, 1) * max_length)
    return loss, {"tapered": (bad_T & (ratio_T < 1)).float().sum()}


def on_a_batch(logprobs_BT: Tensor, mask_BT: Tensor, advantages_B: Tensor) -> Tensor:
    """Return the loss of padded rows. They were just sampled, so the sampler's log-probabilities are the policy's."""
    logprobs_T, sequence_T = logprobs_BT[mask_BT], mask_BT.nonzero()[:, 0]
    tokens = PolicyTokens(
        logprobs_T=logprobs_T,
        sampler_logprobs_T=logprobs_T.detach(),
        advantages_T=advantages_B[sequence_T],
        entropy_T=torch.zeros_like(logprobs_T),
        sequence_T=sequence_T,
        sequences=len(mask_BT),
    )
    totals = StepTotals(samples=1, tokens=int(mask_BT.sum()))  # the caller divides by the step's rollouts
    return tapered_loss(tokens, totals, PolicyConfig(), grpo_in_one_file.MAX_CONTEXT)[0]


if __name__ == "__main__":
    grpo_in_one_file.main(loss=on_a_batch)
