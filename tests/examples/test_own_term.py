"""A loss term from outside, named by its import path, is trained with settings of its own."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import Row, pack, totals
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer.data import unpack
from trainer.model.policy_model import Policy
from trainer.train import loss_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "examples"), *sys.path])


def own(**settings) -> ChannelsConfig:
    term = {"name": "own_term:EntropyFloor", "weight": 2.0, "settings": settings}
    return ChannelsConfig.model_validate({"policy": {"correction": "none"}, "own": [term]})


def make_sample(index: int) -> Sample:
    mask = [0] * 3 + [1] * (3 + index)
    return Sample(
        sample_id=f"{index}", group_id="g", source="s", task_id="t", loss_mask=pack_flags(mask), reward=1.0,
        input_ids=pack_ints(torch.arange(len(mask)) + index), logprobs=pack_floats([-3.0 * each for each in mask]),
        advantages=pack_floats([(1.0 if index % 2 else -1.0) * each for each in mask]), temperature=1.0,
        version_spans=[VersionSpan(3, len(mask), 0)], turns=[],
    )  # fmt: skip


def small_policy() -> Policy:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Policy(transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager"), "eager")


def step_loss(policy: Policy, channels: ChannelsConfig, budget: int) -> tuple[torch.Tensor, float]:
    """The step's loss, and what the own term adds to it, over rows of at most `budget` tokens."""
    samples, terms = [make_sample(index) for index in range(4)], channels.terms(8)
    (batches,) = pack(samples, run_id="r", step=1, world_size=1, max_tokens=budget)
    rows = [Row.of(batch) for batch in batches]
    counts = {term.name: sum(term.count(row) for row in rows) for term in terms}
    step_totals = msgspec.structs.replace(totals(samples), own=counts)
    parts = [loss_of(policy, unpack(row, terms, CPU), step_totals, terms)[0] for row in rows]
    return sum(part.total for part in parts), sum(part.sums["loss/entropy_floor"].item() for part in parts)


def test_an_own_term_is_trained_and_does_not_depend_on_rows():
    # A floor above the largest entropy: a few steps of gradient descent raise the entropy of the chosen tokens. In
    # many rows or one, the loss is the same.
    policy, channels = small_policy(), own(floor_nats=4.0)
    (one, _), (many, _) = (step_loss(policy, channels, budget) for budget in (4096, 16))
    assert torch.allclose(one, many, atol=1e-5)
    optimizer, seen = torch.optim.SGD(policy.parameters(), lr=0.5), []
    for _ in range(5):
        optimizer.zero_grad()
        loss, added = step_loss(policy, channels, 4096)
        loss.backward()
        optimizer.step()
        seen.append(added)
    assert seen[-1] < seen[0]


# A mean over its own micro-batch is named with its file and line.
def test_a_mean_of_a_micro_batch_is_named(monkeypatch, caplog):
    policy, channels = small_policy(), own(floor_nats=4.0)
    step_loss(policy, channels, 16)
    assert not caplog.records
    term = type(channels.terms(8)[-1])
    monkeypatch.setattr(term, "loss", lambda self, inputs, totals: (inputs.entropy.mean(), {"tokens": torch.ones(())}))
    step_loss(policy, channels, 4096)
    assert "test_own_term.py" in caplog.text and "totals.own" in caplog.text


def test_settings_that_the_term_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="no_such"):
        own(no_such=1).terms(8)
