"""This project's policy losses in verl's registry, under the names composer_dr_grpo, composer_grpo, composer_dapo,
composer_gspo and composer_cispo.

    VERL_USE_EXTERNAL_MODULES=composer_prime.integrations.verl python -m verl.trainer.main_ppo \
        actor_rollout_ref.actor.policy_loss.loss_mode=composer_dr_grpo ...

verl imports the modules of that variable in every process; importing this one registers the losses. For other settings,
name a module of your own there that calls `register`.

verl's interface sets the limits:
1. mu is verl's `old_log_probs`: the actor's own at the start of the step, or the engine's in its bypass mode.
2. Rollout-correction weights that verl computed multiply each token's loss.
3. Advantages come from verl's estimator: set algorithm.norm_adv_by_std_in_grpo as the objective needs it.
4. KL and entropy terms are verl's own (actor.use_kl_loss, actor.entropy_coeff); a policy with our KL is refused.
5. bnpo needs the number of micro-batches, which verl does not pass; it is refused as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from composer_prime.channels.policy import PolicyConfig, policy_loss, policy_metrics
from composer_prime.errors import ConfigError
from composer_prime.integrations.padded import flat_tokens, make_po_config
from composer_prime.wire.types import StepTotals

OBJECTIVES = ("dr_grpo", "grpo", "dapo", "gspo", "cispo")


def register(name: str, policy: PolicyConfig) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Make `policy` available to verl as policy_loss.loss_mode = `name`, and return the function that verl will call.

    Raises ConfigError for settings that verl's interface has no data for: denominator `micro_batch`, or a KL weight.
    """
    refused = {
        "denominator = micro_batch (bnpo)": policy.denominator == "micro_batch",
        "kl.weight > 0 (use actor.use_kl_loss)": policy.kl.weight > 0,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(f"policy loss {name!r} has {setting}: verl does not provide what it needs")

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """verl's interface: tensors [batch, response]. The policy has the denominator: `loss_agg_mode` is ignored."""
        tokens = flat_tokens(log_prob, old_log_prob, advantages, response_mask, weight_BT=rollout_is_weights)
        batch_info = dict(getattr(config, "global_batch_info", None) or {})
        ranks = batch_info.get("dp_size") or 1
        rows = int((response_mask.sum(-1) > 0).sum())
        totals = StepTotals(
            samples=int(batch_info.get("global_batch_size") or rows),
            tokens=int(batch_info.get("batch_num_tokens") or tokens.logprobs_T.numel()),
        )
        length = policy.max_completion_length or batch_info.get("loss_scale_factor")
        length = length or response_mask.shape[-1]
        share, sums = policy_loss(tokens, totals, policy, length)
        metrics = policy_metrics({name: value.item() for name, value in sums.items()})
        return share * ranks, {f"actor/{key.removeprefix('policy/')}": value for key, value in metrics.items()}

    return register_policy_loss(name)(loss)


for _objective in OBJECTIVES:
    register(f"composer_{_objective}", make_po_config(_objective))
