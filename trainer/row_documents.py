"""The documents of a micro-batch, checked: samples, then teacher documents, then the sides of preference pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from composer_prime.documents import check_same_turn
from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.prefixes import joined
from composer_prime.wire.types import MicroBatch, flags, floats, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """A micro-batch cut into its documents. N tokens in all; a position is an index among them."""

    batch: MicroBatch
    where: str
    """Which micro-batch it is, for messages."""
    ids_N: np.ndarray
    starts: np.ndarray
    """int64 [documents + 1]: where each begins, and N."""
    samples: int
    """How many of the documents are samples (1 for a dummy, which holds a masked token)."""

    @property
    def first_side(self) -> int:
        """The first document that is a side of a pair."""
        return self.samples + len(self.batch.turns)

    def name(self, document: int) -> str:
        """The sample or pair that a document belongs to."""
        if document >= self.first_side:
            return f"pair {self.batch.pairs[(document - self.first_side) // 2].pair_id}"
        if document >= self.samples:
            document = self.of(self.batch.turns[document - self.samples].student)
        return self.batch.sample_ids[document] if self.batch.sample_ids else "none"

    def of(self, position: int) -> int:
        """The document that holds a position."""
        return int(np.searchsorted(self.starts, position, "right")) - 1

    def tokens(self, document: int) -> np.ndarray:
        return self.ids_N[self.starts[document] : self.starts[document + 1]]

    def positions(self, documents: Iterable[int]) -> np.ndarray:
        """int64: the positions of all tokens of `documents`, in order."""
        return joined(np.arange(self.starts[document], self.starts[document + 1]) for document in documents)

    def teachers(self) -> range:
        return range(self.samples, self.first_side)

    def sides(self) -> range:
        return range(self.first_side, len(self.starts) - 1)


def documents_of(batch: MicroBatch, vocabulary: int) -> Documents:
    """`batch` cut at its borders.

    Raises RunMismatchError (inconsistent lengths, token ids outside the vocabulary, a document whose first token is
    trained, a distilled turn or pair that is cut, overlaps or differs from its teacher's) or NonFiniteError (NaN or
    infinity among logprobs or advantages), naming the samples or pairs.
    """
    where = f"micro-batch {batch.index} of step {batch.step} (samples {', '.join(batch.sample_ids) or 'none'})"
    ids = ints(batch.input_ids)
    _check_arrays(batch, ids, where, vocabulary)
    found = Documents(
        batch=batch,
        where=where,
        ids_N=ids,
        starts=np.cumsum([0, *batch.lengths]),
        samples=len(batch.lengths) - len(batch.turns) - 2 * len(batch.pairs),
    )
    if found.samples != len(batch.sample_ids) and (batch.sample_ids or found.samples not in (0, 1)):
        raise RunMismatchError(
            f"{where}: {len(batch.lengths)} documents for {len(batch.sample_ids)} samples, {len(batch.turns)} teacher "
            f"documents and {len(batch.pairs)} pairs"
        )
    _check_values(found)
    _check_turns(found)
    _check_pairs(found)
    return found


def _check_arrays(batch: MicroBatch, ids: np.ndarray, where: str, vocabulary: int) -> None:
    arrays = {"position_ids": ints(batch.position_ids), "loss_mask": flags(batch.loss_mask),
              "logprobs": floats(batch.logprobs), "advantages": floats(batch.advantages)}  # fmt: skip
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


def _check_values(found: Documents) -> None:
    batch, mask = found.batch, flags(found.batch.loss_mask).astype(bool)
    used = mask.copy()
    for turn in batch.turns:
        used[turn.student : turn.student + turn.count] = True
    if mask[found.starts[:-1]].any():
        raise RunMismatchError(f"{found.where}: a sample's first token is marked as trained, but nothing predicts it")
    for name, values in (("logprobs", floats(batch.logprobs)), ("advantages", floats(batch.advantages))):
        bad = np.flatnonzero(~np.isfinite(values) & used)
        if bad.size:
            sample = found.name(found.of(bad[0]))
            raise NonFiniteError(
                f"{found.where}: {name} of sample {sample} hold NaN or infinity; nothing was trained"
            )


def _check_turns(found: Documents) -> None:
    taken = np.zeros(len(found.ids_N), dtype=bool)
    for document, turn in zip(found.teachers(), found.batch.turns, strict=True):
        start, end = turn.student, turn.student + turn.count
        home = found.of(start)
        what = f"turn at tokens {start}..{end}"
        if not (0 <= home < found.samples and found.starts[home] < start < end <= found.starts[home + 1]):
            raise RunMismatchError(f"{found.where}: {what} lies in no sample, or was cut")
        where = f"{found.where}: sample {found.name(home)}"
        if not found.starts[document] < turn.teacher < found.starts[document + 1]:
            raise RunMismatchError(f"{where}: {what} begins at {turn.teacher}, outside its teacher document")
        check_same_turn(where, what, found.ids_N[start:end], found.ids_N[turn.teacher : found.starts[document + 1]])
        if taken[start:end].any():
            raise RunMismatchError(f"{where}: {what} overlaps another distilled turn")
        taken[start:end] = True


def _check_pairs(found: Documents) -> None:
    for index, pair in enumerate(found.batch.pairs):
        for side, start, end in (
            (0, pair.chosen_start, pair.chosen_end),
            (1, pair.rejected_start, pair.rejected_end),
        ):
            document = found.first_side + 2 * index + side
            if not found.starts[document] < start < end == found.starts[document + 1]:
                raise RunMismatchError(
                    f"{found.where}: pair {pair.pair_id} has an answer at tokens {start}..{end} of a document at "
                    f"{found.starts[document]}..{found.starts[document + 1]}: it needs a context, and must not be cut"
                )
