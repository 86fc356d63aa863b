"""The frozen base: how likely it finds an answer. It chooses among agreeing answers, and measures pairs.

It runs on this machine behind a local model server, or behind an endpoint that gives the log-probabilities of a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
import numpy as np

from composer_prime.config.teachers import FrozenBaseConfig, TeachersConfig
from composer_prime.errors import ConfigError, EndpointError, TeacherError, plain_errors
from composer_prime.llm.client import RETRIED, Endpoint, http_client
from composer_prime.llm.prices import Price
from composer_prime.run.retry import backoff_s
from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.pairs import Pair
from composer_prime.traces.state import Message

T = TypeVar("T")
_SCORES_AT_ONCE = 8
_REFUSED = {400, 413, 422}
"""Of these messages: too long, or none that the chat template takes. Others tell of the endpoint."""


class Scorer(Protocol):
    """How likely the frozen base finds an answer."""

    async def logprobs_per_token(
        self, messages: list[Message], tools: list[dict[str, Any]], answers: Sequence[Message]
    ) -> list[float]:
        """Return for each of `answers` the mean log-probability in nats of its tokens after `messages`.

        They share `messages`, so that a scorer may read those once. Raises TeacherError where the base cannot read one
        of them, EndpointError where it cannot be reached for now.
        """
        ...


class _Scores(msgspec.Struct):
    logprobs_per_token: list[float]


class ServedScorer:
    """The base behind a local model server's /v1/score. At most eight scores are under way; failed ones are repeated as
    a teacher's calls are."""

    def __init__(self, base_url: str, model: str, config: TeachersConfig, api_key: str | None = None) -> None:
        self._name = f"the frozen base {model} at {base_url}"
        self._endpoint = Endpoint(
            name="base",
            base_url=base_url.rstrip("/"),
            model=model,
            api_key=api_key,
            price=Price(input_usd=0.0, output_usd=0.0),
            timeout_s=config.timeout_s,
            max_concurrent=_SCORES_AT_ONCE,
        )
        self._config = config
        self._client = http_client(self._endpoint)
        self._places = asyncio.Semaphore(_SCORES_AT_ONCE)

    async def logprobs_per_token(
        self, messages: list[Message], tools: list[dict[str, Any]], answers: Sequence[Message]
    ) -> list[float]:
        reply = await self._post("/score", _Scores, messages=messages, tools=tools, answers=answers)
        return reply.logprobs_per_token

    async def _post(self, path: str, kind: type[T], **body: Any) -> T:
        """Return the reply. Raises as Scorer does."""
        endpoint, config, fault = self._endpoint, self._config, ""
        content = msgspec.json.encode({"model": endpoint.model, **body})
        async with self._places:
            for attempt in range(-1, config.max_retries):
                if attempt >= 0:
                    await asyncio.sleep(backoff_s(attempt, first_s=config.retry_base_s, longest_s=config.retry_max_s))
                try:
                    async with asyncio.timeout(config.timeout_s):
                        reply = await self._client.post(endpoint.base_url + path, content=content)
                    if reply.is_success:
                        return msgspec.json.decode(reply.content, type=kind)
                except (TimeoutError, httpx.HTTPError, msgspec.DecodeError) as error:
                    fault = f"{error!r} within {config.timeout_s:g} s"
                    continue
                fault = f"status {reply.status_code}: {reply.text[:300]}"
                if reply.status_code in _REFUSED:
                    raise TeacherError(f"{self._name} refused: {fault}")
                if reply.status_code not in RETRIED:
                    break
        raise EndpointError(f"{self._name} gave no score: {fault}")

    async def close(self) -> None:
        await self._client.aclose()


class _Token(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None] | None = None
    """For each token of the prompt but the first, by its id."""


