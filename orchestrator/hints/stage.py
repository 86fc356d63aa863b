"""The targets of the SDPO loss: hints at the turns of a finished group that went wrong. Read this file first.

    rollouts --generate.py (detectors)--> ErrorTurns --generate.py (layers, in order)--> the hint's text
             --HintPlacer (the sample's ids, the hint's between two of them)--> HintedTurn --> Sample.distillations

An error message answers a turn. The turn that went wrong is the assistant turn before it, and the hint goes before that
turn. A turn is hinted at most once. A failure in here costs a hint, never a rollout, and is counted by reason.

The group waits here at most two minutes, and the event loop never: rules and tokens are handled in threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from composer_prime.config import Config
from composer_prime.config.hints import HintsConfig
from composer_prime.console import did_you_mean
from composer_prime.errors import BudgetError, ComposerError, ConfigError
from composer_prime.import_path import PartConfig, as_parts, build_awaited
from composer_prime.monitor.events import event
from composer_prime.wire.types import HintedTurn, Sample, TurnSpan, ints, pack_ints
from orchestrator.chat_template import RENDER_ERRORS
from orchestrator.hints.generate import (
    ENDS,
    ChatEndpoint,
    Detector,
    ErrorTurn,
    HintLayer,
    HintRequest,
    Templates,
    cut,
    find_errors,
    model_hint,
    raw_error,
    sibling_demonstration,
)
from orchestrator.rollouts.groups import CompiledRollout, FinishedRollout
from orchestrator.workers.call_schema import SCHEMA_KINDS
from orchestrator.workers.pool import MessageRecord

logger = logging.getLogger(__name__)

_GROUP_TIMEOUT_S = 120.0
"""How long a finished group waits for its hints; late ones are skipped and counted."""
_LOGGED_FIRST = 20
_MARK = "xyzzy"
_CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": _MARK}],
    "tool": [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": _MARK},
    ],
    "system": [{"role": "user", "content": "question"}, {"role": "system", "content": _MARK}],
}
"""A conversation that ends with a message of each role."""
_SLACK = 8


@dataclass(slots=True)
class _HintedRollout:
    """One rollout while its turns get their hints."""

    rollout: FinishedRollout
    samples: list[Sample]
    turns: list[MessageRecord]
    """The rollout's, with errors and hints."""
    counts: Counter[str] = field(default_factory=Counter)

    def mark(self, error: ErrorTurn, hint: str | None) -> None:
        turn = self.turns[error.message]
        self.turns[error.message] = msgspec.structs.replace(turn, error=error.kind, hint=hint)

    def attach(self, hinted: HintedTurn) -> None:
        """Add the hinted turn to the sample that trains the turn."""
        for index, sample in enumerate(self.samples):
            if any(span.turn == hinted.turn for span in sample.turns):
                distillations = sorted([*sample.distillations, hinted], key=lambda each: each.start)
                self.samples[index] = msgspec.structs.replace(sample, distillations=distillations)
                return

    def result(self) -> CompiledRollout:
        counts = {name: count for name, count in sorted(self.counts.items()) if count}
        return msgspec.structs.replace(self.rollout, turns=self.turns, hints=counts), self.samples


