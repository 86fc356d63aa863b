"""Pairs for the next batch.

    pairs.jsonl --order (cursor)--> pair --gate, tokenise--> Preference   refused: counted by reason, the next is drawn

A pair waits until the density gate has measured it (released.py), and is refused where it missed the gate. A batch's
pairs and the cursor after them are journaled with the batch, so a batch that is served again has the same pairs and a
resumed run goes on where it stopped.

Which pairs of a growing file the density gate lets through (composer_prime/traces/pairs.py), as its verdicts come.

A pair's messages to the token ids that the policy would see and write.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config import Config
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.traces.pairs import Gate, Pair, PairFile, check_binding, gate_file, read_gate, resolve_pairs
from composer_prime.wire.types import Preference, pack_ints
from orchestrator.chat_renderer import RENDER_ERRORS
from orchestrator.preferences.order import Cursor, PairOrder

logger = logging.getLogger(__name__)


class Released:
    """Not thread-safe."""

    def __init__(self, file: PairFile) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        """Time and size of the verdicts' file when it was last read."""
        self._gate = Gate(verdicts=[])

    @property
    def measured(self) -> int:
        """The first so many pairs have a verdict."""
        return self._gate.measured

    def refresh(self) -> bool:
        """Take in what verdicts there are now; whether they changed. Verdicts on other pairs release none."""
        try:
            status = gate_file(self._file.path).stat()
            seen = (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            seen = None
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            gate = read_gate(self._file.path) or Gate(verdicts=[])
            check_binding(gate, self._file)
        except ConfigError as error:
            logger.warning("channel 3 trains no pair: %s", error)
            gate = Gate(verdicts=[])
        self._gate = gate
        return True

    def allows(self, index: int) -> bool:
        """Whether a verdict that passed covers pair `index`."""
        return any(verdict.first <= index < verdict.last and verdict.passed for verdict in self._gate.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLimits:
    """What a pair must fit into, in tokens."""

    max_context: int
    """model.max_context: each side."""
    row_tokens: int
    """trainer.micro_batch_tokens: both sides share one row."""
    max_epsilon: float


class PairTokeniser:
    """Not thread-safe, as renderers are not."""

    def __init__(self, renderer: Any, limits: PairLimits) -> None:
        """`renderer`: the one that rollouts are rendered with."""
        self._renderer, self._limits = renderer, limits
        self._stops = set(renderer.get_stop_token_ids())

    def preference(self, pair: Pair) -> Preference | str:
        """The pair as ids, or why it can't be trained: truncated, doubtful (epsilon), unrenderable, context_differs,
        no_end, same (both answers), too_long (for the context) or row_full.

        context_differs: the template writes the messages before an answer in other tokens than the answer would have
        been sampled after, so its ids would not be those of a rollout.
        """
        if pair.truncated:
            return "truncated"
        if pair.epsilon > self._limits.max_epsilon:
            return "doubtful"
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
        if max(len(chosen), len(rejected)) > self._limits.max_context:
            return "too_long"
        if len(chosen) + len(rejected) > self._limits.row_tokens:
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
        """Position after the token that ends the answer."""
        return next((at + 1 for at in range(start, len(ids)) if ids[at] in self._stops), None)


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
