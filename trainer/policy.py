"""The policy as one module: a packed row in, statistics of its trained tokens out.

The head runs inside this module's forward, so FSDP's root group (embeddings, last norm, head) is gathered once for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.attention import NAME, packing_arguments
from trainer.head import TokenStatistics, token_statistics
from trainer.rows import PackedRow


class Policy(nn.Module):
    """A Hugging Face causal language model as the trainer sees it; its parameters keep their names below `lm.`."""

    def __init__(self, lm: PreTrainedModel, attention: str, *, adapted: bool = False) -> None:
        """`attention` is transformers' name; `adapted` says that `lm` carries low-rank adapters."""
        super().__init__()
        self.lm = lm
        self.attention = attention
        self.adapted = adapted

    @property
    def shares_prefixes(self) -> bool:
        """Whether this attention can compute a common beginning of documents once."""
        return self.attention == NAME

    @property
    def vocabulary(self) -> int:
        return self.lm.config.get_text_config().vocab_size

    def forward(self, row: PackedRow) -> TokenStatistics:
        """Statistics of the row's T trained tokens; see TokenStatistics for shapes."""
        hidden = self.lm.base_model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            attention_mask=None,
            use_cache=False,
            **packing_arguments(self.attention, row.trees, row.input_ids.device),
        ).last_hidden_state[0]
        return token_statistics(
            hidden[row.source_T], row.targets_T, row.temperature_T, self.logits, self.vocabulary
        )

    def logits(self, hidden_T: Tensor) -> Tensor:
        """[T, H] to [T, V], with the scaling or soft cap that some families apply after the head."""
        config = self.lm.config.get_text_config()
        logits_TV = self.lm.get_output_embeddings()(hidden_T)
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits_TV = logits_TV / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits_TV = logits_TV * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits_TV = cap * torch.tanh(logits_TV / cap)
        return logits_TV
