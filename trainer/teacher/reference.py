"""Reference log-probabilities of preference pairs: computed once by the frozen base, then remembered on every rank.

A key is the hash of a side's token ids with the answer's beginning. A resumed run computes its pairs' again.
"""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import NonFiniteError
from trainer.data.rows import ScoredDocuments, reading_of
from trainer.model.policy_model import Policy
from trainer.world import World, gather_texts, gather_words


class ReferenceLogprobs:
    """The answers' summed log-probabilities under the frozen base; every rank holds the same values."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._values: dict[str, float] = {}

    def missing(self, rows: list[ScoredDocuments | None]) -> list[bool]:
        """Return for each row whether any rank lacks a side. A collective; ranks bring equally many rows."""
        lacking = [int(any(key not in self._values for key in self._keys(pairs))) for pairs in rows]
        return [any(flags) for flags in zip(*gather_words(lacking), strict=True)]

    def compute(self, policy: Policy, rows: list[ScoredDocuments | None]) -> None:
        """Score the pairs of `rows`, with the base's weights in place. A collective; ranks bring equally many rows.

        Raises NonFiniteError when the base gives NaN or infinity.
        """
        computed: dict[str, float] = {}
        for pairs in rows:
            sums_S = _answer_logprobs(policy, pairs, self._world.device)
            computed |= dict(zip(self._keys(pairs), sums_S.tolist(), strict=True))
        new = {key: value for key, value in computed.items() if key not in self._values}
        of_all_ranks: dict[str, float] = {}
        for text in gather_texts(json.dumps(new)):
            of_all_ranks |= json.loads(text)
        if not all(map(math.isfinite, of_all_ranks.values())):
            raise NonFiniteError(
                "the frozen base gives NaN or infinity as the log-probability of an answer in a preference pair; "
                "nothing was trained: look at model.path and the pairs"
            )
        self._values |= of_all_ranks

    def of(self, pairs: ScoredDocuments) -> Tensor:
        """Return the answers' sums, float32 [2 P], in the order of the sides."""
        values = [self._values[key] for key in self._keys(pairs)]
        return torch.tensor(values, dtype=torch.float32).to(self._world.device, non_blocking=True)

    def _keys(self, pairs: ScoredDocuments | None) -> list[str]:
        if pairs is None:
            return []
        return [_key(ids, start) for ids, start in zip(pairs.ids, pairs.starts, strict=True)]


def _key(ids: np.ndarray, start: int) -> str:
    digest = hashlib.sha256(f"{start} ".encode())
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def _answer_logprobs(policy: Policy, pairs: ScoredDocuments | None, device: torch.device) -> Tensor:
    """Return the answers' sums, float64 [2 P] on the CPU. Reads one token without pairs, so that ranks stay in step."""
    documents, starts = (list(pairs.ids), pairs.starts) if pairs else ([], ())
    wanted = [np.arange(start, len(ids)) for ids, start in zip(documents, starts, strict=True)]
    answers = [ids[index] for ids, index in zip(documents, wanted, strict=True)]
    targets = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *answers])).to(device)
    scores = policy.scores(reading_of(documents, wanted, device, share=policy.shares_prefixes), targets)
    sides = torch.from_numpy(np.repeat(np.arange(len(answers)), np.array([len(a) for a in answers], dtype=np.int64)))
    return torch.zeros(len(answers), dtype=torch.float64).index_add(0, sides, scores.double().cpu())
