"""A pair's messages to the token ids that the policy would see and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_prime.pairs import Pair
from composer_prime.wire.types import Preference, pack_ints
from orchestrator.render_errors import RENDER_ERRORS


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
