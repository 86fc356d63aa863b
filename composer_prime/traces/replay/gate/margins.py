"""Base margins of pairs: how much likelier the frozen base finds the chosen answer, a token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from composer_prime.errors import ConfigError, TeacherError
from composer_prime.traces.pairs import Pair
from composer_prime.traces.replay.gate.density import Margins
from composer_prime.traces.replay.teachers.scoring import Scorer
from composer_prime.traces.state import Message

_AT_ONCE = 8


async def base_margins(scorer: Scorer, pairs: Sequence[Pair], *, most: int = 400, seed: int = 0) -> Margins:
    """Margins of at most `most` pairs, drawn at random; pairs that the base cannot read are left out.

    Raises ConfigError when fewer than ten pairs, or fewer than two states, could be scored.
    """
    rng = random.Random(seed)
    drawn = rng.sample(pairs, min(most, len(pairs)))
    places = asyncio.Semaphore(_AT_ONCE)

    async def score(pair: Pair, answer: Message) -> float | None:
        async with places:
            try:
                return await scorer.logprob_per_token(pair.state.messages, pair.state.tools, answer)
            except TeacherError:
                return None

    async def margins(pair: Pair) -> tuple[float, float, str] | None:
        others = [other for other in drawn if _place(other) != _place(pair)]
        if not others:
            return None
        stranger = rng.choice(others).rejected
        scores = await asyncio.gather(score(pair, pair.chosen), score(pair, pair.rejected), score(pair, stranger))
        chosen, rejected, cross = scores
        if chosen is None or rejected is None or cross is None:
            return None
        return chosen - rejected, chosen - cross, pair.trace

    found = [each for each in await asyncio.gather(*map(margins, drawn)) if each is not None]
    if len(found) < 10:
        raise ConfigError(
            f"the base scored {len(found)} of {len(drawn)} pairs: at least ten, from two states, are needed; replay "
            "more states, or, where it scored fewer than there are, give a base with a longer context"
        )
    real, cross_step, traces = (list(column) for column in zip(*found, strict=True))
    return Margins(real=real, cross_step=cross_step, traces=traces)


def _place(pair: Pair) -> tuple[str, str]:
    return pair.trace, pair.state.state_id
