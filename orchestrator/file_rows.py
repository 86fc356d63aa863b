"""Rows of files as token ids of the policy: replay-DPO's pairs and SFT's conversations.

    pairs.jsonl -> PairMixer (cursor) -> RowTokenizer.preference -> TermUnit
    files       -> ConversationRow    -> RowTokenizer.demonstration -> DemonstrationRows -> TermUnit

A batch's pairs and the cursor after them are journaled with it. Which conversations a step trains follows from
run.seed, the step and the number of rows alone.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.channels.sft import NAME as SFT
from composer_prime.config import Config
from composer_prime.console import pluralize
from composer_prime.data.conversation_rows import ConversationRow, digest, read_rows
from composer_prime.data.pairs import Pair, PairFile, resolve_pairs
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.monitor.events import event
from composer_prime.wire.types import TermUnit, pack_flags, pack_ints
from orchestrator.chat_template import RENDER_ERRORS
from orchestrator.rollouts.groups import derive_seed

logger = logging.getLogger(__name__)

FILES, EVAL_FILES = "orchestrator.demonstrations.files", "orchestrator.demonstrations.eval_files"


class PairCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a pass. Pairs that the file gained since wait for the next one."""

    number: int = 0
    """From 0."""
    position: int = 0
    """Pairs that were drawn."""
    known: int = 0
    """Pairs in the file when the pass began."""
    digest: str = ""
    """Of their lines: a resumed run's file must begin with the same."""


class RowTokenizer:
    """Turns messages into token ids. Not thread-safe."""

    def __init__(self, renderer: Any, *, max_context: int, row_tokens: int = 0) -> None:
        """`renderer`: of rollouts. `row_tokens`: both sides of a pair share one row."""
        self._renderer = renderer
        self._max_context = max_context
        self._row_tokens = row_tokens
        self._stops = set(renderer.get_stop_token_ids())

    def preference(self, pair: Pair) -> TermUnit | str:
        """Return the pair as ids, or why it cannot be trained.

        context_differs: the template writes what precedes an answer otherwise than an answer is sampled after.
        """
        if pair.truncated:
            return "truncated"
        messages, tools = pair.state.messages, pair.state.tools or None
        try:
            context = self._render(messages, tools, opening=True)
            sides = [self._render([*messages, answer], tools) for answer in (pair.chosen, pair.rejected)]
        except RENDER_ERRORS:
            return "unrenderable"
        if not context or any(side[: len(context)] != context for side in sides):
            return "context_differs"
        ends = [self._end(side, len(context), len(side)) for side in sides]
        if None in ends:
            return "no_end"
        chosen, rejected = (side[:end] for side, end in zip(sides, ends, strict=True))
        if chosen == rejected:
            return "same"
        if max(len(chosen), len(rejected)) > self._max_context:
            return "too_long"
        if len(chosen) + len(rejected) > self._row_tokens:
            return "row_full"
        return pair_unit(
            pair_id=pair.pair_id,
            chosen_ids=pack_ints(chosen),
            rejected_ids=pack_ints(rejected),
            context=len(context),
            epsilon=pair.epsilon,
        )

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, opening: bool = False) -> list[int]:
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=opening))

    def _end(self, ids: list[int], start: int, stop: int) -> int | None:
        """Return the position after the token that ends the answer; None before `stop`."""
        return next((at + 1 for at in range(start, stop) if ids[at] in self._stops), None)

    def demonstration(self, row: ConversationRow) -> TermUnit | None:
        """Return the row as ids; None where it is too long. Raises ConfigError for the template."""
        if row.tools and not getattr(self._renderer, "supports_tools", True):
            raise ConfigError(
                f"{row.name} has tools, but the chat template of the model writes none: use a model or a "
                "model.chat_template with tools, or remove them from the row"
            )
        try:
            ids, mask = self._marked(row)
        except ConfigError:
            raise
        except RENDER_ERRORS as error:
            raise ConfigError(
                f"{row.name}: the chat template cannot render this conversation: {error}; repair the row, or set "
                "model.chat_template to another"
            ) from None
        if len(ids) > self._max_context:
            return None
        return TermUnit(term=SFT, name=f"row {row.name}", documents=[pack_ints(ids)], masks=[pack_flags(mask)])

    def _marked(self, row: ConversationRow) -> tuple[list[int], list[bool]]:
        messages = [{key: value for key, value in each.items() if key != "weight"} for each in row.messages]
        rendered = self._renderer.render(messages, tools=row.tools)
        ids, imitated = list(rendered.token_ids), set(row.imitated)
        if len(rendered.sampled_mask) != len(ids):
            return ids, self._marked_by_prefixes(row, messages, ids)
        owners = rendered.message_indices
        if lost := _lost(messages, set(owners)):
            raise ConfigError(
                f"{row.name}: the chat template leaves out message {lost[0]}, which has role "
                f"{messages[lost[0]]['role']!r}: give it a role that the model knows, or remove it"
            )
        mask = [owner in imitated and sampled for owner, sampled in zip(owners, rendered.sampled_mask, strict=True)]
        shown = {owner for owner, trained in zip(owners, mask, strict=True) if trained}
        if shown != imitated or mask[0]:
            raise _unmarked(row, f"it shows {len(shown)} of {pluralize(len(imitated), 'assistant turn')}")
        return ids, mask

    def _marked_by_prefixes(self, row: ConversationRow, messages: list[dict[str, Any]], ids: list[int]) -> list[bool]:
        """Mark a turn from its first token to the one that ends it."""
        mask = [False] * len(ids)
        for index in row.imitated:
            if index == 0:
                raise _unmarked(row, "the conversation begins with an answer, and it opens none without a question")
            context = self._render(messages[:index], row.tools, opening=True)
            # A turn that ends otherwise must not reach the stop token of a later one.
            last = min(len(ids), len(self._render(messages[: index + 1], row.tools)))
            start = len(context)
            if ids[:start] != context:
                raise _unmarked(row, f"it writes what comes before message {index} otherwise once an answer follows")
            end = self._end(ids, start, last)
            if end is None:
                raise _unmarked(row, f"no end-of-turn token follows message {index}")
            mask[start:end] = [True] * (end - start)
        return mask


