"""From a hint's text to a Distillation: hinted context, then the turn's own ids. Pure; runs in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from composer_prime.errors import EmptyMaskError
from composer_prime.wire.types import Distillation, Sample, TurnSpan, ints, pack_ints
from orchestrator.hints.error_turn import ErrorTurn
from orchestrator.hints.placement import HintPlacer


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLimits:
    """What a teacher document must fit into, in tokens."""

    max_context: int
    """model.max_context: what the policy can see."""
    row_tokens: int
    """trainer.micro_batch_tokens: a sample and its teacher documents share one row."""


def span_of(samples: Sequence[Sample], turn: int) -> tuple[Sample, TurnSpan] | None:
    """The sample that turn number `turn` is trained in, and where."""
    spans = ((sample, span) for sample in samples for span in sample.turns)
    return next(((sample, span) for sample, span in spans if span.turn == turn), None)


def distillation(
    sample: Sample, span: TurnSpan, hinted_ids: np.ndarray, error: ErrorTurn, weight: float
) -> Distillation:
    """`hinted_ids` int32 [U_context]. Raises EmptyMaskError for a turn without tokens."""
    turn_ids = ints(sample.input_ids)[span.start : span.end]
    if len(turn_ids) == 0:
        raise EmptyMaskError(
            f"sample {sample.sample_id}, turn {span.turn} ({error.kind}): tokens [{span.start}, {span.end}) are none, "
            "so channel 2 has nothing to learn there"
        )
    return Distillation(
        start=span.start,
        end=span.end,
        teacher_ids=pack_ints(np.concatenate([hinted_ids, turn_ids])),
        teacher_start=len(hinted_ids),
        weight=weight,
        turn=span.turn,
        error=error.kind,
    )


def place(
    sample: Sample, span: TurnSpan, *, placer: HintPlacer, role: str, hint: str, error: ErrorTurn, weight: float,
    limits: DocumentLimits,
) -> Distillation | str:  # fmt: skip
    """The distillation, or why there is none: no_place, too_long (for the context) or row_full.

    Raises EmptyMaskError.
    """
    context_ids = ints(sample.input_ids)[: span.start]
    hinted_ids = placer.hinted(context_ids, role, hint)
    if hinted_ids is None:
        return "no_place"
    made = distillation(sample, span, hinted_ids, error, weight)
    length = len(ints(made.teacher_ids))
    if length > limits.max_context:
        return "too_long"
    others = sum(len(ints(other.teacher_ids)) for other in sample.distillations)
    if sample.num_tokens + others + length > limits.row_tokens:
        return "row_full"
    return made
