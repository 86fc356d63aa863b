"""The SDPO loss: turns, weights, clip and denominators."""

from __future__ import annotations

import dataclasses
import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl_oracle import loss_utils

from composer_prime.channels.policy import PolicyConfig, PolicyTerm
from composer_prime.channels.sdpo import SdpoTerm, SdpoTokens, sdpo_loss, sdpo_metrics
from composer_prime.config.channels import SdpoConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


class Turns:
    """Hinted turns of the given lengths with random divergences, float64."""

    def __init__(self, seed: int, lengths: list[int], gap: float = 0.5) -> None:
        draw = torch.Generator().manual_seed(seed)
        count = sum(lengths)
        double = {"generator": draw, "dtype": torch.float64}
        self.lengths = lengths
        self.divergence_D = torch.rand(count, **double)
        self.logprobs_D = -torch.rand(count, **double) * 3
        self.sampler_D = self.logprobs_D + gap * torch.randn(count, **double)
        self.entropy_D = torch.rand(count, **double) * 2
        self.teacher_D = self.logprobs_D + torch.randn(count, **double)
        self.weight_D = torch.rand(len(lengths), **double)[self._turn_of(lengths)]

    def tokens(self, divergence_D: torch.Tensor, turns: slice = slice(None)) -> SdpoTokens:
        starts = [sum(self.lengths[:index]) for index in range(len(self.lengths) + 1)]
        first, last, _ = turns.indices(len(self.lengths))
        part = slice(starts[first], starts[max(first, last)])
        own = self.lengths[first : max(first, last)]
        return SdpoTokens(
            divergence_D=divergence_D[part],
            logprobs_D=self.logprobs_D[part],
            sampler_logprobs_D=self.sampler_D[part],
            weight_D=self.weight_D[part],
            turn_D=self._turn_of(own),
            kind_D=torch.zeros(sum(own), dtype=torch.long),
            turns=len(own),
            row_tokens=sum(own),
            sample_tokens_D=torch.tensor(own)[self._turn_of(own)] if own else torch.zeros(0, dtype=torch.long),
            teacher_entropy_D=self.entropy_D[part],
            teacher_logprobs_D=self.teacher_D[part],
        )

    @staticmethod
    def _turn_of(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([turn for turn, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)

    def loss(
        self, config: SdpoConfig = SdpoConfig(), splits: tuple[slice, ...] = (slice(None),), denominator: str = "tokens"
    ):
        """The loss where each turn is a sample of its own, and its gradient with respect to the divergences."""
        divergence_D = self.divergence_D.clone().requires_grad_()
        term = SdpoTerm(config, PolicyTerm(PolicyConfig(denominator=denominator), 10))
        totals = StepTotals(samples=len(self.lengths), tokens=sum(self.lengths), micro_batches=len(splits))
        shares = [term.loss(self.tokens(divergence_D, part), totals)[0] for part in splits]
        loss = torch.stack(shares).sum()
        loss.backward()
        return loss.detach(), divergence_D.grad


def test_the_is_clip_is_trl_s():
    # A token mean of weight * min(pi / mu, 2) * divergence, the ratio detached: TRL's clipping, to 1e-6.
    turns = Turns(0, [3, 5, 2], gap=1.0)
    divergence_D = turns.divergence_D.clone().requires_grad_()
    logprobs_D = turns.logprobs_D.requires_grad_()
    clipped = loss_utils.apply_importance_sampling_clipping(divergence_D, logprobs_D, turns.sampler_D, 2.0)
    (turns.weight_D * clipped).mean().backward()
    loss, gradient = turns.loss()
    assert abs(loss - (turns.weight_D * clipped).mean()) <= 1e-9
    assert (gradient - divergence_D.grad).abs().max() <= 1e-9 and logprobs_D.grad is None
    assert ((logprobs_D - turns.sampler_D).exp() > 2).any()


def test_it_divides_as_the_policy_loss_does():
    # Two samples of 1 and 3 tokens, max_length 10: by hand for each denominator of the policy loss.
    turns = Turns(1, [1, 3])
    turns.sampler_D = turns.logprobs_D
    weighed = turns.weight_D * turns.divergence_D
    by_sample = (weighed[0] + weighed[1:].mean()) / 2
    expected = {
        "constant": weighed.sum() / 20,
        "tokens": weighed.mean(),
        "sequence": by_sample,
        "micro_batch": weighed.mean(),
    }
    for denominator, value in expected.items():
        assert math.isclose(turns.loss(denominator=denominator)[0], value, abs_tol=1e-12), denominator
    by_part = turns.loss(splits=(slice(0, 1), slice(1, 2)), denominator="micro_batch")[0]
    assert math.isclose(by_part, by_sample, abs_tol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 6), min_size=0, max_size=6), cut=st.integers(0, 6),
       denominator=st.sampled_from(["constant", "tokens", "sequence"]))  # fmt: skip
