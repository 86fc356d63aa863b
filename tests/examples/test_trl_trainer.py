"""examples/trl_trainer.py: the numbers of TRL's own losses where they mean the same, and training of the tiny model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import composer_prime
from composer_prime.channels.policy import PolicyConfig
from composer_prime.errors import ConfigError
from examples.trl_trainer import OwnLossTrainer

TINY = Path(composer_prime.__file__).parent / "assets/tiny/policy"


def digits(completions: list[str], **_) -> list[float]:
    """Share of digits among a completion's characters."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def trainer_of(folder: Path, policy: PolicyConfig, **settings):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    given = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 12, "learning_rate": 1e-3,
             "max_steps": 2, "scale_rewards": "none", "beta": 0.0} | settings  # fmt: skip
    args = GRPOConfig(output_dir=str(folder), report_to=[], use_cpu=True, save_strategy="no", logging_steps=1,
                      disable_tqdm=True, seed=0, lr_scheduler_type="constant", bf16=False, **given)  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["What is 3 plus 4?", "add 10 and 5", "sum of 2, 8", "6 times 7"] * 4})
    return OwnLossTrainer(model, reward_funcs=digits, args=args, train_dataset=prompts, processing_class=tokenizer,
                          policy=policy)  # fmt: skip


def batch_of(trainer: GRPOTrainer) -> dict:
    """A generated, scored batch of one accumulation window."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def gradients(trainer: GRPOTrainer, loss: torch.Tensor) -> list[torch.Tensor]:
    trainer.model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "scaling"), [("dr_grpo", "none"), ("grpo", "group"), ("dapo", "group")])
def test_on_the_same_batch_loss_and_gradients_are_trl_s(tmp_path, objective, scaling):
    # A batch that TRL generated and scored, with old log-probabilities that differ from the policy's: our subclass's
    # loss and every parameter's gradient equal GRPOTrainer's with the same loss_type, to float32's precision.
    policy = PolicyConfig(objective=objective, correction="none", clip_high=0.2)
    trainer = trainer_of(tmp_path, policy, scale_rewards=scaling, loss_type=objective)
    batch = batch_of(trainer)
    batch["advantages"] = torch.linspace(-1, 1, len(batch["advantages"]))
    with torch.no_grad():
        logprobs = trainer.tokens(trainer.model, batch).logprobs_T
    old = torch.zeros(batch["completion_ids"].shape)
    old[batch["completion_mask"].bool()] = logprobs
    batch["old_per_token_logps"] = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    theirs = GRPOTrainer._compute_loss(trainer, trainer.model, copy.copy(batch))
    their_gradients = gradients(trainer, theirs)
    ours = trainer._compute_loss(trainer.model, batch)
    our_gradients = gradients(trainer, ours)
    assert abs(ours - theirs) <= 1e-6 and ours.abs() > 1e-4
    assert max((one - other).abs().max() for one, other in zip(our_gradients, their_gradients, strict=True)) <= 1e-6


@pytest.mark.slow
def test_the_tiny_model_learns_in_trl_s_loop(tmp_path):
    # TRL's own train(): 6 steps of two accumulated micro-batches; the reward rises and the metrics are ours.
    trainer = trainer_of(tmp_path, PolicyConfig(), max_steps=6, gradient_accumulation_steps=2, num_generations=16,
                         learning_rate=2e-3)  # fmt: skip
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert any((one != other).any() for one, other in zip(before, trainer.model.parameters(), strict=True))
    last = trainer.state.log_history[-2]
    assert {"policy/mismatch_kl", "policy/ess", "policy/entropy"} <= last.keys()


def test_arguments_of_trl_that_contradict_the_channels_are_refused(tmp_path):
    # Advantages scaled in another way than the objective needs, or another KL weight: both values and the remedy.
    with pytest.raises(ConfigError, match=r"scale_rewards is 'none', but objective grpo.*set scale_rewards = 'group'"):
        trainer_of(tmp_path, PolicyConfig(objective="grpo"))
    with pytest.raises(ConfigError, match=r"GRPOConfig.beta is 0.0, but kl.weight is 0\.1"):
        trainer_of(tmp_path, PolicyConfig(kl={"weight": 0.1}))
