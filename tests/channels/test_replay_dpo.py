"""Replay-DPO's losses against TRL's DPOTrainer and CPOTrainer, and by their properties."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl_oracle import Accelerator

from composer_prime.channels.replay_dpo import PairTokens, replay_dpo_loss, replay_dpo_metrics
from composer_prime.config.channels import ReplayDpoConfig
from composer_prime.errors import ConfigError

LOSSES = ("cdpo", "sigmoid", "robust", "ipo", "sigmoid_norm", "simpo")


class Pairs:
    """P pairs of answers of 1 to 8 tokens with random log-probabilities and epsilons, float64."""

    def __init__(self, seed: int, count: int = 4) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (2, count), generator=draw)
        double = {"generator": draw, "dtype": torch.float64}
        self.chosen = [-2 * torch.rand(int(length), **double) for length in lengths[0]]
        self.rejected = [-2 * torch.rand(int(length), **double) for length in lengths[1]]
        self.reference = torch.stack([-torch.rand(count, **double) * lengths[side] for side in (0, 1)])
        self.epsilon_P = torch.rand(count, **double) * 0.4

    @property
    def totals(self) -> int:
        return len(self.chosen)

    def leaves(self) -> list[torch.Tensor]:
        return [side.clone().requires_grad_() for side in self.chosen + self.rejected]

    def tokens(self, leaves: list[torch.Tensor], part: slice = slice(None)) -> PairTokens:
        count = len(self.chosen)
        chosen, rejected = leaves[:count][part], leaves[count:][part]
        zero = torch.zeros(0, dtype=torch.float64)
        sums = [torch.stack([side.sum() for side in sides]) if sides else zero for sides in (chosen, rejected)]
        lengths = [torch.tensor([len(side) for side in sides]) for sides in (chosen, rejected)]
        return PairTokens(chosen_logprobs_P=sums[0], rejected_logprobs_P=sums[1], chosen_length_P=lengths[0],
                          rejected_length_P=lengths[1], reference_chosen_P=self.reference[0][part],
                          reference_rejected_P=self.reference[1][part], epsilon_P=self.epsilon_P[part])  # fmt: skip

    def loss(self, config: ReplayDpoConfig, splits: tuple[slice, ...] = (slice(None),)):
        leaves = self.leaves()
        shares = [replay_dpo_loss(self.tokens(leaves, part), self.totals, config)[0] for part in splits]
        loss = torch.stack(shares).sum()
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves]

    def trl(self, losses: dict[str, float], beta: float, noisy: bool = False):
        """TRL's loss pair by pair, each with its own label noise, averaged; and the gradients."""
        leaves, count = self.leaves(), len(self.chosen)
        each = [
            trl_pair_loss(leaves[index], leaves[count + index], self.reference[0][index], self.reference[1][index],
                          losses=losses, beta=beta, epsilon=self.epsilon_P[index].item() if noisy else 0.0)
            for index in range(count)
        ]  # fmt: skip
        loss = torch.stack(each).mean()
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves]


def trl_pair_loss(
    chosen_T: Tensor,
    rejected_T: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    losses: dict[str, float],
    beta: float,
    epsilon: float = 0.0,
) -> Tensor:
    """DPOTrainer's loss of one pair from its answers' token log-probabilities [T_c], [T_r] (with gradient).

    `losses` maps TRL's loss types to their weights. The prompt is one token; TRL divides by the unshifted mask, which
    then counts the answer's tokens.
    """
    from trl import DPOTrainer

    length = max(len(chosen_T), len(rejected_T))
    rows = [torch.cat([side, side.new_zeros(length - len(side))]) for side in (chosen_T, rejected_T)]
    mask = torch.zeros(2, 1 + length, dtype=torch.long)
    mask[0, 1 : 1 + len(chosen_T)] = 1
    mask[1, 1 : 1 + len(rejected_T)] = 1
    zeros = torch.zeros(2, length, dtype=torch.float64)
    outputs = SimpleNamespace(
        log_probs=torch.stack(rows), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
    )
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        beta=beta,
        label_smoothing=epsilon,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    inputs = {
        "input_ids": torch.zeros(2, 1 + length, dtype=torch.long),
        "attention_mask": torch.ones(2, 1 + length, dtype=torch.long),
        "completion_mask": mask,
        "ref_chosen_logps": reference_chosen[None],
        "ref_rejected_logps": reference_rejected[None],
    }
    return DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs, inputs, False)


