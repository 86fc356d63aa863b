"""An OpenAI-compatible chat endpoint: cached, within a budget, with a deadline for every call.

    ask --in the cache?--> yes: answer, free
             | no
             v
        reserve the worst case's cost (BudgetError) -> wait for a place -> POST -> cost -> cache file

A call that was sent costs its worst case until the reply shows otherwise: a count of tokens, or a refusal (4xx) that no
model answered. Only usable answers are cached; the cost of the others is written down as well, so that a resumed run's
budget counts all that was spent. After failures in a row the endpoint is left alone for a while.

The answers of an endpoint that were paid for, and what the run spent on it.

A file of JSON lines, one a call: {"key", "text", "cost_usd"}, without a text where the call gave no usable answer. It
is read at start. The newest texts are kept in memory; of the others only where their lines begin.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from composer_prime.config.hints import EndpointConfig
from composer_prime.errors import BudgetError, ConfigError, EndpointError
from composer_prime.run.costs import CostLedger

logger = logging.getLogger(__name__)


_IN_MEMORY = 4096


class PaidCall(msgspec.Struct, frozen=True):
    key: str
    text: str | None
    """None for a call that may have cost something and gave nothing."""
    cost_usd: float


class AnswerCache:
    def __init__(self, path: Path | None, *, in_memory: int = _IN_MEMORY) -> None:
        """`path` None keeps the newest `in_memory` answers, and nothing on disk."""
        self._path, self._in_memory = path, in_memory
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._offsets: dict[str, int] = {}
        """Where an answer's line begins in the file."""
        self._end, self._torn = 0, False
        self._writing = asyncio.Lock()
        self.spent_usd = 0.0
        """By all calls in the file."""
        if path is not None and path.exists():
            self._scan(path)

    def newest(self, key: str) -> str | None:
        """The answer, where it is in memory."""
        if key in self._texts:
            self._texts.move_to_end(key)
        return self._texts.get(key)

    async def older(self, key: str) -> str | None:
        """The answer, where it is in the file."""
        offset = self._offsets.get(key)
        if offset is None or self._path is None:
            return None
        try:
            text = (await asyncio.to_thread(_read, self._path, offset)).text
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("an answer could not be read back from %s: %s", self._path, error)
            return None
        if text is not None:
            self._remember(key, text)
        return text

    async def add(self, call: PaidCall) -> None:
        """Keep `call`; a disk that refuses costs the line only."""
        if call.text is not None:
            self._remember(call.key, call.text)
        if self._path is None:
            return
        async with self._writing:
            line = b"\n" * self._torn + msgspec.json.encode(call) + b"\n"
            try:
                await asyncio.to_thread(_append, self._path, line)
            except OSError as error:
                logger.warning("a paid answer could not be kept in %s: %s", self._path, error)
                return
            if call.text is not None:
                self._offsets[call.key] = self._end + self._torn
            self._end, self._torn = self._end + len(line), False

    def _remember(self, key: str, text: str) -> None:
        self._texts[key] = text
        while len(self._texts) > self._in_memory:
            self._texts.popitem(last=False)

    def _scan(self, path: Path) -> None:
        with path.open("rb") as file:
            for raw in file:
                try:
                    call = msgspec.json.decode(raw, type=PaidCall)
                except msgspec.DecodeError:
                    call = None  # A torn line costs that answer only.
                if call is not None:
                    self.spent_usd += call.cost_usd
                if call is not None and call.text is not None:
                    self._offsets[call.key] = self._end
                    self._remember(call.key, call.text)
                self._end += len(raw)
                self._torn = not raw.endswith(b"\n")


def _read(path: Path, offset: int) -> PaidCall:
    with path.open("rb") as file:
        file.seek(offset)
        return msgspec.json.decode(file.readline(), type=PaidCall)


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


Messages = list[dict[str, str]]
_FAILED_LIMIT = 5
"""Failures in a row after which the endpoint is left alone."""
_TIMED_OUT = 408
_MAX_REPLY_BYTES = 1 << 20
_KEPT = 2
"""Raised when something else of a reply is kept than before: answers in older cache files are then asked for again.
2: without the model's thinking."""
_BYTES_PER_TOKEN = 2
"""Prompts are reserved for as if each token had only so many bytes; hardly any text has fewer."""


