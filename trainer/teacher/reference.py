"""Reference log-probabilities of preference pairs: computed once by the frozen base, then read from the run directory.

    reference/logprobs.jsonl    {"key": ..., "logprob": ..., "check": ...}      one line a side, appended by rank 0

A key is the hash of the base model, the compute type and the side's token ids with the answer's beginning. A damaged
line counts as absent: its side is computed again, and the next start writes the file without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from composer_prime.console import pluralize
from composer_prime.errors import NonFiniteError
from composer_prime.model_source import weight_files
from composer_prime.run.run_dir import write_atomic
from trainer.data.rows import ScoredDocuments, reading_of
from trainer.model.policy_model import Policy
from trainer.world import World, gather_texts, gather_words

logger = logging.getLogger(__name__)


class ReferenceLogprobs:
    """The answers' summed log-probabilities under the frozen base; every rank holds the same values."""

    def __init__(self, path: Path, folder: Path, world: World) -> None:
        """A collective: rank 0 hashes the model in `folder` and reads the cache for all."""
        self._path = path
        self._world = world
        self._prefix = f"{gather_texts(model_hash(folder) if world.first else '')[0]} {world.compute_dtype}"
        text = path.read_text(errors="replace") if world.first and path.exists() else ""
        lines = gather_texts(text)[0].splitlines()
        self._values = _parse(lines)
        if world.first and len(lines) > len(self._values):
            self._save(self._values, anew=True)

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
        entries = [json.loads(line) for text in gather_texts(_lines(new)) for line in text.splitlines()]
        of_all_ranks = {entry["key"]: entry["logprob"] for entry in entries}
        if not all(map(math.isfinite, of_all_ranks.values())):
            raise NonFiniteError(
                "the frozen base gives NaN or infinity as the log-probability of an answer in a preference pair; "
                "nothing was trained: look at model.path and the pairs"
            )
        self._values |= of_all_ranks
        if self._world.first and of_all_ranks:
            self._save(of_all_ranks, anew=False)

    def of(self, pairs: ScoredDocuments) -> Tensor:
        """Return the answers' sums, float32 [2 P], in the order of the sides."""
        values = [self._values[key] for key in self._keys(pairs)]
        return torch.tensor(values, dtype=torch.float32).to(self._world.device, non_blocking=True)

    def _keys(self, pairs: ScoredDocuments | None) -> list[str]:
        if pairs is None:
            return []
        return [self._key(ids, start) for ids, start in zip(pairs.ids, pairs.starts, strict=True)]

    def _key(self, ids: np.ndarray, start: int) -> str:
        digest = hashlib.sha256(f"{self._prefix} {start} ".encode())
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
        return digest.hexdigest()

    def _save(self, values: dict[str, float], *, anew: bool) -> None:
        try:
            if anew:
                write_atomic(self._path, _lines(values).encode())
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(_lines(values))
        except OSError as error:  # a later run computes the values again
            logger.warning("reference log-probabilities cannot be saved to %s: %s", self._path, error)


def model_hash(folder: Path) -> str:
    """Return the sha256 over config.json and the weight files of `folder`."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *weight_files(folder)]:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
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


def _lines(values: dict[str, float]) -> str:
    return "".join(
        json.dumps({"key": key, "logprob": value, "check": _check(key, value)}) + "\n" for key, value in values.items()
    )


def _check(key: str, value: float) -> str:
    return hashlib.blake2b(f"{key} {value!r}".encode(), digest_size=8).hexdigest()


def _parse(lines: list[str]) -> dict[str, float]:
    """Return the sides whose lines are whole."""
    values: dict[str, float] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            key, value = entry["key"], entry["logprob"]
            if entry["check"] != _check(key, value) or not math.isfinite(value):
                raise ValueError(line)
            values[key] = value
        except (ValueError, KeyError, TypeError):
            continue
    if damaged := len(lines) - len(values):
        logger.warning("%s of cached reference log-probabilities: computed again", pluralize(damaged, "damaged line"))
    return values
