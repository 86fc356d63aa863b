"""A micro-batch as tensors on the device: what the forward pass, the head and the loss terms need, and nothing else.

    documents            sample ... | units of other terms ...
    N computed tokens    all of them in one forward pass; what starts alike is computed once
    R head rows          tokens that a term reads ... | tokens of hinted turns ...     each token once
    teacher documents    of the hinted turns, in passes of their own

A position counts the tokens of all documents (composer_prime/packing/pack.py); terms name the positions that they read.
`computed_N` leads from a position to its place in the forward pass (-1: not read), `head_row_N` to its row of the head
(-1: none). The hidden state of the token before predicts a token: source_R is computed_N[position - 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from composer_prime.channels.term import Term, TermRows
from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.packing.pack import Row, Tree, joined, prefix_layout
from composer_prime.wire.types import MicroBatch, flags, floats, ints


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
class TermRow:
    """A term's part of a row, on the device."""

    head_rows: Tensor | None
    """int64 [K]: the head's rows of its tokens; None for all, in order."""
    arrays: Mapping[str, Tensor]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredDocuments:
    """S documents whose ends the frozen base scores."""

    ids: tuple[np.ndarray, ...]
    """int32 each."""
    starts: tuple[int, ...]
    """Where the scored tokens begin in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow(Reading):
    """A row to train on."""

    targets_R: Tensor
    """int64 [R]: the predicted tokens."""
    temperature_R: Tensor | None
    """float32 [R]: sampling temperature; None where it is 1 throughout."""
    document_R: Tensor
    """int64 [R]: the document of each token."""
    terms: Mapping[str, TermRow]
    """By the term's name."""
    taught: tuple[Reading, ...]
    """The passes that read the teacher documents; their D predicted tokens are the head's last D rows."""
    scored: ScoredDocuments | None
    """What the frozen base scores (preference pairs); None where no term asks for it."""
    names: tuple[str, ...]
    """The sample or unit of each document."""
    packed_tokens: int
    """Tokens of all documents, before common prefixes were merged; >= N."""
    sample_ids: list[str]


def unpack(
    row: Row,
    terms: Sequence[Term],
    device: torch.device,
    *,
    share: bool = False,
    max_tokens: int | None = None,
) -> PackedRow:
    """Make the tensors of a checked micro-batch for `terms`. Documents of other terms are not read.

    `share` merges common beginnings. Teacher documents are read in passes of at most `max_tokens` computed tokens.
    """
    put = partial(_tensor, device=device)
    asked = {term.name: term.rows(row) for term in terms}
    read = [*range(row.samples), *row.documents(asked)]
    read = read or [0]  # the row may hold nothing but other terms' documents
    layout = prefix_layout([row.tokens(document) for document in read], share=share)
    positions = joined(np.arange(*row.starts[document : document + 2]) for document in read)
    computed_N = np.full(len(row.ids_N), -1, dtype=np.int64)
    computed_N[positions] = layout.where
    computed = positions[layout.kept]
    hinted = joined(asked[term.name].positions for term in terms if term.is_taught)
    predicted, head_row_N = _head_rows(len(row.ids_N), [rows.positions for rows in asked.values()], hinted)
    document_R = row.document_of(predicted)
    own_rows = {name: head_row_N[rows.positions] for name, rows in asked.items()}
    temperatures = np.asarray(row.batch.temperatures, dtype=np.float32)
    return PackedRow(
        input_ids=put(row.ids_N[computed], torch.int64)[None],
        position_ids=put(row.depth_N[computed], torch.int64)[None],
        trees=layout.trees,
        source_R=put(computed_N[predicted - 1], torch.int64),
        targets_R=put(row.ids_N[predicted], torch.int64),
        temperature_R=None if (temperatures == 1.0).all() else put(temperatures[document_R], torch.float32),
        document_R=put(document_R, torch.int64),
        terms={name: _term_row(rows, own_rows[name], len(predicted), put) for name, rows in asked.items()},
        taught=_taught(row, device, share, max_tokens) if any(term.is_taught for term in terms) else (),
        scored=next((_scored(row, term.name) for term in terms if term.is_scored), None),
        names=tuple(row.name(index) for index in range(len(row.starts) - 1)),
        packed_tokens=len(row.ids_N),
        sample_ids=list(row.batch.sample_ids),
    )


