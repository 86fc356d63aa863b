"""From the units of a row to the micro-batch that travels: documents end to end, and who learns from whom.

    | sample | sample | ... | teacher document | ... | chosen | rejected | chosen | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from composer_prime.documents import Unit
from composer_prime.wire.seal import sealed
from composer_prime.wire.types import (
    DistilledTurn,
    MicroBatch,
    PairInRow,
    Preference,
    pack_flags,
    pack_floats,
    pack_ints,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which micro-batch it is."""

    run_id: str
    step: int
    rank: int
    index: int


def micro_batch(units: Sequence[Unit], place: Place) -> MicroBatch:
    """The sealed micro-batch of a row's units; one masked token when there are none."""
    samples = [unit.sample for unit in units if unit.sample is not None]
    documents, turns, pairs = _laid_out(units)
    lengths = [len(document) for document in documents]
    rest = sum(lengths) - sum(sample.num_tokens for sample in samples)
    temperatures = [sample.temperature for sample in samples]
    temperatures += [unit.sample.temperature for unit in units if unit.sample for _ in unit.distillations]
    temperatures += [1.0] * (len(documents) - len(temperatures))
    return sealed(
        MicroBatch(
            run_id=place.run_id,
            step=place.step,
            rank=place.rank,
            index=place.index,
            version_min=min((sample.version_min for sample in samples), default=place.step - 1),
            version_max=max((sample.version_max for sample in samples), default=place.step - 1),
            input_ids=pack_ints(np.concatenate(documents)),
            position_ids=pack_ints(np.concatenate([np.arange(length) for length in lengths])),
            lengths=lengths,
            loss_mask=b"".join(sample.loss_mask for sample in samples) + pack_flags(np.zeros(rest)),
            logprobs=b"".join(sample.logprobs for sample in samples) + pack_floats(np.zeros(rest)),
            advantages=b"".join(sample.advantages for sample in samples) + pack_floats(np.zeros(rest)),
            temperatures=temperatures,
            sample_ids=[sample.sample_id for sample in samples],
            turns=turns,
            pairs=pairs,
        )
    )


def _laid_out(units: Sequence[Unit]) -> tuple[list[np.ndarray], list[DistilledTurn], list[PairInRow]]:
    """Documents in the order of the row, and where in it channels 2 and 3 find theirs."""
    with_sample = [unit for unit in units if unit.sample is not None]
    documents = [unit.documents[0] for unit in with_sample]
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    end, turns, pairs = starts[-1], [], []
    for unit, start in zip(with_sample, starts, strict=False):
        for wanted, document in zip(unit.distillations, unit.documents[1:], strict=True):
            count = wanted.end - wanted.start
            turns.append(DistilledTurn(start + wanted.start, end + wanted.teacher_start, count, wanted.weight))
            documents.append(document)
            end += len(document)
    for unit in units:
        if unit.preference is not None:
            pairs.append(_pair(unit.preference, end, *map(len, unit.documents)))
            documents += unit.documents
            end += unit.tokens
    return documents or [np.zeros(1, dtype=np.int32)], turns, pairs


def _pair(pair: Preference, start: int, chosen: int, rejected: int) -> PairInRow:
    middle, end = start + chosen, start + chosen + rejected
    return PairInRow(pair.pair_id, start + pair.context, middle, middle + pair.context, end, pair.epsilon)
