"""The frozen base: how likely it finds an answer. It chooses among agreeing answers, and measures pairs.

It runs on this machine behind a local model server, or behind an endpoint that gives the log-probabilities of a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np

from composer_prime.config.teachers import FrozenBaseConfig
from composer_prime.errors import ConfigError, TeacherError
from composer_prime.llm.client import Endpoint, http_client
from composer_prime.llm.prices import Price
from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.pairs import Pair
from composer_prime.traces.state import Message

_SCORES_AT_ONCE = 8


class Scorer(Protocol):
    """How likely the frozen base finds an answer."""

    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        """Return the mean log-probability in nats of the answer's tokens after `messages`. Raises TeacherError."""
        ...


class ServedScorer:
    """The base behind a local model server's /v1/score."""

    def __init__(self, base_url: str, model: str, timeout_s: float) -> None:
        self._model = model
        self._client = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, trust_env=False)

    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        body = {"model": self._model, "messages": messages, "tools": tools, "answer": answer}
        try:
            reply = await self._client.post("/score", json=body)
        except httpx.HTTPError as error:
            raise TeacherError(f"the frozen base did not score an answer: {error!r}") from None
        if reply.status_code != 200:
            raise TeacherError(f"the frozen base did not score an answer: {reply.text[:300]}")
        return float(reply.json()["logprob_per_token"])

    async def close(self) -> None:
        await self._client.aclose()


class _Token(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None] | None = None
    """For each token of the prompt but the first, by its id."""


