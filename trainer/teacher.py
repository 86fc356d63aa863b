"""What a step reads under other weights before it trains: the self-teacher's states, reference log-probabilities.

Teachers (SDPO, arXiv 2601.20802, and its code). `live` is the policy itself. `ema` follows it: theta_T += rate *
(theta - theta_T) after each step. `frozen` is the start. The teacher reads the documents of hinted turns in passes of
their own, forward only, before the step.

The frozen weights, or an average of their own, are also the reference of the KL penalty. The frozen ones score pairs.
Each set of weights takes the policy's place once a step. Its results are [D, H] and [T], detached. Every pass gathers
parameters from all ranks, so the ranks first agree on what is read.

No second model is built. A set of weights is exchanged with the policy's shards; a forward pass gathers it as it would
the policy's; then the exchange is undone to the last bit. No backward pass may be under way meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_prime.channels import replay_dpo
from composer_prime.channels.policy import PolicyTerm
from composer_prime.channels.sdpo import divergence
from composer_prime.config.channels import AVERAGES, ChannelsConfig, weight_sets
from composer_prime.errors import NonFiniteError
from trainer.data.rows import PackedRow, ScoredDocuments, reading_of
from trainer.head import HeadTeacher
from trainer.model.policy_model import Policy
from trainer.world import World, gather_texts, gather_words

logger = logging.getLogger(__name__)

_REFERENCE_RATE = 0.01
"""Share of the trained weights added at each step to the reference's average."""


@dataclass(slots=True, kw_only=True)
class AuxiliaryLogprobs:
    """What one row's loss needs of other weights."""

    teacher: HeadTeacher | None = None
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
        self._swaps["live"] = nullcontext

    @torch.no_grad()
    def prepare(self, rows: Sequence[PackedRow]) -> list[AuxiliaryLogprobs]:
        """Read what `rows` need under every set of weights that is not the policy's. A collective."""
        results = [AuxiliaryLogprobs() for _ in rows]
        passes = self._teacher_passes(rows)
        uncached = self._uncached(rows)
        reads: dict[str, list[Callable[[], None]]] = {name: [] for name in self._swaps}
        if self._sets.reference is not None:
            reads[self._sets.reference].append(partial(self._read_reference, rows, results))
        if any(passes):
            reads[self._sets.teacher or "live"].append(partial(self._read_teacher, rows, passes, results))
        if self._cache is not None and uncached:
            reads["frozen"].append(partial(self._cache.compute, self._policy, uncached))
        self._policy.eval()
        try:
            for name in filter(reads.get, reads):
                with self._swaps[name]():
                    for read in reads[name]:
                        read()
        finally:
            self._policy.train()
        for row, result in zip(rows, results, strict=True):
            if self._cache is not None and row.scored is not None:
                result.references[replay_dpo.NAME] = self._cache.of(row.scored)
        return results

    def _uncached(self, rows: Sequence[PackedRow]) -> list[ScoredDocuments | None]:
        """Return the pairs that any rank has to score. A collective."""
        scored = [row.scored for row in rows] if self._cache else []
        missing = self._cache.missing(scored) if self._cache else []
        return [pairs for pairs, is_missing in zip(scored, missing, strict=True) if is_missing]

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
        """Return for each row how many passes the rank with the most takes for its teacher documents."""
        if self._channels.sdpo.weight == 0:
            return [0] * len(rows)
        return [max(words) for words in zip(*gather_words([len(row.taught) for row in rows]), strict=True)]

    def _read_reference(self, rows: Sequence[PackedRow], results: Sequence[AuxiliaryLogprobs]) -> None:
        for row, result in zip(rows, results, strict=True):
            logprobs_R, head_rows = self._policy(row).logprobs_R, row.terms[PolicyTerm.name].head_rows
            result.references[PolicyTerm.name] = logprobs_R if head_rows is None else logprobs_R[head_rows]

    def _read_teacher(self, rows: Sequence[PackedRow], passes: list[int], results: Sequence[AuxiliaryLogprobs]) -> None:
        """Read each row's teacher documents. A rank with fewer passes than another reads one token."""
        head, sdpo = self._policy.head(), self._channels.sdpo
        for row, count, result in zip(rows, passes, results, strict=True):
            idle = [reading_of([], [], row.input_ids.device, share=False)] * (count - len(row.taught))
            states = [self._policy.states(each) for each in (*row.taught, *idle)]
            if row.taught:
                result.teacher = HeadTeacher(
                    hidden_DH=torch.cat(states),
                    head=head,
                    divergence=lambda student, teacher, targets: divergence(student, teacher, sdpo, targets),
                )


