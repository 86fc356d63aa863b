"""Which generated questions are for training and which for evaluation.

A generator is a function of (seed, index) and often draws the same question twice, so neither another seed nor another
range of indices keeps two sets apart. The question's own hash does: it decides the split, whatever seed drew it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

from composer_prime.errors import ConfigError

Split = Literal["train", "eval"]

_TRIES_PER_TASK = 200


def split_of(question: str, eval_share: float) -> Split:
    """`eval` for a share `eval_share` (0..1) of all questions."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) < eval_share * 2**64 else "train"


def entries_of(dataset: Any, name: str, *, split: Split, eval_share: float, count: int) -> Iterator[dict[str, Any]]:
    """The first `count` entries of a reasoning-gym dataset that belong to `split`.

    Raises ConfigError when the dataset has too few questions of that split.
    """
    found = 0
    limit = count * _TRIES_PER_TASK
    for index in range(limit):
        entry = dataset[index]
        if split_of(entry["question"], eval_share) == split:
            yield entry
            found += 1
            if found == count:
                return
    raise ConfigError(
        f"reasoning_gym: {name} gave {found} of {count} {split} tasks in {limit} tries: it has too few different "
        f"questions. Ask for fewer tasks, widen its settings, or change eval_share (now {eval_share:g})"
    )
