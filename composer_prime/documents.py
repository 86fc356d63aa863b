"""What has to share a row: a sample with its teacher documents, or both sides of a preference pair.

    sample                    context ── turn ── tool ── turn
    teacher document          context ── hint ── turn           channel 2 reads the turn in both, token by token
    preference pair           context ── chosen                 channel 3 compares the two answers
                              context ── rejected
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from composer_prime.errors import ConfigError, RunMismatchError
from composer_prime.wire.types import Distillation, Preference, Sample, flags, ints
from composer_prime.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Documents that go into one row together; exactly one of `sample` and `preference` is there."""

    name: str
    documents: tuple[np.ndarray, ...]
    """Token ids, int32 [T_i] each: the sample and its teacher documents, or the chosen and the rejected side."""
    sample: Sample | None = None
    distillations: tuple[Distillation, ...] = ()
    """One for each document but the first."""
    preference: Preference | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def group(self) -> str:
        """Units of one group start alike."""
        return self.sample.group_id if self.sample else self.name


def units(samples: Iterable[Sample], preferences: Iterable[Preference], *, distil: bool, max_tokens: int) -> list[Unit]:
    """Everything that a step trains, checked; teacher documents are left out unless `distil`.

    Raises ConfigError (too long for a row of `max_tokens`, given twice, a first token that is trained) or
    RunMismatchError (a teacher document that does not end in its turn, a pair without a common context or an answer).
    """
    made = [_of_sample(sample, distil) for sample in samples] + [_of_pair(pair) for pair in preferences]
    seen: set[str] = set()
    for unit in made:
        if unit.name in seen:
            raise ConfigError(f"{unit.name} was given twice for one step")
        seen.add(unit.name)
        _check_room(unit, max_tokens)
    return made


def check_same_turn(where: str, turn: str, student: np.ndarray, teacher: np.ndarray) -> None:
    """Raise RunMismatchError unless both hold the same token ids; the message gives the first difference."""
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
    distillations = tuple(sample.distillations) if distil else ()
    for distillation in distillations:
        _check_distillation(sample.sample_id, ids, distillation)
    documents = (ids, *(ints(distillation.teacher_ids) for distillation in distillations))
    return Unit(
        name=f"sample {sample.sample_id}", documents=documents, sample=sample, distillations=distillations
    )


def _check_distillation(sample_id: str, ids: np.ndarray, wanted: Distillation) -> None:
    where, turn = f"sample {sample_id}", f"turn {wanted.turn}"
    if not 1 <= wanted.start < wanted.end <= len(ids) or wanted.teacher_start < 1:
        raise RunMismatchError(
            f"{where}: {turn} is tokens {wanted.start}..{wanted.end} of {len(ids)}, from token {wanted.teacher_start} "
            "of its teacher document: a turn needs a token and a context on both sides"
        )
    check_same_turn(where, turn, ids[wanted.start : wanted.end], ints(wanted.teacher_ids)[wanted.teacher_start :])


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
        raise RunMismatchError(f"{where}: epsilon is {pair.epsilon}, a label's noise is in 0 to 0.5")
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
        f"{unit.name} and its {counted(len(unit.distillations), 'teacher document')} have {unit.tokens} tokens "
        f"and must share a row, {limit} {unit.tokens}, or hint fewer turns of a rollout"
    )


def tokens_of(bundle: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in bundle)
