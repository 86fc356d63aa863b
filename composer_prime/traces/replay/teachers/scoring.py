"""How likely the frozen base finds an answer: the seam by which agreeing answers are told apart, and pairs measured."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from composer_prime.errors import TeacherError
from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.replay.teachers.local import weights_mark
from composer_prime.traces.state import Message


class Scorer(Protocol):
    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        """Mean log-probability in nats of the answer's tokens after `messages`. Raises TeacherError."""
        ...


class ServedScorer:
    """The base behind a local model server's /v1/score (inference/model_server.py)."""

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


class KeptScorer:
    """Scores on disk, by the base's weights and everything else that they depend on: a replay from the cache gives the
    same pairs. What is not there is asked of `inner`; without one there is no score."""

    def __init__(self, folder: Path, model: str, inner: Scorer | None = None) -> None:
        """Raises ModelNotFoundError."""
        self.inner, self._folder, self._mark = inner, folder, weights_mark(model)

    async def logprob_per_token(self, messages: list[Message], tools: list[dict[str, Any]], answer: Message) -> float:
        content = msgspec.json.encode([self._mark, messages, tools, answer], order="deterministic")
        key = hashlib.blake2b(content, digest_size=16).hexdigest()
        path = self._folder / key[:2] / f"{key}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=float)
        except (OSError, msgspec.DecodeError):
            pass
        if self.inner is None:
            raise TeacherError(f"{self._folder} holds no score of this answer, and no base is served")
        score = await self.inner.logprob_per_token(messages, tools, answer)
        await asyncio.to_thread(write_atomic, path, msgspec.json.encode(score))
        return score


async def likeliest(
    scorer: Scorer | None, messages: list[Message], tools: list[dict[str, Any]], answers: tuple[Message, ...]
) -> tuple[Message, str]:
    """(the answer that the base finds likeliest per token, how it was chosen).

    The first one where there is no scorer, or the base cannot read one of them (a context longer than its own).
    """
    distinct = [answer for index, answer in enumerate(answers) if answer not in answers[:index]]
    if len(distinct) == 1:
        return distinct[0], "only"
    if scorer is None:
        return distinct[0], "first"
    try:
        scores = [await scorer.logprob_per_token(messages, tools, answer) for answer in distinct]
    except TeacherError:
        return distinct[0], "first"
    return distinct[scores.index(max(scores))], "likeliest"
