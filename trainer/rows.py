"""A micro-batch as tensors on the device: what the forward pass and the loss need, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from composer_prime.channels.policy import PolicyTokens
from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.prefixes import Tree, layout
from composer_prime.wire.types import MicroBatch, flags, floats, ints
from trainer.head import TokenStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The tokens of several documents that are computed (N), and those of them that are trained (T, may be 0)."""

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]: position within the document."""
    trees: tuple[Tree, ...]
    """Which tokens attend to which: one tree a document, or several documents as branches of one."""
    source_T: Tensor
    """int64 [T]: index of the hidden state that predicts the token, that of the token before it."""
    targets_T: Tensor
    """int64 [T]: the trained tokens."""
    temperature_T: Tensor | None
    """float32 [T]: sampling temperature; None where it is 1 throughout."""
    sampler_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    """int64 [T]: index of the token's document in the row."""
    documents: int
    packed_tokens: int
    """Tokens of all documents, before common prefixes were merged; >= N."""
    sample_ids: list[str]

    def policy_tokens(self, statistics: TokenStatistics) -> PolicyTokens:
        """Channel 1's view of this row, given what the forward pass computed."""
        return PolicyTokens(
            logprobs_T=statistics.logprobs_T,
            sampler_logprobs_T=self.sampler_logprobs_T,
            advantages_T=self.advantages_T,
            entropy_T=statistics.entropy_T,
            sequence_T=self.sequence_T,
            sequences=self.documents,
        )


def unpack(batch: MicroBatch, device: torch.device, vocabulary: int, *, share: bool = False) -> PackedRow:
    """Tensors of `batch` on `device`; `share` merges the common beginnings of neighbouring documents.

    Raises RunMismatchError (inconsistent lengths, token ids outside the vocabulary, a document whose first token is
    trained) or NonFiniteError (NaN or infinity among logprobs or advantages), both naming the samples.
    """
    ids, mask = ints(batch.input_ids), flags(batch.loss_mask).astype(bool)
    _check(batch, ids, mask, vocabulary)
    trained = np.flatnonzero(mask)
    plan = layout(np.split(ids, np.cumsum(batch.lengths)[:-1]), share=share)
    document = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[trained]

    def on_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device=device, dtype=dtype, non_blocking=True)

    one = all(temperature == 1.0 for temperature in batch.temperatures)
    temperatures = None if one else np.asarray(batch.temperatures, dtype=np.float32)[document]
    return PackedRow(
        input_ids=on_device(ids[plan.kept], torch.int64)[None],
        position_ids=on_device(ints(batch.position_ids)[plan.kept], torch.int64)[None],
        trees=plan.trees,
        source_T=on_device(plan.where[trained - 1], torch.int64),
        targets_T=on_device(ids[trained], torch.int64),
        temperature_T=None if temperatures is None else on_device(temperatures, torch.float32),
        sampler_logprobs_T=on_device(floats(batch.logprobs)[trained], torch.float32),
        advantages_T=on_device(floats(batch.advantages)[trained], torch.float32),
        sequence_T=on_device(document, torch.int64),
        documents=len(batch.lengths),
        packed_tokens=len(ids),
        sample_ids=list(batch.sample_ids),
    )


def _check(batch: MicroBatch, ids: np.ndarray, mask: np.ndarray, vocabulary: int) -> None:
    where = f"micro-batch {batch.index} of step {batch.step} (samples {', '.join(batch.sample_ids) or 'none'})"
    arrays = {"position_ids": ints(batch.position_ids), "loss_mask": mask, "logprobs": floats(batch.logprobs),
              "advantages": floats(batch.advantages)}  # fmt: skip
    for name, array in arrays.items():
        if len(array) != len(ids):
            raise RunMismatchError(f"{where}: {name} has {len(array)} entries for {len(ids)} tokens")
    if sum(batch.lengths) != len(ids) or min(batch.lengths, default=0) < 1:
        raise RunMismatchError(f"{where}: lengths {batch.lengths} do not add up to {len(ids)} tokens")
    if len(batch.temperatures) != len(batch.lengths) or min(batch.temperatures) <= 0:
        raise RunMismatchError(f"{where}: temperatures {batch.temperatures} must be one positive number a sample")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise RunMismatchError(
            f"{where}: token ids {ids.min()}..{ids.max()}, the model's vocabulary is 0..{vocabulary - 1}"
        )
    if mask[np.cumsum([0, *batch.lengths[:-1]])].any():
        raise RunMismatchError(f"{where}: a sample's first token is marked as trained, but nothing predicts it")
    for name in ("logprobs", "advantages"):
        bad = ~np.isfinite(arrays[name]) & mask
        if bad.any():
            index = int(np.repeat(np.arange(len(batch.lengths)), batch.lengths)[bad][0])
            sample = batch.sample_ids[index] if index < len(batch.sample_ids) else "none"
            raise NonFiniteError(f"{where}: {name} of sample {sample} hold NaN or infinity; nothing was trained")
