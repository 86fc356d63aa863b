"""A micro-batch as tensors on the device: what the forward pass, the head and the loss need, and nothing else.

    documents            sample ... | chosen, rejected ... | demonstration ... | teacher document ...
    N computed tokens    all of them in one forward pass; what starts alike is computed once
    R head rows          tokens of the policy loss, replay-DPO and SFT ... | tokens of hinted turns ...  each token once
    loss terms           T, D, P and E entries

Five index spaces, and how one leads to the next:

    position     all documents end to end; the wire has those before the teachers'     Documents.ids_N, starts
    document     which of the documents                              position -> document: Documents.of
    computed     in the forward pass, common beginnings once         position -> computed: computed_N (-1: not read)
    head row     R, each predicted token once, hinted turns last     position -> head row: head_row_N (-1: none)
    loss term    T, A and E index the head rows by policy_T, answer_A, demonstrated_E; D are the last D head rows

The hidden state of the token before predicts a token: source_R is computed_N[position - 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.packing.pack import check_same_turn
from composer_prime.packing.prefixes import Tree, joined, prefix_layout
from composer_prime.wire.types import HintedTurnInRow, MicroBatch, PairInRow, flags, floats, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Documents that one forward pass reads: N computed tokens."""

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]: position within the document."""
    trees: tuple[Tree, ...]
    """Which tokens attend to which: one tree a document, or several documents as branches of one."""
    source_R: Tensor
    """int64 [R]: index of the hidden state that predicts each of these tokens, that of the token before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow(Reading):
    """A row to train on. T, D and A may be 0; D is 0 where SDPO is off."""

    targets_R: Tensor
    """int64 [R]: the predicted tokens."""
    temperature_R: Tensor | None
    """float32 [R]: sampling temperature; None where it is 1 throughout."""
    document_R: Tensor
    """int64 [R]: the document of each token."""

    policy_T: Tensor | None
    """int64 [T]: the policy loss's rows of the head; None for all, in order."""
    sampler_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    """int64 [T]: the sample of each token."""
    sequences: int

    sampler_logprobs_D: Tensor
    """float32 [D]: the tokens of hinted turns, turn by turn; they are the head's last D rows."""
    weight_D: Tensor
    turn_D: Tensor
    """int64 [D]: the hinted turn of each token."""
    turns: int
    teacher_source_D: Tensor | None
    """int64 [D]: the teacher's hidden states among those of this row; None where the row does not read them."""
    teacher_readings: tuple[Reading, ...]
    """The teacher documents in passes of their own, with D predicted tokens; empty where the row reads them."""

    pairs: PairsRow | None
    """None where replay-DPO is off."""
    demonstrated_E: Tensor | None
    """int64 [E]: the head's rows of demonstrated tokens; None where SFT is off."""

    names: tuple[str, ...]
    """The sample, pair or demonstration of each document."""
    packed_tokens: int
    """Tokens of all documents, before common prefixes were merged; >= N."""
    sample_ids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsRow:
    """A row's preference pairs: A answer tokens on 2 P sides (chosen 0, rejected 0, chosen 1, ...)."""

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


