"""What a step reads under other weights before it trains: the self-teacher's states, reference log-probabilities.

Teachers (SDPO, arXiv 2601.20802, and its code). `live` is the policy itself. `ema` follows it: theta_T += rate *
(theta - theta_T) after each step. `frozen` is the start. `trust_region` mixes logits: (1 - mix) * frozen + mix * live.
Which weights read the teacher's documents, and with what share of the teacher's logits:

    kind             other weights     share       the policy itself        share
    live             none                          in the row, or apart     1
    ema              average           1           no
    frozen           frozen            1           no
    trust_region     frozen            1 - mix     apart                    mix

The frozen weights, or an average of their own, are also the reference of the KL penalty. The frozen ones score pairs.
Each set of weights takes the policy's place once a step. Its results are [D, H] and [T], detached. Every pass gathers
parameters from all ranks, so the ranks first agree on what is read.

A live teacher's documents are read where it costs fewer FLOPs (`teachers_in_row`):

    in the row    what they add to the samples' trees, forward and backward: their gradients are 0, but are computed
    apart         all of their trees, forward only: contexts that the samples hold are computed again, and those that
                  passes have in common where one pass cannot hold them all (trainer.micro_batch_tokens)

No second model is built. A set of weights is exchanged with the policy's shards; a forward pass gathers it as it would
the policy's; then the exchange is undone to the last bit. No backward pass may be under way meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from composer_prime.channels import replay_dpo
from composer_prime.channels.policy import PolicyTerm
from composer_prime.channels.sdpo import divergence
from composer_prime.config.channels import AVERAGES, ChannelsConfig, weight_sets
from composer_prime.config.trainer import TrainerConfig
from composer_prime.packing.pack import model_flops
from composer_prime.packing.prefixes import FlopCost, prefix_layout
from composer_prime.packing.row import Row
from trainer.data.rows import PackedRow, ScoredDocuments, reading_of, teacher_passes
from trainer.head.fused import TeacherMixture, TeacherPart
from trainer.model.policy_model import Policy
from trainer.teacher.reference import ReferenceLogprobs
from trainer.world import gather_words

logger = logging.getLogger(__name__)

MIX = 0.05
"""Share of the live logits in a trust_region teacher's."""
_REFERENCE_RATE = 0.01
"""Share of the trained weights added at each step to the reference's average."""


@dataclass(slots=True, kw_only=True)
class AuxiliaryLogprobs:
    """What one row's loss needs of other weights."""

    teacher: TeacherMixture | None = None
    references: dict[str, Tensor] = field(default_factory=dict)
    """By term: the policy's float32 [T], for the KL penalty; replay_dpo's [2 P], each answer's sum."""