def _lost(messages: list[dict[str, Any]], shown: set[int]) -> list[int]:
    """Return messages with text or calls, and without a token."""
    return [
        index
        for index, message in enumerate(messages)
        if index not in shown
        and (message.get("content") or message.get("tool_calls"))
        and not (index and messages[index - 1]["role"] == message["role"] == "system")
    ]


def _unmarked(row: ConversationRow, reason: str) -> ConfigError:
    return ConfigError(
        f"{row.name}: the chat template cannot mark the assistant's tokens: {reason}; set model.chat_template to one "
        "that only appends, or name a renderer of the model (model.renderer)"
    )


class PairMixer:
    """Each pass over the file has its own order. Call it from one thread at a time."""

    def __init__(
        self,
        file: PairFile,
        tokenizer: RowTokenizer,
        *,
        per_step: int,
        seed: int,
        active: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """`active(step)`: where replay-DPO has no weight, no pair is drawn."""
        self._file = file
        self._tokenizer = tokenizer
        self._per_step = per_step
        self._seed = seed
        self._active = active
        self.cursor = PairCursor()
        """After the last draw."""
        self.metrics: dict[str, float] = {}
        """Of the last draw."""
        self._pass: list[int] = []
        self._refused: dict[int, str] = {}
        """Why a pair cannot be trained, by number."""
        self._warned_at = 0
        """Pairs in the file when it was last said that none can be trained."""

    def restore(self, cursor: PairCursor) -> None:
        """Continue from `cursor`. Raises CheckpointError for a file of other pairs."""
        available = self._file.refresh()
        if cursor.known > available or self._file.digest(cursor.known) != cursor.digest:
            raise CheckpointError(
                f"{self._file.path} has {available} pairs and does not begin with the {cursor.known} pairs of the "
                "checkpoint's pass: give the run the file it was started with (it may have grown since), or start a "
                "new run"
            )
        self.cursor = cursor
        self._shuffle()

    def draw(self, step: int) -> list[TermUnit]:
        """Return the next `per_step` pairs that can be trained, none twice; fewer in a small file."""
        available = self._file.refresh() if self._active(step) else 0
        preferences: dict[str, TermUnit] = {}
        for _ in range(2 * available):
            if len(preferences) == self._per_step or len(self._refused) + len(preferences) >= available:
                break
            index = self._next(available)
            preference = None if index in self._refused else self._preference(index)
            if preference is not None:
                preferences.setdefault(preference.name, preference)
        refused = Counter(self._refused.values())
        if not preferences and available not in (0, self._warned_at):
            self._warned_at = available
            reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
            path = self._file.path
            logger.warning("replay-DPO trains nothing: all %d pairs of %s are refused (%s)", available, path, reasons)
        self.metrics = {
            "pairs/in_file": float(len(self._file)),
            "pairs/served": float(len(preferences)),
            "pairs/pass": float(self.cursor.number),
            "pairs/refused": float(len(self._refused)),
            **{f"pairs/refused/{reason}": float(count) for reason, count in sorted(refused.items())},
        }
        return list(preferences.values())

    def _next(self, available: int) -> int:
        """Return the next pair's number, of `available` > 0 in the file."""
        if self.cursor.position == self.cursor.known:
            number = self.cursor.number + (self.cursor.known > 0)
            self.cursor = PairCursor(number=number, known=available, digest=self._file.digest(available))
            self._shuffle()
        index = self._pass[self.cursor.position]
        self.cursor = msgspec.structs.replace(self.cursor, position=self.cursor.position + 1)
        return index

    def _shuffle(self) -> None:
        self._pass = list(range(self.cursor.known))
        random.Random(derive_seed(self._seed, "pairs", self.cursor.number)).shuffle(self._pass)

    def _preference(self, index: int) -> TermUnit | None:
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


class DemonstrationRows:
    """A run's rows, tokenized at its start. Thread-safe."""

    def __init__(
        self,
        rows: Sequence[TermUnit | None],
        held_out: Sequence[TermUnit] = (),
        *,
        per_step: int,
        seed: int,
        digest: str = "",
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        """`rows`: None for one that is too long. `left_out`: `row NAME` of those that made a step not finite."""
        self.held_out = list(held_out)
        self.digest = digest
        self._rows = list(rows)
        self._per_step = per_step
        self._seed = seed
        self._left_out = left_out
        self._pass: tuple[int, list[int]] = (-1, [])
        """The last one that was asked for, with its order."""

    def leave_out(self, names: set[str]) -> None:
        """Serve none of `names`, which made a step not finite."""
        self._left_out |= names

    def of_step(self, step: int) -> list[TermUnit]:
        """Return the rows of `step` (from 1): each once a pass."""
        if not self._rows:
            return []
        number, place = divmod(step - 1, -(-len(self._rows) // self._per_step))
        kept, order = self._pass
        if kept != number:
            order = list(range(len(self._rows)))
            random.Random(derive_seed(self._seed, "demonstrations", number)).shuffle(order)
            self._pass = (number, order)
        chosen = (self._rows[index] for index in order[place * self._per_step : (place + 1) * self._per_step])
        return [row for row in chosen if row is not None and row.name not in self._left_out]

    def metrics(self, step: int) -> dict[str, float]:
        if not self._rows:
            return {}
        served = self.of_step(step)
        return {
            "sft/rows": float(len(served)),
            "sft/pass": float((step - 1) // -(-len(self._rows) // self._per_step)),
            "sft/rows_in_files": float(len(self._rows)),
            "sft/rows_skipped": float(sum(row is None for row in self._rows)),
        }

    def check_resume(self, before: str) -> None:
        """Raise CheckpointError unless the files are those of the checkpoint, whose digest was `before`."""
        if before != self.digest:
            raise CheckpointError(
                f"{FILES} have digest {self.digest[:12] or 'none'}, but the checkpoint was made with "
                f"{before[:12] or 'none'}: give the run the files it was started with, or start a new run"
            )


NO_ROWS = DemonstrationRows([], per_step=1, seed=0)


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
    return PairMixer(
        PairFile(path),
        _build_tokenizer(config, chat_folder),
        per_step=preferences.pairs_per_step,
        seed=config.run.seed,
        active=lambda step: config.channels.replay_dpo.weight_at(step) > 0,
    )


def build_demonstrations(
    config: Config, chat_folder: Path, left_out: frozenset[str] = frozenset()
) -> DemonstrationRows:
    """Read and tokenize the files of a run. Loads the renderer: call it from a thread. Raises ConfigError."""
    settings = config.orchestrator.demonstrations
    if not config.run.max_steps or not (settings.files or settings.eval_files):
        return NO_ROWS
    tokenizer = _build_tokenizer(config, chat_folder)
    rows = [tokenizer.demonstration(row) for row in read_rows(settings.files, FILES)]
    skipped = rows.count(None)
    if rows and skipped == len(rows):
        raise ConfigError(
            f"all {len(rows)} rows of {FILES} are longer than model.max_context = {config.model.max_context}: raise it"
        )
    held_out = [tokenizer.demonstration(row) for row in read_rows(settings.eval_files, EVAL_FILES)]
    tokens = sum(row.num_trained for row in rows if row is not None)
    text = (
        f"{pluralize(len(rows), 'demonstration')} with {tokens:,} tokens to imitate, {len(held_out)} held out; "
        f"{skipped} and {held_out.count(None)} are longer than model.max_context and left out"
    )
    logger.log(logging.WARNING if skipped else logging.INFO, text, extra=event("demonstrations"))
    return DemonstrationRows(
        rows,
        [row for row in held_out if row is not None],
        per_step=settings.rows_per_step,
        seed=config.run.seed,
        digest=digest(settings.files) if settings.files else "",
        left_out=left_out,
    )


def _build_tokenizer(config: Config, chat_folder: Path) -> RowTokenizer:
    from orchestrator.chat_renderer import build_renderer

    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    return RowTokenizer(renderer, max_context=config.model.max_context, row_tokens=config.trainer.micro_batch_tokens)
