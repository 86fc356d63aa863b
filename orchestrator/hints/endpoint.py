"""The endpoint behind a hint writer or a judge of rollouts: text in, text out, within one budget for the run.

Only usable answers are cached. The cost of the others is kept in the same file, so that a resumed run counts all that
was spent. A call that was sent costs its worst case until the reply tells less: a count of tokens, or a refusal.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config.hints import EndpointConfig
from composer_prime.errors import BudgetError, CapError, ConfigError, EndpointError
from composer_prime.llm.budget import Budget
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.client import ChatClient, ChatRequest, Endpoint
from composer_prime.llm.prices import PER_MILLION, Price
from composer_prime.run.costs import CostLedger

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]
_KEY_VERSION = 2
"""Part of every cache key. Raise it when something else of a reply is kept than before: answers in older caches are
then asked for again. 2: without the model's thinking."""
_BYTES_PER_TOKEN = 2
"""Prompts are reserved for with this few bytes a token; hardly any text has fewer."""
_TEMPERATURE = 0.0
_CALLS = 8
"""Calls in flight."""
_REST_S = 30.0
"""Pause without calls after five failures in a row."""
_CUT_THOUGHT = ("<think>", "<thinking>")
"""What an answer begins with whose second thought was cut: its first one was taken out."""


class ChatEndpoint:
    def __init__(
        self,
        config: EndpointConfig,
        *,
        name: str,
        cache: Path | None = None,
        ledger: CostLedger | None = None,
    ) -> None:
        """`name`: the configuration key that messages name. `cache`: where answers are kept (SQLite); None keeps
        them in memory. `ledger`: where calls that cost something are written down.

        Raises ConfigError when the configured key variable is not set, or the cache cannot be opened.
        """
        api_key = os.environ.get(config.api_key_var) if config.api_key_var else None
        if config.api_key_var and not api_key:
            raise ConfigError(
                f"{name}.api_key_var is {config.api_key_var!r}, but the environment has no such variable: "
                "export it, or leave the setting out for an endpoint without a key"
            )
        self._config = config
        self._name = name
        self._ledger = ledger
        self._cost_writer = ThreadPoolExecutor(1, thread_name_prefix="hint-costs")
        """Another process may keep the cache locked for seconds. The event loop must not wait for it."""
        self._cache = AnswerCache(cache)
        self._keys: dict[str, str] = {}
        """Cache key of each call in flight."""
        self._under_way: dict[str, asyncio.Task[tuple[CachedAnswer, bool]]] = {}
        """Calls by cache key."""
        self._callers: Counter[str] = Counter()
        self._price = Price(
            input_usd=config.input_usd_per_mtok * PER_MILLION, output_usd=config.output_usd_per_mtok * PER_MILLION
        )
        self._budget = Budget(config.budget_usd, self._record, self._cache.spent_usd)
        endpoint = Endpoint(
            name=name,
            base_url=config.base_url,
            model=config.model,
            api_key=api_key,
            price=self._price,
            timeout_s=config.timeout_s,
            max_concurrent=_CALLS,
            rest_s=_REST_S,
        )
        self.client = ChatClient(endpoint, self._budget, self._cache)

    @property
    def cost_usd(self) -> float:
        """Spent by this run, before its resumes too."""
        return self._budget.spent_usd

    async def close(self) -> None:
        """Wait until all costs are kept. Calls must have ended."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._cache.close)
            stack.push_async_callback(asyncio.to_thread, self._cost_writer.shutdown)
            stack.push_async_callback(self.client.close)

    async def ask(self, messages: Messages, *, variant: str = "", check: Callable[[str], object] | None = None) -> str:
        """Return the answer's text. The same question is asked only once, also when several ask it at once.

        `variant` tells apart what must not share answers. `check` raises EndpointError for an answer of no use.

        Raises BudgetError before a call that could pass the budget, EndpointError when no usable answer came.
        """
        config = self._config
        size = sum(len(message["content"].encode()) + 16 for message in messages)
        bound_usd = self._price.bound_usd(size // _BYTES_PER_TOKEN, config.max_tokens)
        parts = [_KEY_VERSION, config.model, _TEMPERATURE, config.max_tokens, variant, messages]
        key = hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()

        def check_text(answer: CachedAnswer) -> None:
            text = self._text(answer)
            if check is not None:
                check(text)

        request = ChatRequest(
            question=Question(
                endpoint=config.base_url,
                model=config.model,
                messages=messages,
                tools=[],
                temperature=_TEMPERATURE,
                max_tokens=config.max_tokens,
            ),
            key=key,
            bound_usd=bound_usd,
            state=key,
            check=check_text,
        )
        try:
            return self._text(await self._call(request))
        except CapError:
            raise BudgetError(
                self._budget.closed
                or f"{self._name}: a call may cost {bound_usd:.6f} USD, but {self.cost_usd:.6f} USD of budget_usd = "
                f"{config.budget_usd:g} are spent: raise {self._name}.budget_usd to continue"
            ) from None

    async def _call(self, request: ChatRequest) -> CachedAnswer:
        """Share the call in flight with this question, else make one. It is canceled when its last caller leaves."""
        key = request.key
        if key not in self._under_way:
            self._under_way[key] = asyncio.create_task(self.client.ask(request))
        task = self._under_way[key]
        self._callers[key] += 1
        try:
            answer, _ = await asyncio.shield(task)
            return answer
        finally:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._callers[key], self._under_way[key]
                task.cancel()
                await asyncio.wait([task])  # Its cost is noted then.

    def _text(self, answer: CachedAnswer) -> str:
        text = answer.message.get("content") or ""
        if not text or text.startswith(_CUT_THOUGHT):
            raise EndpointError(
                f"{self._name}: the answer holds no text beside the model's thinking; its limit is "
                f"{self._config.max_tokens} tokens: raise it, or have the endpoint not think"
            )
        return text

    def _record(self, kind: str, **values: Any) -> None:
        """Write down what a call cost. A disk that refuses costs the line only."""
        if kind == "reserved":
            self._keys[values["call"]] = values["state"]
            return
        key, usd = self._keys.pop(values["call"]), values["usd"]
        self._budget.take_state(key)
        if not usd:
            return
        self._cost_writer.submit(self._keep_cost, key, usd)
        if self._ledger is not None:
            try:
                self._ledger.write("hint", endpoint=self._name, usd=usd)
            except OSError as error:
                logger.warning("%s: a call's cost could not be kept in %s: %s", self._name, self._ledger.path, error)

    def _keep_cost(self, key: str, usd: float) -> None:
        try:
            self._cache.add_cost(key, usd)
        except OSError as error:
            logger.warning("%s: a call's cost could not be kept: %s", self._name, error)