@dataclass(slots=True, kw_only=True, eq=False)
class HintStage:
    """Finds the error turns of a group's rollouts, and attaches a hinted turn to the samples of each."""

    config: HintsConfig
    detectors: Mapping[str, Detector]
    """By name. Of two detectors that name one turn, the first one counts."""
    layers: Mapping[str, HintLayer]
    """By name, in the order in which they are tried."""
    placer: HintPlacer
    max_context: int
    """Tokens of a hinted context and its turn at most."""
    endpoint: ChatEndpoint | None = None
    """The model that writes hints."""
    distil: bool = True
    """When False, hints are logged, but nothing learns from them."""
    weight_of: Callable[[str], float] = field(default=lambda kind: 1.0, kw_only=True)
    """The licence of a kind of error, a factor on its weight; hints of kinds with 0 are logged, and not distilled."""
    _num_failures: int = field(default=0, init=False)

    async def close(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()

    async def attach(self, group: Sequence[CompiledRollout]) -> list[CompiledRollout]:
        """Return the group with its hints. What is not done in time is left out."""
        works = [_HintedRollout(rollout, list(samples), list(rollout.turns)) for rollout, samples in group]
        rollouts = [rollout for rollout, _ in group]
        try:
            async with asyncio.timeout(_GROUP_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for work in works:
                    if work.samples:
                        tasks.create_task(self._hint_rollout(work, rollouts))
        except TimeoutError:
            logger.warning("the hints of a group were not all done in %g s", _GROUP_TIMEOUT_S)
        return [work.result() for work in works]

    async def _hint_rollout(self, work: _HintedRollout, rollouts: list[FinishedRollout]) -> None:
        siblings = [other for other in rollouts if other is not work.rollout]
        errors = await self._find_errors(work)
        for error in errors:
            work.mark(error, None)
            work.counts.update(("found", f"kind/{error.kind}", "skipped/late"))
        for error in errors:
            reason = await self._hint_turn(work, error, siblings)
            work.counts["skipped/late"] -= 1
            work.counts["hinted" if reason is None else f"skipped/{reason}"] += 1

    async def _find_errors(self, work: _HintedRollout) -> list[ErrorTurn]:
        """Return the errors in the order of their turns."""
        error_of_turn: dict[int, ErrorTurn] = {}
        for name, find in self.detectors.items():
            try:
                errors = list(await find(work.rollout))
                if wrong := [each for each in errors if not isinstance(each, ErrorTurn)]:
                    raise TypeError(
                        f"it gave {wrong[0]!r:.60}, not what `error_turn` of orchestrator.hints.generate makes"
                    )
            except Exception as error:
                self._count_failure(work, f"failed/{name}", error)
                continue
            for error in errors:
                session = work.turns[error.message].session
                # The policy does not train on turns that a simulated user or a judge wrote.
                if session >= len(work.rollout.sessions) or work.rollout.sessions[session].trainable:
                    error_of_turn.setdefault(error.turn, error)
        return [error_of_turn[turn] for turn in sorted(error_of_turn)]

    async def _hint_turn(self, work: _HintedRollout, error: ErrorTurn, siblings: list[FinishedRollout]) -> str | None:
        """Hint one turn. Return None when that worked, else the reason why not."""
        if work.rollout.turns[error.message].finish_reason == "length":
            return "cut"
        if self.config.weights.get(error.kind, 1.0) == 0:
            return "no_weight"
        if work.counts["hinted"] >= (self.config.max_turns if self.config.scope == "turn" else 1):
            return "max_turns"
        request = HintRequest(error=error, rollout=work.rollout, siblings=siblings)
        hint = await self._write_hint(work, request)
        if hint is None:
            return "no_hint"
        hinted = await asyncio.to_thread(self._place, work, error, hint)
        if isinstance(hinted, str):
            return hinted
        work.mark(error, hint)
        for turn in hinted:
            if self.distil and turn.weight > 0:
                work.attach(turn)
        return None

    async def _write_hint(self, work: _HintedRollout, request: HintRequest) -> str | None:
        """Return the hint of the first layer that has one."""
        for name, write in self.layers.items():
            try:
                hint = await write(request)
            except Exception as error:
                self._count_failure(work, f"failed/{name}", error)
                continue
            if hint is not None and hint.strip():
                work.counts[f"layer/{name}"] += 1
                return cut(hint.strip(), self.config.max_hint_chars)
        return None

    def _place(self, work: _HintedRollout, error: ErrorTurn, hint: str) -> list[HintedTurn] | str:
        """Return the turns of the scope after a context with the hint, or the reason why the hint has no place."""
        sample = next((each for each in work.samples if any(span.turn == error.turn for span in each.turns)), None)
        if sample is None:
            return "empty_mask"
        spans = sorted(sample.turns, key=lambda span: span.start)
        if self.config.scope != "rollout":
            spans = spans[next(index for index, span in enumerate(spans) if span.turn == error.turn) :]
        first = next(turn for turn in work.turns if turn.turn == spans[0].turn)
        role = "user" if first.parent is None else work.turns[first.parent].role
        weight = self.config.weights.get(error.kind, 1.0) * self.weight_of(error.kind)
        spans = spans[: 1 if self.config.scope == "turn" else None]
        hinted = self.placer.place(sample, spans, hint, role=role, weight=weight, kind=error.kind)
        if isinstance(hinted, str):
            return hinted
        return [turn for turn in hinted if len(ints(turn.teacher_ids)) <= self.max_context] or "too_long"

    def _count_failure(self, work: _HintedRollout, name: str, error: Exception) -> None:
        """Count the failure of a detector or generator, and log the first ones."""
        work.counts["over_budget" if isinstance(error, BudgetError) else name] += 1
        self._num_failures += 1
        if self._num_failures <= _LOGGED_FIRST:
            ours, about = isinstance(error, ComposerError), event("budget") if isinstance(error, BudgetError) else None
            text = error if ours else repr(error)
            logger.warning("hints, %s: %s", name, text, exc_info=None if ours else error, extra=about)


# -- where the hint goes -------------------------------------------------------------------------------------------


class HintPlacer:
    """Puts a hint at the end of the message before the turn, between two token ids of the turn's context.

        … <|im_start|>user question [\n hint] <|im_end|> <|im_start|>assistant  turn

    The context is never rendered again: what the template would strip or tokenize otherwise stays as it was. The
    renderer tells only, on made-up conversations, the text that closes a message before the assistant's turn begins.
    That closing must stand at the end of the context's own ids.
    """

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        """Raises ConfigError when the chat template has no such place."""
        self._renderer = renderer
        self._lock = threading.Lock()
        """Renderers are not thread-safe."""
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._reserved = sorted({token.content for token in added if token.special and len(token.content) > 1})
        opening = self._opening()
        self._closings = {role: self._closing(role, opening) for role in _CONVERSATIONS}
        """By role: the text after a message's content, up to where the assistant's turn begins; None: not found."""
        context = np.array(self._render(_CONVERSATIONS["user"], opening=True), np.int32)
        if self.hinted(context, "user", "probe") is None:
            raise ConfigError(_no_place("the end of a user message cannot be found in its rendering"))

    def hinted(self, context_ids: np.ndarray, role: str, hint: str) -> np.ndarray | None:
        """Return `context_ids` [T] with the hint's ids in it: int32 [T + hint]. None where there is no place.

        `role`: of the last message before the turn. Taking the hint's ids out again gives `context_ids`.
        """
        hint, closing = self._harmless(hint), self._closings.get(role)
        if closing is None:
            return None
        at = self._find(context_ids, closing)
        if at is not None:
            return _inserted(context_ids, at, self._encode("\n" + hint))
        # The content's last token may have swallowed the white space of the closing: then the hint goes after it.
        rest = closing.lstrip()
        space = closing[: len(closing) - len(rest)]
        at = self._find(context_ids, rest) if space else None
        if at is None or not self._decode(context_ids[max(0, at - _SLACK) : at]).endswith(space):
            return None
        return _inserted(context_ids, at, self._encode(hint + space))

    def place(
        self, sample: Sample, spans: Sequence[TurnSpan], hint: str, *, role: str, weight: float, kind: str
    ) -> list[HintedTurn] | str:
        """Return the turns `spans` of a sample, in order, where `hint` stands before the first of them.

        `role`: of the message before the first. `kind`: of the error. Returns the reason where the hint has no place.
        """
        ids, start = ints(sample.input_ids), spans[0].start
        with self._lock:
            hinted_ids = self.hinted(ids[:start], role, hint)
        if hinted_ids is None:
            return "no_place"
        return [
            HintedTurn(
                start=span.start,
                end=span.end,
                teacher_ids=pack_ints(np.concatenate([hinted_ids, ids[start : span.end]])),
                teacher_start=len(hinted_ids) + span.start - start,
                weight=weight,
                turn=span.turn,
                error=kind,
            )
            for span in spans
        ]

    def _find(self, ids: np.ndarray, ending: str) -> int | None:
        """Return where the tail of `ids` begins whose text is exactly `ending`."""
        for at in range(len(ids) - 1, max(-1, len(ids) - 2 - len(ending.encode())), -1):
            text = self._decode(ids[at:])
            if text == ending:
                return at
            if not ending.endswith(text) and "\ufffd" not in text:
                return None
        return None

    # -- renderings of made-up conversations ---------------------------------------------------------------------

    def _render(self, messages: list[dict[str, Any]], *, opening: bool) -> list[int]:
        tools = _TOOLS if any(message["role"] == "tool" for message in messages) else None
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=opening))

    def _opening(self) -> str:
        """Return the text that opens the assistant's turn. Raises ConfigError."""
        try:
            shorter, longer = (self._render(_CONVERSATIONS["user"], opening=opening) for opening in (False, True))
        except RENDER_ERRORS as error:
            raise ConfigError(_no_place(f"{type(error).__name__}: {error}")) from None
        if longer[: len(shorter)] != shorter or len(longer) == len(shorter):
            raise ConfigError(_no_place("the assistant's turn has no opening of its own"))
        return self._decode(longer[len(shorter) :])

    def _closing(self, role: str, opening: str) -> str | None:
        try:
            text = self._decode(self._render(_CONVERSATIONS[role], opening=True))
        except RENDER_ERRORS:
            return None
        _, mark, closing = text.rpartition(_MARK)
        return closing if mark and closing.endswith(opening) else None

    # -- tokens --------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Any) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _harmless(self, hint: str) -> str:
        """Break up special tokens in a hint, which an error text may quote: they must not end a message."""
        for text in self._reserved:
            hint = hint.replace(text, f"{text[0]} {text[1:]}")
        return hint


