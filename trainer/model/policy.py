"""The policy as one module: a packed row in, statistics of its tokens out.

The head runs inside this module's forward, so FSDP's root group (embeddings, last norm, head) is gathered once for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_prime.config.trainer import HeadKernels
from trainer.data.rows import PackedRow, Reading
from trainer.head.choose_kernels import choose_kernels
from trainer.head.fused import token_statistics
from trainer.head.head import Divergence, Head, TeacherPart, TeacherTargets, TokenStatistics, head_of
from trainer.head.logit_kernels import LogitKernels
from trainer.model.attention import NAME, packing_arguments

READS = ("states", "scores", "head")
"""Methods besides `forward` that compute with gathered parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """Channel 2's teacher of one row: other weights' parts, and the share of the policy's own logits."""

    parts: tuple[TeacherPart, ...]
    live_share: float
    live_hidden_DH: Tensor | None
    """The policy's own states in the hinted contexts; None when they are among those of the row."""
    divergence: Divergence


class Policy(nn.Module):
    """A Hugging Face causal language model as the trainer sees it; its parameters keep their names below `lm.`."""

    def __init__(
        self, lm: PreTrainedModel, attention: str, *, adapted: bool = False, head_kernels: HeadKernels = "auto"
    ) -> None:
        """`attention` is transformers' name; `adapted` says that `lm` carries low-rank adapters."""
        super().__init__()
        self.lm = lm
        self.attention = attention
        self.adapted = adapted
        self._head_kernels: HeadKernels = head_kernels

    @property
    def shares_prefixes(self) -> bool:
        """Whether this attention can compute a common beginning of documents once."""
        return self.attention == NAME

    @property
    def vocabulary(self) -> int:
        return self.lm.config.get_text_config().vocab_size

    def forward(self, row: PackedRow, teaching: Teaching | None = None) -> TokenStatistics:
        """Statistics of the row's R wanted tokens, the last D of them beside their teacher."""
        hidden_NH = self._hidden(row)
        head = head_of(self.lm)
        distillation = None if teaching is None else _distillation(teaching, row, hidden_NH, head)
        hidden_RH = hidden_NH[row.source_R]
        return token_statistics(
            head, hidden_RH, row.targets_R, row.temperature_R, distillation, passes=self._passes(hidden_RH)
        )

    def states(self, reading: Reading) -> Tensor:
        """Hidden states [R, H] that predict the reading's wanted tokens."""
        return self._hidden(reading)[reading.source_R]

    def scores(self, reading: Reading, targets_R: Tensor, temperature_R: Tensor | None = None) -> Tensor:
        """Log-probabilities [R] of `targets_R` at the reading's wanted places."""
        hidden_RH = self._hidden(reading)[reading.source_R]
        passes = self._passes(hidden_RH)
        return token_statistics(head_of(self.lm), hidden_RH, targets_R, temperature_R, passes=passes).logprobs_R

    def head(self) -> Head:
        """A copy of the output layer as it is now."""
        return head_of(self.lm).detached(copy=True)

    def _passes(self, hidden_RH: Tensor) -> LogitKernels:
        return choose_kernels(self._head_kernels, hidden_RH, self.vocabulary)

    def _hidden(self, reading: Reading) -> Tensor:
        return self.lm.base_model(
            input_ids=reading.input_ids,
            position_ids=reading.position_ids,
            attention_mask=None,
            use_cache=False,
            **packing_arguments(self.attention, reading.trees, reading.input_ids.device),
        ).last_hidden_state[0]


def _distillation(teaching: Teaching, row: PackedRow, hidden_NH: Tensor, head: Head) -> TeacherTargets:
    """The teacher's parts, the policy's own among them; nothing of a teacher has a gradient."""
    parts = teaching.parts
    if teaching.live_share > 0:
        live_DH = hidden_NH[row.distilled.source_D] if teaching.live_hidden_DH is None else teaching.live_hidden_DH
        parts += (TeacherPart(share=teaching.live_share, hidden_DH=live_DH.detach(), head=head.detached()),)
    return TeacherTargets(teacher=parts, divergence=teaching.divergence)