def test_the_split_does_not_matter(seed, lengths, cut, denominator):
    # Whole turns over two micro-batches, either of which may be empty: same loss, same gradient.
    turns = Turns(seed, lengths)
    loss, gradient = turns.loss(denominator=denominator)
    split_loss, split_gradient = turns.loss(splits=(slice(0, cut), slice(cut, None)), denominator=denominator)
    assert torch.allclose(loss, split_loss, atol=1e-14) and torch.allclose(gradient, split_gradient, atol=1e-14)


def test_a_weight_of_zero_drops_its_turn():
    # No gradient reaches the turn.
    turns = Turns(2, [2, 2], gap=0.0)
    turns.weight_D[:2] = 0.0
    _, gradient = turns.loss()
    assert not gradient[:2].any() and torch.allclose(gradient[2:], turns.weight_D[2:] / 4)


def test_endorsed_turns_are_skipped():
    # A turn that the hint makes likelier, summed over its tokens, has no gradient. By default every turn has one.
    turns = Turns(2, [2, 2], gap=0.0)
    turns.teacher_D = turns.logprobs_D + torch.tensor([2.0, -1.0, -2.0, 1.0])
    assert turns.loss()[1].all()
    _, gradient = turns.loss(SdpoConfig(skip_endorsed=True))
    assert not gradient[:2].any() and torch.allclose(gradient[2:], turns.weight_D[2:] / 4)


def test_metrics_by_hand():
    # Per token, per turn, the clipped share and the teacher's entropy; without turns only the zero counts.
    turns = Turns(3, [1, 3])
    turns.sampler_D = turns.logprobs_D - torch.tensor([1.0, 0.0, 0.0, 0.0])
    _, sums = sdpo_loss(turns.tokens(turns.divergence_D), 1.0, SdpoConfig())
    metrics = sdpo_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["sdpo/turns"] == 2 and metrics["sdpo/tokens"] == 4 and metrics["sdpo/is_clip_fraction"] == 0.25
    assert math.isclose(metrics["sdpo/jsd"], turns.divergence_D.mean(), abs_tol=1e-12)
    assert math.isclose(metrics["sdpo/teacher_entropy"], turns.entropy_D.mean(), abs_tol=1e-12)
    ratios = torch.stack([part.sum() for part in (turns.teacher_D - turns.logprobs_D).split([1, 3])])
    assert math.isclose(metrics["sdpo/hint_log_ratio"], ratios.mean(), abs_tol=1e-12)
    assert metrics["sdpo/endorsed"] == (ratios > 0).double().mean()
    nothing = Turns(3, [])
    loss, sums = sdpo_loss(nothing.tokens(nothing.divergence_D), 1.0, SdpoConfig())
    assert loss == 0
    assert sdpo_metrics({name: value.item() for name, value in sums.items()}) == {"sdpo/turns": 0, "sdpo/tokens": 0}


def test_the_divergence_by_kind():
    # Two kinds in the step, of which this rank has one: both have sums, and a mean stands for tokens alone.
    turns = Turns(seed=5, lengths=[2, 3])
    divergence_D = torch.arange(5.0, dtype=torch.float64)
    codes = torch.tensor([zlib.crc32(b"a")] * 5)
    totals = StepTotals(samples=2, tokens=5, hint_kinds=("a", "b"))
    tokens = dataclasses.replace(turns.tokens(divergence_D), kind_D=codes)
    _, sums = SdpoTerm(SdpoConfig(), PolicyTerm(PolicyConfig(), 10)).loss(tokens, totals)
    metrics = sdpo_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["sdpo/jsd/a"] == metrics["sdpo/jsd"] == 2.0 and "sdpo/jsd/b" not in metrics
    assert (sums["tokens/b"], sums["jsd/b"]) == (0, 0)


def test_missing_tokens_are_refused():
    # A turn whose mask is empty is an error.
    empty = Turns(4, [])
    none = dataclasses.replace(empty.tokens(empty.divergence_D), turns=1)
    with pytest.raises(ConfigError, match="1 turns, but 0 tokens"):
        sdpo_loss(none, 1.0, SdpoConfig())
