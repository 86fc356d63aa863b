"""Local teachers and the frozen base: served by a process of their own, and the base's scores of answers.

The process is inference/model_server.py, started by name only: by the launcher of a run, or here where none did.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.errors import DeadlineError, RoleFailedError, TeacherError
from composer_prime.model_source import resolve_model, weight_files
from composer_prime.run.process import child_options, stop
from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.state import Message

_END_S = 10.0
_POLL_S = 0.5
_MARK_BYTES = 1 << 16


def weights_mark(model: str) -> str:
    """Return a digest that tells a model's weights from others of the same name: of the sizes, headers and ends of its
    weight files. Raises ModelNotFoundError.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(resolve_model(model)):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_MARK_BYTES))
            file.seek(max(size - _MARK_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


@asynccontextmanager
async def models_at(models: Sequence[str], *, threads: int, start_timeout_s: float) -> AsyncIterator[str]:
    """Give the base URL where `models` are served: by the launcher (MODELS_VARIABLE), else by a process that ends with
    this context. Raises RoleFailedError or DeadlineError.
    """
    url = os.environ.get(MODELS_VARIABLE)
    if url is None:
        async with local_models(models, threads=threads, start_timeout_s=start_timeout_s) as url:
            yield url
        return
    await _until_served(url, set(models), start_timeout_s)
    yield url


async def _until_served(url: str, models: set[str], timeout_s: float) -> None:
    """Raises DeadlineError, which names what was missing and what was there."""
    status = "nothing answers there"
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while True:
                try:
                    listed = (await client.get("/models")).json()["data"]
                    if models <= {model["id"] for model in listed}:
                        return
                    status = f"it serves {', '.join(model['id'] for model in listed)}"
                except (httpx.HTTPError, ValueError, LookupError, TypeError):
                    pass
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DeadlineError(
            f"waited {timeout_s:g} s for {', '.join(sorted(models))} at {url}, and {status}: see logs/teachers.log, or "
            "raise teachers.local_start_timeout_s"
        ) from None


@asynccontextmanager
async def local_models(models: Sequence[str], *, threads: int, start_timeout_s: float) -> AsyncIterator[str]:
    """Serve models on loopback while the context lasts; give the base URL. Raises RoleFailedError or DeadlineError."""
    models = list(dict.fromkeys(models))
    command = [sys.executable, "-m", "inference.model_server", "--threads", str(threads)]
    for model in models:
        command += ["--model", model]
    # In a session of its own: Ctrl-C must not end the models while their last answers are waited for.
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    server = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, **child_options(environment)
    )
    assert server.stdout is not None
    names = ", ".join(models)
    try:
        try:
            line = await asyncio.wait_for(server.stdout.readline(), start_timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {start_timeout_s:g} s for local models ({names}) to load: raise teachers.local_start_timeout_s"
            ) from None
        if not line:
            status = await server.wait()
            raise RoleFailedError(f"the server of local models ({names}) ended with status {status}; see its message")
        yield json.loads(line)["url"]
    finally:
        await stop(server, _END_S)


class Scorer(Protocol):
    """How likely the frozen base finds an answer. It chooses among agreeing answers, and measures pairs."""

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


class CachedScorer:
    """Scores on disk, by the base's weights and everything else that they depend on. So a replay from the cache gives
    the same pairs. A missing score is asked of `inner`; without one there is no score."""

    def __init__(self, folder: Path, mark: str, inner: Scorer | None) -> None:
        """`mark`: of the base's weights (`weights_mark`)."""
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
    scorer: Scorer | None, messages: list[Message], tools: list[dict[str, Any]], answers: tuple[Message, ...]
) -> tuple[Message, str]:
    """Return (the answer that the base finds likeliest per token, how it was chosen).

    It is the first one where there is no scorer, or the base cannot read one of them (a context longer than its own).
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
