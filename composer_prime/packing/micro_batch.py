"""From the units of a row to the micro-batch on the wire: documents end to end, hinted turns and answers by position.

    | sample | sample | ... | teacher document | ... | chosen | rejected | chosen | ...

A unit is what must share a row: a sample with its teacher documents, or both sides of a preference pair.

    sample                    context ── turn ── tool ── turn
    teacher document          context ── hint ── turn           SDPO reads the turn in both, token by token
    preference pair           context ── chosen                 replay-DPO compares the two answers
                              context ── rejected
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, RunMismatchError
from composer_prime.wire.types import (
    HintedTurn,
    HintedTurnInRow,
    MicroBatch,
    PairInRow,
    Preference,
    Sample,
    flags,
    ints,
    pack_flags,
    pack_floats,
    pack_ints,
    seal_batch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Documents that share a row; exactly one of `sample` and `preference` is set."""

    name: str
    documents: tuple[np.ndarray, ...]
    """Token ids, int32 [T_i] each: the sample and its teacher documents, or the chosen and the rejected side."""
    sample: Sample | None = None
    hinted_turns: tuple[HintedTurn, ...] = ()
    """One for each document but the first."""
    preference: Preference | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def group(self) -> str:
        """The group of rollouts; its units start alike."""
        return self.sample.group_id if self.sample else self.name


def units(samples: Iterable[Sample], preferences: Iterable[Preference], *, distil: bool, max_tokens: int) -> list[Unit]:
    """Return everything that a step trains, checked; teacher documents only with `distil`.

    Raises ConfigError (too long for a row of `max_tokens`, given twice, a first token that is trained) or
    RunMismatchError (a teacher document that does not end in its turn, a pair without a common context or an answer).
    """
    row_units = [_of_sample(sample, distil) for sample in samples] + [_of_pair(pair) for pair in preferences]
    seen: set[str] = set()
    for unit in row_units:
        if unit.name in seen:
            raise ConfigError(f"{unit.name} was given twice for one step")
        seen.add(unit.name)
        _check_room(unit, max_tokens)
    return row_units


def check_same_turn(where: str, turn: str, student: np.ndarray, teacher: np.ndarray) -> None:
    """Raise RunMismatchError with the first difference unless both hold the same token ids."""
    if len(student) == len(teacher) and np.array_equal(student, teacher):
        return
    if len(student) != len(teacher):
        detail = f"{len(student)} tokens in the sample and {len(teacher)} in the teacher document: was it cut?"
    else:
        first = int(np.flatnonzero(student != teacher)[0])
        detail = f"id {student[first]} in the sample and {teacher[first]} in the teacher document at its token {first}"
    raise RunMismatchError(
        f"{where}: {turn} has {detail} (a teacher document must repeat the turn's token ids, never its text)"
    )


def _of_sample(sample: Sample, distil: bool) -> Unit:
    ids = ints(sample.input_ids)
    if len(ids) and flags(sample.loss_mask)[0]:
        raise ConfigError(f"sample {sample.sample_id} trains its first token, which has no context to predict it")
    hinted_turns = tuple(sample.distillations) if distil else ()
    for turn in hinted_turns:
        _check_hinted_turn(sample.sample_id, ids, turn)
    documents = (ids, *(ints(turn.teacher_ids) for turn in hinted_turns))
    return Unit(name=f"sample {sample.sample_id}", documents=documents, sample=sample, hinted_turns=hinted_turns)


def _check_hinted_turn(sample_id: str, ids: np.ndarray, turn: HintedTurn) -> None:
    where, name = f"sample {sample_id}", f"turn {turn.turn}"
    if not 1 <= turn.start < turn.end <= len(ids) or turn.teacher_start < 1:
        raise RunMismatchError(
            f"{where}: {name} is tokens {turn.start}..{turn.end} of {len(ids)}, from token {turn.teacher_start} "
            "of its teacher document: a turn needs a token and a context on both sides"
        )
    check_same_turn(where, name, ids[turn.start : turn.end], ints(turn.teacher_ids)[turn.teacher_start :])


def _of_pair(pair: Preference) -> Unit:
    chosen, rejected = ints(pair.chosen_ids), ints(pair.rejected_ids)
    where = f"preference pair {pair.pair_id}"
    if not 1 <= pair.context < min(len(chosen), len(rejected)):
        raise RunMismatchError(
            f"{where}: {pair.context} tokens of context, {len(chosen)} tokens with the chosen answer, {len(rejected)} "
            "with the rejected one: context and answers need a token each; was a side cut?"
        )
    if not np.array_equal(chosen[: pair.context], rejected[: pair.context]):
        raise RunMismatchError(f"{where}: its sides differ within the {pair.context} tokens of their common context")
    if not 0.0 <= pair.epsilon <= 0.5:
        raise RunMismatchError(f"{where}: epsilon is {pair.epsilon}, it must be in 0 to 0.5")
    return Unit(name=where, documents=(chosen, rejected), preference=pair)


def _check_room(unit: Unit, max_tokens: int) -> None:
    if unit.tokens <= max_tokens:
        return
    limit = f"but trainer.micro_batch_tokens is {max_tokens}: raise trainer.micro_batch_tokens to at least"
    if unit.preference is not None:
        raise ConfigError(f"{unit.name} has {unit.tokens} tokens on its two sides, {limit} {unit.tokens}")
    if len(unit.documents[0]) > max_tokens:
        raise ConfigError(
            f"{unit.name} has {len(unit.documents[0])} tokens, {limit} the longest sample (model.max_context)"
        )
    raise ConfigError(
        f"{unit.name} and its {pluralize(len(unit.hinted_turns), 'teacher document')} have {unit.tokens} tokens "
        f"and must share a row, {limit} {unit.tokens}, or hint fewer turns of a rollout"
    )


def tokens_of(bundle: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in bundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """The place of a micro-batch in the run."""

    run_id: str
    step: int
    rank: int
    index: int


def micro_batch(units: Sequence[Unit], place: RowPlace) -> MicroBatch:
    """Return the sealed micro-batch of a row's units; one masked token when there are none."""
    samples = [unit.sample for unit in units if unit.sample is not None]
    documents, turns, pairs = _lay_out(units)
    lengths = [len(document) for document in documents]
    rest = sum(lengths) - sum(sample.num_tokens for sample in samples)
    temperatures = [sample.temperature for sample in samples]
    temperatures += [unit.sample.temperature for unit in units if unit.sample for _ in unit.hinted_turns]
    temperatures += [1.0] * (len(documents) - len(temperatures))
    return seal_batch(
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


def _lay_out(units: Sequence[Unit]) -> tuple[list[np.ndarray], list[HintedTurnInRow], list[PairInRow]]:
    """Return the documents in the order of the row, and the positions of hinted turns and answers in it."""
    with_sample = [unit for unit in units if unit.sample is not None]
    documents = [unit.documents[0] for unit in with_sample]
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    end, turns, pairs = starts[-1], [], []
    for unit, start in zip(with_sample, starts, strict=False):
        for turn, document in zip(unit.hinted_turns, unit.documents[1:], strict=True):
            count = turn.end - turn.start
            turns.append(HintedTurnInRow(start + turn.start, end + turn.teacher_start, count, turn.weight))
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
