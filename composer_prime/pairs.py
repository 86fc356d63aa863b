"""pairs.jsonl: one preference pair a line, as replay writes them and training reads them (channel 3).

    {"trace": …, "state": {"state_id": …, "messages": […], "tools": […]}, "chosen": {…}, "rejected": {…},
     "epsilon": …, "teachers": {…}, "cost_usd": …}

Messages have the OpenAI form; `chosen` and `rejected` are assistant messages, thinking in `reasoning_content`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from composer_prime.errors import ConfigError

TINY_PAIRS = Path(__file__).parent / "assets" / "tiny" / "pairs.jsonl"
"""Made by infra/tiny_models/pairs.py from toolsmith; its README says how."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the student saw before the turn that the pair is about."""

    state_id: str
    """Unique within a file: `<trace>/<turn number>`."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    """OpenAI function definitions."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    state: State
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    epsilon: float
    """Probability that the label is wrong, in [0, 0.5]."""
    teachers: dict[str, Any] = {}
    """Who voted how, by teacher."""
    cost_usd: float = 0.0
    """What the votes on this state cost."""
    truncated: bool = False
    """Whether a limit cut one of the two answers short; such a pair is not trained."""

    @property
    def pair_id(self) -> str:
        """The same for the same state and answers, wherever the line stands."""
        content = msgspec.json.encode([self.chosen, self.rejected])
        return f"{self.state.state_id}/{hashlib.blake2b(content, digest_size=4).hexdigest()}"


class PairFile(Sequence[Pair]):
    """A pairs.jsonl that may grow while it is read; lines are counted from 0. A pair is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: list[int] = []
        """Where each whole line begins."""
        self._end = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def refresh(self) -> int:
        """Take in the whole lines that were appended since; how many pairs there are now. No file has none.

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

    def digest(self, last: int, first: int = 0) -> str:
        """Of the lines of the pairs `first` to `last` - 1, byte for byte, as 32 hex digits; "" of none."""
        if last <= first:
            return ""
        start = self._offsets[first]
        length = (self._offsets[last] if last < len(self) else self._end) - start
        digest = hashlib.blake2b(digest_size=16)
        with self._open() as file:
            file.seek(start)
            while length and (part := file.read(min(length, 1 << 20))):
                digest.update(part)
                length -= len(part)
        return digest.hexdigest()

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise self._gone() from None

    def _gone(self) -> ConfigError:
        return ConfigError(
            f"{self.path} held {len(self)} pairs and is no longer there: put it back and go on with --resume, or set "
            "orchestrator.preferences.pairs_per_step = 0"
        )

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)

    def read(self, index: int) -> Pair:
        """Raises ConfigError, naming file and line, when the line is no pair."""
        with self._open() as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            pair = msgspec.json.decode(line, type=Pair)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.path}, pair {index + 1} is none ({error}): take its line out, and measure the file with "
                f"`composer pairs report {self.path} --base MODEL`"
            ) from None
        if not 0 <= pair.epsilon <= 0.5:
            raise ConfigError(f"{self.path}, pair {index + 1}: epsilon is {pair.epsilon}, expected 0 <= epsilon <= 0.5")
        return pair


def resolve_pairs(path: Path | None, run_root: Path) -> Path:
    """The file behind orchestrator.preferences.pairs: `tiny` is the embedded one, None the run directory's."""
    if path is None:
        return run_root / "pairs.jsonl"
    return TINY_PAIRS if str(path) == "tiny" else path.expanduser()
