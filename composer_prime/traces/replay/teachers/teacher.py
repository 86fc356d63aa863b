"""One teacher: a question in, an answer out, paid for at most once.

    cache ── hit ──> answer, for nothing
      └─ miss ─> [ pace, reserve, call, settle ] ── retried ──> store, answer
                                                       └──> TeacherError

Each attempt has a reservation of its own. What came back with token counts costs what they say; what came back as an
error status costs nothing, but for those that end a wait for an answer (408, 504, 520 to 524); these, and what came
back unreadable, cut short or not at all, keep their reservation spent, for the endpoint may have charged for it. Where
no connection came about, nothing was asked, and nothing is spent.

Spaces calls so that an endpoint's rate limit is kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import random
import re
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import openai

from composer_prime.config.teachers import TeacherConfig, TeachersConfig
from composer_prime.errors import CapError, TeacherError
from composer_prime.llm.budget import Budget, Reservation
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.prices import Price
from composer_prime.llm.thinking import split_thinking
from composer_prime.plan.cost_forecast import ANSWER_SHARE, BYTES_PER_TOKEN
from composer_prime.traces.ingest.reading import Bad, parse_json
from composer_prime.traces.replay.teachers.local import weights_mark
from composer_prime.traces.state import Message, storable_arguments

_MINUTE_S = 60.0


class CallPacer:
    """At most `per_minute` calls a minute, evenly; 0 does not space them."""

    def __init__(self, per_minute: float) -> None:
        self._interval_s = _MINUTE_S / per_minute if per_minute else 0.0
        self._next = 0.0

    def turn_s(self) -> float:
        """Seconds until the caller's turn; turns are given in the order of asking."""
        now = time.monotonic()
        turn = max(self._next, now)
        self._next = turn + self._interval_s
        return turn - now


_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_MAYBE_CHARGED = {408, 504, *range(520, 525)}
"""A proxy gave up on the endpoint, which may have answered, and charged, all the same."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""The question did not leave: nobody can have charged for it."""
_CONNECT_S = 10.0
"""The longest that a connection may take to come about."""
_PROMPT_OVERHEAD_TOKENS = 64
"""What an endpoint's chat template may add around the messages."""
_ROUNDING = 0.01
"""By which share a bill may differ from the price list."""
_NO_PROVIDER = {404, 503}
"""What OpenRouter answers where no provider meets the request's conditions:
https://openrouter.ai/docs/api-reference/errors."""
_REMEDIES = {
    "max_tokens": 'max_tokens_key = "max_completion_tokens"',
    "max_completion_tokens": 'max_tokens_key = "max_tokens"',
    "temperature": 'temperature = "omit"',
}
"""By the parameter that an endpoint does not support: https://platform.openai.com/docs/guides/reasoning."""
_PARAMETER = re.compile("|".join(sorted(_REMEDIES, reverse=True)))
_UNSUPPORTED = re.compile("unsupported|not support", re.IGNORECASE)
_OWN_KEY_FEE = 0.05
"""What OpenRouter takes for a call by a key of one's own, as a share of its price:
https://openrouter.ai/docs/features/byok."""


class NotAskedError(TeacherError):
    """No call was made."""