def same(ours, theirs) -> None:
    """Loss and every token's gradient agree to 1e-6, and something moves."""
    assert abs(ours[0] - theirs[0]) <= 1e-6
    for own, other in zip(ours[1], theirs[1], strict=True):
        assert (own - other).abs().max() <= 1e-6
    assert max(grad.abs().max() for grad in ours[1]) > 1e-4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "theirs", "noisy"),
    [("cdpo", "aot", True), ("sigmoid", "sigmoid", False), ("robust", "robust", True), ("ipo", "ipo", False),
     ("sigmoid_norm", "sigmoid_norm", False)],
)  # fmt: skip
def test_loss_and_gradient_are_trl_s(seed, loss, theirs, noisy):
    # Five variants equal DPOTrainer's to 1e-6 in float64. TRL's sigmoid has no smoothing, but its aot of one pair is
    # exactly DPO with smoothed labels; each pair goes in with its own epsilon.
    pairs = Pairs(seed)
    config = ReplayDpoConfig(loss=loss, temperature=0.3, nll_weight=0.0)
    same(pairs.loss(config), pairs.trl({theirs: 1.0}, 0.3, noisy))


def test_the_nll_term_is_trl_s_sft_loss():
    # nll_weight times the chosen answer's mean negative log-likelihood, pair by pair.
    pairs = Pairs(5)
    config = ReplayDpoConfig(loss="sigmoid", temperature=0.3, nll_weight=0.2)
    same(pairs.loss(config), pairs.trl({"sigmoid": 1.0, "sft": 0.2}, 0.3))


def test_simpo_is_trl_s():
    # CPOTrainer.cpo_loss with loss_type simpo on length-averaged log-probabilities; the reference plays no part.
    from trl.experimental.cpo import CPOTrainer

    pairs = Pairs(6)
    trainer = SimpleNamespace(loss_type="simpo", beta=2.0, simpo_gamma=0.5, label_smoothing=0.0, alpha=0.0,
                              accelerator=SimpleNamespace(device="cpu"))  # fmt: skip
    leaves = pairs.leaves()
    means = [torch.stack([leaf.mean() for leaf in side]) for side in (leaves[:4], leaves[4:])]
    losses, _, _ = CPOTrainer.cpo_loss(trainer, *means)
    losses.mean().backward()
    config = ReplayDpoConfig(loss="simpo", temperature=2.0, nll_weight=0.0)
    ours = pairs.loss(config)
    same(ours, (losses.mean().detach(), [leaf.grad for leaf in leaves]))
    pairs.reference = pairs.reference * 7
    assert torch.equal(pairs.loss(config)[0], ours[0])


def test_only_simpo_needs_no_reference():
    # simpo's loss is the same, and its metrics leave out what needs a reference; the other losses name what is missing.
    pairs = Pairs(5)
    bare = dataclasses.replace(pairs.tokens(pairs.leaves()), reference_chosen_P=None, reference_rejected_P=None)
    simpo = ReplayDpoConfig(loss="simpo", temperature=2.0)
    loss, sums = replay_dpo_loss(bare, pairs.totals, simpo)
    assert torch.equal(loss.detach(), pairs.loss(simpo)[0])
    metrics = replay_dpo_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["dpo/pairs"] == 4 and not [name for name in metrics if "displace" in name]
    with pytest.raises(ConfigError, match=r"loss is cdpo, but the pairs came without reference"):
        replay_dpo_loss(bare, pairs.totals, ReplayDpoConfig())


