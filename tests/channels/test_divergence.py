"""SDPO's divergences against TRL's and by their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl_oracle import loss_utils

from composer_prime.channels.sdpo import divergence, generalized_jsd
from composer_prime.config.channels import SdpoConfig

BETAS = (0.0, 0.3, 0.5, 0.7, 1.0)


def logits(seed: int, tokens: int = 6, vocabulary: int = 11, scale: float = 2.0):
    """(student with gradient, teacher, sampled tokens), float64."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(tokens, vocabulary, generator=draw, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher, torch.randint(0, vocabulary, (tokens,), generator=draw)


def gradient_of(value: torch.Tensor, wrt: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value.sum(), wrt)[0]


@pytest.mark.parametrize("beta", BETAS)
def test_the_full_divergence_is_trl_s(beta):
    # Value and gradient equal trl.experimental.sdpo's to 1e-6 in float64, at the ends and between them.
    student, teacher, targets = logits(0)
    ours = divergence(student, teacher, SdpoConfig(beta=beta), targets)
    theirs = loss_utils.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=beta)
    assert (ours - theirs).abs().max() <= 1e-6
    assert (gradient_of(ours, student) - gradient_of(theirs, student)).abs().max() <= 1e-6


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [1, 4, 9])
def test_top_k_with_a_tail_is_trl_s(beta, top_k):
    # The student's likeliest K tokens and one bucket for the rest, value and gradient, to 1e-6.
    student, teacher, targets = logits(1)
    ours = divergence(student, teacher, SdpoConfig(beta=beta, kind="top_k", top_k=top_k), targets)
    theirs = loss_utils.compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=top_k, distillation_alpha=beta, distillation_add_tail=True
    )
    assert (ours - theirs).abs().max() <= 1e-6
    assert (gradient_of(ours, student) - gradient_of(theirs, student)).abs().max() <= 1e-6


def test_the_sampled_token_s_gradient_is_trl_s_and_its_value_the_log_ratio():
    # The gradient is log S/T * grad log S; averaged over the student's vocabulary it is that of KL(S || T), and the
    # value averages to the KL itself.
    student, teacher, targets = logits(2)
    config = SdpoConfig(beta=1.0, kind="sampled")
    ours = divergence(student, teacher, config, targets)
    theirs = loss_utils.compute_sampled_token_self_distillation_loss(student, teacher, targets, distillation_alpha=1.0)
    assert (gradient_of(ours, student) - gradient_of(theirs, student)).abs().max() <= 1e-6
    one_student, one_teacher = student[:1], teacher[:1]
    whole = divergence(one_student, one_teacher, SdpoConfig(beta=1.0), targets[:1])
    every = torch.arange(11)
    values = divergence(one_student.expand(11, -1), one_teacher.expand(11, -1), config, every)
    weighed = (one_student.log_softmax(-1).exp().detach()[0] * values).sum()
    assert torch.allclose(weighed, whole[0], atol=1e-12)
    assert torch.allclose(gradient_of(weighed, student), gradient_of(whole, student), atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(0, 5), vocabulary=st.integers(2, 20),
       scale=st.floats(0.01, 30), beta=st.floats(0.05, 0.95))  # fmt: skip
def test_the_jsd_is_bounded_symmetric_and_zero_at_the_teacher(seed, tokens, vocabulary, scale, beta):
    # 0 <= D <= H(beta) <= ln 2; swapping roles and beta changes nothing; at S = T value and gradient vanish.
    student, teacher, targets = logits(seed, tokens, vocabulary, scale)
    value = divergence(student, teacher, SdpoConfig(beta=beta), targets)
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert (value >= -1e-12).all() and (value <= bound + 1e-12).all() and bound <= math.log(2) + 1e-12
    swapped = divergence(teacher, student, SdpoConfig(beta=1 - beta), targets)
    assert torch.allclose(value, swapped, atol=1e-10)
    same = divergence(student, student, SdpoConfig(beta=beta), targets)
    assert same.abs().sum() < 1e-9 and gradient_of(same, student).abs().sum() < 1e-9


def test_the_ends_are_the_kl_divergences_and_not_limits_of_the_inside():
    # beta = 0 is KL(T || S) and beta = 1 KL(S || T) exactly; just inside the ends the JSD is almost zero (the
    # plan says so).
    student, teacher, targets = logits(3, scale=5.0)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = divergence(student, teacher, SdpoConfig(beta=0.0), targets)
    reverse = divergence(student, teacher, SdpoConfig(beta=1.0), targets)
    assert torch.allclose(forward, (log_t.exp() * (log_t - log_s)).sum(-1), atol=1e-12)
    assert torch.allclose(reverse, (log_s.exp() * (log_s - log_t)).sum(-1), atol=1e-12)
    for beta, end in ((0.001, forward), (0.999, reverse)):
        assert (divergence(student, teacher, SdpoConfig(beta=beta), targets) < 0.01 * end).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(3, 15), top_k=st.integers(1, 16),
       beta=st.sampled_from(BETAS))  # fmt: skip
