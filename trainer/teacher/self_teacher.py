"""What a step reads before it trains: the self-teacher's states, reference log-probabilities.

    frozen start weights    reference of the KL penalty | teacher (frozen, trust region) | pairs not in the cache
    moving averages         reference of the KL penalty | teacher (ema)
    live weights            teacher, where a pass of its own costs less than the samples' row (teacher_place.py)

Teachers (SDPO, arXiv 2601.20802, and its code): `live` is the policy itself; `ema` follows it, theta_T += rate *
(theta - theta_T) after each step; `frozen` is the start; `trust_region` mixes logits, (1 - mix) * frozen + mix * live.
Which pass reads the teacher's documents, and with what share of the teacher's logits:

    kind             set of weights in place    share     the policy itself          share
    live             none                                 in the row, or apart       1
    ema              teacher (average)          1         no
    frozen           frozen                     1         no
    trust_region     frozen                     1 - mix   apart                      mix

Each set of weights takes the policy's place once a step; what it gives is [D, H] and [T], detached. Ranks agree on what
is read, because every pass gathers parameters from all of them.

Other weights for the same policy: a second set of values that takes the parameters' place for a while.

    WeightSnapshot          a moving average of the trained parameters, or their start; sharded like them, float32
    AdaptersOff     with low-rank adapters the start weights are the base: the adapters count for nothing

No second model is built: values are exchanged with the shards, a forward pass gathers them as it would the policy's,
and the exchange is undone to the last bit. Nothing of a backward pass may be under way meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_prime.channels.divergence import divergence
from composer_prime.config.channels import AVERAGES, ChannelsConfig, weight_sets
from trainer.data.rows import PackedRow
from trainer.head.head import TeacherPart
from trainer.model.policy import Policy, Teaching
from trainer.teacher.reference import ReferenceLogprobs
from trainer.world import gather_words

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """Something that can take the place of the policy's weights."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]: ...


