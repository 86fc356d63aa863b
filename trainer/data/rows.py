"""A micro-batch as tensors on the device: what the forward pass, the head and the channels need, nothing else.

    documents (row_documents.py)    sample ... | teacher document ... | chosen rejected ...
    read (N computed tokens)        all of them in one forward pass; what starts alike is computed once
    head rows (R)                   tokens of channels 1 and 3 ... | distilled tokens ...        each needed token once
    channels                        T, D and P entries, by index among the head's rows

Five index spaces, and how one leads to the next:

    position     in the micro-batch, all documents end to end; what the wire counts in      Documents.ids_N, starts
    document     which of the documents                              position -> document by Documents.of
    computed     in the forward pass, common beginnings once         position -> computed by where_N (-1: not read)
    head row     R, each wanted token once, distilled ones last      position -> head row by row_N (-1: not wanted)
    channel      T, A: by policy_T, answer_A among the head rows; D: the last D head rows

A token is predicted by the hidden state of the token before it: source_R is where_N[position - 1].

The documents of a micro-batch, checked: samples, then teacher documents, then the sides of preference pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.packing.micro_batch import check_same_turn
from composer_prime.packing.prefixes import Tree, joined, prefix_layout
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
            raise NonFiniteError(f"{found.where}: {name} of sample {sample} hold NaN or infinity; nothing was trained")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Documents that one forward pass reads: N tokens that are computed."""

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]: position within the document."""
    trees: tuple[Tree, ...]
    """Which tokens attend to which: one tree a document, or several documents as branches of one."""
    source_R: Tensor
    """int64 [R]: index of the hidden state that predicts each wanted token, that of the token before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedTurnsRow:
    """Channel 2's tokens of a row: the head's last D rows, turn by turn."""

    sampler_logprobs_D: Tensor
    """float32 [D]."""
    weight_D: Tensor
    turn_D: Tensor
    """int64 [D]: which of the row's turns."""
    turns: int
    source_D: Tensor | None
    """int64 [D]: the teacher's hidden states among those of the row itself; None when its documents are apart."""
    teacher: Reading | None
    """The teacher documents alone; `source_R` has D entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsRow:
    """Channel 3's pairs of a row: A answer tokens on 2 P sides (chosen 0, rejected 0, chosen 1, ...)."""

    answer_A: Tensor
    """int64 [A]: the tokens' rows of the head."""
    side_A: Tensor
    """int64 [A]."""
    length_S: Tensor
    """float32 [2 P]: tokens of each answer."""
    epsilon_P: Tensor
    documents: tuple[np.ndarray, ...]
    """int32 ids of each side, context and answer."""
    answer_starts: tuple[int, ...]
    """Where the answer begins in each side."""

    @property
    def pairs(self) -> int:
        return len(self.documents) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow(Reading):
    """A row to train on. T, D and A may be 0."""

    targets_R: Tensor
    """int64 [R]: the wanted tokens."""
    temperature_R: Tensor | None
    """float32 [R]: sampling temperature; None where it is 1 throughout."""
    document_R: Tensor
    """int64 [R]: which document the token is of."""
    policy_T: Tensor | None
    """int64 [T]: channel 1's rows of the head; None for all, in order."""
    sampler_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    """int64 [T]: which sample of the row the token belongs to."""
    sequences: int
    distilled: HintedTurnsRow | None
    pairs: PairsRow | None
    names: tuple[str, ...]
    """The sample or pair of each document."""
    packed_tokens: int
    """Tokens of all documents, before common prefixes were merged; >= N."""
    sample_ids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How micro-batches become rows on this run."""

    device: torch.device
    share: bool = False
    """Merge the common beginnings of documents."""
    distil: bool = False
    """Whether channel 2 is on."""
    prefer: bool = False
    """Whether channel 3 is on."""
    teacher_in_row: bool = False
    """Whether the teacher's documents are read in the forward pass of the row (a live teacher only)."""


def unpack(found: Documents, options: RowOptions) -> PackedRow:
    """Tensors of a checked micro-batch; documents of a channel that is off are not read."""
    batch, place = found.batch, _Placer(found, options)
    in_row = options.distil and options.teacher_in_row
    read = [*range(found.samples), *(found.teachers() if in_row else ()), *(found.sides() if options.prefer else ())]
    if not read:  # teacher documents and sides of channels that are off
        read = [0]
    plan, where_N = place.layout(read)
    trained = np.flatnonzero(flags(batch.loss_mask))
    distilled = joined(np.arange(turn.student, turn.student + turn.count) for turn in place.turns)
    answers = joined(
        np.arange(*span)
        for pair in place.pairs
        for span in ((pair.chosen_start, pair.chosen_end), (pair.rejected_start, pair.rejected_end))
    )
    wanted = np.r_[np.setdiff1d(np.union1d(trained, answers), distilled), distilled].astype(np.int64)
    row_N = np.full(len(found.ids_N), -1)
    row_N[wanted] = np.arange(len(wanted))
    document = np.searchsorted(found.starts, wanted, "right") - 1
    return PackedRow(
        **plan,
        source_R=place.put(where_N[wanted - 1], torch.int64),
        targets_R=place.put(found.ids_N[wanted], torch.int64),
        temperature_R=place.temperatures(document),
        document_R=place.put(document, torch.int64),
        policy_T=None if len(wanted) == len(trained) and not len(distilled) else place.put(row_N[trained], torch.int64),
        sampler_logprobs_T=place.put(floats(batch.logprobs)[trained], torch.float32),
        advantages_T=place.put(floats(batch.advantages)[trained], torch.float32),
        sequence_T=place.put(np.searchsorted(found.starts, trained, "right") - 1, torch.int64),
        sequences=found.samples,
        distilled=place.distilled(distilled, where_N) if options.distil else None,
        pairs=place.pairs_row(row_N[answers]) if options.prefer else None,
        names=tuple(found.name(index) for index in range(len(batch.lengths))),
        packed_tokens=len(found.ids_N),
        sample_ids=list(batch.sample_ids),
    )


