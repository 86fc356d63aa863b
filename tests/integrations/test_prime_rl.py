"""The loss as prime-rl's custom loss, against a stand-in of the interface that its documentation describes.

prime-rl is not on the package index. The stand-in holds the documented dataclasses and does what its trainer does with
a custom loss: import it by path, call it once a sequence with the kwargs, add up, divide by the step's trained tokens.
"""

import importlib
import math
import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor

from composer_prime.errors import ConfigError


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def train_loss(loss_config: dict, sequences: list[LossInputs]) -> tuple[Tensor, dict[str, Tensor]]:
    """The rl component of a step, as prime-rl's trainer computes it from `[trainer.loss]`."""
    module, _, name = loss_config["import_path"].rpartition(".")
    custom = getattr(importlib.import_module(module), name)
    outputs = [custom(inputs, **loss_config["kwargs"]) for inputs in sequences]
    tokens = sum(int(inputs.loss_mask.sum()) for inputs in sequences)
    metrics = {name: torch.stack([output.metrics[name] for output in outputs]) for name in outputs[0].metrics}
    return torch.stack([output.loss for output in outputs]).sum() / tokens, metrics


@pytest.fixture
def prime_rl(monkeypatch):
    """The stand-in as prime_rl.trainer.rl.loss."""
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        module = ModuleType(name)
        module.LossInputs, module.LossOutputs = LossInputs, LossOutputs
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("composer_prime.integrations.prime_rl", None)
    yield
    sys.modules.pop("composer_prime.integrations.prime_rl", None)


def sequences(count: int = 3, weights: bool = False) -> list[LossInputs]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        double = {"generator": draw, "dtype": torch.float64}
        logprobs = -2 * torch.rand(16 + index, **double)
        made.append(LossInputs(
            trainer_logprobs=logprobs.requires_grad_(),
            inference_logprobs=(logprobs.detach() + 0.5 * torch.randn(16 + index, **double)).clamp(max=-1e-3),
            ref_logprobs=None,
            advantages=torch.randn(16 + index, **double),
            loss_mask=torch.rand(16 + index, **double) < 0.7,
            loss_weights=torch.rand(16 + index, **double) if weights else None,
        ))  # fmt: skip
    return made


def config(**kwargs) -> dict:
    return {"import_path": "composer_prime.integrations.prime_rl.composer_loss", "kwargs": kwargs}


@pytest.mark.parametrize("weights", [False, True])
def test_with_its_settings_the_loss_is_prime_rl_s_default_but_its_pull(prime_rl, weights):
    # dppo without a cap: the sum of w (-keep A r) over tokens, its published form without the pull toward the sampler.
    rows = sequences(weights=weights)
    settings = {"objective": "dr_grpo", "correction": "dppo", "dppo_ratio_cap": None}
    loss, metrics = train_loss(config(**settings), rows)
    total, masked = torch.zeros((), dtype=torch.float64), []
    for row in rows:
        log_ratio = row.trainer_logprobs - row.inference_logprobs
        moved = row.trainer_logprobs.exp() - row.inference_logprobs.exp()
        dropped = torch.where(row.advantages > 0, moved > 0.2, moved < -0.2)
        per_token = -(1.0 - dropped.double()) * row.advantages * log_ratio.exp()
        weight = 1.0 if row.loss_weights is None else row.loss_weights
        total = total + (per_token * weight)[row.loss_mask].sum()
        masked.append(dropped[row.loss_mask].double().mean())
    total = total / sum(int(row.loss_mask.sum()) for row in rows)
    assert torch.allclose(loss, total, atol=1e-12)
    ours = torch.autograd.grad(loss, [row.trainer_logprobs for row in rows], retain_graph=True)
    theirs = torch.autograd.grad(total, [row.trainer_logprobs for row in rows])
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(ours, theirs, strict=True))
    assert torch.allclose(metrics["masked_fraction"], torch.stack(masked)) and metrics["masked_fraction"].any()


@pytest.mark.parametrize("objective", ["dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo"])
def test_every_objective_runs_and_an_empty_sequence_is_a_zero(prime_rl, objective):
    # Finite loss and gradient; a sequence without member tokens adds a zero that backward passes through.
    rows = sequences()
    rows[1].loss_mask = torch.zeros_like(rows[1].loss_mask)
    loss, metrics = train_loss(config(objective=objective), rows)
    loss.backward()
    assert math.isfinite(loss.item()) and rows[0].trainer_logprobs.grad.abs().max() > 0
    assert torch.equal(rows[1].trainer_logprobs.grad, torch.zeros_like(rows[1].trainer_logprobs))
    assert metrics["mismatch_kl"].shape == (3,) and metrics["mismatch_kl"][1] == 0


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"objective": "dpao"}, "'dapo'"),
        ({"denominator": "sequence"}, "prime-rl divides a custom loss by the tokens of the step"),
        ({"kl": {"weight": 0.1}}, "came without reference log-probabilities"),
    ],
)
def test_settings_without_their_inputs_are_refused(prime_rl, kwargs, words):
    # Unknown names, and settings that need what LossInputs does not hold: an error with the remedy.
    with pytest.raises(ConfigError) as raised:
        train_loss(config(**kwargs), sequences())
    assert words in str(raised.value)