class NoAnswerError(TeacherError):
    """Calls were made, and none of them gave an answer."""

    def __init__(self, reason: str, *, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds
        """As Asked.seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAnswer:
    """An answer, and what it took this time."""

    answer: CachedAnswer
    key: str
    cached: bool
    cost_usd: float
    """Paid now; 0 from the cache."""
    seconds: float
    """Of all attempts and the pauses between them; what was waited for before the first is no part of it."""


class _Failed(Exception):
    """One attempt that gave no answer."""

    def __init__(self, reason: str, *, again: bool, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.again, self.after_s = again, after_s


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text; some endpoints give the object itself."""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of which those of type text count."""
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _CostDetails(msgspec.Struct):
    upstream_inference_cost: float | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None
    """USD, where the endpoint says what it charged (OpenRouter)."""
    is_byok: bool | None = None
    """Whether the model's provider charged beside that, by a key of the user's own."""
    cost_details: _CostDetails | None = None

    def charged(self, listed_usd: float) -> float:
        """USD: what the endpoint says; by its price list where it does not."""
        if self.cost is None or self.cost < 0:
            return listed_usd
        return self.cost + self._upstream_usd

    def limit(self, listed_usd: float) -> float:
        """USD: the most that a call of this price may be charged with."""
        return listed_usd * (1 + _ROUNDING + (_OWN_KEY_FEE if self._upstream_usd else 0.0))

    @property
    def _upstream_usd(self) -> float:
        """What the model's provider charged, where that is not in `cost`."""
        return (self.cost_details.upstream_inference_cost if self.cost_details and self.is_byok else None) or 0.0


class _Reply(msgspec.Struct):
    """The part of a chat completion that is read; a body that lacks it is no answer."""

    choices: list[_Choice]
    usage: _Usage


class Teacher:
    def __init__(
        self,
        config: TeacherConfig,
        shared: TeachersConfig,
        price: Price,
        budget: Budget,
        cache: AnswerCache,
        *,
        base_url: str | None = None,
    ) -> None:
        """`base_url`: where a local teacher is served. Raises ConfigError when the endpoint's key is not set.

        It may take seconds (`_completions`), so that it belongs into no event loop that has something else to do.
        """
        self.config, self.price = config, price
        self._shared, self._budget, self._cache = shared, budget, cache
        self._endpoint = base_url or config.base_url
        # A local teacher has another port each time: its answers depend on its weights alone.
        self._identity = f"local:{weights_mark(config.model)}" if config.local else config.base_url
        self._client = None if shared.cache_only else _client(config, self._endpoint, shared.timeout_s)
        self._create = None if self._client is None else _completions(self._client)
        self._max_price = _max_price(price) if config.at_openrouter else None
        self._pace = CallPacer(config.requests_per_minute)
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._asking: dict[str, asyncio.Task[TeacherAnswer]] = {}
        self._random = random.Random()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def family(self) -> str:
        return self.config.known_family

    def question(self, messages: list[Message], tools: list[dict[str, Any]]) -> Question:
        shared = self._shared
        return Question(
            endpoint=self._identity,
            model=self.config.model,
            messages=messages,
            tools=tools,
            temperature=self.config.temperature_of(shared.temperature),
            max_tokens=shared.max_tokens,
        )

    def bound_usd(self, question: Question) -> float:
        """The most that asking may cost, by the bytes of the question and the limit of the answer."""
        size = len(msgspec.json.encode([question.messages, question.tools]))
        tokens = int(size / self._shared.budget.bytes_per_token) + _PROMPT_OVERHEAD_TOKENS
        return self.price.bound_usd(tokens, question.max_tokens)

    def expected_usd(self, question: Question) -> float:
        """What asking will cost, about."""
        size = len(msgspec.json.encode([question.messages, question.tools]))
        return self.price.cost_usd(int(size / BYTES_PER_TOKEN), int(ANSWER_SHARE * question.max_tokens))

    def knows(self, question: Question) -> bool:
        """Whether the answer is in the cache: asking costs nothing."""
        return self._cache.get(question.key) is not None

    async def ask(self, question: Question, *, trace: str, state: str) -> TeacherAnswer:
        """Raises NoAnswerError when there is no usable answer, NotAskedError when it may not be asked for, CapError
        when the call would pass a cap.
        """
        key = question.key
        stored = self._cache.get(key)
        if stored is not None:
            return TeacherAnswer(answer=_without_thinking(stored), key=key, cached=True, cost_usd=0.0, seconds=0.0)
        if self._client is None:
            raise NotAskedError(
                f"teachers.cache_only is true, and {self._shared.cache_dir} holds no answer of {self.name} to this "
                "state: replay with cache_only = false once"
            )
        under_way = self._asking.get(key)
        if under_way is not None:
            asked = await asyncio.shield(under_way)
            return TeacherAnswer(answer=asked.answer, key=key, cached=True, cost_usd=0.0, seconds=asked.seconds)
        task = asyncio.ensure_future(self._call(question, key, trace, state))
        self._asking[key] = task
        task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await task

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _call(self, question: Question, key: str, trace: str, state: str) -> TeacherAnswer:
        """Attempts until one answers."""
        seconds, reason = 0.0, ""
        async with self._places:
            for attempt in range(self._shared.max_retries + 1):
                await self._budget.pause(self._pace.turn_s())
                reserved = await self._budget.reserve(
                    trace=trace, state=state, teacher=self.name, usd=self.bound_usd(question)
                )
                start = time.monotonic()
                try:
                    answer = await self._attempt(question, key, reserved, attempt)
                except _Failed as failed:
                    reason = str(failed)
                    if self._budget.closed is not None and failed.again:
                        raise CapError(self._budget.closed, scope="run") from None
                    again = failed.again and attempt < self._shared.max_retries
                    if again:
                        await self._budget.pause(self._pause_s(attempt, failed.after_s))
                    seconds += time.monotonic() - start
                    if not again:
                        break
                    continue
                seconds += answer.seconds
                return TeacherAnswer(answer=answer, key=key, cached=False, cost_usd=answer.cost_usd, seconds=seconds)
        raise NoAnswerError(
            f"{self.name} ({self.config.model} at {self._endpoint}) gave no answer: {reason}", seconds=seconds
        )

    async def _attempt(self, question: Question, key: str, reserved: Reservation, attempt: int) -> CachedAnswer:
        """One call, settled however it ends; its answer is kept before it is settled. Raises _Failed."""
        start, usd, status, tokens = time.monotonic(), reserved.usd, "cancelled", (0, 0)
        try:
            raw = await self._post(question)
            reply = _decoded(raw)
            tokens = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
            listed = self.price.cost_usd(*tokens)
            usd, status = reply.usage.charged(listed), "ok"
            self._check_charge(usd, listed, reply.usage.limit(listed), reserved)
            answer = _answer(reply, usd, time.monotonic() - start)
            await asyncio.to_thread(self._cache.put, key, answer)
            return answer
        except openai.APIStatusError as error:
            status = f"status {error.status_code}"
            usd = reserved.usd if error.status_code in _MAYBE_CHARGED else 0.0
            again, why = error.status_code in _RETRIED, self._remedy(error)
            raise _Failed(
                f"{status}: {_brief(error)}{why}", again=again, after_s=_retry_after(error.response)
            ) from None
        except (TimeoutError, openai.APITimeoutError) as error:
            status = "deadline"
            usd = 0.0 if isinstance(error.__cause__, _NEVER_SENT) else reserved.usd
            raise _Failed(f"no reply within {self._shared.timeout_s:g} s", again=True) from None
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            cause, status = error.__cause__ or error, "connection"
            sent = not isinstance(cause, _NEVER_SENT)
            usd = reserved.usd if sent else 0.0
            raise _Failed(f"{'connection lost' if sent else 'no connection'}: {_brief(cause)}", again=True) from None
        except _Failed as failed:
            status = str(failed)
            raise
        finally:
            self._budget.settle(
                reserved,
                usd,
                status=status,
                attempt=attempt,
                seconds=round(time.monotonic() - start, 4),
                input_tokens=tokens[0],
                output_tokens=tokens[1],
            )

    async def _post(self, question: Question) -> bytes:
        """The body of a reply with status 200. The deadline covers the whole attempt, a dripping body too."""
        assert self._create is not None
        options: dict[str, Any] = {self.config.max_tokens_key: question.max_tokens}
        if question.temperature is not None:
            options["temperature"] = question.temperature
        if question.tools:
            options["tools"] = question.tools
        if self._max_price is not None:
            options["extra_body"] = {"provider": {"max_price": self._max_price}}
        async with asyncio.timeout(self._shared.timeout_s):
            raw = await self._create(
                model=question.model,
                messages=question.messages,  # pyright: ignore[reportArgumentType]
                **options,
            )
            return raw.content

    def _remedy(self, error: openai.APIStatusError) -> str:
        """What to do where the endpoint takes other parameters, or no provider is as cheap as the price list says."""
        refused = _PARAMETER.search(error.param or str(error)) if _UNSUPPORTED.search(str(error)) else None
        if refused is not None:
            return f" (set {_REMEDIES[refused.group()]} for this teacher)"
        if self._max_price is None or error.status_code not in _NO_PROVIDER:
            return ""
        prompt, completion = self._max_price["prompt"], self._max_price["completion"]
        return (
            f" (only providers were asked that charge at most ${prompt:g} for a million prompt tokens and "
            f"${completion:g} for a million answer tokens; where none does, correct input_usd_per_mtok and "
            "output_usd_per_mtok of the teacher)"
        )

    def _check_charge(self, usd: float, listed: float, limit: float, reserved: Reservation) -> None:
        """An endpoint that charges more than the bound, or than its prices, ends the replay: no cap would hold long."""
        self._budget.charged(reserved, usd)
        if usd > limit:
            self._budget.close(
                f"{self.name} charged ${usd:.6f} for a call that costs ${listed:.6f} by its prices: correct "
                "input_usd_per_mtok and output_usd_per_mtok of the teacher"
            )

    def _pause_s(self, attempt: int, asked_s: float | None) -> float:
        """Full jitter below a doubling bound; an endpoint's own wish counts, up to the longest pause."""
        shared = self._shared
        bound = min(shared.retry_base_s * 2**attempt, shared.retry_max_s)
        wish = min(asked_s or 0.0, shared.retry_max_s)
        return max(wish, self._random.uniform(bound / 2, bound))


def _client(config: TeacherConfig, endpoint: str, timeout_s: float) -> openai.AsyncOpenAI:
    key = "local" if config.local else config.api_key()
    # A connection that does not come about ends before the whole attempt, which may have been charged for, does.
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s / 2, _CONNECT_S))
    # A proxy that the environment names leads out of this machine: what is on it would not be found there.
    direct = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=timeout) if _is_here(endpoint) else None
    # Retries are ours: each has to be paid for and accounted.
    return openai.AsyncOpenAI(api_key=key, base_url=endpoint, timeout=timeout, max_retries=0, http_client=direct)