class EndpointScorer(ServedScorer):
    """The base behind an endpoint that knows vLLM's `prompt_logprobs` and `add_generation_prompt`:
    https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.

    Other endpoints give no log-probability of a text that they did not write. Then no answer is scored.
    """

    _unable = False

    def __init__(self, place: FrozenBaseConfig, config: TeachersConfig) -> None:
        """Raises ConfigError when the key is not set."""
        super().__init__(place.base_url, place.model, config, place.api_key())

    async def logprobs_per_token(
        self, messages: list[Message], tools: list[dict[str, Any]], answers: Sequence[Message]
    ) -> list[float]:
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(self._prompt(messages, tools, opening=True))
                answered = [
                    group.create_task(self._prompt([*messages, answer], tools, opening=False)) for answer in answers
                ]
        ids = [token for token, _ in asked.result()]
        scores = []
        for whole in (each.result() for each in answered):
            if [token for token, _ in whole[: len(ids)]] != ids or len(whole) == len(ids):
                raise TeacherError(
                    "the chat template of the frozen base does not write the answer right behind its context"
                )
            scores.append(fmean(logprob for _, logprob in whole[len(ids) :]))
        return scores

    async def _prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], *, opening: bool
    ) -> list[tuple[str, float]]:
        """Return (token id, log-probability) of each token of the prompt but the first."""
        tokens = None
        if not self._unable:
            offered = {"tools": tools, "tool_choice": "none"} if tools else {}  # "auto" needs a tool parser
            wanted = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "add_generation_prompt": opening}
            reply = await self._post("/chat/completions", _Scored, messages=messages, **wanted, **offered)
            tokens = reply.prompt_logprobs
        if tokens is None:
            self._unable = True
            raise TeacherError(
                f"{self._name} gives no log-probabilities of a prompt (prompt_logprobs), as vLLM does: without them "
                "the first of agreeing answers is taken, and no margin can be measured"
            )
        first = [next(iter(token.items())) for token in tokens if token]
        return [(token, found.logprob) for token, found in first]


class CachedScorer:
    """Scores on disk, by the base's weights and everything else that they depend on. So a replay from the cache gives
    the same pairs. A missing score is asked of `inner`; without one there is no score."""

    def __init__(self, folder: Path, mark: str, inner: Scorer | None) -> None:
        """`mark` is the base's `weights_mark`, or its endpoint's mark."""
        self._folder = folder
        self._mark = mark
        self._inner = inner

    async def logprobs_per_token(
        self, messages: list[Message], tools: list[dict[str, Any]], answers: Sequence[Message]
    ) -> list[float]:
        paths = [self._path(messages, tools, answer) for answer in answers]
        scores = {path: score for path in paths if (score := _read_score(path)) is not None}
        missing = {path: answer for path, answer in zip(paths, answers, strict=True) if path not in scores}
        if missing:
            if self._inner is None:
                raise TeacherError(f"{self._folder} holds no score of this answer, and no base is served")
            scores |= await self._ask(self._inner, messages, tools, missing)
        return [scores[path] for path in paths]

    async def _ask(
        self, inner: Scorer, messages: list[Message], tools: list[dict[str, Any]], missing: dict[Path, Message]
    ) -> dict[Path, float]:
        """Return the scores of `missing`, and keep them. Where `inner` cannot read one answer, the others are kept."""
        try:
            found = await inner.logprobs_per_token(messages, tools, list(missing.values()))
        except TeacherError:
            if len(missing) == 1:
                raise
        else:
            for path, score in zip(missing, found, strict=True):
                await asyncio.to_thread(write_atomic, path, msgspec.json.encode(score))
            return dict(zip(missing, found, strict=True))
        scores, unread = dict[Path, float](), list[TeacherError]()
        for path, answer in missing.items():
            try:
                scores |= await self._ask(inner, messages, tools, {path: answer})
            except TeacherError as error:
                unread.append(error)
        if unread:
            raise unread[0]
        return scores

    def _path(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> Path:
        content = msgspec.json.encode([self._mark, messages, tools, answer], order="deterministic")
        key = hashlib.blake2b(content, digest_size=16).hexdigest()
        return self._folder / key[:2] / f"{key}.json"


def _read_score(path: Path) -> float | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=float)
    except (OSError, msgspec.DecodeError):
        return None