class ReferenceLogprobs:
    """The summed log-probabilities of pairs' answers under the frozen base: computed once, remembered on every rank.

    A key is the hash of a side's token ids with the answer's beginning. A resumed run computes its pairs' again.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._values: dict[str, float] = {}

    def missing(self, rows: list[ScoredDocuments | None]) -> list[bool]:
        """Return for each row whether any rank lacks a side. A collective; ranks bring equally many rows."""
        lacking = [int(any(key not in self._values for key in self._keys(pairs))) for pairs in rows]
        return [any(flags) for flags in zip(*gather_words(lacking), strict=True)]

    def compute(self, policy: Policy, rows: list[ScoredDocuments | None]) -> None:
        """Score the pairs of `rows`, with the base's weights in place. A collective; ranks bring equally many rows.

        Raises NonFiniteError when the base gives NaN or infinity.
        """
        computed: dict[str, float] = {}
        for pairs in rows:
            sums_S = _answer_logprobs(policy, pairs, self._world.device)
            computed |= dict(zip(self._keys(pairs), sums_S.tolist(), strict=True))
        new = {key: value for key, value in computed.items() if key not in self._values}
        of_all_ranks: dict[str, float] = {}
        for text in gather_texts(json.dumps(new)):
            of_all_ranks |= json.loads(text)
        if not all(map(math.isfinite, of_all_ranks.values())):
            raise NonFiniteError(
                "the frozen base gives NaN or infinity as the log-probability of an answer in a preference pair; "
                "nothing was trained: look at model.path and the pairs"
            )
        self._values |= of_all_ranks

    def of(self, pairs: ScoredDocuments) -> Tensor:
        """Return the answers' sums, float32 [2 P], in the order of the sides."""
        values = [self._values[key] for key in self._keys(pairs)]
        return torch.tensor(values, dtype=torch.float32).to(self._world.device, non_blocking=True)

    def _keys(self, pairs: ScoredDocuments | None) -> list[str]:
        if pairs is None:
            return []
        return [_key(ids, start) for ids, start in zip(pairs.ids, pairs.starts, strict=True)]


def _key(ids: np.ndarray, start: int) -> str:
    digest = hashlib.sha256(f"{start} ".encode())
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def _answer_logprobs(policy: Policy, pairs: ScoredDocuments | None, device: torch.device) -> Tensor:
    """Return the answers' sums, float64 [2 P] on the CPU. Reads one token without pairs, so that ranks stay in step."""
    documents, starts = (list(pairs.ids), pairs.starts) if pairs else ([], ())
    wanted = [np.arange(start, len(ids)) for ids, start in zip(documents, starts, strict=True)]
    answers = [ids[index] for ids, index in zip(documents, wanted, strict=True)]
    targets = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *answers])).to(device)
    scores = policy.scores(reading_of(documents, wanted, device, share=policy.shares_prefixes), targets)
    sides = torch.from_numpy(np.repeat(np.arange(len(answers)), np.array([len(a) for a in answers], dtype=np.int64)))
    return torch.zeros(len(answers), dtype=torch.float64).index_add(0, sides, scores.double().cpu())


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