def _head_rows(count: int, terms: list[np.ndarray], hinted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that the head reads, each once with `hinted` last, and the head row of each position [N]."""
    predicted = np.r_[np.setdiff1d(joined(terms), hinted), hinted].astype(np.int64)
    head_row_N = np.full(count, -1)
    head_row_N[predicted] = np.arange(len(predicted))
    return predicted, head_row_N


def _term_row(rows: TermRows, head_rows: np.ndarray, count: int, put: partial[Tensor]) -> TermRow:
    in_order = np.array_equal(head_rows, np.arange(count))
    arrays = {
        name: put(array, torch.float32 if array.dtype.kind == "f" else torch.int64)
        for name, array in rows.arrays.items()
    }
    return TermRow(head_rows=None if in_order else put(head_rows, torch.int64), arrays=arrays, counts=rows.counts)


def _scored(row: Row, term: str) -> ScoredDocuments:
    documents = row.documents([term])
    starts = [spans[0][0] for unit in row.units(term) for spans in unit.spans]
    return ScoredDocuments(
        ids=tuple(row.tokens(document) for document in documents),
        starts=tuple(int(start - row.starts[document]) for start, document in zip(starts, documents, strict=True)),
    )


def _taught(row: Row, device: torch.device, share: bool, max_tokens: int | None) -> tuple[Reading, ...]:
    """Return the passes that read the teacher documents."""
    readings = []
    for teachers in _teacher_passes(row, share=share, max_tokens=max_tokens):
        ids = [row.tokens(teacher) for teacher in teachers]
        counts = [row.batch.turns[teacher - row.first_teacher].count for teacher in teachers]
        predicted = [np.arange(len(each) - count, len(each)) for each, count in zip(ids, counts, strict=True)]
        readings.append(reading_of(ids, predicted, device, share=share))
    return tuple(readings)


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


def _teacher_passes(row: Row, *, share: bool, max_tokens: int | None) -> list[range]:
    """Cut the teacher documents, in order, into passes of at most `max_tokens` computed tokens each."""
    passes: list[range] = []
    for teacher in row.teachers():
        if passes:
            longer = range(passes[-1].start, teacher + 1)
            layout = prefix_layout([row.tokens(each) for each in longer], share=share)
            if max_tokens is None or len(layout.kept) <= max_tokens:
                passes[-1] = longer
                continue
        passes.append(range(teacher, teacher + 1))
    return passes


def checked_row(batch: MicroBatch, vocabulary: int) -> Row:
    """Cut `batch` into its documents, after a check of what the packer does not know.

    Raises RunMismatchError (lengths or temperatures that do not fit, token ids outside the vocabulary, a first token
    that is trained) or NonFiniteError (NaN or infinity among logprobs or advantages). Both name what is at fault.
    """
    where = f"micro-batch {batch.index} of step {batch.step} (samples {', '.join(batch.sample_ids) or 'none'})"
    count = len(ints(batch.input_ids))
    arrays = {"loss_mask": flags(batch.loss_mask), "logprobs": floats(batch.logprobs),
              "advantages": floats(batch.advantages)}  # fmt: skip
    for name, array in arrays.items():
        if len(array) != count:
            raise RunMismatchError(f"{where}: {name} has {len(array)} entries for {count} tokens")
    if sum(batch.lengths) != count or min(batch.lengths, default=0) < 1:
        raise RunMismatchError(f"{where}: lengths {batch.lengths} do not add up to {count} tokens")
    if len(batch.temperatures) != len(batch.lengths) or min(batch.temperatures) <= 0:
        raise RunMismatchError(f"{where}: temperatures {batch.temperatures} must be one positive number a document")
    row = Row.of(batch)
    first = np.isin(row.starts[: len(batch.lengths)], row.trained)
    if first.any():
        name = row.name(int(np.flatnonzero(first)[0]))
        raise RunMismatchError(f"{where}: the first token is marked as trained in {name}, but nothing predicts it")
    if row.ids_N.min() < 0 or row.ids_N.max() >= vocabulary:
        raise RunMismatchError(
            f"{where}: token ids {row.ids_N.min()}..{row.ids_N.max()}, the model's vocabulary is 0..{vocabulary - 1}"
        )
    _check_finite(row, where)
    return row


def _check_finite(row: Row, where: str) -> None:
    """Check the figures of the tokens that are trained or distilled."""
    used = flags(row.batch.loss_mask).astype(bool)
    for turn in row.batch.turns:
        used[turn.student : turn.student + turn.count] = True
    for name, values in (("logprobs", row.sampler_logprobs), ("advantages", row.advantages)):
        bad = np.flatnonzero(used & ~np.isfinite(values))
        if len(bad):
            sample = row.name(int(row.document_of(bad[0])))
            raise NonFiniteError(f"{where}: {name} of sample {sample} hold NaN or infinity; nothing was trained")