class WeightSnapshot:
    """A second value for each trained parameter of `module`, at first the parameter's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: parameter.detach().clone() for name, parameter in _trained(module)}

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move by `rate` of the way towards the parameters: the moving average of one step."""
        for name, parameter in _trained(self._module):
            _local(self._values[name]).lerp_(_local(parameter), rate)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The module computes with these values inside the block, and with its own again after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):  # whole parameters that a forward pass left behind would still be used
                module.reshard()
        for name, parameter in _trained(self._module):
            own, other = _local(parameter), _local(self._values[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    def state(self) -> dict[str, Tensor]:
        """The values by parameter name, to be saved and loaded in place."""
        return self._values

    def reset(self) -> None:
        """Take the parameters' values."""
        self.follow(1.0)


class AdaptersOff:
    """The base model below the adapters of `module`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Adapters are scaled to 0 inside the block; switching them off through peft would change what is trained."""
        from peft.tuners.lora import LoraLayer  # peft takes seconds to import

        layers = [module for module in self._module.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.scale_layer(0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.unscale_layer()


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True, kw_only=True)
class AuxiliaryLogprobs:
    """What one row's loss needs of other weights."""

    teaching: Teaching | None = None
    reference_logprobs_T: Tensor | None = None
    """float32 [T], for the KL penalty."""
    reference_S: Tensor | None = None
    """float32 [2 P]: each answer's sum under the frozen base; None where channel 3 has no reference."""


class SelfTeacher:
    """The other weights of a run, and the passes that read them."""

    def __init__(self, policy: Policy, channels: ChannelsConfig, cache: ReferenceLogprobs | None) -> None:
        """`policy` holds the start weights now. `cache` is there when channel 3 has a reference."""
        self._policy, self._channels, self._cache = policy, channels, cache
        self._sets = weight_sets(channels)
        self._averages = {name: WeightSnapshot(policy) for name in AVERAGES if name in self._sets.needed}
        self._rates = {"teacher": channels.sdpo.teacher.rate, "reference": channels.policy.kl.ema_rate}
        self._weights: dict[str, Weights] = dict(self._averages)
        if "frozen" in self._sets.needed:
            self._weights["frozen"] = AdaptersOff(policy) if policy.adapted else WeightSnapshot(policy)

    def prepare(self, rows: Sequence[PackedRow], step: int) -> list[AuxiliaryLogprobs]:
        """Read what `rows` need, with every set of weights that is not the policy's. A collective."""
        aids = [AuxiliaryLogprobs() for _ in rows]
        taught = self._taught(rows)
        lacking = self._cache.missing([row.pairs for row in rows]) if self._cache else []
        parts: dict[int, TeacherPart] = {}
        with _reading(self._policy):
            for name, weights in self._weights.items():
                refers, teaches = name == self._sets.reference, name == self._sets.teacher and any(taught)
                lacks = name == "frozen" and any(lacking)
                if not (refers or teaches or lacks):
                    continue
                with weights.swapped_in():
                    if refers:
                        self._refer(rows, aids)
                    if teaches:
                        parts = self._parts(rows, taught)
                    if lacks:
                        wanted = [row.pairs for row, lacks in zip(rows, lacking, strict=True) if lacks]
                        self._cache.compute(self._policy, wanted)
            live = self._states(rows, taught) if self._live_share > 0 else {}
        for index, (row, aid) in enumerate(zip(rows, aids, strict=True)):
            aid.teaching = self._teaching(row, parts.get(index), live.get(index), step)
            if self._cache is not None and row.pairs is not None:
                aid.reference_S = self._cache.of(row.pairs)
        return aids

    def follow(self) -> None:
        """After a step: the averages move towards the new weights."""
        for name, average in self._averages.items():
            average.follow(self._rates[name])

    def catch_up(self, steps: int) -> None:
        """The weights moved as in `steps` steps, which other clusters took: the averages follow as far."""
        for name, average in self._averages.items():
            average.follow(1.0 - (1.0 - self._rates[name]) ** steps)

    def start_anew(self) -> None:
        """The averages begin at the policy's present weights: their past is another model's."""
        for average in self._averages.values():
            average.reset()

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """The moving averages by name, for the checkpoint; loading writes into these tensors."""
        return {name: average.state() for name, average in self._averages.items()}

    def begin(self, name: str) -> None:
        """Start the average `name` from the policy's present weights."""
        logger.info("the checkpoint holds no moving average for the %s: it starts from the policy's weights", name)
        self._averages[name].reset()

    def _taught(self, rows: Sequence[PackedRow]) -> list[bool]:
        """Of each row, whether any rank has teacher documents apart from it."""
        own = [int(row.distilled is not None and row.distilled.teacher is not None and row.distilled.turns > 0)
               for row in rows]  # fmt: skip
        if self._channels.sdpo.weight == 0:
            return [False] * len(own)
        return [any(words) for words in zip(*gather_words(own), strict=True)]

    def _refer(self, rows: Sequence[PackedRow], aids: list[AuxiliaryLogprobs]) -> None:
        for row, aid in zip(rows, aids, strict=True):
            logprobs_R = self._policy(row).logprobs_R
            aid.reference_logprobs_T = logprobs_R if row.policy_T is None else logprobs_R[row.policy_T]

    def _parts(self, rows: Sequence[PackedRow], taught: list[bool]) -> dict[int, TeacherPart]:
        """What the weights in place give for each taught row."""
        states, head = self._states(rows, taught), self._policy.head()
        share = 1.0 - self._live_share
        return {index: TeacherPart(share=share, hidden_DH=states_DH, head=head) for index, states_DH in states.items()}

    def _states(self, rows: Sequence[PackedRow], taught: list[bool]) -> dict[int, Tensor]:
        return {
            index: self._policy.states(row.distilled.teacher)
            for index, (row, wanted) in enumerate(zip(rows, taught, strict=True))
            if wanted
        }

    @property
    def _live_share(self) -> float:
        """Share of the policy's own logits in the teacher's."""
        teacher = self._channels.sdpo.teacher
        return {"live": 1.0, "trust_region": teacher.mix}.get(teacher.kind, 0.0)

    def _teaching(self, row: PackedRow, other: TeacherPart | None, live: Tensor | None, step: int) -> Teaching | None:
        if row.distilled is None or row.distilled.turns == 0:
            return None
        return Teaching(
            parts=() if other is None else (other,),
            live_share=self._live_share,
            live_hidden_DH=live,
            divergence=lambda student, teacher, targets: divergence(
                student, teacher, self._channels.sdpo, targets, step=step
            ),
        )


@contextmanager
def _reading(policy: Policy) -> Iterator[None]:
    """No gradients, no dropout."""
    policy.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        policy.train()
