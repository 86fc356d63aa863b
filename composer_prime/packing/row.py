"""A micro-batch as its documents: samples, then the units of other loss terms, then teacher documents.

    position     all documents end to end; the wire has those before the teachers'     ids_N, starts
    document     which of the documents                              position -> document: document_of

Torch-free. pack.py has checked what it packed, and the checksum of a micro-batch shows any change since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from composer_prime.packing.prefixes import joined
from composer_prime.wire.types import MicroBatch, UnitInRow, flags, floats, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch, cut into its documents. A position counts its N tokens."""

    batch: MicroBatch
    ids_N: np.ndarray
    starts: np.ndarray
    """int64 [documents + 1]: where each begins, and N."""
    samples: int
    """How many of the documents are samples (1 for a dummy, which holds a masked token)."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Row:
        """Cut `batch` at its borders."""
        ids = ints(batch.input_ids)
        starts = np.cumsum([0, *batch.lengths])
        samples = len(batch.lengths) - sum(len(unit.spans) for unit in batch.units)
        homes = [int(np.searchsorted(starts, turn.student, "right")) - 1 for turn in batch.turns]
        teachers = [
            np.concatenate([ids[starts[home] : starts[home] + turn.shared], ints(turn.tail)])
            for home, turn in zip(homes, batch.turns, strict=True)
        ]
        return cls(
            batch=batch,
            ids_N=np.concatenate([ids, *teachers]),
            starts=np.cumsum([0, *batch.lengths, *map(len, teachers)]),
            samples=samples,
        )

    @property
    def first_teacher(self) -> int:
        """The first teacher document, after all others."""
        return len(self.batch.lengths)

    @property
    def depth_N(self) -> np.ndarray:
        """int64 [N]: position within the document."""
        return np.arange(len(self.ids_N)) - np.repeat(self.starts[:-1], np.diff(self.starts))

    @property
    def trained(self) -> np.ndarray:
        """int64 [T]: the positions of the samples' trained tokens."""
        return np.flatnonzero(flags(self.batch.loss_mask))

    @property
    def sampler_logprobs(self) -> np.ndarray:
        """float32: by position, the log-probability under the sampling distribution."""
        return floats(self.batch.logprobs)

    @property
    def advantages(self) -> np.ndarray:
        """float32: by position, 0 where the token is not trained."""
        return floats(self.batch.advantages)

    def document_of(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the documents that hold these positions."""
        return np.searchsorted(self.starts, positions, "right") - 1

    def tokens(self, document: int) -> np.ndarray:
        """Return a document's token ids."""
        return self.ids_N[self.starts[document] : self.starts[document + 1]]

    def teachers(self) -> range:
        return range(self.first_teacher, len(self.starts) - 1)

    def units(self, term: str) -> list[UnitInRow]:
        """Return the units of `term`, in order."""
        return [unit for unit in self.batch.units if unit.term == term]

    def documents(self, terms: Iterable[str]) -> list[int]:
        """Return the documents of the units of `terms`, in order."""
        names = set(terms)
        return [
            unit.document + index for unit in self.batch.units if unit.term in names for index in range(len(unit.spans))
        ]

    def name(self, document: int) -> str:
        """Return the sample or unit that a document belongs to."""
        if document >= self.first_teacher:
            document = int(self.document_of(self.batch.turns[document - self.first_teacher].student))
        if document >= self.samples:
            owners = [unit.name for unit in self.batch.units for _ in unit.spans]
            return owners[document - self.samples]
        return self.batch.sample_ids[document] if self.batch.sample_ids else "none"


def span_positions(unit: UnitInRow) -> np.ndarray:
    """Return the positions that a unit trains, document by document."""
    return joined(np.arange(start, end) for spans in unit.spans for start, end in spans)