class SelfTeacher:
    """The other weights of a run, and the passes that read them."""

    def __init__(self, policy: Policy, channels: ChannelsConfig, cache: ReferenceLogprobs | None) -> None:
        """`policy` holds the start weights now. `cache` is None where replay-DPO has no reference."""
        self._policy = policy
        self._channels = channels
        self._cache = cache
        self._sets = weight_sets(channels)
        self._averages = {name: WeightSnapshot(policy) for name in AVERAGES if name in self._sets.needed}
        self._rates = {"teacher": channels.sdpo.teacher.rate, "reference": _REFERENCE_RATE}
        self._swaps: dict[str, Callable[[], AbstractContextManager[None]]] = {
            name: average.swapped_in for name, average in self._averages.items()
        }
        if "frozen" in self._sets.needed:
            self._swaps["frozen"] = (
                partial(adapters_off, policy) if policy.adapted else WeightSnapshot(policy).swapped_in
            )

    @torch.no_grad()
    def prepare(self, rows: Sequence[PackedRow]) -> list[AuxiliaryLogprobs]:
        """Read what `rows` need under every set of weights that is not the policy's. A collective."""
        results = [AuxiliaryLogprobs() for _ in rows]
        passes = self._teacher_passes(rows)
        uncached = self._uncached(rows)
        other_parts: dict[int, TeacherPart] = {}
        reads: dict[str, list[Callable[[], None]]] = {name: [] for name in self._swaps}
        if self._sets.reference in reads:
            reads[self._sets.reference].append(partial(self._read_reference, rows, results))
        if self._sets.teacher in reads and any(passes):
            reads[self._sets.teacher].append(partial(self._read_teacher, rows, passes, other_parts))
        if self._cache is not None and uncached:
            reads["frozen"].append(partial(self._cache.compute, self._policy, uncached))
        self._policy.eval()
        try:
            self._read(reads)
            policy_states = self._states(rows, passes) if self._policy_share > 0 else {}
        finally:
            self._policy.train()
        for index, row in enumerate(rows):
            if row.taught is not None and row.taught.turns > 0:
                results[index].teacher = self._mixture(other_parts.get(index), policy_states.get(index))
            if self._cache is not None and row.scored is not None:
                results[index].references[replay_dpo.NAME] = self._cache.of(row.scored)
        return results

    def _uncached(self, rows: Sequence[PackedRow]) -> list[ScoredDocuments | None]:
        """Return the pairs that any rank has to score. A collective."""
        scored = [row.scored for row in rows] if self._cache else []
        missing = self._cache.missing(scored) if self._cache else []
        return [pairs for pairs, is_missing in zip(scored, missing, strict=True) if is_missing]

    def _read(self, reads: dict[str, list[Callable[[], None]]]) -> None:
        for name in filter(reads.get, reads):
            with self._swaps[name]():
                for read in reads[name]:
                    read()

    def _read_teacher(self, rows: Sequence[PackedRow], passes: list[int], parts: dict[int, TeacherPart]) -> None:
        head, share = self._policy.head(), 1.0 - self._policy_share
        for index, states_DH in self._states(rows, passes).items():
            parts[index] = TeacherPart(share=share, hidden_DH=states_DH, head=head)

    def follow(self) -> None:
        """Move the averages towards the new weights; called after each step."""
        for name, average in self._averages.items():
            average.follow(self._rates[name])

    def catch_up(self, steps: int) -> None:
        """Move the averages as far as `steps` steps would: other clusters took them, and the weights moved at once."""
        for name, average in self._averages.items():
            average.follow(1.0 - (1.0 - self._rates[name]) ** steps)

    def start_anew(self) -> None:
        """Begin the averages at the policy's present weights: their past is another model's."""
        for average in self._averages.values():
            average.follow(1.0)

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Return the moving averages by name, for the checkpoint; loading writes into these tensors."""
        return {name: average.values for name, average in self._averages.items()}

    def begin(self, name: str) -> None:
        """Begin the average `name`, which the checkpoint lacks, at the policy's present weights."""
        logger.info("the checkpoint holds no moving average for the %s: it starts from the policy's weights", name)
        self._averages[name].follow(1.0)

    def _teacher_passes(self, rows: Sequence[PackedRow]) -> list[int]:
        """Return for each row how many passes the rank with the most takes for teacher documents apart from it."""
        if self._channels.sdpo.weight == 0:
            return [0] * len(rows)
        apart = [len(row.taught.readings) if row.taught else 0 for row in rows]
        return [max(words) for words in zip(*gather_words(apart), strict=True)]

    def _read_reference(self, rows: Sequence[PackedRow], results: Sequence[AuxiliaryLogprobs]) -> None:
        for row, result in zip(rows, results, strict=True):
            logprobs_R, head_rows = self._policy(row).logprobs_R, row.terms[PolicyTerm.name].head_rows
            result.references[PolicyTerm.name] = logprobs_R if head_rows is None else logprobs_R[head_rows]

    def _states(self, rows: Sequence[PackedRow], passes: list[int]) -> dict[int, Tensor]:
        """Return the states of each row's teacher documents. A rank with fewer passes than another reads one token."""
        states: dict[int, Tensor] = {}
        for index, (row, count) in enumerate(zip(rows, passes, strict=True)):
            readings = row.taught.readings if row.taught else ()
            idle = [reading_of([], [], row.input_ids.device, share=False)] * (count - len(readings))
            if count:
                states[index] = torch.cat([self._policy.states(each) for each in (*readings, *idle)])
        return states

    @property
    def _policy_share(self) -> float:
        """Share of the policy's own logits in the teacher's."""
        teacher = self._channels.sdpo.teacher
        return {"live": 1.0, "trust_region": MIX}.get(teacher.kind, 0.0)

    def _mixture(self, other: TeacherPart | None, policy_states: Tensor | None) -> TeacherMixture:
        parts = () if other is None else (other,)
        if self._policy_share > 0:
            parts += (TeacherPart(share=self._policy_share, hidden_DH=policy_states, head=None),)
        sdpo = self._channels.sdpo
        return TeacherMixture(
            parts=parts,
            divergence=lambda student, teacher, targets: divergence(student, teacher, sdpo, targets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """The cost of a model's blocks."""

    forward: FlopCost
    trained: FlopCost
    """Forward and backward pass."""

    @classmethod
    def of(cls, model: PretrainedConfig, trainer: TrainerConfig) -> ReadCost:
        """Count in forward passes of weights: a backward pass costs one for the inputs' gradients, one for the weights'
        unless only adapters train, and one more for recomputed activations. Attention has no weights: its backward
        pass costs two. A model whose config lacks the usual fields counts by tokens alone."""
        text = model.get_text_config()
        try:
            per_token, per_pair = model_flops(text.to_dict())
            per_token -= 2.0 * text.hidden_size * text.vocab_size
        except KeyError:
            per_token, per_pair = 1.0, 0.0
        recomputed = int(trainer.activation_checkpointing)
        weights = int(trainer.lora is None)
        return cls(
            forward=FlopCost(per_token=per_token, per_pair=per_pair),
            trained=FlopCost(per_token=(2 + weights + recomputed) * per_token, per_pair=(3 + recomputed) * per_pair),
        )

    def of_teachers(self, row: Row, *, share: bool, max_tokens: int | None = None) -> tuple[float, float]:
        """Return the FLOPs of a live teacher's documents: (in the samples' row, in passes of their own).

        `share`: common beginnings are computed once. The row is infinitely expensive where it, with the units of other
        terms, would pass `max_tokens` computed tokens.
        """
        if not row.batch.turns:
            return 0.0, 0.0
        samples, teachers = range(row.samples), row.teachers()
        units = range(row.samples, row.first_teacher)
        tokens_of = lambda *parts: [row.tokens(index) for indices in parts for index in indices]
        whole = prefix_layout(tokens_of(samples, teachers, units), share=share)
        passes = teacher_passes(row, share=share, max_tokens=max_tokens)
        apart = sum(self.forward(prefix_layout(tokens_of(each), share=share).trees) for each in passes)
        if max_tokens is not None and len(whole.kept) > max_tokens:
            return math.inf, apart
        both, alone = (prefix_layout(tokens_of(*parts), share=share) for parts in ((samples, teachers), (samples,)))
        return self.trained(both.trees) - self.trained(alone.trees), apart


def teachers_in_row(
    rows: Sequence[Row],
    channels: ChannelsConfig,
    cost: ReadCost,
    *,
    share: bool,
    max_tokens: int | None = None,
) -> list[bool]:
    """Return for each row whether the samples' forward pass reads a live teacher, by the work of all ranks.

    False for a row that would pass `max_tokens` on any rank, and for a teacher with other weights. A collective when
    SDPO is on with a live teacher.
    """
    if channels.sdpo.weight == 0 or channels.sdpo.teacher.kind != "live":
        return [False] * len(rows)
    costs = [cost.of_teachers(row, share=share, max_tokens=max_tokens) for row in rows]
    saved = [_TOO_LONG if math.isinf(in_row) else int(apart - in_row) for in_row, apart in costs]
    return [sum(flops) > 0 for flops in zip(*gather_words(saved), strict=True)]


_TOO_LONG = -(1 << 62)
"""More FLOPs than all ranks together save."""


class WeightSnapshot:
    """A second value for each trained parameter of `module`, at first the parameter's own; sharded alike, float32."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values = {name: parameter.detach().clone() for name, parameter in _trained(module)}
        """By parameter name; checkpoints are loaded in place."""

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move by `rate` of the way towards the parameters, which is the moving average of a step; 1 takes them."""
        for name, parameter in _trained(self._module):
            _local(self.values[name]).lerp_(_local(parameter), rate)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the module compute with these values inside the block, and with its own again after it."""
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
            current, other = _local(parameter), _local(self.values[name])
            copy = current.clone()
            current.copy_(other)
            other.copy_(copy)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Scale the adapters of `module` to 0 inside the block: with adapters, the start weights are the base model.

    Switching them off through peft would change what is trained.
    """
    from peft.tuners.lora import LoraLayer  # peft takes seconds to import

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
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
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