class EndpointScorer:
    """The base behind an endpoint that knows vLLM's `prompt_logprobs` and `add_generation_prompt`:
    https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.

    Other endpoints give no log-probability of a text that they did not write. Then no answer is scored.
    """

    def __init__(self, config: FrozenBaseConfig, timeout_s: float) -> None:
        """Raises ConfigError when the key is not set."""
        key = None if config.api_key_var is None else os.environ.get(config.api_key_var)
        if config.api_key_var is not None and not key:
            raise ConfigError(
                f"the frozen base at {config.base_url} needs a key: set the environment variable {config.api_key_var}"
            )
        self._config = config
        self._unable: str | None = None
        self._client = http_client(
            Endpoint(
                name="base",
                base_url=config.base_url,
                model=config.model,
                api_key=key,
                price=Price(input_usd=0.0, output_usd=0.0),
                timeout_s=timeout_s,
                max_concurrent=_SCORES_AT_ONCE,
            )
        )

    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        context, whole = await asyncio.gather(
            self._prompt(messages, tools, opening=True), self._prompt([*messages, answer], tools, opening=False)
        )
        ids = [token for token, _ in context]
        if [token for token, _ in whole[: len(ids)]] != ids or len(whole) == len(ids):
            raise TeacherError(
                "the chat template of the frozen base does not write the answer right behind its context"
            )
        logprobs = [logprob for _, logprob in whole[len(ids) :]]
        return sum(logprobs) / len(logprobs)

    async def _prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], *, opening: bool
    ) -> list[tuple[str, float]]:
        """Return (token id, log-probability) of each token of the prompt but the first."""
        if self._unable is not None:
            raise TeacherError(self._unable)
        config = self._config
        body = {"model": config.model, "messages": messages, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body |= {"add_generation_prompt": opening} | ({"tools": tools} if tools else {})
        url = f"{config.base_url.rstrip('/')}/chat/completions"
        try:
            reply = await self._client.post(url, content=msgspec.json.encode(body))
            reply.raise_for_status()
            tokens = msgspec.json.decode(reply.content, type=_Scored).prompt_logprobs
        except httpx.HTTPStatusError:
            raise TeacherError(f"the frozen base at {config.base_url} refused: {reply.text[:300]}") from None
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise TeacherError(f"the frozen base at {config.base_url} did not score an answer: {error!r}") from None
        if tokens is None:
            self._unable = (
                f"{config.base_url} gives no log-probabilities of a prompt (prompt_logprobs), as vLLM does: without "
                "them the first of agreeing answers is taken, and no margin can be measured"
            )
            raise TeacherError(self._unable)
        first = [next(iter(token.items())) for token in tokens if token]
        return [(token, found.logprob) for token, found in first]

    async def close(self) -> None:
        await self._client.aclose()


class CachedScorer:
    """Scores on disk, by the base's weights and everything else that they depend on. So a replay from the cache gives
    the same pairs. A missing score is asked of `inner`; without one there is no score."""

    def __init__(self, folder: Path, mark: str, inner: Scorer | None) -> None:
        """`mark` is the base's `weights_mark`, or its endpoint's mark."""
        self._folder = folder
        self._mark = mark
        self._inner = inner

    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        content = msgspec.json.encode([self._mark, messages, tools, answer], order="deterministic")
        key = hashlib.blake2b(content, digest_size=16).hexdigest()
        path = self._folder / key[:2] / f"{key}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=float)
        except (OSError, msgspec.DecodeError):
            pass
        if self._inner is None:
            raise TeacherError(f"{self._folder} holds no score of this answer, and no base is served")
        score = await self._inner.logprob_per_token(messages, tools, answer)
        await asyncio.to_thread(write_atomic, path, msgspec.json.encode(score))
        return score


async def likeliest(
    scorer: Scorer | None,
    messages: list[Message],
    tools: list[dict[str, Any]],
    answers: tuple[Message, ...],
    unscored: Counter[str],
) -> tuple[Message, str]:
    """Return (the answer that the base finds likeliest per token, how it was chosen).

    It is the first one where there is no scorer, or the base cannot read one of them (a context longer than its own),
    for a reason that `unscored` counts.
    """
    distinct = [answer for index, answer in enumerate(answers) if answer not in answers[:index]]
    if len(distinct) == 1:
        return distinct[0], "only"
    if scorer is None:
        return distinct[0], "first"
    try:
        scores = [await scorer.logprob_per_token(messages, tools, answer) for answer in distinct]
    except TeacherError as error:
        unscored[str(error)] += 1
        return distinct[0], "first"
    return distinct[scores.index(max(scores))], "likeliest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """Base margins in nats a token, one entry a pair."""

    real: list[float]
    cross_step: list[float]
    """With another state's rejected answer."""
    traces: list[str]
    unread: int = 0
    """Pairs that were drawn and that the base could not read."""

    @property
    def p_flipped(self) -> float:
        return sign_flip_p(self.real, self.traces)

    @property
    def p_cross_step(self) -> float:
        """p of "the rejected answer could be exchanged for another state's"."""
        differences = [cross - real for real, cross in zip(self.real, self.cross_step, strict=True)]
        return sign_flip_p(differences, self.traces)


async def base_margins(scorer: Scorer, pairs: Sequence[Pair], *, most: int = 400, seed: int = 0) -> Margins:
    """Return the margins of at most `most` pairs, drawn at random. Pairs that the base cannot read are left out.

    Raises ConfigError when fewer than ten pairs, or fewer than two states, could be scored.
    """
    rng = random.Random(seed)
    drawn = rng.sample(pairs, min(most, len(pairs)))
    places, reasons = asyncio.Semaphore(_SCORES_AT_ONCE), Counter[str]()

    async def score(pair: Pair, answer: Message) -> float:
        async with places:
            try:
                return await scorer.logprob_per_token(pair.state.messages, pair.state.tools, answer)
            except TeacherError as error:
                reasons[str(error)] += 1
                return math.nan

    async def margins(pair: Pair) -> tuple[float, float, str] | None:
        others = [other for other in drawn if (other.trace, other.state.state_id) != (pair.trace, pair.state.state_id)]
        if not others:
            return None
        answers = pair.chosen, pair.rejected, rng.choice(others).rejected
        chosen, rejected, cross = await asyncio.gather(*(score(pair, answer) for answer in answers))
        return None if math.isnan(chosen + rejected + cross) else (chosen - rejected, chosen - cross, pair.trace)

    scored = [each for each in await asyncio.gather(*map(margins, drawn)) if each is not None]
    if len(scored) < 10:
        raise ConfigError(
            f"the base scored {len(scored)} of {len(drawn)} pairs: at least ten, from two states, are needed; replay "
            "more states, or, where it scored fewer than there are, give a base with a longer context"
            + "".join(f" ({reason})" for reason, _ in reasons.most_common(1))
        )
    real, cross_step, traces = (list(column) for column in zip(*scored, strict=True))
    return Margins(real=real, cross_step=cross_step, traces=traces, unread=len(drawn) - len(scored))


def sign_flip_p(values: Sequence[float], clusters: Sequence[str], *, resamples: int = 9_999, seed: int = 0) -> float:
    """Return the two-sided p of "the signs of a cluster's values could be exchanged", by the mean of all `values`.

    `values` of one cluster ([values], named in `clusters`) are flipped together, however alike they are: whole-block
    sign flips (Winkler et al. 2015, NeuroImage 123:253; with few clusters Canay, Romano and Shaikh 2017, Econometrica
    85:1013). All flips are counted out where there are at most `resamples`; else so many are drawn, and the p is
    (1 + those at least as extreme) / (1 + resamples), so never 0 (Phipson and Smyth 2010). Not below `smallest_p`.
    """
    _, places = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(places, weights=np.asarray(values, dtype=np.float64))
    least = abs(sums.sum()) - 1e-12 * np.abs(sums).sum()
    # Exchanging all signs at once changes no two-sided statistic: the first may stay.
    others = len(sums) - 1
    if 2**others <= resamples:
        flips = np.arange(2**others)[:, None] >> np.arange(others) & 1
        return float((np.abs(sums[0] + (1 - 2 * flips) @ sums[1:]) >= least).mean())
    rng, extreme = np.random.default_rng(seed), 0
    for start in range(0, resamples, 1_000):
        signs = rng.choice((-1.0, 1.0), size=(min(1_000, resamples - start), len(sums)))
        extreme += int((np.abs(signs @ sums) >= least).sum())
    return (1 + extreme) / (1 + resamples)


def smallest_p(clusters: int) -> float:
    """Return what `sign_flip_p` can reach: of the 2^n flips, two are as extreme as the strongest."""
    return min(2.0 ** (1 - clusters), 1.0)
