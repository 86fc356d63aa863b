"""Pairs for the next batch.

    pairs.jsonl --order (cursor)--> pair --gate, tokenise--> Preference   refused: counted by reason, the next is drawn

A pair waits until the density gate has measured it (released.py), and is refused where it missed the gate. A batch's
pairs and the cursor after them are journaled with the batch, so a batch that is served again has the same pairs and a
resumed run goes on where it stopped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config import Config
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.pairs import PairFile, resolve_pairs
from composer_prime.wire.types import Preference
from orchestrator.preferences.order import Cursor, PairOrder
from orchestrator.preferences.released import Released
from orchestrator.preferences.tokenise import PairLimits, PairTokeniser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    preferences: list[Preference]
    cursor: Cursor
    metrics: dict[str, float]


class PairMixer:
    """Not thread-safe: one caller at a time. Its work reads a file and tokenises, so call it from a thread."""

    def __init__(
        self,
        file: PairFile,
        tokeniser: PairTokeniser,
        *,
        per_step: int,
        seed: int,
        active: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """`active(step)`: whether channel 3 has a weight at that step; where it has none, no pair is drawn."""
        self._active = active
        self._file, self._tokeniser, self._per_step = file, tokeniser, per_step
        self._order, self._released = PairOrder(seed), Released(file)
        self._refused: dict[int, str] = {}
        """Why a pair of the file can't be trained, by number."""
        self._digest: tuple[int, str] = (0, "")
        """Of how many pairs, and their digest."""
        self._warned_at = 0

    def restore(self, cursor: Cursor) -> None:
        """Raises CheckpointError when the file has fewer pairs than it had, or others."""
        available = self._file.refresh()
        if cursor.known <= available and self._file.digest(cursor.known) != cursor.digest:
            raise CheckpointError(
                f"{self._file.path} does not begin with the {cursor.known} pairs of the checkpoint's pass: give the "
                "run the file it was started with (it may have grown since), or start a new run"
            )
        self._order.seek(cursor, available)

    def draw(self, step: int) -> Drawn:
        """The next `per_step` pairs that can be trained, fewer where the file has fewer; none twice."""
        available = self._measured() if self._active(step) else 0
        drawn: dict[str, Preference] = {}
        for _ in range(2 * available):
            if len(drawn) == self._per_step or len(self._refused) + len(drawn) >= available:
                break
            index = self._order.next(available)
            made = None if index in self._refused else self._preference(index)
            if made is not None:
                drawn.setdefault(made.pair_id, made)
        self._warn_refused(available, len(drawn))
        return Drawn(preferences=list(drawn.values()), cursor=self._cursor(), metrics=self._metrics(len(drawn)))

    def _measured(self) -> int:
        """The first so many pairs of the file have a verdict; a new one gives those that were withheld another try."""
        self._file.refresh()
        if self._released.refresh():
            self._refused = {index: reason for index, reason in self._refused.items() if reason != "gate"}
        return self._released.measured

    def _cursor(self) -> Cursor:
        """The order's, with the digest of the pairs that its pass knows."""
        cursor = self._order.cursor
        if cursor.known != self._digest[0]:
            self._digest = (cursor.known, self._file.digest(cursor.known))
        return msgspec.structs.replace(cursor, digest=self._digest[1])

    def _warn_refused(self, available: int, served: int) -> None:
        """Once for each state of the file: no pair of it can be trained."""
        if served or available in (0, self._warned_at):
            return
        self._warned_at = available
        reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(self._refused.values()).most_common())
        path = self._file.path
        logger.warning("channel 3 trains nothing: all %d pairs of %s are refused (%s)", available, path, reasons)

    def _preference(self, index: int) -> Preference | None:
        if not self._released.allows(index):
            self._refused[index] = "gate"
            return None
        try:
            made = self._tokeniser.preference(self._file.read(index))
        except ConfigError as error:
            if not self._file.path.exists():
                raise
            logger.warning("a pair is left out: %s", error)
            made = "no_pair"
        if isinstance(made, str):
            self._refused[index] = made
            return None
        return made

    def _metrics(self, served: int) -> dict[str, float]:
        """pairs/…: what the file holds, what was served, and refused pairs by reason, so far."""
        refused = Counter(self._refused.values())
        return {
            "pairs/in_file": float(len(self._file)),
            "pairs/measured": float(self._released.measured),
            "pairs/served": float(served),
            "pairs/pass": float(self._order.cursor.number),
            "pairs/refused": float(len(self._refused)),
            **{f"pairs/refused/{reason}": float(count) for reason, count in sorted(refused.items())},
        }


def build_mixer(config: Config, chat_folder: Path, run_root: Path) -> PairMixer | None:
    """None where no pairs are mixed in. Loads the renderer: call it from a thread.

    Raises ConfigError when a file that the configuration names is not there; the run directory's own may come later.
    """
    preferences = config.orchestrator.preferences
    if not preferences.pairs_per_step:
        return None
    from orchestrator.chat_renderer import build_renderer

    path = resolve_pairs(preferences.pairs, run_root)
    if preferences.pairs is not None and not path.is_file():
        raise ConfigError(
            f"orchestrator.preferences.pairs is {preferences.pairs}, but there is no such file: name a pairs.jsonl, "
            "or leave it out to read the run directory's own"
        )
    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    limits = PairLimits(
        max_context=config.model.max_context,
        row_tokens=config.trainer.micro_batch_tokens,
        max_epsilon=preferences.max_epsilon,
    )
    tokeniser = PairTokeniser(renderer, limits)
    return PairMixer(
        PairFile(path),
        tokeniser,
        per_step=preferences.pairs_per_step,
        seed=config.run.seed,
        active=lambda step: config.channels.replay_dpo.weight_at(step) > 0,
    )
