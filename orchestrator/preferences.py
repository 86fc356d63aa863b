"""Replay-DPO's pairs for the next batch. How pairs are made: composer_prime/traces/replay.

    pairs.jsonl -> PairOrder (cursor) -> pair -> PairTokenizer -> Preference

A refused pair is counted by reason and the next one is drawn. A batch's pairs and the cursor after them are journaled
with the batch. So a batch that is served again has the same pairs, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config import Config
from composer_prime.data.pairs import Pair, PairFile, resolve_pairs
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.wire.types import Preference, pack_ints
from orchestrator.chat_template import RENDER_ERRORS
from orchestrator.rollouts.groups import derive_seed

logger = logging.getLogger(__name__)


class PairCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a pass. Pairs that the file gained since the pass began wait for the next one."""

    number: int = 0
    """Pass, from 0."""
    position: int = 0
    """Pairs of the pass that were drawn."""
    known: int = 0
    """Pairs that the file held when the pass began."""
    digest: str = ""
    """Digest of those pairs' lines; a resumed run's file must begin with the same lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDraw:
    preferences: list[Preference]
    metrics: dict[str, float]


class PairMixer:
    """Not thread-safe: one caller at a time. It reads a file and tokenizes, so call it from a thread."""

    def __init__(
        self,
        file: PairFile,
        tokenizer: PairTokenizer,
        *,
        per_step: int,
        seed: int,
        active: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """`active(step)`: whether replay-DPO has a weight at that step; where it has none, no pair is drawn."""
        self._file = file
        self._tokenizer = tokenizer
        self._per_step = per_step
        self._active = active
        self._order = PairOrder(seed)
        self.cursor: PairCursor | None = None
        """Where the pairs continue after the last draw; None before the first."""
        self._refused: dict[int, str] = {}
        """Why a pair of the file cannot be trained, by number."""
        self._digest: tuple[int, str] = (0, "")
        """A number of pairs from the file's start, and their digest."""
        self._warned_at = 0
        """Pairs in the file when it was last reported that none can be trained."""

    def restore(self, cursor: PairCursor) -> None:
        """Continue from `cursor`. Raises CheckpointError when the file has fewer pairs than it had, or others."""
        available = self._file.refresh()
        if cursor.known <= available and self._file.digest(cursor.known) != cursor.digest:
            raise CheckpointError(
                f"{self._file.path} does not begin with the {cursor.known} pairs of the checkpoint's pass: give the "
                "run the file it was started with (it may have grown since), or start a new run"
            )
        self._order.seek(cursor, available)
        self.cursor = cursor

    def draw(self, step: int) -> PairDraw:
        """Return the next `per_step` pairs that can be trained, none twice; fewer where the file has fewer.

        Warns once for each state of the file that no pair of it can be trained.
        """
        available = 0
        if self._active(step):
            available = self._file.refresh()
        preferences: dict[str, Preference] = {}
        for _ in range(2 * available):
            if len(preferences) == self._per_step or len(self._refused) + len(preferences) >= available:
                break
            index = self._order.next(available)
            preference = None if index in self._refused else self._preference(index)
            if preference is not None:
                preferences.setdefault(preference.pair_id, preference)
        refused = Counter(self._refused.values())
        if not preferences and available not in (0, self._warned_at):
            self._warned_at = available
            reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
            path = self._file.path
            logger.warning("replay-DPO trains nothing: all %d pairs of %s are refused (%s)", available, path, reasons)
        metrics = {
            "pairs/in_file": float(len(self._file)),
            "pairs/served": float(len(preferences)),
            "pairs/pass": float(self._order.cursor.number),
            "pairs/refused": float(len(self._refused)),
            **{f"pairs/refused/{reason}": float(count) for reason, count in sorted(refused.items())},
        }
        self.cursor = self._next_cursor()
        return PairDraw(preferences=list(preferences.values()), metrics=metrics)

    def _next_cursor(self) -> PairCursor:
        """Return the order's cursor with the digest of the pairs that its pass covers."""
        cursor = self._order.cursor
        if cursor.known != self._digest[0]:
            self._digest = (cursor.known, self._file.digest(cursor.known))
        return msgspec.structs.replace(cursor, digest=self._digest[1])

    def _preference(self, index: int) -> Preference | None:
        try:
            preference = self._tokenizer.preference(self._file.read(index))
        except ConfigError as error:
            if not self._file.path.exists():
                raise
            logger.warning("a pair is left out: %s", error)
            preference = "no_pair"
        if isinstance(preference, str):
            self._refused[index] = preference
            return None
        return preference