def test_top_k_never_exceeds_the_whole_and_meets_it_at_all_but_one(seed, vocabulary, top_k, beta):
    # Merging tokens into a tail cannot raise a divergence; with K >= V - 1 nothing is merged: equal to the last bits.
    student, teacher, targets = logits(seed, 4, vocabulary)
    whole = divergence(student, teacher, SdpoConfig(beta=beta), targets)
    merged = divergence(student, teacher, SdpoConfig(beta=beta, kind="top_k", top_k=top_k), targets)
    assert (merged <= whole + 1e-12).all()
    if top_k >= vocabulary - 1:
        assert torch.equal(merged, whole)


def test_the_tail_of_all_but_one_token_is_that_token():
    # The tail bucket itself, not a shortcut: K = V - 2 of a vocabulary whose last two tokens are one token halved.
    student, teacher, targets = logits(4, vocabulary=8)
    halves = [torch.cat([side, side[:, -1:]], dim=1) - torch.tensor([0.0] * 7 + [math.log(2)] * 2)
              for side in (student.detach().sort(descending=True).values, teacher)]  # fmt: skip
    whole = divergence(student.detach().sort(descending=True).values, teacher, SdpoConfig(), targets)
    merged = divergence(halves[0], halves[1], SdpoConfig(kind="top_k", top_k=7), targets)
    assert torch.allclose(merged, whole, atol=1e-12)


def test_only_the_student_has_a_gradient():
    # A teacher that is the live policy gets none, in every variant.
    for settings_of in ({}, {"kind": "top_k", "top_k": 3}, {"kind": "sampled", "beta": 1.0}):
        student, teacher, targets = logits(5)
        teacher.requires_grad_()
        divergence(student, teacher, SdpoConfig(**settings_of), targets).sum().backward()
        assert teacher.grad is None and student.grad.abs().max() > 0


@pytest.mark.parametrize("variant", [{}, {"kind": "top_k", "top_k": 3}, {"kind": "sampled", "beta": 1.0}])
def test_masked_vocabulary_and_nan(variant):
    # -inf logits (padding of a vocabulary) give finite values and gradients; NaN gives NaN.
    student, teacher, targets = logits(8)
    blocked = torch.zeros(11, dtype=torch.float64).index_fill(0, torch.tensor([9, 10]), -math.inf)
    targets = targets.clamp(max=8)
    value = divergence(student + blocked, teacher + blocked, SdpoConfig(**variant), targets)
    clean = divergence(student[:, :9], teacher[:, :9], SdpoConfig(**variant), targets)
    assert torch.allclose(value, clean, atol=1e-12) and torch.isfinite(gradient_of(value, student)).all()
    for broken in ((student * math.nan, teacher), (student, teacher * math.nan)):
        assert torch.isnan(divergence(*broken, SdpoConfig(**variant), targets)).all()


def test_float32_agrees_with_float64():
    # Large logits over a large vocabulary: float32 stays within 1e-4 of float64.
    student, teacher, targets = logits(9, 8, 5000, scale=8.0)
    for beta in BETAS:
        exact = divergence(student, teacher, SdpoConfig(beta=beta), targets)
        single = divergence(student.float(), teacher.float(), SdpoConfig(beta=beta), targets)
        assert (single - exact).abs().max() < 1e-4 * max(1.0, exact.max().item())


def test_the_jsd_of_two_coins_by_hand():
    # S = (1, 0) up to the floor and T = (0, 1): M is even, D = ln 2.
    certain = torch.tensor([[0.0, -1e4]], dtype=torch.float64)
    assert math.isclose(generalized_jsd(certain, certain.flip(1), 0.5).item(), math.log(2), rel_tol=1e-12)


@pytest.mark.parametrize("settings_", [{}, {"kind": "top_k", "top_k": 4}, {"kind": "top_k", "top_k": 2}], ids=str)
def test_masked_tokens_give_no_nan(settings_):
    # A student whose logits are -inf at all but four tokens, and a teacher that masks another one: value and gradient
    # stay finite, and no gradient reaches a masked token.
    student, teacher, targets = logits(9)
    student = student.detach().index_fill(1, torch.arange(4, 11), -math.inf).requires_grad_()
    teacher[:, 3] = -math.inf
    value = divergence(student, teacher, SdpoConfig(**settings_), targets % 4)
    gradient = gradient_of(value, student)
    assert value.isfinite().all() and gradient.isfinite().all() and not gradient[:, 4:].any()