def unpack(
    documents: Documents,
    device: torch.device,
    *,
    share: bool = False,
    distil: bool = False,
    prefer: bool = False,
    imitate: bool = False,
    teacher_in_row: bool = False,
    max_tokens: int | None = None,
) -> PackedRow:
    """Make the tensors of a checked micro-batch. Documents of a loss term that is off are not read.

    `share` merges common beginnings. `distil`: SDPO is on. `prefer`: replay-DPO is on. `imitate`: SFT is on.
    `teacher_in_row`: the forward pass reads a live teacher's documents, too; else passes of at most `max_tokens` do.
    """
    batch, put = documents.batch, partial(_tensor, device=device)
    turns, pairs = batch.turns if distil else [], batch.pairs if prefer else []
    read = [*range(documents.samples), *(documents.teachers() if distil and teacher_in_row else ())]
    read += [*(documents.sides() if prefer else ()), *(documents.demonstrations() if imitate else ())]
    read = read or [0]  # it may hold only terms that are off
    layout = prefix_layout([documents.tokens(document) for document in read], share=share)
    positions = joined(np.arange(*documents.starts[document : document + 2]) for document in read)
    computed_N = np.full(len(documents.ids_N), -1, dtype=np.int64)
    computed_N[positions] = layout.where
    computed = positions[layout.kept]
    trained = np.flatnonzero(flags(batch.loss_mask))
    hinted = joined(np.arange(turn.student, turn.student + turn.count) for turn in turns)
    answers = joined(np.arange(start, end) for pair in pairs for start, end in _answers(pair))
    spans = [span for each in batch.demonstrations for span in each.spans] if imitate else []
    demonstrated = joined(np.arange(start, end) for start, end in spans)
    predicted, head_row_N = _head_rows(len(documents.ids_N), [trained, answers, demonstrated], hinted)
    document_R = documents.of(predicted)
    turn_D = np.repeat(np.arange(len(turns)), np.array([turn.count for turn in turns], dtype=np.int64))
    temperatures, apart = np.asarray(batch.temperatures, dtype=np.float32), distil and not teacher_in_row
    return PackedRow(
        input_ids=put(documents.ids_N[computed], torch.int64)[None],
        position_ids=put(documents.depth_N[computed], torch.int64)[None],
        trees=layout.trees,
        source_R=put(computed_N[predicted - 1], torch.int64),
        targets_R=put(documents.ids_N[predicted], torch.int64),
        temperature_R=None if (temperatures == 1.0).all() else put(temperatures[document_R], torch.float32),
        document_R=put(document_R, torch.int64),
        policy_T=None if len(predicted) == len(trained) and not len(hinted) else put(head_row_N[trained], torch.int64),
        sampler_logprobs_T=put(floats(batch.logprobs)[trained], torch.float32),
        advantages_T=put(floats(batch.advantages)[trained], torch.float32),
        sequence_T=put(documents.of(trained), torch.int64),
        sequences=documents.samples,
        sampler_logprobs_D=put(floats(batch.logprobs)[hinted], torch.float32),
        weight_D=put(np.array([turn.weight for turn in turns])[turn_D], torch.float32),
        turn_D=put(turn_D, torch.int64),
        turns=len(turns),
        teacher_source_D=put(computed_N[documents.taught() - 1], torch.int64) if distil and teacher_in_row else None,
        teacher_readings=_teacher_readings(documents, device, share, max_tokens) if apart else (),
        pairs=_pairs_row(documents, head_row_N[answers], put) if prefer else None,
        demonstrated_E=put(head_row_N[demonstrated], torch.int64) if imitate else None,
        names=tuple(documents.name(index) for index in range(len(documents.starts) - 1)),
        packed_tokens=len(documents.ids_N),
        sample_ids=list(batch.sample_ids),
    )


