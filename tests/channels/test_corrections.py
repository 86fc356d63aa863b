"""Off-policy corrections and KL terms of the policy loss, against TRL and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from rows import Rows, make_po_config
from test_policy import as_trl_names_it, same
from trl_oracle import trl_loss

from composer_prime.channels.policy import estimate, policy_loss
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals

OBJECTIVES = ("dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_importance_weights_are_trl_s_truncation(objective):
    # tis equals TRL's correction by tokens (truncate) to 1e-6 in float64.
    rows = Rows(7, gap=0.9)
    importance_BT = (rows.logprobs_BT - rows.sampler_BT).exp().clamp(max=2.0)
    assert importance_BT[rows.mask_BT.bool()].unique().numel() > 2
    config = make_po_config(objective, correction="tis", clip_low=0.2, clip_high=0.2)
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, None, rows.advantages_B, rows.mask_BT, importance_BT=importance_BT,
                      **as_trl_names_it(objective, 0.2, 0.2, 5.0))  # fmt: skip
    same(rows.loss(config), theirs, theirs_BT)


def four_tokens(pi: list[float], mu: list[float], advantages: list[float], reference: list[float] | None = None,
                **settings):  # fmt: skip
    """(loss, gradient, sums) of dr_grpo over one sequence of tokens, length divisor 10."""
    reference_T = None if reference is None else torch.tensor(reference, dtype=torch.float64).log()
    logprobs = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros(len(pi), dtype=torch.float64)
    tokens = PolicyTokens(logprobs_T=logprobs, sampler_logprobs_T=torch.tensor(mu, dtype=torch.float64).log(),
                          advantages_T=torch.tensor(advantages, dtype=torch.float64), entropy_T=zeros,
                          sequence_T=zeros.long(), sequences=1, reference_logprobs_T=reference_T)  # fmt: skip
    totals = StepTotals(samples=1, tokens=len(pi))
    loss, sums = policy_loss(tokens, totals, make_po_config("dr_grpo", **settings), 10)
    loss.backward()
    return loss.item(), logprobs.grad, sums


def test_dppo_by_hand():
    # Four tokens, pi - mu = .3, .3, -.3, -.1 with A = 1, -1, -1, 1: the 1st and 3rd are dropped, the rest weigh r A.
    loss, gradient, sums = four_tokens([0.6, 0.6, 0.3, 0.5], [0.3, 0.3, 0.6, 0.6], [1.0, -1.0, -1.0, 1.0])
    expected = -(0.0 + (0.6 / 0.3) * -1.0 + 0.0 + (0.5 / 0.6)) / 10
    assert math.isclose(loss, expected, abs_tol=1e-12)
    assert torch.allclose(gradient, torch.tensor([0.0, 0.2, 0.0, -0.5 / 6.0], dtype=torch.float64), atol=1e-12)
    assert sums["masked_fraction"] == 2 and sums["clip_fraction"] == 0


def test_dppo_caps_the_ratio_of_a_rare_token_that_it_keeps():
    # pi = .1 and mu = 1e-5 is inside the trust region, with a ratio of 10 000: it counts as much as the cap says.
    loss, gradient, sums = four_tokens([0.1, 0.5], [1e-5, 0.5], [1.0, 1.0], dppo_ratio_cap=10.0)
    assert (
        math.isclose(loss, -(10.0 + 1.0) / 10, abs_tol=1e-9)
        and sums["clip_fraction"] == 1
        and sums["masked_fraction"] == 0
    )
    assert torch.allclose(gradient, torch.tensor([-1.0, -0.1], dtype=torch.float64), atol=1e-9)
    loss, gradient, _ = four_tokens([0.1, 0.5], [1e-5, 0.5], [1.0, 1.0], dppo_ratio_cap=None)
    assert math.isclose(loss, -(1e4 + 1.0) / 10, rel_tol=1e-9) and math.isclose(gradient[0], -1e3, rel_tol=1e-9)


def test_dppo_uses_the_penalized_advantage():
    # k1 turns A = 0.1 into 0.1 - log(.6 / .1) < 0: the token, .3 above mu, is now pushed down, which is to be trained;
    # and A = -0.1 into -0.1 + log(.9 / .3) > 0 keeps the one that fell to .3 and is pushed up again.
    penalty = {"weight": 1.0, "estimator": "k1"}
    _, gradient, sums = four_tokens([0.6, 0.3], [0.3, 0.6], [0.1, -0.1], [0.1, 0.9], kl=penalty)
    advantages = [0.1 - math.log(0.6 / 0.1), -0.1 + math.log(0.9 / 0.3)]
    expected = torch.tensor([-2.0 * advantages[0] / 10, -0.5 * advantages[1] / 10], dtype=torch.float64)
    assert sums["masked_fraction"] == 0 and torch.allclose(gradient, expected, atol=1e-12)


def test_k3_ratio_is_capped_where_dppo_caps_the_ratio():
    # For a token with r = 10 000 the penalty is cap * k3, and its gradient is bounded too.
    penalty = {"weight": 1.0, "estimator": "k3_ratio"}
    loss, gradient, _ = four_tokens([0.1], [1e-5], [0.0], [0.2], kl=penalty, dppo_ratio_cap=10.0)
    k3 = 2.0 - 1.0 - math.log(2.0)
    assert math.isclose(loss, 10.0 * k3 / 10, rel_tol=1e-9)
    assert math.isclose(gradient[0], 10.0 * (k3 + 1.0 - 2.0) / 10, rel_tol=1e-9)
    loss, *_ = four_tokens([0.1], [1e-5], [0.0], [0.2], kl=penalty, dppo_ratio_cap=None)
    assert math.isclose(loss, 1e4 * k3 / 10, rel_tol=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("estimator", ["k3", "k3_ratio"])
def test_k3_is_trl_s(objective, estimator):
    # k3 and k3 r enter the loss after the clip, with the same normalization; TRL calls the latter bias-corrected.
    rows = Rows(3)
    config = make_po_config(objective, correction="none", clip_low=0.2, clip_high=0.2,
                            kl={"weight": 0.4, "estimator": estimator})  # fmt: skip
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, rows.sampler_BT, rows.advantages_B, rows.mask_BT, reference_BT=rows.reference_BT,
                      kl_weight=0.4, kl_times_ratio=estimator == "k3_ratio",
                      **as_trl_names_it(objective, 0.2, 0.2, 5.0))  # fmt: skip
    same(rows.loss(config), theirs, theirs_BT)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_k1_is_a_change_of_the_advantage(objective):
    # k1 equals TRL's loss without KL and with advantages A - 0.4 (log pi - log ref), a token each.
    rows = Rows(3)
    advantages_BT = rows.advantages_B[:, None] - 0.4 * (rows.logprobs_BT - rows.reference_BT)
    config = make_po_config(objective, correction="none", clip_low=0.2, clip_high=0.2,
                            kl={"weight": 0.4, "estimator": "k1"})  # fmt: skip
    theirs_BT = rows.logprobs_BT.clone().requires_grad_()
    theirs = trl_loss(theirs_BT, rows.sampler_BT, advantages_BT, rows.mask_BT,
                      **as_trl_names_it(objective, 0.2, 0.2, 5.0))  # fmt: skip
    same(rows.loss(config), theirs, theirs_BT)


def test_estimators_and_their_gradients_by_enumeration():
    # Over a whole vocabulary weighted by pi: E[k1] = E[k3] = KL(pi || ref) and k3 >= 0. Gradients of the loss a user
    # gets: k1 in the advantage, k2 and k3 r give grad KL; k1 in the loss gives 0.
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=draw, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    sampled = logprobs.detach().exp()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (true_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    values = {name: estimate(name, logprobs, reference) for name in ("k1", "k2", "k3")}
    assert torch.allclose((sampled * values["k1"]).sum(), kl, atol=1e-12)
    assert torch.allclose((sampled * values["k3"]).sum(), kl, atol=1e-12) and (values["k3"] >= 0).all()

    def gradient(per_token):
        return torch.autograd.grad((sampled * per_token).sum(), logits, retain_graph=True)[0]

    ratio = (logprobs - logprobs.detach()).exp()
    assert torch.allclose(gradient(ratio * values["k1"].detach()), true_gradient, atol=1e-12)
    assert torch.allclose(gradient(values["k2"]), true_gradient, atol=1e-12)
    assert torch.allclose(gradient(ratio * values["k3"]), true_gradient, atol=1e-12)
    assert gradient(values["k1"]).abs().max() < 1e-12


def test_mismatch_estimates_the_kl_by_enumeration():
    # E_mu[k3] = KL(mu || pi), exactly, when every token of the vocabulary is weighted by mu.
    draw = torch.Generator().manual_seed(0)
    mu = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    pi = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    gap = pi - mu
    assert torch.allclose((mu.exp() * (gap.expm1() - gap)).sum(), (mu.exp() * (mu - pi)).sum(), atol=1e-12)


def test_a_penalty_without_reference_is_refused():
    # kl.weight > 0 and no reference log-probabilities: an error with both and the remedy, for every estimator.
    for estimator in ("k1", "k2", "k3", "k3_ratio"):
        with pytest.raises(ConfigError, match=r"kl\.weight"):
            four_tokens([0.5], [0.5], [1.0], kl={"weight": 0.1, "estimator": estimator})
