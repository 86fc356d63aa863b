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
"""Made by infra/tiny_models/pairs.py from toolsmith; its README says how."""
EMBEDDED_PAIRS = {"tiny": TINY_PAIRS, "tiny_code": TINY_PAIRS.parents[1] / "tiny_code" / "pairs.jsonl"}
"""The pairs that ship, by name. Those of `tiny_code` are from micro_code, made by infra/tiny_code/pairs.py."""


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
    """What the votes on this state cost."""
    truncated: bool = False
    """Whether a limit cut one of the two answers short. Such a pair is not trained."""

    @property
    def pair_id(self) -> str:
        """Return an id that depends on state and answers alone, wherever the line stands."""
        content = msgspec.json.encode([self.chosen, self.rejected])
        return f"{self.state.state_id}/{hashlib.blake2b(content, digest_size=4).hexdigest()}"


class PairFile:
    """A pairs.jsonl that may grow while it is read. Lines are counted from 0. Each pair is read from disk on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: list[int] = []
        """Where each whole line begins."""
        self._end = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def refresh(self) -> int:
        """Take in the whole lines that were appended since. Return how many pairs there are; a missing file has none.

        Raises ConfigError when the file held pairs and is gone.
        """
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
        """Return 32 hex digits over the lines of the first `count` pairs, byte for byte; "" of none."""
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
        """Return one pair. Raises ConfigError, which names file and line, when the line is not a pair."""
        with self._open() as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            pair = msgspec.json.decode(line, type=Pair)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.path}, pair {index + 1} is invalid ({error}): remove its line, and measure the file with "
                f"`composer pairs report {self.path}`"
            ) from None
        if not 0 <= pair.epsilon <= 0.5:
            raise ConfigError(f"{self.path}, pair {index + 1}: epsilon is {pair.epsilon}, expected 0 <= epsilon <= 0.5")
        return pair


def resolve_pairs(path: Path | None, run_root: Path) -> Path:
    """Return the file of orchestrator.preferences.pairs: `tiny` and `tiny_code` are embedded, None is the run's."""
    return run_root / "pairs.jsonl" if path is None else EMBEDDED_PAIRS.get(str(path)) or path.expanduser()