class PairOrder:
    """Which pair comes next: each pass over the file in its own order, from a cursor that a checkpoint can hold."""

    def __init__(self, seed: int) -> None:
        self.cursor = PairCursor()
        self._seed = seed
        self._pass: list[int] = []

    def seek(self, cursor: PairCursor, available: int) -> None:
        """Continue from `cursor`. Raises CheckpointError when the file lost pairs since."""
        if cursor.known > available:
            raise CheckpointError(
                f"the checkpoint's pass over the pairs file had {cursor.known} pairs, the file has {available}: give "
                "the run the file it was started with (it may have grown since)"
            )
        self.cursor = cursor
        self._shuffle()

    def next(self, available: int) -> int:
        """Return the next pair's number. `available`: pairs in the file now, at least 1."""
        if self.cursor.position == self.cursor.known:
            number = self.cursor.number + (self.cursor.known > 0)
            self.cursor = PairCursor(number=number, known=available)
            self._shuffle()
        index = self._pass[self.cursor.position]
        self.cursor = msgspec.structs.replace(self.cursor, position=self.cursor.position + 1)
        return index

    def _shuffle(self) -> None:
        self._pass = list(range(self.cursor.known))
        random.Random(derive_seed(self._seed, "pairs", self.cursor.number)).shuffle(self._pass)


class PairTokenizer:
    """Turns a pair's messages into the token ids that the policy would see and write. Not thread-safe."""

    def __init__(self, renderer: Any, *, max_context: int, row_tokens: int) -> None:
        """`renderer`: the one that rollouts are rendered with. `max_context`: longest side, in tokens. `row_tokens`:
        both sides share one row.
        """
        self._renderer = renderer
        self._max_context = max_context
        self._row_tokens = row_tokens
        self._stops = set(renderer.get_stop_token_ids())

    def preference(self, pair: Pair) -> Preference | str:
        """Return the pair as ids, or why it cannot be trained.

        Reasons: truncated, unrenderable, context_differs, no_end, same (both answers), too_long
        (for the context), row_full. context_differs: the template writes the messages before an answer in other tokens
        than the answer would be sampled after, so the ids would not be those of a rollout.
        """
        if pair.truncated:
            return "truncated"
        try:
            context = self._render(pair.state.messages, pair, opening=True)
            sides = [self._render([*pair.state.messages, answer], pair) for answer in (pair.chosen, pair.rejected)]
        except RENDER_ERRORS:
            return "unrenderable"
        if not context or any(side[: len(context)] != context for side in sides):
            return "context_differs"
        ends = [self._end(side, len(context)) for side in sides]
        if None in ends:
            return "no_end"
        chosen, rejected = (side[:end] for side, end in zip(sides, ends, strict=True))
        if chosen == rejected:
            return "same"
        if max(len(chosen), len(rejected)) > self._max_context:
            return "too_long"
        if len(chosen) + len(rejected) > self._row_tokens:
            return "row_full"
        return Preference(
            pair_id=pair.pair_id,
            chosen_ids=pack_ints(chosen),
            rejected_ids=pack_ints(rejected),
            context=len(context),
            epsilon=pair.epsilon,
        )

    def _render(self, messages: list[dict[str, Any]], pair: Pair, *, opening: bool = False) -> list[int]:
        tools = pair.state.tools or None
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=opening))

    def _end(self, ids: list[int], start: int) -> int | None:
        """Return the position after the token that ends the answer."""
        return next((at + 1 for at in range(start, len(ids)) if ids[at] in self._stops), None)


def build_mixer(config: Config, chat_folder: Path, run_root: Path) -> PairMixer | None:
    """Return None where no pairs are mixed in. Loads the renderer: call it from a thread.

    Raises ConfigError when a file that the configuration names is missing; the run directory's own may come later.
    """
    preferences = config.orchestrator.preferences
    if not preferences.pairs_per_step:
        return None
    path = resolve_pairs(preferences.pairs, run_root)
    if preferences.pairs is not None and not path.is_file():
        raise ConfigError(
            f"orchestrator.preferences.pairs is {preferences.pairs}, but there is no such file: name a pairs.jsonl, "
            "or leave it out to read the run directory's own"
        )
    from orchestrator.chat_renderer import build_renderer

    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    tokenizer = PairTokenizer(
        renderer,
        max_context=config.model.max_context,
        row_tokens=config.trainer.micro_batch_tokens,
    )
    return PairMixer(
        PairFile(path),
        tokenizer,
        per_step=preferences.pairs_per_step,
        seed=config.run.seed,
        active=lambda step: config.channels.replay_dpo.weight_at(step) > 0,
    )