def _inserted(ids: np.ndarray, at: int, new: list[int]) -> np.ndarray:
    return np.concatenate([ids[:at], np.asarray(new, np.int32), ids[at:]]).astype(np.int32)


def _no_place(reason: str) -> str:
    return (
        f"the model's chat template has no place for a hint at the end of a message ({reason}): use another template "
        "(model.chat_template), or remove orchestrator.hints"
    )


# -- the stage of a run --------------------------------------------------------------------------------------------


def build_hints(config: Config, chat_folder: Path, run_root: Path) -> HintStage | None:
    """Build the stage; None without [orchestrator.hints]. Loads the renderer, in a thread then. Raises ConfigError."""
    hints = config.orchestrator.hints
    if hints is None:
        return None
    from orchestrator.chat_renderer import build_renderer, read_tokenizer

    templates = Templates.load(hints.template)
    check_kinds(hints, templates)
    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    placer = HintPlacer(renderer, read_tokenizer(str(chat_folder)))
    endpoint = ChatEndpoint(hints.llm, run_root) if hints.llm is not None and hints.asks_model else None
    rules = {part.name for part in as_parts(hints.detect) if not part.is_own}
    detectors: dict[str, Detector] = {
        "rules": lambda rollout: asyncio.to_thread(find_errors, templates, rules, rollout)
    }
    detectors |= own_parts(hints.detect, "orchestrator.hints.detect")
    layers: dict[str, HintLayer] = {
        "template": templates.hint,
        "raw_error": raw_error,
        "sibling": sibling_demonstration,
    }
    layers |= own_parts(hints.layers, "orchestrator.hints.layers")
    if endpoint is not None:
        layers["llm"] = functools.partial(model_hint, endpoint)
    return HintStage(
        config=hints,
        detectors=detectors,
        layers={part.name: layers[part.name] for part in as_parts(hints.layers)},
        placer=placer,
        max_context=config.model.max_context,
        endpoint=endpoint,
        distil=config.channels.sdpo.weight > 0,
    )


def own_parts(entries: Sequence[str | PartConfig], setting: str) -> dict[str, Any]:
    """Build the parts of a list that are named by import path, by that path. Raises ConfigError."""
    return {part.name: build_awaited(part.name, part.settings, setting) for part in as_parts(entries) if part.is_own}


def check_kinds(hints: HintsConfig, templates: Templates) -> None:
    """Raise ConfigError when orchestrator.hints.weights names a kind of error that nothing finds."""
    kinds = templates.kinds | SCHEMA_KINDS | {"repeated", *ENDS}
    unknown = sorted(set(hints.weights) - kinds)
    if unknown and not any(part.is_own for part in as_parts(hints.detect)):
        raise ConfigError(
            f"orchestrator.hints.weights names {unknown}, which is not a kind of error; there are "
            f"{', '.join(sorted(kinds))}{did_you_mean(unknown[0], kinds)}"
        )