def _head_rows(count: int, terms: list[np.ndarray], hinted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that the head reads, each once with `hinted` last, and the head row of each position [N]."""
    predicted = np.r_[np.setdiff1d(np.concatenate(terms), hinted), hinted].astype(np.int64)
    head_row_N = np.full(count, -1)
    head_row_N[predicted] = np.arange(len(predicted))
    return predicted, head_row_N


def reading_of(
    documents: list[np.ndarray], predicted: list[np.ndarray], device: torch.device, *, share: bool
) -> Reading:
    """Make the forward pass over `documents` (ids, [T_i] each) for their tokens `predicted` (indices >= 1 within each).

    Without documents it reads one token, so that ranks stay in step.
    """
    if not documents:
        documents, predicted = [np.zeros(1, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    layout = prefix_layout(documents, share=share)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    tokens = joined(start + index for start, index in zip(starts, predicted, strict=True))
    positions = joined(np.arange(len(document)) for document in documents)
    put = partial(_tensor, dtype=torch.int64, device=device)
    return Reading(
        input_ids=put(np.concatenate(documents)[layout.kept])[None],
        position_ids=put(positions[layout.kept])[None],
        trees=layout.trees,
        source_R=put(layout.where[tokens - 1]),
    )


def _tensor(values: np.ndarray, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values)).to(device=device, dtype=dtype, non_blocking=True)


def _teacher_readings(
    documents: Documents, device: torch.device, share: bool, max_tokens: int | None
) -> tuple[Reading, ...]:
    turns, first = documents.batch.turns, documents.first_teacher
    readings = []
    for teachers in teacher_passes(documents, share=share, max_tokens=max_tokens):
        ids = [documents.tokens(teacher) for teacher in teachers]
        counts = [turns[teacher - first].count for teacher in teachers]
        predicted = [np.arange(len(each) - count, len(each)) for each, count in zip(ids, counts, strict=True)]
        readings.append(reading_of(ids, predicted, device, share=share))
    return tuple(readings)


def teacher_passes(documents: Documents, *, share: bool, max_tokens: int | None) -> list[range]:
    """Cut the teacher documents, in order, into passes of at most `max_tokens` computed tokens each."""
    passes: list[range] = []
    for teacher in documents.teachers():
        if passes:
            longer = range(passes[-1].start, teacher + 1)
            layout = prefix_layout([documents.tokens(each) for each in longer], share=share)
            if max_tokens is None or len(layout.kept) <= max_tokens:
                passes[-1] = longer
                continue
        passes.append(range(teacher, teacher + 1))
    return passes


def _pairs_row(documents: Documents, answer_A: np.ndarray, put: partial[Tensor]) -> PairsRow:
    sides, pairs = documents.sides(), documents.batch.pairs
    starts = joined(np.array([pair.chosen_start, pair.rejected_start]) for pair in pairs)
    starts = starts - documents.starts[sides.start : sides.stop]
    side_ids = tuple(documents.tokens(side) for side in sides)
    lengths = np.array([len(ids) for ids in side_ids], dtype=np.int64) - starts
    return PairsRow(
        answer_A=put(answer_A, torch.int64),
        side_A=put(np.repeat(np.arange(len(side_ids)), lengths), torch.int64),
        length_S=put(lengths, torch.float32),
        epsilon_P=put(np.array([pair.epsilon for pair in pairs]), torch.float32),
        documents=side_ids,
        answer_starts=tuple(starts.tolist()),
    )


def _answers(pair: PairInRow) -> tuple[tuple[int, int], tuple[int, int]]:
    return (pair.chosen_start, pair.chosen_end), (pair.rejected_start, pair.rejected_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """A checked micro-batch, cut into samples, sides of pairs, demonstrations and teacher documents.

    A position counts its N tokens.
    """

    batch: MicroBatch
    where: str
    """Which micro-batch it is, for messages."""
    ids_N: np.ndarray
    starts: np.ndarray
    """int64 [documents + 1]: where each begins, and N."""
    samples: int
    """How many of the documents are samples (1 for a dummy, which holds a masked token)."""

    @property
    def first_teacher(self) -> int:
        """The first teacher document, after all others."""
        return len(self.batch.lengths)

    def name(self, document: int) -> str:
        """Return the sample, pair or demonstration that a document belongs to."""
        if document >= self.first_teacher:
            document = int(self.of(self.batch.turns[document - self.first_teacher].student))
        elif document in (rows := self.demonstrations()):
            return f"row {self.batch.demonstrations[document - rows.start].name}"
        elif document >= self.samples:
            return f"pair {self.batch.pairs[(document - self.samples) // 2].pair_id}"
        return self.batch.sample_ids[document] if self.batch.sample_ids else "none"

    def of(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the documents that hold these positions."""
        return np.searchsorted(self.starts, positions, "right") - 1

    def tokens(self, document: int) -> np.ndarray:
        return self.ids_N[self.starts[document] : self.starts[document + 1]]

    def teachers(self) -> range:
        return range(self.first_teacher, len(self.starts) - 1)

    def taught(self) -> np.ndarray:
        """Return the positions of hinted turns in their teacher documents, turn by turn."""
        ends = self.starts[1:][self.first_teacher :]
        return joined(np.arange(end - turn.count, end) for end, turn in zip(ends, self.batch.turns, strict=True))

    @property
    def depth_N(self) -> np.ndarray:
        """int64 [N]: position within the document."""
        return np.arange(len(self.ids_N)) - np.repeat(self.starts[:-1], np.diff(self.starts))

    def sides(self) -> range:
        return range(self.samples, self.samples + 2 * len(self.batch.pairs))

    def demonstrations(self) -> range:
        return range(self.first_teacher - len(self.batch.demonstrations), self.first_teacher)


def documents_of(batch: MicroBatch, vocabulary: int) -> Documents:
    """Cut `batch` at its borders and check it.

    Raises RunMismatchError: inconsistent lengths, token ids outside the vocabulary, a document whose first token is
    trained, a hinted turn or pair that is cut, overlaps or differs from its teacher's, a span outside its
    demonstration. Raises NonFiniteError: NaN or infinity among logprobs or advantages. Both name what is at fault.
    """
    where = f"micro-batch {batch.index} of step {batch.step} (samples {', '.join(batch.sample_ids) or 'none'})"
    ids_N = ints(batch.input_ids)
    _check_arrays(batch, ids_N, where, vocabulary)
    starts = np.cumsum([0, *batch.lengths])
    samples = len(batch.lengths) - 2 * len(batch.pairs) - len(batch.demonstrations)
    teachers = [_teacher_ids(turn, ids_N, starts[: samples + 1], where, vocabulary) for turn in batch.turns]
    documents = Documents(
        batch=batch,
        where=where,
        ids_N=np.concatenate([ids_N, *teachers]),
        starts=np.cumsum([0, *batch.lengths, *map(len, teachers)]),
        samples=samples,
    )
    if documents.samples != len(batch.sample_ids) and (batch.sample_ids or documents.samples not in (0, 1)):
        raise RunMismatchError(
            f"{where}: {len(batch.lengths)} documents for {len(batch.sample_ids)} samples, {len(batch.pairs)} pairs "
            f"and {len(batch.demonstrations)} demonstrations"
        )
    _check_values(documents)
    _check_turns(documents)
    _check_pairs(documents)
    _check_demonstrations(documents)
    return documents


def _check_arrays(batch: MicroBatch, ids_N: np.ndarray, where: str, vocabulary: int) -> None:
    arrays = {"position_ids": ints(batch.position_ids), "loss_mask": flags(batch.loss_mask),
              "logprobs": floats(batch.logprobs), "advantages": floats(batch.advantages)}  # fmt: skip
    for name, array in arrays.items():
        if len(array) != len(ids_N):
            raise RunMismatchError(f"{where}: {name} has {len(array)} entries for {len(ids_N)} tokens")
    if sum(batch.lengths) != len(ids_N) or min(batch.lengths, default=0) < 1:
        raise RunMismatchError(f"{where}: lengths {batch.lengths} do not add up to {len(ids_N)} tokens")
    if len(batch.temperatures) != len(batch.lengths) or min(batch.temperatures) <= 0:
        raise RunMismatchError(f"{where}: temperatures {batch.temperatures} must be one positive number a sample")
    if ids_N.min() < 0 or ids_N.max() >= vocabulary:
        raise RunMismatchError(
            f"{where}: token ids {ids_N.min()}..{ids_N.max()}, the model's vocabulary is 0..{vocabulary - 1}"
        )


def _teacher_ids(
    turn: HintedTurnInRow, ids_N: np.ndarray, starts: np.ndarray, where: str, vocabulary: int
) -> np.ndarray:
    """Return the ids of a turn's teacher document; `starts`: of the samples, and their end."""
    what = f"turn at tokens {turn.student}..{turn.student + turn.count}"
    home = int(np.searchsorted(starts, turn.student, "right")) - 1
    if not (
        0 <= home < len(starts) - 1 and starts[home] < turn.student < turn.student + turn.count <= starts[home + 1]
    ):
        raise RunMismatchError(f"{where}: {what} lies in no sample, or was cut")
    tail, length = ints(turn.tail), int(starts[home + 1] - starts[home])
    if not (0 <= turn.shared <= length and len(tail) and tail.min() >= 0 and tail.max() < vocabulary):
        raise RunMismatchError(
            f"{where}: {what} has a teacher document of {turn.shared} tokens of its sample's {length} and "
            f"{len(tail)} more with ids {tail.min(initial=0)}..{tail.max(initial=0)}; the model's vocabulary is "
            f"0..{vocabulary - 1}"
        )
    return np.concatenate([ids_N[starts[home] : starts[home] + turn.shared], tail])


def _check_values(documents: Documents) -> None:
    batch, mask = documents.batch, flags(documents.batch.loss_mask).astype(bool)
    used = mask.copy()
    for turn in batch.turns:
        used[turn.student : turn.student + turn.count] = True
    if mask[documents.starts[: documents.first_teacher]].any():
        raise RunMismatchError(
            f"{documents.where}: a sample's first token is marked as trained, but nothing predicts it"
        )
    for name, values in (("logprobs", floats(batch.logprobs)), ("advantages", floats(batch.advantages))):
        bad = np.flatnonzero(~np.isfinite(values) & used)
        if bad.size:
            sample = documents.name(int(documents.of(bad[0])))
            raise NonFiniteError(
                f"{documents.where}: {name} of sample {sample} hold NaN or infinity; nothing was trained"
            )


def _check_turns(documents: Documents) -> None:
    ids_N, taken = documents.ids_N, np.zeros(len(documents.ids_N), dtype=bool)
    for document, turn in zip(documents.teachers(), documents.batch.turns, strict=True):
        start, end = turn.student, turn.student + turn.count
        what, teacher_ids = f"turn at tokens {start}..{end}", documents.tokens(document)
        where = f"{documents.where}: sample {documents.name(document)}"
        if len(teacher_ids) <= turn.count:
            raise RunMismatchError(f"{where}: {what} has {len(teacher_ids)} tokens in its teacher document: no context")
        check_same_turn(where, what, ids_N[start:end], teacher_ids[-turn.count :])
        if taken[start:end].any():
            raise RunMismatchError(f"{where}: {what} overlaps another hinted turn")
        taken[start:end] = True


def _check_pairs(documents: Documents) -> None:
    sides = ((pair.pair_id, start, end) for pair in documents.batch.pairs for start, end in _answers(pair))
    for document, (pair_id, start, end) in zip(documents.sides(), sides, strict=True):
        first, stop = documents.starts[document], documents.starts[document + 1]
        if not first < start < end == stop:
            raise RunMismatchError(
                f"{documents.where}: pair {pair_id} has an answer at tokens {start}..{end} of a document at "
                f"{first}..{stop}: it needs a context, and must not be cut"
            )


def _check_demonstrations(documents: Documents) -> None:
    for document, each in zip(documents.demonstrations(), documents.batch.demonstrations, strict=True):
        first, stop = documents.starts[document], documents.starts[document + 1]
        edges = [first, *(edge for span in each.spans for edge in span)]
        if not each.spans or edges[-1] > stop or any(after <= before for before, after in pairwise(edges)):
            raise RunMismatchError(
                f"{documents.where}: row {each.name} trains tokens {each.spans[:4]} of a document at {first}..{stop}: "
                "spans are in order, apart, and behind the first token"
            )
