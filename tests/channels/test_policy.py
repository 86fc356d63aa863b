"""The policy loss: six objectives against TRL, against arithmetic by hand, and over shapes, masks and splits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Rows, make_po_config
from trl_oracle import trl_loss

from composer_prime.channels.policy import policy_loss, policy_metrics

OBJECTIVES = ("dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo")
CORRECTIONS = ("none", "tis", "dppo")


def as_trl_names_it(objective: str, low: float, high: float, cap: float) -> dict:
    """TRL's settings of the same objective: gspo is grpo with sequence ratios, cispo's cap is epsilon_high."""
    if objective == "gspo":
        return {"objective": "grpo", "level": "sequence", "clip_low": low, "clip_high": high}
    return {"objective": objective, "clip_low": low, "clip_high": cap if objective == "cispo" else high}


def same(ours, theirs, theirs_BT) -> None:
    """Loss and gradient agree to 1e-6, and the gradient is not trivially zero."""
    theirs.backward()
    loss, gradient = ours
    assert abs(loss - theirs) <= 1e-6 and (gradient - theirs_BT.grad).abs().max() <= 1e-6
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_trl_s_without_correction(objective, seed):
    # With old = the sampler's log-probabilities, loss and gradient equal TRL's to 1e-6 in float64.
    rows = Rows(seed, gap=0.9)
    config = make_po_config(objective, correction="none", clip_low=0.2, clip_high=0.28)
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, rows.sampler_BT, rows.advantages_B, rows.mask_BT,
                      **as_trl_names_it(objective, 0.2, 0.28, 5.0))  # fmt: skip
    same(rows.loss(config), theirs, theirs_BT)


@pytest.mark.parametrize("objective", ["gspo", "dapo", "cispo"])
def test_an_objective_s_own_clip_range_is_trl_s_recommended_one(objective):
    # gspo 3e-4 / 4e-4, dapo 0.2 / 0.28, cispo 5 absolute: what the papers set, without a user setting.
    rows = Rows(1, gap=2e-4 if objective == "gspo" else 2.0)
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    low, high = (3e-4, 4e-4) if objective == "gspo" else (0.2, 0.28)
    theirs = trl_loss(theirs_BT, rows.sampler_BT, rows.advantages_B, rows.mask_BT,
                      **as_trl_names_it(objective, low, high, 5.0))  # fmt: skip
    same(rows.loss(make_po_config(objective)), theirs, theirs_BT)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_on_policy_grpo_is_minus_the_mean_advantage(correction):
    # With pi = mu, r is 1 everywhere: grpo's value is -mean(A), nothing is masked or clipped, ESS is 1, mismatch 0.
    rows = Rows(3)
    rows.sampler_BT = rows.logprobs_BT.clone()
    config = make_po_config("grpo", correction=correction)
    loss, gradient = rows.loss(config)
    assert abs(loss + rows.advantages_B.mean()) < 1e-12 and gradient.abs().max() > 0
    _, sums = policy_loss(rows.tokens(rows.logprobs_BT), rows.totals(), config, 32)
    metrics = policy_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/masked_fraction"] == metrics["policy/clip_fraction"] == 0
    assert abs(metrics["policy/ess"] - 1) < 1e-12 and abs(metrics["policy/mismatch_kl"]) < 1e-12
    assert abs(metrics["policy/entropy"] - rows.entropy_BT[rows.mask_BT.bool()].mean()) < 1e-12


@pytest.mark.parametrize("correction", ["none", "tis", "dppo"])
def test_gspo_is_grpo_where_a_sequence_s_ratios_are_equal(correction):
    # With one ratio for all tokens of a sequence, its geometric mean is that ratio: value and gradient agree.
    rows = Rows(4)
    shift_B1 = torch.linspace(-0.15, 0.15, 5, dtype=torch.float64)[:, None]  # dppo drops no token
    rows.sampler_BT = rows.logprobs_BT + shift_B1
    wide = {"correction": correction, "clip_low": 0.3, "clip_high": 0.3}
    loss, gradient = rows.loss(make_po_config("gspo", **wide))
    plain, plain_gradient = rows.loss(make_po_config("grpo", **wide))
    assert torch.allclose(loss, plain, atol=1e-12) and torch.allclose(gradient, plain_gradient, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 3])
def test_bnpo_is_dapo_on_one_micro_batch_and_depends_on_the_split(cut):
    # One micro-batch: the same denominator. Two: the mean of the micro-batches' token means, as TRL accumulates it.
    rows = Rows(8)
    bnpo, dapo = make_po_config("bnpo", clip_high=0.28), make_po_config("dapo")
    loss, gradient = rows.loss(bnpo)
    assert torch.equal(loss, rows.loss(dapo)[0]) and torch.equal(gradient, rows.loss(dapo)[1])
    splits = (slice(0, cut), slice(cut, None))
    split_loss, _ = rows.loss(bnpo, splits=splits)
    alone = [
        trl_loss(rows.logprobs_BT[part], rows.sampler_BT[part], rows.advantages_B[part], rows.mask_BT[part],
                 objective="bnpo", clip_high=0.28)
        for part in splits
    ]  # fmt: skip
    assert torch.allclose(split_loss, torch.stack(alone).mean(), atol=1e-9)
    assert abs(split_loss - loss) > 1e-6


def test_dr_grpo_is_padding_invariant_and_halves_with_twice_the_length():
    # Masked padding changes nothing; doubling max_completion_length halves the loss exactly.
    config = make_po_config("dr_grpo", correction="none")
    rows, padded = Rows(1), Rows(1)
    pad = torch.zeros(5, 6)
    for name in ("logprobs_BT", "sampler_BT", "mask_BT", "reference_BT", "entropy_BT"):
        own = getattr(padded, name)
        setattr(padded, name, torch.cat([own, pad.to(own.dtype)], dim=1))
    loss, gradient = rows.loss(config)
    padded_loss, padded_gradient = padded.loss(config)
    assert loss == padded_loss and torch.equal(gradient, padded_gradient[:, :9]) and not padded_gradient[:, 9:].any()
    half, half_gradient = rows.loss(config, max_length=64)
    assert loss == 2 * half and torch.equal(gradient, 2 * half_gradient)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 7),
    length=st.integers(1, 12),
    empty_rows=st.integers(0, 3),
    cut=st.integers(0, 7),
    objective=st.sampled_from([name for name in OBJECTIVES if name != "bnpo"]),
    correction=st.sampled_from(CORRECTIONS),
    kl=st.sampled_from(["k1", "k2", "k3", "k3_ratio"]),
)
def test_split_invariance_with_empty_rows(seed, batch, length, empty_rows, cut, objective, correction, kl):
    # However the step is cut into micro-batches, loss and gradient stay; rows without trained tokens change nothing.
    rows = Rows(seed, batch, length, empty_rows=min(empty_rows, batch))
    config = make_po_config(
        objective,
        correction=correction,
        kl={"weight": 0.1, "estimator": kl},
    )
    loss, gradient = rows.loss(config)
    split_loss, split_gradient = rows.loss(config, splits=(slice(0, cut), slice(cut, None)))
    assert torch.allclose(loss, split_loss, rtol=1e-12, atol=1e-14)
    assert torch.allclose(gradient, split_gradient, rtol=1e-12, atol=1e-14)
    filled = slice(0, batch - min(empty_rows, batch))
    _, filled_gradient = rows.loss(config, splits=(filled,))
    assert torch.allclose(gradient, filled_gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    objective=st.sampled_from(OBJECTIVES),
    correction=st.sampled_from(CORRECTIONS),
    order=st.permutations(range(5)),
)
def test_the_order_of_the_sequences_does_not_matter(seed, objective, correction, order):
    # A permutation of the packed sequences permutes the gradient and leaves the loss.
    rows, other = Rows(seed), Rows(seed)
    for name in ("logprobs_BT", "sampler_BT", "mask_BT", "advantages_B", "reference_BT", "entropy_BT"):
        setattr(other, name, getattr(rows, name)[list(order)])
    config = make_po_config(objective, correction=correction)
    loss, gradient = rows.loss(config)
    permuted_loss, permuted_gradient = other.loss(config)
    assert torch.allclose(loss, permuted_loss, rtol=1e-12, atol=1e-14)
    assert torch.allclose(gradient[list(order)], permuted_gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), gap=st.floats(0, 30), correction=st.sampled_from(CORRECTIONS))
def test_metrics_stay_in_their_ranges(seed, gap, correction):
    # k3 >= 0, 0 < ESS <= 1, fractions in [0, 1], all finite, also when the policies are far apart.
    rows = Rows(seed, gap=gap)
    config = make_po_config("dr_grpo", correction=correction)
    loss, sums = policy_loss(rows.tokens(rows.logprobs_BT), rows.totals(), config, 32)
    metrics = policy_metrics({name: value.item() for name, value in sums.items()})
    assert torch.isfinite(loss) and all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/mismatch_kl"] >= -1e-15 and 0 < metrics["policy/ess"] <= 1 + 1e-9
    assert 0 <= metrics["policy/masked_fraction"] <= 1 and 0 <= metrics["policy/clip_fraction"] <= 1
    assert metrics["policy/reference_kl"] >= -1e-15


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["logprobs_BT", "sampler_BT", "advantages_B"])
def test_nan_is_never_hidden(objective, name):
    # One NaN among the trained tokens' inputs makes the loss NaN under every correction: no clamp swallows it.
    for correction in CORRECTIONS:
        rows = Rows(9)
        getattr(rows, name)[0, ...] = math.nan
        loss, _ = policy_loss(
            rows.tokens(rows.logprobs_BT), rows.totals(), make_po_config(objective, correction=correction), 32
        )
        assert torch.isnan(loss), correction