async def likeliest(
    scorer: Scorer | None,
    messages: list[Message],
    tools: list[dict[str, Any]],
    answers: tuple[Message, ...],
    unscored: Counter[str],
) -> tuple[Message, str]:
    """Return (the answer that the base finds likeliest per token, how it was chosen).

    It is the first one where there is no scorer, or the base cannot read one of them (a context longer than its own),
    for a reason that `unscored` counts. Raises EndpointError where the base cannot be reached: it may choose later.
    """
    distinct = [answer for index, answer in enumerate(answers) if answer not in answers[:index]]
    if len(distinct) == 1:
        return distinct[0], "only"
    if scorer is None:
        return distinct[0], "first"
    try:
        scores = await scorer.logprobs_per_token(messages, tools, distinct)
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


async def base_margins(scorer: Scorer, pairs: Sequence[Pair], *, most: int = 400) -> Margins:
    """Return the margins of at most `most` pairs, drawn at random. Pairs that the base cannot read are left out.

    Raises ConfigError when fewer than ten pairs, or fewer than two states, could be scored, EndpointError where the
    base cannot be reached.
    """
    rng, reasons = random.Random(0), Counter[str]()
    drawn = rng.sample(pairs, min(most, len(pairs)))

    async def margins(pair: Pair) -> tuple[float, float, str] | None:
        others = [other for other in drawn if (other.trace, other.state.state_id) != (pair.trace, pair.state.state_id)]
        if not others:
            return None
        answers = pair.chosen, pair.rejected, rng.choice(others).rejected
        try:
            scores = await scorer.logprobs_per_token(pair.state.messages, pair.state.tools, answers)
        except TeacherError as error:
            reasons[str(error)] += 1
            return None
        chosen, rejected, cross = scores
        return None if math.isnan(sum(scores)) else (chosen - rejected, chosen - cross, pair.trace)

    with plain_errors():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(margins(pair)) for pair in drawn]
    scored = [each for task in tasks if (each := task.result()) is not None]
    if len(scored) < 10:
        raise ConfigError(
            f"the base scored {len(scored)} of {len(drawn)} pairs: at least ten, from two states, are needed; replay "
            "more states, or, where it scored fewer than there are, give a base with a longer context"
            + "".join(f" ({reason})" for reason, _ in reasons.most_common(1))
        )
    real, cross_step, traces = (list(column) for column in zip(*scored, strict=True))
    return Margins(real=real, cross_step=cross_step, traces=traces, unread=len(drawn) - len(scored))


def sign_flip_p(values: Sequence[float], clusters: Sequence[str], *, resamples: int = 9_999) -> float:
    """Return the two-sided p of "the signs of a cluster's values could be exchanged", by the mean of all `values`.

    `values` of one cluster ([values], named in `clusters`) are flipped together, however alike they are: whole-block
    sign flips (Winkler et al. 2015, NeuroImage 123:253; with few clusters Canay, Romano and Shaikh 2017, Econometrica
    85:1013). If there are at most `resamples` flips, all are counted. Otherwise that many are drawn, and the p is
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
    rng, extreme = np.random.default_rng(0), 0
    for start in range(0, resamples, 1_000):
        signs = rng.choice((-1.0, 1.0), size=(min(1_000, resamples - start), len(sums)))
        extreme += int((np.abs(signs @ sums) >= least).sum())
    return (1 + extreme) / (1 + resamples)


def smallest_p(clusters: int) -> float:
    """Return what `sign_flip_p` can reach: of the 2^n flips, two are as extreme as the strongest."""
    return min(2.0 ** (1 - clusters), 1.0)
