"""Where a live teacher's documents are read: in the samples' forward pass, or in a pass of their own.

    in the row    what they add to the samples' trees, forward and backward: their gradients are 0, but are computed
    apart         all of their trees, forward only: contexts that the samples hold are computed again

`teachers_in_row` takes the cheaper way, counted in FLOPs from the batch: products with the blocks' weights by token,
attention by pair of positions. So a long context with a short turn is read in the row, a short one apart. The output
layer sees the same rows either way. Not counted: a pass of its own gathers sharded parameters once more, and starts
more kernels. benchmarks/hinted_rows.py times both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.packing.pack import model_flops
from composer_prime.packing.prefixes import FlopCost, prefix_layout
from trainer.data.rows import Documents
from trainer.world import gather_words


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

    def of_teachers(self, documents: Documents, *, share: bool) -> tuple[float, float]:
        """Return the FLOPs of a live teacher's documents: (in the samples' row, in a pass of their own).

        `share`: common beginnings are computed once.
        """
        if not documents.batch.turns:
            return 0.0, 0.0
        samples, both, apart = (
            prefix_layout([documents.tokens(index) for index in indices], share=share).trees
            for indices in (range(documents.samples), range(documents.first_side), documents.teachers())
        )
        return self.trained(both) - self.trained(samples), self.forward(apart)


def teachers_in_row(
    rows: Sequence[Documents], channels: ChannelsConfig, cost: ReadCost, *, share: bool, dropout: bool = False
) -> list[bool]:
    """Return for each row whether the samples' forward pass reads a live teacher, by the work of all ranks.

    False for a teacher with other weights, and where adapters have dropout: in the row the teacher would be as noisy as
    the student, in a pass of its own it is not. A collective when SDPO is on with a live teacher.
    """
    if channels.sdpo.weight == 0 or channels.sdpo.teacher.kind != "live" or dropout:
        return [False] * len(rows)
    costs = [cost.of_teachers(documents, share=share) for documents in rows]
    saved = [int(apart - in_row) for in_row, apart in costs]
    return [sum(flops) > 0 for flops in zip(*gather_words(saved), strict=True)]
