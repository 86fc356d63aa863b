"""Random rows for the policy loss, padded as TRL takes them and flat as this project's losses take them."""

import torch
from torch import Tensor

from composer_prime.channels.policy import PolicyConfig, policy_loss
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.wire.types import StepTotals

ALL = (slice(None),)


def make_po_config(objective: str = "dr_grpo", **settings) -> PolicyConfig:
    return PolicyConfig.model_validate({"objective": objective, **settings})


class Rows:
    """B sequences of up to T tokens with random log-probabilities, advantages and masks, float64."""

    def __init__(self, seed: int, batch: int = 5, length: int = 9, *, gap: float = 0.4, empty_rows: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        double = {"generator": draw, "dtype": torch.float64}
        self.logprobs_BT = -torch.rand(batch, length, **double) * 3
        self.sampler_BT = (self.logprobs_BT + gap * torch.randn(batch, length, **double)).clamp(max=-1e-4)
        self.advantages_B = torch.randn(batch, **double)
        self.mask_BT = (torch.rand(batch, length, **double) < 0.7).long()
        self.mask_BT[:, 0] = 1
        self.mask_BT[batch - empty_rows :] = 0
        self.reference_BT = (self.logprobs_BT + 0.3 * torch.randn(batch, length, **double)).clamp(max=-1e-4)
        self.entropy_BT = torch.rand(batch, length, **double) * 2

    def tokens(self, logprobs_BT: Tensor, rows: slice = ALL[0], entropy_BT: Tensor | None = None) -> PolicyTokens:
        """The trained tokens of some rows, flat, as the trainer gathers them."""
        mask_BT = self.mask_BT[rows].bool()
        sequence_BT = torch.arange(mask_BT.shape[0])[:, None].expand_as(mask_BT)
        advantages_BT = self.advantages_B[rows][:, None].expand(mask_BT.shape)
        entropy_BT = self.entropy_BT if entropy_BT is None else entropy_BT
        return PolicyTokens(
            logprobs_T=logprobs_BT[rows][mask_BT],
            sampler_logprobs_T=self.sampler_BT[rows][mask_BT],
            advantages_T=advantages_BT[mask_BT],
            entropy_T=entropy_BT[rows][mask_BT],
            sequence_T=sequence_BT[mask_BT],
            sequences=mask_BT.shape[0],
            reference_logprobs_T=self.reference_BT[rows][mask_BT],
        )

    def totals(self, micro_batches: int = 1) -> StepTotals:
        counts = self.mask_BT.sum(1)
        return StepTotals(samples=int((counts > 0).sum()), tokens=int(counts.sum()), micro_batches=micro_batches)

    def loss(
        self, config: PolicyConfig, max_length: int = 32, splits: tuple[slice, ...] = ALL
    ) -> tuple[Tensor, Tensor]:
        """(loss, gradient [B, T]) of the step, cut into micro-batches at `splits`."""
        logprobs_BT = self.logprobs_BT.clone().requires_grad_()
        totals = self.totals(len(splits))
        shares = [policy_loss(self.tokens(logprobs_BT, rows), totals, config, max_length)[0] for rows in splits]
        loss = torch.stack(shares).sum()
        loss.backward()
        return loss.detach(), logprobs_BT.grad