def at_margin(z: float, loss: str, epsilon: float = 0.2):
    """(loss, dloss/dz) of one pair of one-token answers with margin z."""
    chosen = torch.tensor([z / 0.1], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    pairs = PairTokens(chosen_logprobs_P=chosen, rejected_logprobs_P=zero, chosen_length_P=one, rejected_length_P=one,
                       reference_chosen_P=zero, reference_rejected_P=zero, epsilon_P=epsilon * one)  # fmt: skip
    config = ReplayDpoConfig(loss=loss, nll_weight=0.0, temperature=0.1)
    value, sums = replay_dpo_loss(pairs, 1, config)
    value.backward()
    return value.item(), chosen.grad.item() / 0.1, sums


@pytest.mark.parametrize("loss", ["cdpo", "sigmoid", "robust", "sigmoid_norm"])
def test_a_policy_at_its_reference_has_loss_ln_2(loss):
    # z = 0: ln 2, whatever the epsilon, and not yet counted as right.
    value, _, sums = at_margin(0.0, loss)
    assert math.isclose(value, math.log(2), rel_tol=1e-12) and sums["accuracy"] == 0 and sums["displaced_fraction"] == 0


def test_a_random_label_teaches_nothing():
    # cDPO at epsilon = 1/2 is smallest at z = 0; at epsilon it is smallest at z = log((1 - eps) / eps).
    assert abs(at_margin(0.0, "cdpo", 0.5)[1]) < 1e-12
    assert min(at_margin(z, "cdpo", 0.5)[0] for z in (-2.0, -0.1, 0.1, 2.0)) > math.log(2)
    assert abs(at_margin(math.log(0.8 / 0.2), "cdpo", 0.2)[1]) < 1e-12


def test_robust_stays_finite_up_to_a_random_label():
    # epsilon = 0.5 would divide by zero; it counts as 0.45.
    assert at_margin(1.0, "robust", 0.5)[:2] == at_margin(1.0, "robust", 0.45)[:2]
    assert all(math.isfinite(number) for number in at_margin(1.0, "robust", 0.5)[:2])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 6), cut=st.integers(0, 6), loss=st.sampled_from(LOSSES))
def test_the_split_does_not_matter_and_gradients_point_the_right_way(seed, count, cut, loss):
    # Pairs over two micro-batches, either possibly empty: same loss and gradients. Without pairs: zero on the graph.
    pairs = Pairs(seed, count)
    config = ReplayDpoConfig(loss=loss)
    whole, gradients = pairs.loss(config) if count else (torch.zeros(()), [])
    if not count:
        leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
        tokens = pairs.tokens([])
        empty = PairTokens(**{name: getattr(tokens, name) for name in tokens.__dataclass_fields__}
                           | {"chosen_logprobs_P": leaf[:0] * 1.0})  # fmt: skip
        value, sums = replay_dpo_loss(empty, pairs.totals, config)
        value.backward()
        assert value == 0 and torch.equal(leaf.grad, torch.zeros(3, dtype=torch.float64))
        assert replay_dpo_metrics({name: number.item() for name, number in sums.items()}) == {"dpo/pairs": 0.0}
        return
    split, split_gradients = pairs.loss(config, (slice(0, cut), slice(cut, None)))
    assert torch.allclose(whole, split, atol=1e-12)
    for one, other in zip(gradients, split_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_metrics_by_hand():
    # Two pairs, one right and one wrong. The chosen answers lost 0.5 and gained 0.25 nats a token.
    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    pairs = PairTokens(chosen_logprobs_P=column(-3.0, -2.0), rejected_logprobs_P=column(-9.0, -1.0),
                       chosen_length_P=column(2, 4), rejected_length_P=column(4, 1),
                       reference_chosen_P=column(-2.0, -3.0), reference_rejected_P=column(-4.0, -3.0),
                       epsilon_P=column(0.1, 0.1))  # fmt: skip
    totals = 2
    _, sums = replay_dpo_loss(pairs, totals, ReplayDpoConfig(temperature=0.1))
    metrics = replay_dpo_metrics({name: value.item() for name, value in sums.items()})
    expected = {"dpo/pairs": 2, "dpo/accuracy": 0.5, "dpo/margin": (0.4 - 0.1) / 2, "dpo/displacement": -0.125,
                "dpo/displacement_rejected": (-1.25 + 2.0) / 2, "dpo/displaced_fraction": 0.5,
                "dpo/chosen_nll": (1.5 + 0.5) / 2}  # fmt: skip
    assert metrics == pytest.approx(expected, abs=1e-12)
