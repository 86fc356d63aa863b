"""What settings would quietly do: not wrong, but seldom meant. For the plan."""

from __future__ import annotations

from composer_prime.config import Config
from composer_prime.config.replay_dpo import SIMPO_TEMPERATURE


def setting_notes(config: Config) -> list[str]:
    """One sentence each, with the key, its value, what follows from it and the remedy."""
    parts = (_all_warm_up, _never_begins, _short_rows, _near_an_end, _flat_simpo)
    return [note for part in parts for note in part(config)]


def _all_warm_up(config: Config) -> list[str]:
    """A short trial of a configuration that is made for long runs: the same steps as the long run's first ones."""
    warmup, steps = config.trainer.schedule.warmup_steps, config.run.max_steps
    if not 0 < steps <= warmup:
        return []
    return [
        f"run.max_steps is {steps} and trainer.schedule.warmup_steps is {warmup}: all steps are warm-up, the learning "
        f"rate ends at {steps / warmup:.0%} of its peak; for more set --trainer.schedule.warmup_steps 0"
    ]


def _never_begins(config: Config) -> list[str]:
    last = config.run.max_steps
    channels = {"sdpo": config.channels.sdpo, "replay_dpo": config.channels.replay_dpo}
    return [
        f"channels.{name}.schedule.start_step is {channel.schedule.start_step}, but run.max_steps is {last}: the "
        f"channel never gets its weight of {channel.weight:g}; set start_step <= {last}, or its weight to 0"
        for name, channel in channels.items()
        if channel.weight and 0 < last < channel.schedule.start_step
    ]


def _short_rows(config: Config) -> list[str]:
    row, context = config.trainer.micro_batch_tokens, config.model.max_context
    if not config.channels.sdpo.weight or row >= 2 * context:
        return []
    return [
        f"trainer.micro_batch_tokens is {row:,}, and a sample of up to model.max_context = {context:,} tokens shares "
        "its row with the hinted documents of its turns: long rollouts lose hints (counted as row_full); set "
        f"micro_batch_tokens >= {2 * context:,} (2 x max_context)"
    ]


def _near_an_end(config: Config) -> list[str]:
    sdpo = config.channels.sdpo
    if not sdpo.weight or not (0 < sdpo.beta < 0.05 or 0.95 < sdpo.beta < 1):
        return []
    end = 0 if sdpo.beta < 0.5 else 1
    return [
        f"channels.sdpo.beta is {sdpo.beta}: near its ends the generalised JSD goes to 0, not to the KL divergence "
        f"that beta = {end} gives; set beta = {end}, or a value in 0.05..0.95"
    ]


def _flat_simpo(config: Config) -> list[str]:
    replay = config.channels.replay_dpo
    if not replay.weight or replay.loss != "simpo" or replay.temperature >= 1:
        return []
    return [
        f"channels.replay_dpo.temperature is {replay.temperature:g} with loss = simpo, whose margin is a mean a token: "
        f"the loss hardly tells answers apart; leave it out ({SIMPO_TEMPERATURE:g}), or set about that"
    ]