@dataclass(slots=True, eq=False)
class _Call:
    """A question under way, and who waits for it."""

    task: asyncio.Task[str] | None = None
    waiting: int = 0
    sent: bool = False
    cost_usd: float = 0.0
    """What it has to be counted as, by what is known so far."""


class ChatEndpoint:
    def __init__(
        self,
        config: EndpointConfig,
        *,
        name: str,
        cache: Path | None = None,
        key: str | None = None,
        ledger: CostLedger | None = None,
    ) -> None:
        """`name`: the configuration key that messages name. `key`: the bearer token, where it is known here. `ledger`:
        where calls that cost something are written down.

        Raises ConfigError when the configured key variable is not set.
        """
        self._config, self._name = config, name
        self._key = key or api_key(config, name)
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._cache, self._ledger = AnswerCache(cache), ledger
        self._asking: dict[str, _Call] = {}
        self._reserved_usd = 0.0
        self._failed_in_row, self._resting_until = 0, 0.0
        self.cost_usd = self._cache.spent_usd
        """Spent by this run."""
        self.calls = self.cached = 0

    async def close(self) -> None:
        tasks = [call.task for call in self._asking.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, messages: Messages, *, variant: str = "", check: Callable[[str], object] | None = None) -> str:
        """The answer's text; the same question is asked only once. `variant` tells apart what must not share answers.
        `check` raises EndpointError for an answer that is of no use.

        Raises BudgetError before a call that could pass the budget, EndpointError when no usable answer came.
        """
        key = self._cache_key(messages, variant)
        known = self._cache.newest(key)
        if known is not None:
            self.cached += 1
            return known
        call = self._asking.get(key)
        if call is None or call.task is None:
            call = self._asking[key] = _Call()
            call.task = asyncio.create_task(self._answer(call, key, messages, check))
            call.task.add_done_callback(lambda done: self._ended(key, done))
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if not call.waiting and not call.sent and self._asking.get(key) is call:
                del self._asking[key]
                call.task.cancel()

    def _ended(self, key: str, task: asyncio.Task[str]) -> None:
        call = self._asking.get(key)
        if call is not None and call.task is task:
            del self._asking[key]
        if not task.cancelled():
            task.exception()  # Whoever asked may have stopped waiting.

    async def _answer(self, call: _Call, key: str, messages: Messages, check: Callable[[str], object] | None) -> str:
        known = await self._cache.older(key)
        if known is not None:
            self.cached += 1
            return known
        worst_usd, text = self._reserve(messages), None
        try:
            async with self._places:
                self._refuse_while_resting()
                call.sent, call.cost_usd = True, worst_usd
                self.calls += 1
                answer = await self._post(call, messages)
                if check is not None:
                    check(answer)
                text = answer
                self._failed_in_row = 0
        except EndpointError:
            self._note_failure(call)
            raise
        finally:
            self._reserved_usd -= worst_usd
            self.cost_usd += call.cost_usd
            if call.cost_usd:
                self._write_down(call.cost_usd)
            if text is not None or call.cost_usd:
                await self._cache.add(PaidCall(key, text, call.cost_usd))
        return text

    def _write_down(self, usd: float) -> None:
        """A disk that refuses costs the line only."""
        if self._ledger is not None:
            try:
                self._ledger.write("hint", endpoint=self._name, usd=usd)
            except OSError as error:
                logger.warning("%s: a call's cost could not be kept in %s: %s", self._name, self._ledger.path, error)

    def _reserve(self, messages: Messages) -> float:
        """The worst case's cost, USD, set aside. Raises BudgetError."""
        worst_usd = self._worst_case_usd(messages)
        if self.cost_usd + self._reserved_usd + worst_usd > self._config.budget_usd and worst_usd > 0:
            raise BudgetError(
                f"{self._name}: a call may cost {worst_usd:.6f} USD, but {self.cost_usd:.6f} USD of budget_usd = "
                f"{self._config.budget_usd:g} are spent and {self._reserved_usd:.6f} reserved: raise {self._name}."
                "budget_usd to go on"
            )
        self._reserved_usd += worst_usd
        return worst_usd

    def _refuse_while_resting(self) -> None:
        left_s = self._resting_until - time.monotonic()
        if left_s > 0:
            raise EndpointError(
                f"{self._name}: {self._failed_in_row} calls in a row failed, so it is left alone for another "
                f"{left_s:.1f} s ({self._name}.rest_s)"
            )

    def _note_failure(self, call: _Call) -> None:
        if not call.sent:
            return
        self._failed_in_row += 1
        if self._failed_in_row >= _FAILED_LIMIT:
            self._resting_until = time.monotonic() + self._config.rest_s

    async def _post(self, call: _Call, messages: Messages) -> str:
        """The answer's text; lowers the call's cost to what the reply shows it to be."""
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
        except aiohttp.ClientConnectorError as error:
            call.cost_usd = 0.0
            raise EndpointError(f"{self._name}: {url}: {type(error).__name__}: {error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EndpointError(f"{self._name}: {url}: {type(error).__name__}: {error}") from None
        if reply.status != 200:
            if 400 <= reply.status < 500 and reply.status != _TIMED_OUT:
                call.cost_usd = 0.0
            said = content[:200].decode(errors="replace")
            raise EndpointError(f"{self._name}: {url} answered {reply.status}: {said}")
        return self._read(call, content)

    def _read(self, call: _Call, content: bytes) -> str:
        """The text without thinking. An answer without a count of its tokens costs what was reserved."""
        try:
            reply = msgspec.json.decode(content)
            said = reply["choices"][0]["message"]["content"] or ""
            usage = reply.get("usage") or {}
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            start = content[:120].decode(errors="replace")
            raise EndpointError(f"{self._name}: the answer is no chat completion; it starts with {start!r}") from None
        if not isinstance(said, str):
            raise EndpointError(f"{self._name}: the answer's content is {type(said).__name__}, expected text")
        tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if all(isinstance(count, int) for count in tokens):
            call.cost_usd = self._cost_usd(*tokens)
        text = without_thinking(said)
        if not text:
            raise EndpointError(
                f"{self._name}: the answer holds no text beside the model's thinking; its limit is "
                f"{self._config.max_tokens} tokens: raise it, or have the endpoint not think"
            )
        return text

    def _cost_usd(self, prompt_tokens: int, answer_tokens: int) -> float:
        config = self._config
        return (prompt_tokens * config.input_usd_per_mtok + answer_tokens * config.output_usd_per_mtok) / 1e6

    def _worst_case_usd(self, messages: Messages) -> float:
        size = sum(len(message["content"].encode()) + 16 for message in messages)
        return self._cost_usd(size // _BYTES_PER_TOKEN, self._config.max_tokens)

    def _cache_key(self, messages: Messages, variant: str) -> str:
        config = self._config
        what = [_KEPT, config.model, config.temperature, config.max_tokens, variant, messages]
        return hashlib.blake2b(msgspec.json.encode(what), digest_size=16).hexdigest()


_JSON = {"Content-Type": "application/json"}


def without_thinking(text: str) -> str:
    """What an answer says after its thinking, which some servers leave in the content; "" where it never got there.

    The opening tag may be missing: some chat templates put it into the prompt.
    """
    said = text.rpartition("</think>")[2].strip()
    return "" if said.startswith("<think>") else said


async def _content(reply: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            raise ValueError(f"the answer is longer than {_MAX_REPLY_BYTES} bytes")
    return bytes(content)


def api_key(config: EndpointConfig, name: str) -> str | None:
    """The key of the endpoint that setting `name` describes. Raises ConfigError when its variable is not set."""
    if config.api_key_var is None:
        return None
    key = os.environ.get(config.api_key_var)
    if not key:
        raise ConfigError(
            f"{name}.api_key_var is {config.api_key_var!r}, but the environment has no such variable: "
            "export it, or leave the setting out for an endpoint without a key"
        )
    return key
