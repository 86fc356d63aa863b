"""SFT's rows for each step: recorded conversations as the token ids that the policy reads, with what it imitates.

    files -> rows (composer_prime/data/conversation_rows.py) -> renderer -> TermUnit -> step N

Imitated are the tokens that the policy itself would sample in an assistant turn: content, thinking, tool calls and the
token that ends the turn. The template's opening of a turn, and everything that others say, is context.

Which rows a step trains follows from run.seed, the step and the number of rows alone. So nothing of it is saved but a
digest of the files: a resumed run needs the same ones.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_prime.channels.sft import NAME as SFT
from composer_prime.config import Config
from composer_prime.console import pluralize
from composer_prime.data.conversation_rows import ConversationRow, digest, read_rows
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.monitor.events import event
from composer_prime.wire.types import TermUnit, pack_flags, pack_ints
from orchestrator.chat_template import RENDER_ERRORS
from orchestrator.rollouts.groups import derive_seed

logger = logging.getLogger(__name__)

FILES, EVAL_FILES = "orchestrator.demonstrations.files", "orchestrator.demonstrations.eval_files"


class DemonstrationRows:
    """The rows of a run, tokenized once at its start. Thread-safe."""

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
        """`rows`: None for one that is too long. `left_out`: rows (`row NAME`) that made a step not finite."""
        self.held_out = list(held_out)
        self.digest = digest
        self._rows = list(rows)
        self._per_step = per_step
        self._seed = seed
        self._left_out = left_out

    def leave_out(self, names: set[str]) -> None:
        """Serve no rows of `names` from now on: they made a step not finite."""
        self._left_out |= names

    def of_step(self, step: int) -> list[TermUnit]:
        """Return the rows of `step` (from 1): each row once a pass, in an order of that pass."""
        if not self._rows:
            return []
        number, place = divmod(step - 1, -(-len(self._rows) // self._per_step))
        order = list(range(len(self._rows)))
        random.Random(derive_seed(self._seed, "demonstrations", number)).shuffle(order)
        chosen = (self._rows[index] for index in order[place * self._per_step : (place + 1) * self._per_step])
        return [row for row in chosen if row is not None and row.name not in self._left_out]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the figures of `step` for the trainer's line."""
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


class RowTokenizer:
    """Turns conversations into token ids with the tokens to imitate. Not thread-safe."""

    def __init__(self, renderer: Any, *, max_context: int) -> None:
        """`renderer`: the one that rollouts are rendered with. `max_context`: longest row, in tokens."""
        self._renderer = renderer
        self._max_context = max_context
        self._stops = set(renderer.get_stop_token_ids())

    def demonstration(self, row: ConversationRow) -> TermUnit | None:
        """Return the row as ids; None where it is too long.

        Raises ConfigError: the template cannot render it, or not mark what an assistant wrote.
        """
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
        """Mark from where a turn is sampled to the token that ends it: for a template that does not say more."""
        mask = [False] * len(ids)
        for index in row.imitated:
            if index == 0:
                raise _unmarked(row, "the conversation begins with an answer, and it opens none without a question")
            context = self._renderer.render_ids(messages[:index], tools=row.tools, add_generation_prompt=True)
            # A turn that ends with another token than the stop token must not reach that of a later turn.
            last = min(len(ids), len(self._renderer.render_ids(messages[: index + 1], tools=row.tools)))
            start = len(context)
            if ids[:start] != list(context):
                raise _unmarked(row, f"it writes what comes before message {index} otherwise once an answer follows")
            end = next((at + 1 for at in range(start, last) if ids[at] in self._stops), None)
            if end is None:
                raise _unmarked(row, f"no end-of-turn token follows message {index}")
            mask[start:end] = [True] * (end - start)
        return mask


def _lost(messages: list[dict[str, Any]], shown: set[int]) -> list[int]:
    """Return the messages with text or calls that have no token. Renderers may join neighboring system messages."""
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


def build_demonstrations(
    config: Config, chat_folder: Path, left_out: frozenset[str] = frozenset()
) -> DemonstrationRows:
    """Read and tokenize the files of a run. Loads the renderer: call it from a thread. Raises ConfigError."""
    settings = config.orchestrator.demonstrations
    if not config.run.max_steps or not (settings.files or settings.eval_files):
        return NO_ROWS
    from orchestrator.chat_renderer import build_renderer

    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    tokenizer = RowTokenizer(renderer, max_context=config.model.max_context)
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