def _completions(client: openai.AsyncOpenAI):
    """What asks the endpoint. The client imports this part of itself on first use, 500 modules: a second and a half,
    many on a busy machine, in which nothing else would go on, and which are not the endpoint's."""
    return client.chat.completions.with_raw_response.create


def _max_price(price: Price) -> dict[str, float]:
    """USD a million tokens, above which OpenRouter gives a request to no provider:
    https://openrouter.ai/docs/features/provider-routing#max-price."""
    most = 1e6 * (1 + _ROUNDING)
    return {"prompt": round(price.input_usd * most, 6), "completion": round(price.output_usd * most, 6)}


def _is_here(endpoint: str) -> bool:
    """Whether the endpoint is on this machine's loopback."""
    host = httpx.URL(endpoint).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _decoded(raw: bytes) -> _Reply:
    value = parse_json(raw)
    try:
        reply = msgspec.convert(value, _Reply)
    except msgspec.ValidationError as error:
        error = value.reason if isinstance(value, Bad) else error
        raise _Failed(f"the reply is no chat completion ({error})", again=True) from None
    if not reply.choices or min(reply.usage.prompt_tokens, reply.usage.completion_tokens) < 0:
        raise _Failed("the reply holds no answer", again=True)
    return reply


def _answer(reply: _Reply, usd: float, seconds: float) -> CachedAnswer:
    choice = reply.choices[0]
    content = split_thinking(_text(choice.message.content))[0].strip()
    message: Message = {"role": "assistant", "content": content or None}
    calls = choice.message.tool_calls or []
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    return CachedAnswer(
        message=message,
        finish_reason=choice.finish_reason or "stop",
        input_tokens=reply.usage.prompt_tokens,
        output_tokens=reply.usage.completion_tokens,
        cost_usd=usd,
        seconds=seconds,
    )


def _without_thinking(stored: CachedAnswer) -> CachedAnswer:
    """Answers that an older release kept may hold some: it is taken out as it is from a reply."""
    said = split_thinking(_text(stored.message.get("content")))[0].strip()
    return msgspec.structs.replace(stored, message={**stored.message, "content": said or None})


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def _arguments(given: str | dict[str, Any] | None) -> str:
    return storable_arguments(given) if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; None where the endpoint names no number of them."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def _brief(error: BaseException) -> str:
    return json.dumps(str(error) or type(error).__name__)[1:-1][:200]
