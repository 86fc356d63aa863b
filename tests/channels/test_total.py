"""The sum of the loss terms and its schedules."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Rows
from test_replay_dpo import Pairs
from test_sdpo import Turns

from composer_prime.channels.policy import PolicyConfig
from composer_prime.channels.replay_dpo import replay_dpo_loss
from composer_prime.channels.sdpo import sdpo_loss
from composer_prime.channels.term import Sums, Term, TermConfig, TermRows, channel_metrics, total_loss
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import Row
from composer_prime.wire.types import StepTotals

TOTALS = StepTotals(samples=5, tokens=99, distilled_tokens=7, distilled_turns=2, units={"replay_dpo": 4})


class Step:
    """A micro-batch with tokens for all three loss terms, all attached to one leaf."""

    def __init__(self, seed: int = 0) -> None:
        self.rows, self.turns, self.pairs = Rows(seed), Turns(seed, [3, 4]), Pairs(seed)
        self.leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def inputs(self) -> dict:
        policy, sdpo, dpo = self.leaf
        leaves = [side + dpo * torch.arange(len(side)) for side in self.pairs.chosen]
        leaves += [side - dpo * torch.arange(len(side)) for side in self.pairs.rejected]
        return {
            "policy": self.rows.tokens(self.rows.logprobs_BT + policy * torch.arange(9)),
            "sdpo": self.turns.tokens(self.turns.divergence_D * (1 + sdpo)),
            "replay_dpo": self.pairs.tokens(leaves),
        }

    def backward(self, config: ChannelsConfig, step: int = 1, inputs: dict | None = None):
        self.leaf.grad = None
        parts = total_loss(config.terms(32), inputs or self.inputs(), TOTALS, step)
        parts.total.backward()
        return parts, self.leaf.grad.clone()


def weighed(alpha: float, beta: float, **more) -> ChannelsConfig:
    return ChannelsConfig(sdpo={"weight": alpha} | more, replay_dpo={"weight": beta} | more)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_without_weights_the_total_is_the_policy_loss_bit_for_bit(seed):
    # alpha = beta = 0: value and gradient are those of the policy loss alone, bit for bit, whether the other terms'
    # tokens are there or not, and even if those are broken.
    step = Step(seed)
    full = step.inputs()
    alone, gradient = step.backward(ChannelsConfig(), inputs={"policy": full["policy"]})
    loss, row_gradient = step.rows.loss(PolicyConfig())
    with_tokens, other_gradient = step.backward(ChannelsConfig())
    broken = step.inputs() | {"sdpo": step.turns.tokens(step.turns.divergence_D * math.nan)}
    with_nan, nan_gradient = step.backward(ChannelsConfig(), inputs=broken)
    for parts in (alone, with_tokens, with_nan):
        assert parts.total.item() == alone.total.item()
    assert torch.equal(gradient, other_gradient) and torch.equal(gradient, nan_gradient)
    own_totals = step.rows.totals()
    assert total_loss(ChannelsConfig().terms(32), full, own_totals).total.item() == loss.item()
    assert row_gradient.abs().max() > 0


def test_the_total_is_the_weighted_sum_of_its_terms():
    # L = policy + 0.5 sdpo + 0.25 dpo, each term's own loss unweighted in the sums, and gradients likewise.
    step = Step(1)
    inputs = step.inputs()
    config = weighed(0.5, 0.25)
    parts, gradient = step.backward(config, inputs=inputs)
    policy = total_loss(ChannelsConfig().terms(32), inputs, TOTALS).total
    sdpo, _ = sdpo_loss(inputs["sdpo"], TOTALS.samples * 32, config.sdpo)
    dpo, _ = replay_dpo_loss(inputs["replay_dpo"], 4, config.replay_dpo)
    assert torch.allclose(parts.total, policy + 0.5 * sdpo + 0.25 * dpo, atol=1e-12)
    assert parts.sums["loss/sdpo"] == sdpo and parts.sums["loss/replay_dpo"] == dpo
    _, plain = step.backward(ChannelsConfig())
    assert gradient[0] == plain[0] and gradient[1] != 0 and gradient[2] != 0 and plain[1] == plain[2] == 0
    metrics = channel_metrics(weighed(1, 1).terms(32), {name: value.item() for name, value in parts.sums.items()})
    assert {"loss/total", "loss/sdpo", "policy/entropy", "sdpo/jsd", "dpo/accuracy"} <= metrics.keys()


def test_without_its_weight_the_policy_loss_adds_nothing():
    # channels.policy.weight = 0, as in SDPO and OPSD: the other terms alone, and the policy's metrics stay.
    step = Step(1)
    config = ChannelsConfig(policy={"weight": 0}, sdpo={"weight": 0.5})
    parts, gradient = step.backward(config)
    assert parts.total == 0.5 * parts.sums["loss/sdpo"] and parts.sums["loss/policy"] != 0
    assert gradient[0] == 0 and gradient[1] != 0


def test_terms_without_tokens_are_zeros_on_the_graph():
    # No trained token, turn or pair in this micro-batch: 0 with a gradient of 0 in every leaf, and only counts.
    step = Step(2)
    full = step.inputs()
    none = {
        "policy": step.rows.tokens(step.rows.logprobs_BT + step.leaf[0], slice(0, 0)),
        "sdpo": step.turns.tokens(step.turns.divergence_D * step.leaf[1], slice(0, 0)),
        "replay_dpo": dataclasses.replace(
            step.pairs.tokens(step.pairs.leaves(), slice(0, 0)),
            chosen_logprobs_P=full["replay_dpo"].chosen_logprobs_P[:0],
        ),
    }
    parts, gradient = step.backward(weighed(1.0, 1.0), inputs=none)
    assert parts.total == 0 and torch.equal(gradient, torch.zeros(3, dtype=torch.float64))
    metrics = channel_metrics(weighed(1, 1).terms(32), {name: value.item() for name, value in parts.sums.items()})
    zeros = ("loss/policy", "loss/sdpo", "loss/replay_dpo", "loss/total", "sdpo/turns", "sdpo/tokens", "dpo/pairs")
    assert metrics == dict.fromkeys(zeros, 0.0)


def test_the_names_of_the_sums_do_not_depend_on_the_tokens():
    # Ranks add their sums up by position: a rank without turns or pairs must have the same names.
    step = Step(3)
    full = step.inputs()
    fewer = full | {"sdpo": step.turns.tokens(step.turns.divergence_D, slice(0, 0))}
    config = weighed(1.0, 1.0)
    one, other = (total_loss(config.terms(32), inputs, TOTALS) for inputs in (full, fewer))
    assert list(one.sums) == list(other.sums)


class OwnTerm(Term):
    name = "own"
    given: Any = None

    def rows(self, row: Row) -> TermRows:
        return TermRows(positions=row.trained)

    def loss(self, inputs: Any, totals: StepTotals) -> tuple[torch.Tensor, Sums]:
        return self.given

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {}


# A loss without its sums, one number a token, one without a gradient, none: the function is named with its line.
@pytest.mark.parametrize(
    "given", [torch.zeros((), requires_grad=True), (torch.zeros(3), {}), (torch.zeros(()), {}), None]
)
def test_an_own_term_that_gives_no_loss(given):
    term, inputs = OwnTerm(TermConfig(weight=1.0)), Step(1).inputs() | {"own": None}
    term.given = given
    with pytest.raises(ConfigError, match=r"test_total\.py:\d+, in loss"):
        total_loss([*ChannelsConfig().terms(32), term], inputs, TOTALS)
    term.given = (torch.zeros((), requires_grad=True), {"n": torch.ones(())})
    assert "own/n" in total_loss([*ChannelsConfig().terms(32), term], inputs, TOTALS).sums


def test_schedules():
    # The full weight to step 10, two steps down, then the policy loss alone.
    schedule = {"end_step": 10, "decay_steps": 1}
    config = weighed(0.6, 0.6, schedule=schedule)
    weights = [config.sdpo.weight_at(step) for step in range(1, 14)]
    assert weights == pytest.approx([*[0.6] * 10, 0.3, 0, 0])
    assert weights == [config.replay_dpo.weight_at(step) for step in range(1, 14)]
    step = Step(4)
    plain, gradient = step.backward(ChannelsConfig())
    parts, own = step.backward(config, 12)
    assert parts.total.item() == plain.total.item() and torch.equal(own, gradient)
    assert step.backward(config, 5)[0].total.item() != plain.total.item()


def test_a_weight_without_its_input_is_refused():
    # alpha > 0 without any turns (None) would silently train without SDPO.
    step = Step(5)
    inputs = step.inputs()
    for missing, config in (("sdpo", weighed(0.1, 0)), ("replay_dpo", weighed(0, 0.1))):
        with pytest.raises(ConfigError, match=rf"channels\.{missing}\.weight"):
            total_loss(config.terms(32), {name: inputs[name] for name in inputs if name != missing}, TOTALS)


def test_nan_in_an_input_is_nan_in_the_loss():
    # Nothing hides it, so the step finds it in its loss before anything is changed.
    for channel, name in (("policy", "logprobs_T"), ("policy", "advantages_T"), ("sdpo", "divergence_D"),
                          ("replay_dpo", "chosen_logprobs_P")):  # fmt: skip
        inputs = Step(6).inputs()
        part = inputs[channel]
        broken = getattr(part, name).detach().clone()
        broken[1] = math.nan
        inputs[channel] = dataclasses.replace(part, **{name: broken})
        assert total_loss(weighed(1.0, 1.0).terms(32), inputs, TOTALS).total.isnan()
