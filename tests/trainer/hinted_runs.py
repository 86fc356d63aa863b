"""Samples with hinted turns, and preference pairs, for the trainer's tests."""

import msgspec
import numpy as np
from small_runs import VOCABULARY, make_samples

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.config.channels import ChannelsConfig
from composer_prime.wire.types import HintedTurn, Sample, TermUnit, flags, ints, pack_ints

HINT = 5


def make_hinted(step: int, count: int = 12, **options) -> list[Sample]:
    """`make_samples` with a hint at the first turn of every second sample, and at both turns of every fourth."""
    rng = np.random.default_rng(1000 + step)
    return [_hinted(sample, rng, index) for index, sample in enumerate(make_samples(step, count, **options))]


def _hinted(sample: Sample, rng: np.random.Generator, index: int) -> Sample:
    ids, mask = ints(sample.input_ids), flags(sample.loss_mask)
    edges = np.flatnonzero(np.diff(np.r_[0, mask, 0]))
    turns = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    wanted = turns if index % 4 == 3 else turns[: int(index % 2 == 1)]
    made = []
    for number, (start, end) in enumerate(wanted):
        hint = rng.integers(0, VOCABULARY, HINT)
        teacher = np.r_[ids[:start], hint, ids[start:end]]
        made.append(
            HintedTurn(start=start, end=end, teacher_ids=pack_ints(teacher), teacher_start=start + HINT,
                         weight=1.0 + 0.5 * number, turn=number, error="test")
        )  # fmt: skip
    return msgspec.structs.replace(sample, distillations=made)


def make_pairs(step: int, count: int = 3) -> list[TermUnit]:
    """Reproducible pairs of step `step`; their answers are of different lengths."""
    rng = np.random.default_rng(2000 + step)
    made = []
    for index in range(count):
        context, chosen, rejected = (rng.integers(0, VOCABULARY, size) for size in rng.integers(4, 16, 3))
        made.append(
            pair_unit(pair_id=f"p{step}-{index}", chosen_ids=pack_ints(np.r_[context, chosen]),
                      rejected_ids=pack_ints(np.r_[context, rejected]), context=len(context),
                      epsilon=float(rng.uniform(0, 0.4)))
        )  # fmt: skip
    return made


def three_channels(kind: str = "live", **policy) -> ChannelsConfig:
    """All channels on, with a self-teacher of `kind`."""
    teacher = {"kind": kind, "rate": 0.3}
    return ChannelsConfig.model_validate(
        {
            "policy": {"correction": "none", **policy},
            "sdpo": {"weight": 0.7, "teacher": teacher},
            "replay_dpo": {"weight": 0.4, "nll_weight": 0.1},
        }
    )
