"""Are these numbers fit to be trained on? Reads every tensor, so on an accelerator the host waits: call it where that
is no loss, or after a step whose loss came out NaN, to say where it began.

The losses themselves hide nothing: NaN in any input is NaN in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from composer_prime.channels.policy import PolicyTokens
from composer_prime.channels.replay_dpo import PairTokens
from composer_prime.channels.sdpo import DistilTokens
from composer_prime.channels.total import ChannelInputs
from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.wire.types import StepTotals

EPSILON_MAX = 0.5


def check_inputs(inputs: ChannelInputs, totals: StepTotals) -> None:
    """Look at every tensor of a micro-batch and at the step's denominators.

    Raises NonFiniteError (NaN or infinity, with channel, tensor and position) or RunMismatchError (lengths that differ,
    an owner out of range, a turn without tokens, a negative weight, an epsilon outside [0, 0.5], a denominator smaller
    than this micro-batch's own count).
    """
    channels: list[PolicyTokens | DistilTokens | PairTokens] = [
        part for part in (inputs.policy, inputs.sdpo, inputs.replay_dpo) if part is not None
    ]
    for part in channels:
        _check_lengths(part)
        _check_finite(part)
    _check_owners("channel 1", inputs.policy.sequence_T, inputs.policy.sequences)
    _check_denominator("tokens", totals.tokens, inputs.policy.logprobs_T.numel())
    if inputs.sdpo is not None:
        _check_distillation(inputs.sdpo, totals)
    if inputs.replay_dpo is not None:
        _check_pairs(inputs.replay_dpo, totals)


def _tensors(part: object) -> Iterator[tuple[str, Tensor]]:
    for field in fields(part):  # pyright: ignore[reportArgumentType]
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _channel(part: object) -> str:
    return {PolicyTokens: "channel 1", DistilTokens: "channel 2", PairTokens: "channel 3"}[type(part)]


def _check_lengths(part: object) -> None:
    shapes = {name: tuple(value.shape) for name, value in _tensors(part)}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise RunMismatchError(f"{_channel(part)}: tensors must be one-dimensional and equally long, not {listed}")


def _check_finite(part: object) -> None:
    for name, value in _tensors(part):
        bad = (~torch.isfinite(value.detach())).nonzero()
        if bad.numel():
            place = int(bad[0])
            raise NonFiniteError(
                f"{_channel(part)}: {name} is {value[place].item()} at position {place} ({len(bad)} of {value.numel()} "
                "are NaN or infinite): look at the logits of that token; lower the learning rate if they grew"
            )


def _check_owners(channel: str, owner: Tensor, count: int) -> None:
    if owner.numel() and not (int(owner.min()) >= 0 and int(owner.max()) < count):
        raise RunMismatchError(
            f"{channel}: tokens belong to {int(owner.min())}..{int(owner.max())}, but there are {count}, counted from 0"
        )


def _check_denominator(name: str, total: int, own: int) -> None:
    if total < own:
        raise RunMismatchError(
            f"the step's totals count {total} {name}, but this micro-batch alone has {own}: totals are over all ranks "
            "and micro-batches of the step, before its first backward pass"
        )


def _check_distillation(tokens: DistilTokens, totals: StepTotals) -> None:
    _check_owners("channel 2", tokens.turn_D, tokens.turns)
    empty = set(range(tokens.turns)) - set(tokens.turn_D.tolist())
    if empty:
        raise RunMismatchError(
            f"channel 2: turns {sorted(empty)} of {tokens.turns} have no token in the mask (thinking counts): leave "
            "them out"
        )
    _refuse_below("channel 2: weight_D", tokens.weight_D, 0.0)
    _check_denominator("distilled_tokens", totals.distilled_tokens, tokens.divergence_D.numel())
    _check_denominator("distilled_turns", totals.distilled_turns, tokens.turns)


def _check_pairs(pairs: PairTokens, totals: StepTotals) -> None:
    _refuse_below("channel 3: chosen_length_P", pairs.chosen_length_P, 1.0)
    _refuse_below("channel 3: rejected_length_P", pairs.rejected_length_P, 1.0)
    outside = ((pairs.epsilon_P < 0) | (pairs.epsilon_P > EPSILON_MAX)).nonzero()
    if outside.numel():
        place = int(outside[0])
        raise RunMismatchError(
            f"channel 3: epsilon_P is {pairs.epsilon_P[place].item():g} at pair {place}; the probability that a label "
            f"is wrong lies in [0, {EPSILON_MAX}]: above it, swap chosen and rejected"
        )
    _check_denominator("pairs", totals.pairs, pairs.epsilon_P.numel())


def _refuse_below(name: str, values: Tensor, least: float) -> None:
    low = (values < least).nonzero()
    if low.numel():
        place = int(low[0])
        raise RunMismatchError(f"{name} is {values[place].item():g} at position {place}; at least {least:g} is needed")