def reading_of(documents: list[np.ndarray], wanted: list[np.ndarray], device: torch.device, *, share: bool) -> Reading:
    """A forward pass over `documents` (ids, [T_i] each) for their tokens `wanted` (indices >= 1 within each)."""
    plan = prefix_layout(documents, share=share)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    tokens = joined(start + index for start, index in zip(starts, wanted, strict=True))
    put = lambda values: torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)
    positions = joined(np.arange(len(document)) for document in documents)
    return Reading(
        input_ids=put(np.concatenate(documents)[plan.kept])[None],
        position_ids=put(positions[plan.kept])[None],
        trees=plan.trees,
        source_R=put(plan.where[tokens - 1]),
    )


class _Placer:
    """Makes the tensors of one row."""

    def __init__(self, found: Documents, options: RowOptions) -> None:
        self._found, self._options, self._batch = found, options, found.batch
        self.turns = found.batch.turns if options.distil else []
        self.pairs = found.batch.pairs if options.prefer else []

    def put(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device=self._options.device, dtype=dtype, non_blocking=True)

    def layout(self, read: list[int]) -> tuple[dict, np.ndarray]:
        """What the forward pass over the documents `read` takes, and the computed token of each position (-1: none)."""
        found = self._found
        plan = prefix_layout([found.tokens(document) for document in read], share=self._options.share)
        positions = found.positions(read)
        where_N = np.full(len(found.ids_N), -1, dtype=np.int64)
        where_N[positions] = plan.where
        kept = positions[plan.kept]
        tensors = {
            "input_ids": self.put(found.ids_N[kept], torch.int64)[None],
            "position_ids": self.put(ints(self._batch.position_ids)[kept], torch.int64)[None],
            "trees": plan.trees,
        }
        return tensors, where_N

    def temperatures(self, document: np.ndarray) -> Tensor | None:
        if all(temperature == 1.0 for temperature in self._batch.temperatures):
            return None
        return self.put(np.asarray(self._batch.temperatures, dtype=np.float32)[document], torch.float32)

    def distilled(self, distilled: np.ndarray, where_N: np.ndarray) -> HintedTurnsRow:
        counts = np.array([turn.count for turn in self.turns], dtype=np.int64)
        turn = np.repeat(np.arange(len(counts)), counts)
        taught = joined(np.arange(turn.teacher, turn.teacher + turn.count) for turn in self.turns)
        in_row = self._options.teacher_in_row
        return HintedTurnsRow(
            sampler_logprobs_D=self.put(floats(self._batch.logprobs)[distilled], torch.float32),
            weight_D=self.put(np.array([turn.weight for turn in self.turns])[turn], torch.float32),
            turn_D=self.put(turn, torch.int64),
            turns=len(counts),
            source_D=self.put(where_N[taught - 1], torch.int64) if in_row else None,
            teacher=None if in_row else self._teacher(),
        )

    def _teacher(self) -> Reading:
        """The teacher documents in a row of their own; without any, one token, so that ranks stay in step."""
        found = self._found
        documents = [found.tokens(document) for document in found.teachers()] if self.turns else []
        wanted = [
            np.arange(len(document) - turn.count, len(document))
            for document, turn in zip(documents, self.turns, strict=True)
        ]
        if not documents:
            documents, wanted = [np.zeros(1, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
        return reading_of(documents, wanted, self._options.device, share=self._options.share)

    def pairs_row(self, answer_A: np.ndarray) -> PairsRow:
        found, sides = self._found, self._found.sides() if self.pairs else range(0)
        begins = joined(np.array([pair.chosen_start, pair.rejected_start]) for pair in self.pairs)
        starts = begins - found.starts[list(sides)] if len(begins) else begins
        documents = tuple(found.tokens(document) for document in sides)
        lengths = np.array([len(document) for document in documents], dtype=np.int64) - starts
        return PairsRow(
            answer_A=self.put(answer_A, torch.int64),
            side_A=self.put(np.repeat(np.arange(len(documents)), lengths), torch.int64),
            length_S=self.put(lengths, torch.float32),
            epsilon_P=self.put(np.array([pair.epsilon for pair in self.pairs]), torch.float32),
            documents=documents,
            answer_starts=tuple(starts.tolist()),
        )
