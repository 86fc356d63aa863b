"""What a step computed of single tokens, for `composer view` (monitor.tokens)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from composer_prime.channels.policy import PolicyTerm
from composer_prime.channels.sdpo import SdpoTerm
from composer_prime.run.run_dir import write_atomic
from composer_prime.wire.types import MicroBatch, flags

_DIGITS = 5


class TokenFigures:
    """The figures of one step's micro-batches on this rank. They stay on the device until `write`."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Tensor | None]] = []

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note a micro-batch: mismatch (trainer's less sampler's log-probability) and SDPO's divergence, in nats.

        `inputs`: those of the loss terms, by name.
        """
        policy, sdpo = inputs[PolicyTerm.name], inputs.get(SdpoTerm.name)
        mismatch_T = policy.logprobs_T.detach() - policy.sampler_logprobs_T
        self._noted.append((mismatch_T, None if sdpo is None else sdpo.divergence_D.detach()))

    def write(self, path: Path, batches: Sequence[MicroBatch]) -> None:
        """Write a line for each sample of `batches`, in the order in which they were noted. Raises OSError."""
        noted, self._noted = self._noted, []
        encoder = msgspec.json.Encoder()
        lines = (line for batch, figures in zip(batches, noted, strict=True) for line in _lines(batch, *figures))
        write_atomic(path, b"".join(encoder.encode(line) + b"\n" for line in lines))

    def drop(self) -> None:
        """Forget a step that was skipped."""
        self._noted.clear()


def _lines(batch: MicroBatch, mismatch_T: Tensor, divergence_D: Tensor | None) -> Iterator[dict[str, Any]]:
    """Yield each sample's figures.

    `mismatch` has a value for each trained token, in order; `divergence` [first token, values] for each hinted turn.
    """
    starts = np.cumsum([0, *batch.lengths])
    trained = np.r_[0, flags(batch.loss_mask).cumsum()][starts]
    mismatch = _rounded(mismatch_T)
    divergence, done = [] if divergence_D is None else _rounded(divergence_D), 0
    of_sample: dict[int, list[Any]] = {}
    for turn in batch.turns if divergence else []:
        sample = int(np.searchsorted(starts, turn.student, side="right")) - 1
        values = divergence[done : done + turn.count]
        of_sample.setdefault(sample, []).append([int(turn.student - starts[sample]), values])
        done += turn.count
    for index, sample_id in enumerate(batch.sample_ids):
        yield {
            "sample_id": sample_id,
            "mismatch": mismatch[trained[index] : trained[index + 1]],
            "divergence": of_sample.get(index, []),
        }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, _DIGITS) for value in values.float().tolist()]
