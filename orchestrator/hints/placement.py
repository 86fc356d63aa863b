"""Place a hint at the end of the message before the turn, between two token ids of the turn's context.

    … <|im_start|>user question [\n hint] <|im_end|> <|im_start|>assistant  turn

The context is never rendered again. What the template would strip (earlier thinking) or tokenize otherwise stays as it
was, and so do the turn's own ids. The renderer is used for one thing only, on made-up conversations: the text that
closes a message before the assistant's turn begins. That closing must stand at the end of the context's own ids;
otherwise there is no place for a hint.

The result is a HintedTurn: hinted context, then the turn's own ids. Everything here is pure and runs in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_prime.errors import ConfigError
from composer_prime.wire.types import HintedTurn, Sample, TurnSpan, ints, pack_ints
from orchestrator.chat_template import RENDER_ERRORS
from orchestrator.hints.generate import ErrorTurn

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


class HintPlacer:
    """Puts hints into contexts. Not thread-safe, because renderers are not."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        """`renderer`: the one that renders rollouts. Raises ConfigError when the chat template has no such place."""
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._reserved = _special_texts(tokenizer)
        self._ids_of_ending: dict[str, np.ndarray] = {}
        """The last ids of each ending: most contexts end in the same ones, and decoding is slow."""
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

    def _find(self, ids: np.ndarray, ending: str) -> int | None:
        """Return where the tail of `ids` begins whose text is exactly `ending`."""
        remembered = self._ids_of_ending.get(ending)
        if remembered is not None and np.array_equal(ids[-len(remembered) :], remembered):
            return len(ids) - len(remembered)
        for at in range(len(ids) - 1, max(-1, len(ids) - 2 - len(ending.encode())), -1):
            text = self._decode(ids[at:])
            if text == ending:
                self._ids_of_ending[ending] = np.array(ids[at:])
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


def _special_texts(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return sorted({token.content for token in added.values() if token.special and len(token.content) > 1})


def _inserted(ids: np.ndarray, at: int, new: list[int]) -> np.ndarray:
    return np.concatenate([ids[:at], np.asarray(new, np.int32), ids[at:]]).astype(np.int32)


def _no_place(reason: str) -> str:
    return (
        f"the model's chat template has no place for a hint at the end of a message ({reason}): use another template "
        "(model.chat_template), or remove orchestrator.hints"
    )


def span_of(samples: Sequence[Sample], turn: int) -> tuple[Sample, TurnSpan] | None:
    """Return the sample in which turn number `turn` is trained, and where."""
    spans = ((sample, span) for sample in samples for span in sample.turns)
    return next(((sample, span) for sample, span in spans if span.turn == turn), None)


def place_hint(
    placer: HintPlacer, sample: Sample, span: TurnSpan, *, role: str, hint: str, error: ErrorTurn, weight: float
) -> HintedTurn | None:
    """Return the turn at `span` after a context with `hint`; None where there is no place for it."""
    ids = ints(sample.input_ids)
    hinted_ids = placer.hinted(ids[: span.start], role, hint)
    if hinted_ids is None:
        return None
    return HintedTurn(
        start=span.start,
        end=span.end,
        teacher_ids=pack_ints(np.concatenate([hinted_ids, ids[span.start : span.end]])),
        teacher_start=len(hinted_ids),
        weight=weight,
        turn=span.turn,
        error=error.kind,
    )
