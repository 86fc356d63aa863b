"""Channel 1 against TRL, against arithmetic by hand, and over shapes, masks and splits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl_oracle import trl_loss

from composer_prime.channels.policy import PolicyTokens, policy_loss, policy_metrics
from composer_prime.channels.total import ChannelInputs, channel_metrics, max_completion_length, total_loss
from composer_prime.config.channels import ChannelsConfig, PolicyConfig
from composer_prime.wire.types import StepTotals


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

    def tokens(self, logprobs_BT: Tensor, rows: slice = slice(None)) -> PolicyTokens:
        """The trained tokens of some rows, flat, as the trainer gathers them."""
        mask_BT = self.mask_BT[rows].bool()
        sequence_BT = torch.arange(mask_BT.shape[0])[:, None].expand_as(mask_BT)
        advantages_BT = self.advantages_B[rows][:, None].expand(mask_BT.shape)
        return PolicyTokens(
            logprobs_T=logprobs_BT[rows][mask_BT],
            sampler_logprobs_T=self.sampler_BT[rows][mask_BT],
            advantages_T=advantages_BT[mask_BT],
            entropy_T=torch.ones(int(mask_BT.sum()), dtype=torch.float64),
            sequence_T=sequence_BT[mask_BT],
            sequences=mask_BT.shape[0],
        )

    @property
    def totals(self) -> StepTotals:
        counts = self.mask_BT.sum(1)
        return StepTotals(samples=int((counts > 0).sum()), tokens=int(counts.sum()), groups=1)

    def loss(self, config: PolicyConfig, max_length: int = 32, splits: tuple[slice, ...] = (slice(None),)):
        """(loss, gradient [B, T]) of the step, cut into micro-batches at `splits`."""
        logprobs_BT = self.logprobs_BT.clone().requires_grad_()
        shares = [policy_loss(self.tokens(logprobs_BT, rows), self.totals, config, max_length)[0] for rows in splits]
        loss = torch.stack(shares).sum()
        loss.backward()
        return loss.detach(), logprobs_BT.grad


@pytest.mark.parametrize("objective", ["dr_grpo", "grpo"])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_trl_s_without_correction(objective, seed):
    # With old = the sampler's log-probabilities, loss and gradient equal TRL's to 1e-6 in float64.
    rows = Rows(seed)
    config = PolicyConfig(objective=objective, correction="none", clip_low=0.2, clip_high=0.28)
    loss, gradient = rows.loss(config)
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, rows.sampler_BT, rows.advantages_B, rows.mask_BT,
                      objective=objective, clip_low=0.2, clip_high=0.28, max_length=32)  # fmt: skip
    theirs.backward()
    assert abs(loss - theirs) <= 1e-6 and (gradient - theirs_BT.grad).abs().max() <= 1e-6
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("objective", ["dr_grpo", "grpo"])
def test_tis_is_trl_s_token_truncation(objective):
    # Truncated importance sampling equals TRL's vLLM correction (token level, cap 2) to 1e-6 in float64.
    rows = Rows(7, gap=0.9)
    importance_BT = (rows.logprobs_BT - rows.sampler_BT).exp().clamp(max=2.0)
    assert (importance_BT == 2.0).any() and (importance_BT < 1.0).any()
    loss, gradient = rows.loss(PolicyConfig(objective=objective, correction="tis", tis_cap=2.0))
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, None, rows.advantages_B, rows.mask_BT, objective=objective, clip_low=0.2,
                      clip_high=0.2, max_length=32, importance_BT=importance_BT)  # fmt: skip
    theirs.backward()
    assert abs(loss - theirs) <= 1e-6 and (gradient - theirs_BT.grad).abs().max() <= 1e-6


def test_dppo_by_hand():
    # Four tokens, pi - mu = .3, .3, -.3, -.1 with A = 1, -1, -1, 1: the 1st and 3rd are dropped, the rest weigh r A.
    mu = torch.tensor([0.3, 0.3, 0.6, 0.6], dtype=torch.float64)
    pi = torch.tensor([0.6, 0.6, 0.3, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    logprobs = pi.log().requires_grad_()
    tokens = PolicyTokens(logprobs_T=logprobs, sampler_logprobs_T=mu.log(), advantages_T=advantages,
                          entropy_T=torch.zeros(4, dtype=torch.float64), sequence_T=torch.zeros(4, dtype=torch.long),
                          sequences=1)  # fmt: skip
    totals = StepTotals(samples=1, tokens=4, groups=1)
    loss, sums = policy_loss(tokens, totals, PolicyConfig(correction="dppo", dppo_threshold=0.2), 10)
    loss.backward()
    expected = -(0.0 + (0.6 / 0.3) * -1.0 + 0.0 + (0.5 / 0.6)) / 10
    assert math.isclose(loss.item(), expected, abs_tol=1e-12)
    assert torch.allclose(logprobs.grad, torch.tensor([0.0, 0.2, 0.0, -0.5 / 6.0], dtype=torch.float64), atol=1e-12)
    assert sums["masked"] == 2 and sums["clipped"] == 0


@pytest.mark.parametrize("correction", ["none", "tis", "dppo"])
def test_on_policy_grpo_is_minus_the_mean_advantage(correction):
    # With pi = mu, r is 1 everywhere: grpo's value is -mean(A), nothing is masked or clipped, ESS is 1, mismatch 0.
    rows = Rows(3)
    rows.sampler_BT = rows.logprobs_BT.clone()
    config = PolicyConfig(objective="grpo", correction=correction)
    loss, gradient = rows.loss(config)
    assert abs(loss + rows.advantages_B.mean()) < 1e-12 and gradient.abs().max() > 0
    _, sums = policy_loss(rows.tokens(rows.logprobs_BT), rows.totals, config, 32)
    metrics = policy_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/masked_fraction"] == metrics["policy/clip_fraction"] == 0
    assert abs(metrics["policy/ess"] - 1) < 1e-12 and abs(metrics["policy/mismatch_kl"]) < 1e-12
    assert metrics["policy/entropy"] == 1.0


def test_dr_grpo_is_padding_invariant_and_halves_with_twice_the_length():
    # Masked padding changes nothing; doubling max_completion_length halves the loss exactly.
    config = PolicyConfig(objective="dr_grpo", correction="none")
    rows, padded = Rows(1), Rows(1)
    pad = torch.zeros(5, 6)
    for name in ("logprobs_BT", "sampler_BT", "mask_BT"):
        own = getattr(padded, name)
        setattr(padded, name, torch.cat([own, pad.to(own.dtype)], dim=1))
    loss, gradient = rows.loss(config)
    padded_loss, padded_gradient = padded.loss(config)
    assert loss == padded_loss and torch.equal(gradient, padded_gradient[:, :9]) and not padded_gradient[:, 9:].any()
    half, half_gradient = rows.loss(config, max_length=64)
    assert loss == 2 * half and torch.equal(gradient, 2 * half_gradient)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 7),
    length=st.integers(1, 12),
    empty_rows=st.integers(0, 3),
    cut=st.integers(0, 7),
    objective=st.sampled_from(["dr_grpo", "grpo"]),
    correction=st.sampled_from(["none", "tis", "dppo"]),
)
def test_split_invariance_with_empty_rows(seed, batch, length, empty_rows, cut, objective, correction):
    # However the step is cut into micro-batches, loss and gradient stay; rows without trained tokens change nothing.
    rows = Rows(seed, batch, length, empty_rows=min(empty_rows, batch))
    config = PolicyConfig(objective=objective, correction=correction)
    loss, gradient = rows.loss(config)
    split_loss, split_gradient = rows.loss(config, splits=(slice(0, cut), slice(cut, None)))
    assert torch.allclose(loss, split_loss, rtol=1e-12, atol=1e-14)
    assert torch.allclose(gradient, split_gradient, rtol=1e-12, atol=1e-14)
    filled = slice(0, batch - min(empty_rows, batch))
    _, filled_gradient = rows.loss(config, splits=(filled,))
    assert torch.allclose(gradient, filled_gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), gap=st.floats(0, 30))
def test_metrics_stay_in_their_ranges(seed, gap):
    # k3 >= 0, 0 < ESS <= 1, fractions in [0, 1], all finite, also when the policies are far apart.
    rows = Rows(seed, gap=gap)
    _, sums = policy_loss(rows.tokens(rows.logprobs_BT), rows.totals, PolicyConfig(), 32)
    metrics = policy_metrics({name: value.item() for name, value in sums.items()})
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/mismatch_kl"] >= -1e-15 and 0 < metrics["policy/ess"] <= 1 + 1e-9
    assert 0 <= metrics["policy/masked_fraction"] <= 1


def test_mismatch_estimates_the_kl_by_enumeration():
    # E_mu[k3] = KL(mu || pi), exactly, when every token of the vocabulary is weighed by mu.
    draw = torch.Generator().manual_seed(0)
    mu = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    pi = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    gap = pi - mu
    assert torch.allclose((mu.exp() * (gap.exp() - gap - 1)).sum(), (mu.exp() * (mu - pi)).sum(), atol=1e-12)


def test_an_empty_micro_batch_is_a_zero_on_the_graph():
    # No trained token: the loss is 0, its gradient is 0 everywhere and not missing, and it has no metrics.
    nothing = torch.zeros(0)
    for objective in ("dr_grpo", "grpo"):
        hidden = torch.randn(3, requires_grad=True)
        tokens = PolicyTokens(logprobs_T=hidden[:0] * 1.0, sampler_logprobs_T=nothing, advantages_T=nothing,
                              entropy_T=nothing, sequence_T=torch.zeros(0, dtype=torch.long), sequences=1)  # fmt: skip
        config = ChannelsConfig(policy=PolicyConfig(objective=objective))
        parts = total_loss(ChannelInputs(policy=tokens), StepTotals(samples=0, tokens=0, groups=0), config, 8)
        parts.total.backward()
        assert parts.total == 0 and torch.equal(hidden.grad, torch.zeros(3))
    metrics = channel_metrics({name: value.item() for name, value in parts.sums.items()})
    assert metrics == {"loss/policy": 0.0, "loss/total": 0.0}


def test_the_total_is_bitwise_channel_1():
    # With no other channel the sum is the policy loss itself, in value and gradient.
    rows = Rows(11)
    config = ChannelsConfig()
    logprobs_BT = rows.logprobs_BT.clone().requires_grad_()
    parts = total_loss(ChannelInputs(policy=rows.tokens(logprobs_BT)), rows.totals, config, 32)
    parts.total.backward()
    loss, gradient = rows.loss(config.policy)
    assert torch.equal(parts.total.detach(), loss) and torch.equal(logprobs_BT.grad, gradient)


def test_length_divisor_defaults_to_the_context():
    # max_completion_length when set, else model.max_context.
    assert max_completion_length(ChannelsConfig(), 2048) == 2048
    config = ChannelsConfig(policy=PolicyConfig(max_completion_length=100))
    assert max_completion_length(config, 2048) == 100
