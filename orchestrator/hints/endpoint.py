"""An OpenAI-compatible chat endpoint: cached, within a budget, with a deadline for every call.

    ask --in the cache?--> yes: answer, free
             | no
             v
        reserve the worst case's cost (BudgetError) -> wait for a place -> POST -> real cost -> cache file

The cache file (JSON lines, one an answer, with its cost) is read at start: a resumed run pays no answer twice, and its
budget counts what was spent before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from composer_prime.config.hints import EndpointConfig
from composer_prime.errors import BudgetError, ConfigError, EndpointError

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]
_CACHED = 4096
_MAX_REPLY_BYTES = 1 << 20
_BYTES_PER_TOKEN = 2
"""Prompts are reserved for as if each token had only so many bytes; hardly any text has fewer."""


class _Cached(msgspec.Struct, frozen=True):
    key: str
    text: str
    cost_usd: float


class ChatEndpoint:
    def __init__(self, config: EndpointConfig, *, name: str, cache: Path | None = None, key: str | None = None) -> None:
        """`name`: the configuration key that messages name. `key`: the bearer token, where it is known here.

        Raises ConfigError when the configured key variable is not set.
        """
        self._config, self._name, self._cache_file = config, name, cache
        self._key = key or _key(config, name)
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._reserved_usd = 0.0
        self.cost_usd = 0.0
        """Spent by this run."""
        self.calls = self.cached = 0
        for line in _lines(cache):
            self._remember(line.key, line.text)
            self.cost_usd += line.cost_usd

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, messages: Messages, *, variant: str = "") -> str:
        """The answer's text; the same question is asked only once. `variant` tells apart what must not share answers.

        Raises BudgetError before a call that could pass the budget, EndpointError when no usable answer came.
        """
        key = self._cache_key(messages, variant)
        if key in self._answers:
            self.cached += 1
            self._answers.move_to_end(key)
            return self._answers[key]
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._call(key, messages))
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    def _ended(self, key: str, task: asyncio.Task[str]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # Whoever asked may have stopped waiting.

    async def _call(self, key: str, messages: Messages) -> str:
        reserved = self._worst_case_usd(messages)
        if self.cost_usd + self._reserved_usd + reserved > self._config.budget_usd and reserved > 0:
            raise BudgetError(
                f"{self._name}: a call may cost {reserved:.6f} USD, but {self.cost_usd:.6f} USD of budget_usd = "
                f"{self._config.budget_usd:g} are spent and {self._reserved_usd:.6f} reserved: raise {self._name}."
                "budget_usd to go on"
            )
        self._reserved_usd += reserved
        try:
            async with self._places:
                self.calls += 1
                text, cost_usd = await self._post(messages, reserved)
        finally:
            self._reserved_usd -= reserved
        self.cost_usd += cost_usd
        self._remember(key, text)
        await self._write(_Cached(key, text, cost_usd))
        return text

    async def _post(self, messages: Messages, worst_usd: float) -> tuple[str, float]:
        config = self._config
        body = {"model": config.model, "messages": messages, "max_tokens": config.max_tokens,
                "temperature": config.temperature}  # fmt: skip
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        url = config.base_url.rstrip("/") + "/chat/completions"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with (
                asyncio.timeout(config.timeout_s),
                self._session.post(url, data=msgspec.json.encode(body), headers=headers | _JSON) as reply,
            ):
                content = await _content(reply)
        except TimeoutError:
            raise EndpointError(f"{self._name}: {url} gave no answer within {config.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EndpointError(f"{self._name}: {url}: {type(error).__name__}: {error}") from None
        if reply.status != 200:
            said = content[:200].decode(errors="replace")
            raise EndpointError(f"{self._name}: {url} answered {reply.status}: {said}")
        return self._read(content, worst_usd)

    def _read(self, content: bytes, worst_usd: float) -> tuple[str, float]:
        """Text and cost. An answer without a count of its tokens costs what was reserved."""
        try:
            reply = msgspec.json.decode(content)
            text = reply["choices"][0]["message"]["content"] or ""
            usage = reply.get("usage") or {}
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            start = content[:120].decode(errors="replace")
            raise EndpointError(f"{self._name}: the answer is no chat completion; it starts with {start!r}") from None
        if not isinstance(text, str):
            raise EndpointError(f"{self._name}: the answer's content is {type(text).__name__}, expected text")
        tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not all(isinstance(count, int) for count in tokens):
            return text, worst_usd
        return text, self._cost_usd(*tokens)

    def _cost_usd(self, prompt_tokens: int, answer_tokens: int) -> float:
        config = self._config
        return (prompt_tokens * config.input_usd_per_million + answer_tokens * config.output_usd_per_million) / 1e6

    def _worst_case_usd(self, messages: Messages) -> float:
        size = sum(len(message["content"].encode()) + 16 for message in messages)
        return self._cost_usd(size // _BYTES_PER_TOKEN, self._config.max_tokens)

    def _cache_key(self, messages: Messages, variant: str) -> str:
        config = self._config
        what = [config.model, config.temperature, config.max_tokens, variant, messages]
        return hashlib.blake2b(msgspec.json.encode(what), digest_size=16).hexdigest()

    def _remember(self, key: str, text: str) -> None:
        self._answers[key] = text
        while len(self._answers) > _CACHED:
            self._answers.popitem(last=False)

    async def _write(self, line: _Cached) -> None:
        if self._cache_file is None:
            return
        try:
            await asyncio.to_thread(_append, self._cache_file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            logger.warning("%s: an answer could not be kept in %s: %s", self._name, self._cache_file, error)


_JSON = {"Content-Type": "application/json"}


async def _content(reply: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            raise ValueError(f"the answer is longer than {_MAX_REPLY_BYTES} bytes")
    return bytes(content)


def _key(config: EndpointConfig, name: str) -> str | None:
    if config.api_key_variable is None:
        return None
    key = os.environ.get(config.api_key_variable)
    if not key:
        raise ConfigError(
            f"{name}.api_key_variable is {config.api_key_variable!r}, but the environment has no such variable: "
            "export it, or leave the setting out for an endpoint without a key"
        )
    return key


def _lines(path: Path | None) -> list[_Cached]:
    """The whole lines of a cache file; what is no answer (a torn last line) is left out."""
    if path is None or not path.exists():
        return []
    found: list[Any] = []
    for raw in path.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(raw, type=_Cached))
        except msgspec.DecodeError:
            continue
    return found


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
