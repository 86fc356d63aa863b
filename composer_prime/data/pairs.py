"""pairs.jsonl: one preference pair a line, as replay writes them and the replay-DPO loss reads them.

    {"trace": …, "state": {"state_id": …, "messages": […], "tools": […]}, "chosen": {…}, "rejected": {…},
     "epsilon": …, "teachers": {…}, "cost_usd": …}

Messages have the OpenAI form; `chosen` and `rejected` are assistant messages, thinking in `reasoning_content`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from composer_prime.errors import ConfigError

TINY_PAIRS = Path(__file__).parents[1] / "assets" / "tiny" / "pairs.jsonl"
"""Made by infra/tiny_models/pairs.py from toolsmith."""
EMBEDDED_PAIRS = {"tiny": TINY_PAIRS, "tiny_code": TINY_PAIRS.parents[1] / "tiny_code" / "pairs.jsonl"}
"""By name; those of `tiny_code` are made by infra/tiny_code/pairs.py."""


class PairState(msgspec.Struct, frozen=True, kw_only=True):
    """What the student saw before the turn of the pair."""

    state_id: str
    """Unique within a file: `<trace>/<turn number>`."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    """OpenAI function definitions."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    state: PairState
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    epsilon: float
    """Probability that the label is wrong, in [0, 0.5]."""
    teachers: dict[str, Any] = {}
    """The votes, by teacher."""
    cost_usd: float = 0.0
    truncated: bool = False
    """Whether a limit cut an answer short. Such a pair is not trained."""

    @property
    def pair_id(self) -> str:
        """An id by state and answers alone, wherever the line stands."""
        content = msgspec.json.encode([self.chosen, self.rejected])
        return f"{self.state.state_id}/{hashlib.blake2b(content, digest_size=4).hexdigest()}"


class PairFile:
    """A pairs.jsonl that may grow while it is read. Pairs are counted from 0 and read on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: list[int] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def refresh(self) -> int:
        """Take in whole lines that were appended, and return how many pairs there are. Raises ConfigError."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if line.strip():
                        self._offsets.append(self._end)
                    self._end += len(line)
        except FileNotFoundError:
            if self._offsets:
                raise self._gone() from None
        return len(self)

    def digest(self, count: int) -> str:
        """Return 32 hex digits over the lines of the first `count` pairs; "" of none."""
        if not count:
            return ""
        start = self._offsets[0]
        left = (self._offsets[count] if count < len(self) else self._end) - start
        digest = hashlib.blake2b(digest_size=16)
        with self._open() as file:
            file.seek(start)
            while left and (part := file.read(min(left, 1 << 20))):
                digest.update(part)
                left -= len(part)
        return digest.hexdigest()

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise self._gone() from None

    def _gone(self) -> ConfigError:
        return ConfigError(
            f"{self.path} held {len(self)} pairs and is no longer there: put it back and use --resume, or set "
            "orchestrator.preferences.pairs_per_step = 0"
        )

    def read(self, index: int) -> Pair:
        """Return one pair. Raises ConfigError."""
        with self._open() as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            pair = msgspec.json.decode(line, type=Pair)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}, pair {index + 1} is invalid ({error}): remove its line") from None
        if not 0 <= pair.epsilon <= 0.5:
            raise ConfigError(f"{self.path}, pair {index + 1}: epsilon is {pair.epsilon}, expected 0 to 0.5")
        return pair


def resolve_pairs(path: Path | None, run_root: Path) -> Path:
    """Return the file of orchestrator.preferences.pairs: an embedded one by name, the run's for None."""
    if path is None:
        return run_root / "pairs.jsonl"
    return EMBEDDED_PAIRS.get(str(path)) or path.expanduser()
