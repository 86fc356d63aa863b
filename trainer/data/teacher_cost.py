"""Where a live teacher's documents are read: in the samples' forward pass, or in one of their own.

    in the row    what they add to the samples' trees, forward and backward: their gradients are 0, but are computed
    apart         all of their trees, forward only: contexts that the samples hold are computed again

The rule takes the smaller work, counted in FLOPs from the batch: products with the blocks' weights by token, attention
by pair of positions. So a long context with a short turn is read in the row, a short one apart. The output layer sees
the same rows either way. Not counted: that a pass of its own gathers sharded parameters once more, and starts more
kernels. benchmarks/hinted_rows.py times both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.packing.pack import model_flops
from composer_prime.packing.prefixes import Tree, prefix_layout
from trainer.data.rows import Documents
from trainer.world import gather_words


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCost:
    """FLOPs of reading trees: a token's, and a pair's of which a document of L tokens has L^2."""

    per_token: float
    per_pair: float

    def __call__(self, trees: Iterable[Tree]) -> float:
        return sum(self.per_token * tree.tokens + self.per_pair * tree.pairs() for tree in trees)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """What the blocks of a model cost."""

    forward: FlopCost
    trained: FlopCost
    """Forward and backward pass."""

    @classmethod
    def of(cls, model: PretrainedConfig, trainer: TrainerConfig) -> ReadCost:
        """A backward pass costs a forward pass for the inputs' gradients, one for the weights' unless only adapters
        train, and one more where activations are computed again; attention, without weights, twice a forward pass.
        A model whose shape is not described in the usual words counts by tokens alone."""
        text = model.get_text_config()
        try:
            per_token, per_pair = model_flops(text.to_dict())
            per_token -= 2.0 * text.hidden_size * text.vocab_size
        except KeyError:
            per_token, per_pair = 1.0, 0.0
        again = int(trainer.activation_checkpointing)
        return cls(
            forward=FlopCost(per_token=per_token, per_pair=per_pair),
            trained=FlopCost(
                per_token=(2 + int(trainer.lora is None) + again) * per_token, per_pair=(3 + again) * per_pair
            ),
        )

    def of_teachers(self, found: Documents, *, share: bool) -> tuple[float, float]:
        """FLOPs of a live teacher's documents: (in the samples' row, in a pass of their own).

        `share` says whether common beginnings are computed once.
        """
        if not found.batch.turns:
            return 0.0, 0.0
        alone, both, apart = (
            prefix_layout([found.tokens(document) for document in documents], share=share).trees
            for documents in (range(found.samples), range(found.first_side), found.teachers())
        )
        return self.trained(both) - self.trained(alone), self.forward(apart)


def teachers_in_row(
    batches: Sequence[Documents], channels: ChannelsConfig, cost: ReadCost, *, share: bool, dropout: bool = False
) -> list[bool]:
    """Of each row, whether a live teacher is read in the samples' forward pass, by the work of all ranks.

    Never for a teacher that other weights take part in, nor where adapters drop inputs: in the row the teacher would
    be as noisy as the student, in a pass of its own it is not. A collective when channel 2 is on with a live teacher.
    """
    if channels.sdpo.weight == 0 or channels.sdpo.teacher.kind != "live" or dropout:
        return [False] * len(batches)
    work = [cost.of_teachers(documents, share=share) for documents in batches]
    saved = [int(apart - in_row) for in_row, apart in work]
    return [sum(words) > 0 for words in zip(*gather_words(saved), strict=True)]
