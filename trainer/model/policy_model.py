"""The policy as one module: a packed row in, statistics of its tokens out.

The head runs inside this module's forward, so FSDP gathers its root group (embeddings, last norm, head) once for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from trainer.data.rows import PackedRow, Reading
from trainer.head.fused import Head, HeadTeacher, TokenStatistics, head_of, likeliest, token_statistics
from trainer.model.attention import SHARING, packing_arguments

FORWARD_METHODS = ("states", "scores", "grades", "head")
"""Methods besides `forward` that compute with gathered parameters."""


class Policy(nn.Module):
    """A Hugging Face causal language model as the trainer sees it; its parameters keep their names below `lm.`."""

    def __init__(self, lm: PreTrainedModel, attention: str, *, adapted: bool = False) -> None:
        """`attention` is transformers' name; `adapted`: `lm` carries low-rank adapters."""
        super().__init__()
        self.lm = lm
        self.attention = attention
        self.adapted = adapted

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether this attention can compute a common beginning of documents once."""
        return self.attention in SHARING

    @property
    def vocabulary(self) -> int:
        return self.lm.config.get_text_config().vocab_size

    def forward(self, row: PackedRow, teacher: HeadTeacher | None = None) -> TokenStatistics:
        """Return statistics of the row's R wanted tokens, the last D of them beside their teacher."""
        hidden_NH, head = self._hidden(row), head_of(self.lm)
        return token_statistics(head, hidden_NH[row.source_R], row.targets_R, row.temperature_R, teacher)

    def states(self, reading: Reading) -> Tensor:
        """Return the hidden states [R, H] that predict the reading's wanted tokens."""
        return self._hidden(reading)[reading.source_R]

    def scores(self, reading: Reading, targets_R: Tensor) -> Tensor:
        """Return the log-probabilities [R] of `targets_R` at the reading's wanted places, at temperature 1."""
        hidden_RH = self._hidden(reading)[reading.source_R]
        return token_statistics(head_of(self.lm), hidden_RH, targets_R).logprobs_R

    @torch.no_grad()
    def grades(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return for each wanted token its log-probability [R], and whether it is the likeliest one [R], bool."""
        hidden_RH, head = self._hidden(row)[row.source_R], head_of(self.lm)
        return token_statistics(head, hidden_RH, row.targets_R).logprobs_R, likeliest(head, hidden_RH) == row.targets_R

    def head(self) -> Head:
        """Return a copy of the output layer as it is now."""
        return head_of(self.lm).copied()

    def _hidden(self, reading: Reading) -> Tensor:
        return self.lm.base_model(
            input_ids=reading.input_ids,
            position_ids=reading.position_ids,
            attention_mask=self._masks(reading) if self.attention == "eager" else None,
            use_cache=False,
            **packing_arguments(self.attention, reading.trees, reading.input_ids.device),
        ).last_hidden_state[0]

    def _masks(self, reading: Reading) -> Tensor | dict[str, Tensor] | None:
        """Return the masks of eager attention, [1, 1, N, N] a kind of layer.

        Made here, because some families (gpt-oss) drop the position IDs, and the borders of documents with them.
        """
        weight = self.lm.get_input_embeddings().get_parameter("weight")
        return create_masks_for_generate(
            config=self.lm.config,
            inputs_embeds=weight.new_empty(1, reading.input_ids.shape[1], 1),
            attention_mask=None,
            past_key_values=None,
            position_ids=reading.position_ids,
        )
