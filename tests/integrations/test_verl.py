"""The losses in verl's registry, called by verl's own ppo_loss. Skipped where verl is not installed.

An environment of its own has it: docs/how-to/other-trainers.md.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)

from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from composer_prime.errors import ConfigError
from composer_prime.integrations.padded import make_po_config
from composer_prime.integrations.verl import OBJECTIVES, register

PROMPT, RESPONSE, ROWS = 3, 7, 6


class Batch:
    """A batch as verl's actor passes it to ppo_loss: prompts of 3 tokens, responses of up to 7, all unpadded."""

    def __init__(self, seed: int, gap: float = 0.4) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, RESPONSE + 1, (ROWS,), generator=draw)
        self.mask = (torch.arange(RESPONSE) < lengths[:, None]).long()
        self.logprobs = -2 * torch.rand(ROWS, RESPONSE, generator=draw, dtype=torch.float64)
        self.old = (self.logprobs + gap * torch.randn(ROWS, RESPONSE, generator=draw, dtype=torch.float64)).clamp(max=0)
        self.advantages = torch.randn(ROWS, 1, generator=draw, dtype=torch.float64).expand(-1, RESPONSE).contiguous()

    def loss(self, mode: str, aggregation: str, weights: Tensor | None = None, **actor) -> tuple[Tensor, Tensor, dict]:
        """(loss, gradient [rows, response], metrics) from verl's ppo_loss with policy_loss.loss_mode = `mode`."""
        leaf = self.logprobs.clone().requires_grad_()
        values = [torch.cat([torch.zeros(PROMPT - 1), leaf[row][self.mask[row].bool()], torch.zeros(1)])
                  for row in range(ROWS)]  # fmt: skip
        fields = {
            "prompts": torch.ones(ROWS, PROMPT, dtype=torch.long),
            "responses": torch.ones(ROWS, RESPONSE, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), self.mask], dim=1),
            "response_mask": self.mask,
            "old_log_probs": self.old * self.mask,
            "advantages": self.advantages,
        }
        data = TensorDict(fields | ({} if weights is None else {"rollout_is_weights": weights}), batch_size=[ROWS])
        counts = {"dp_size": 1, "batch_num_tokens": int(self.mask.sum()), "global_batch_size": ROWS}
        for name, value in counts.items():
            data.set_non_tensor(name, value)
        settings = {"clip_ratio_c": 1e9, "loss_agg_mode": aggregation} | actor
        config = FSDPActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=ROWS,
                                 policy_loss=PolicyLossConfig(loss_mode=mode), **settings)  # fmt: skip
        loss, metrics = ppo_loss(config, {"log_probs": torch.cat(values)}, data)
        loss.backward()
        return loss.detach(), leaf.grad, metrics


def same(ours, theirs) -> None:
    assert abs(ours[0] - theirs[0]) <= 1e-6 and (ours[1] - theirs[1]).abs().max() <= 1e-6
    assert ours[1].abs().max() > 1e-4


@pytest.mark.parametrize(
    ("objective", "settings", "mode", "aggregation", "actor"),
    [
        ("dapo", {}, "vanilla", "token-mean", {"clip_ratio_high": 0.28}),
        ("grpo", {}, "vanilla", "seq-mean-token-mean", {}),
        ("dr_grpo", {"correction": "none"}, "vanilla", "seq-mean-token-sum-norm", {"loss_scale_factor": 50}),
        ("cispo", {}, "cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    ],
)
@pytest.mark.parametrize("weighed", [False, True])
def test_the_registered_loss_is_verl_s_own_of_the_same_name(objective, settings, mode, aggregation, actor, weighed):
    # Through ppo_loss, with and without rollout-correction weights: loss and gradients to 1e-6 in float64.
    batch = Batch(0, gap=0.8)
    weights = torch.rand(ROWS, RESPONSE, generator=torch.Generator().manual_seed(1)).double() if weighed else None
    register("under_test", make_po_config(objective, **settings))
    ours = batch.loss("under_test", "token-mean", weights, **actor)
    same(ours, batch.loss(mode, aggregation, weights, **actor))
    assert "actor/mismatch_kl" in ours[2] and "actor/clip_fraction" in ours[2]


def test_gspo_has_verl_s_value():
    # verl's gspo stops the gradient at the sequence ratio (GSPO-token); values agree, gradients differ by design.
    batch = Batch(2, gap=2e-4)
    ours = batch.loss("composer_gspo", "token-mean")
    theirs = batch.loss("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    assert abs(ours[0] - theirs[0]) <= 1e-6 and ours[1].abs().max() > 1e-4


def test_dppo_has_verl_s_gradient():
    # verl's dppo_tv is written with log pi and a truncated ratio: other value, same gradient, masked and capped alike.
    batch = Batch(3, gap=1.5)
    ratio = (batch.logprobs - batch.old).exp()[batch.mask.bool()]
    assert (ratio > 2.0).any()
    register("under_test", make_po_config("dapo", correction="dppo", dppo_ratio_cap=2.0))
    ours = batch.loss("under_test", "token-mean")
    theirs = batch.loss("dppo_tv", "token-mean", clip_ratio_c=2.0)
    assert (ours[1] - theirs[1]).abs().max() <= 1e-6 and ours[1].abs().max() > 1e-4
    assert ours[2]["actor/masked_fraction"].values[0] == pytest.approx(theirs[2]["actor/pg_clipfrac"].values[0])


@pytest.mark.process
def test_an_external_module_registers_all_names():
    # As verl's documentation asks: the module in VERL_USE_EXTERNAL_MODULES is imported with verl itself.
    code = "import verl; from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r; print(sorted(r))"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "composer_prime.integrations.verl"}
    listed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert listed.returncode == 0, listed.stderr
    assert all(f"composer_{objective}" in listed.stdout for objective in OBJECTIVES)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_policy_learns_under_verl_s_ppo_loss(objective):
    # Gradient steps on log-probabilities of a small softmax policy: what has a positive advantage becomes likelier.
    fn = get_policy_loss_fn(f"composer_{objective}")
    logits = torch.zeros(8, 5, requires_grad=True)
    actions = torch.tensor([0, 0, 1, 1, 2]).expand(8, 5)
    good = torch.arange(8) < 3
    advantages = torch.where(good, 1.0, -1.0)[:, None].expand(8, 5)
    optimizer = torch.optim.SGD([logits], lr=2.0)

    def logprobs() -> Tensor:
        return logits.log_softmax(-1).gather(1, actions)

    before = logprobs().detach()
    for _ in range(5):
        now = logprobs()
        loss, _ = fn(old_log_prob=now.detach(), log_prob=now, advantages=advantages,
                     response_mask=torch.ones(8, 5), config=None)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = logprobs().detach() - before
    assert moved[good].mean() > 0.01 and moved[~good].mean() < -0.01


@pytest.mark.parametrize(
    ("objective", "settings", "words"),
    [("bnpo", {}, "denominator = micro_batch"), ("dapo", {"kl": {"weight": 0.1}}, "use actor.use_kl_loss")],
)
def test_what_verl_cannot_serve_is_refused_at_registration(objective, settings, words):
    # Settings that need what verl does not pass to a policy loss: an error that names where verl has them.
    with pytest.raises(ConfigError) as raised:
        register("refused", make_po_config(objective, **settings))
    assert words in str(raised.value)
