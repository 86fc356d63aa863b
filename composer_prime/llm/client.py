"""The one client of OpenAI-compatible endpoints: a question in, an answer out, paid for at most once.

    cache ── hit ──> answer, free
      └─ miss ─> [ place, pace, reserve, POST, settle ] ── retried ──> keep, answer
                                                             └──> NoAnswerError

Hints, judges and teachers use it. Each attempt has a reservation of its own. A reply with token counts costs what they
say. A reply that is unreadable, cut short or lost keeps its reservation spent: the endpoint may have charged for it.
Where no connection came about, nothing was asked, and nothing is spent.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import logging
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from composer_prime.errors import CapError, EndpointError
from composer_prime.llm.budget import Budget, Reservation
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.prices import Price
from composer_prime.llm.reply import Completion, Usage, answer_of, lenient_json
from composer_prime.run.retry import backoff_s

logger = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_PROXY_GAVE_UP = {408, 504, *range(520, 525)}
"""The endpoint behind the proxy may have answered, and charged, all the same."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""The request was not sent, so it cannot have been charged."""
_CONNECT_S = 10.0
"""The longest that a connection may take to come about."""
_MAX_REPLY_BYTES = 1 << 24
_SHOWN_CHARS = 200
_FAILURES_BEFORE_REST = 5


class NoAnswerError(EndpointError):
    """Calls were made, and none of them gave an answer."""

    def __init__(self, message: str, *, http_status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.http_status = http_status
        """Of the last reply; None where none came, or one that held no answer."""
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint, and how it is asked."""

    name: str
    """In messages and in the cost ledger."""
    base_url: str
    """Up to and without /chat/completions."""
    model: str
    api_key: str | None
    price: Price
    timeout_s: float
    """Deadline of one attempt, a reply that drips in included."""
    max_concurrent: int
    max_tokens_key: str = "max_tokens"
    """What the endpoint calls the limit of an answer."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    max_retries: int = 0
    retry_base_s: float = 1.0
    retry_max_s: float = 30.0
    rest_s: float = 0.0
    """How long nothing is asked after five failures in a row."""
    proxied: bool = True
    """Use the proxy that the environment names, unless the endpoint is on this machine."""
    strict: bool = True
    """How cost is counted.

    Strict: a reply without token counts is not an answer. The charge that a reply states counts, and one above the
    bound or the price list closes the budget. An error status is free unless a proxy gave up waiting.
    Otherwise: a reply without token counts costs the whole reservation. Only the price list counts. Only a refusal (4xx
    other than 408) is free. An answer that cannot be stored on disk is used anyway.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    question: Question
    key: str
    """Under which the answer is cached."""
    bound_usd: float
    """What a call should cost at most."""
    trace: str
    """What the cost is booked on, as is `state`."""
    state: str
    most_usd: float | None = None
    """What a call costs by the worst of tokenizers, where that is more than the bound."""
    check: Callable[[CachedAnswer], object] | None = None
    """Raises EndpointError for an answer of no use, which is then not cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An answer, and what it took this time."""

    answer: CachedAnswer
    key: str
    cached: bool
    cost_usd: float
    """Paid now; 0 from the cache."""


@dataclass(slots=True, eq=False)
class _Call:
    """A question under way."""

    waiting: int = 0
    """Callers that wait for its answer."""
    sent: bool = False
    """Whether an attempt is at the endpoint, which may charge for it."""
    task: asyncio.Task[ChatAnswer] | None = None


@dataclass(eq=False)
class _FailedAttempt(Exception):
    """One attempt without an answer."""

    reason: str
    status: str = ""
    """For the ledger, where it is not the reason."""
    charged: bool = True
    again: bool = True
    after_s: float = 0.0
    """The endpoint's Retry-After."""
    http_status: int | None = None
    body: str = ""


class ChatClient:
    """One endpoint. Used by one event loop.

    Building the HTTP client takes a noticeable part of a second, so build it where nothing else has to run.
    """

    def __init__(self, endpoint: Endpoint, budget: Budget, cache: AnswerCache) -> None:
        self._endpoint = endpoint
        self._budget = budget
        self._cache = cache
        self._url = endpoint.base_url.rstrip("/") + "/chat/completions"
        self._http = http_client(endpoint)
        self._places = asyncio.Semaphore(endpoint.max_concurrent)
        self._under_way: dict[str, _Call] = {}
        self._failures_in_row = 0
        self._rests_until = 0.0
        self.calls = 0
        """Attempts that were sent."""
        self.cached = 0
        """Questions that the cache answered."""

    async def close(self) -> None:
        """End the calls under way, counted at their reservation."""
        tasks = [call.task for call in self._under_way.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Return the answer. Equal requests in flight share one call.

        A caller may be canceled. A call that was sent continues, because it may be charged. Before that, it is dropped
        when no caller is left.

        Raises CapError when a call would pass a cap, NoAnswerError when no usable answer came, EndpointError while the
        endpoint rests.
        """
        key = request.key
        stored = self._cache.get(key)
        if stored is not None:
            self.cached += 1
            return ChatAnswer(answer=stored, key=key, cached=True, cost_usd=0.0)
        call = self._under_way.get(key)
        joined = call is not None
        if call is None or call.task is None:
            call = self._under_way[key] = _Call()
            call.task = asyncio.create_task(self._attempts(call, request))
            call.task.add_done_callback(lambda task: self._forget(key, task))
        call.waiting += 1
        try:
            answer = await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if not call.waiting and not call.sent and self._under_way.get(key) is call:
                del self._under_way[key]
                call.task.cancel()
        return replace(answer, cached=True, cost_usd=0.0) if joined else answer

    def _forget(self, key: str, task: asyncio.Task[ChatAnswer]) -> None:
        call = self._under_way.get(key)
        if call is not None and call.task is task:
            del self._under_way[key]
        if not task.cancelled():
            task.exception()  # read it: the caller may have stopped waiting

    async def _attempts(self, call: _Call, request: ChatRequest) -> ChatAnswer:
        """Try until one attempt answers."""
        endpoint, attempt = self._endpoint, 0
        async with self._places:
            while True:
                self._refuse_while_resting()
                reservation = await self._budget.reserve(
                    trace=request.trace,
                    state=request.state,
                    teacher=endpoint.name,
                    usd=request.bound_usd,
                    most_usd=request.most_usd,
                )
                call.sent = True
                try:
                    answer = await self._attempt(request, reservation, attempt)
                except _FailedAttempt as failed:
                    call.sent = False
                    if self._budget.closed is not None and failed.again:
                        raise CapError(self._budget.closed, scope="run") from None
                    if not (failed.again and attempt < endpoint.max_retries and call.waiting > 0):
                        raise NoAnswerError(
                            f"{endpoint.name} ({endpoint.model} at {endpoint.base_url}) gave no answer: {failed}",
                            http_status=failed.http_status,
                            body=failed.body,
                        ) from None
                    await self._budget.pause(self._pause_s(attempt, failed.after_s))
                    attempt += 1
                    continue
                return ChatAnswer(answer=answer, key=request.key, cached=False, cost_usd=answer.cost_usd)

    async def _attempt(self, request: ChatRequest, reservation: Reservation, attempt: int) -> CachedAnswer:
        """Make one call. However it ends it is settled, after its answer was kept. Raises _FailedAttempt."""
        start, answered = time.monotonic(), False
        usd, tokens, status = reservation.usd, (0, 0), "cancelled"
        self.calls += 1
        try:
            completion, usage = self._decode(await self._post(request.question))
            if usage is not None:
                tokens = (usage.prompt_tokens, usage.completion_tokens)
                usd = self._charge(usage, reservation)
            status = "ok"
            answer = answer_of(completion, tokens, usd, time.monotonic() - start)
            if request.check is not None:
                request.check(answer)
            await self._keep(request.key, answer)
            answered = True
            return answer
        except _FailedAttempt as failed:
            status = failed.status or failed.reason
            usd = reservation.usd if failed.charged else 0.0
            raise
        finally:
            self._note_outcome(answered)
            self._budget.settle(
                reservation,
                usd,
                status=status,
                attempt=attempt,
                seconds=round(time.monotonic() - start, 4),
                input_tokens=tokens[0],
                output_tokens=tokens[1],
            )

    async def _post(self, question: Question) -> bytes:
        """Return the body of a successful reply. Raises _FailedAttempt."""
        endpoint = self._endpoint
        body = {"model": question.model, "messages": question.messages, endpoint.max_tokens_key: question.max_tokens}
        if question.temperature is not None:
            body["temperature"] = question.temperature
        if question.tools:
            body["tools"] = question.tools
        content = bytearray()
        try:
            async with (
                asyncio.timeout(endpoint.timeout_s),
                self._http.stream("POST", self._url, content=msgspec.json.encode(body | endpoint.extra_body)) as reply,
            ):
                async for chunk in reply.aiter_bytes():
                    content += chunk
                    if len(content) > _MAX_REPLY_BYTES:
                        raise _FailedAttempt(f"the reply is longer than {_MAX_REPLY_BYTES} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _FailedAttempt(
                f"no reply within {endpoint.timeout_s:g} s",
                status="deadline",
                charged=not isinstance(error, _NEVER_SENT),
            ) from None
        except httpx.HTTPError as error:
            sent = not isinstance(error, _NEVER_SENT)
            what = "connection lost" if sent else "no connection"
            raise _FailedAttempt(f"{what}: {_brief(error)}", status="connection", charged=sent) from None
        if not reply.is_success:
            raise self._error_status(reply, content.decode(errors="replace"))
        return bytes(content)

    def _error_status(self, reply: httpx.Response, body: str) -> _FailedAttempt:
        status = reply.status_code
        refused = 400 <= status < 500 and status != 408
        wish_s = reply.headers.get("retry-after", "")
        return _FailedAttempt(
            f"status {status}: {_brief(body)}",
            status=f"status {status}",
            charged=status in _PROXY_GAVE_UP if self._endpoint.strict else not refused,
            again=status in RETRIED,
            after_s=float(wish_s) if wish_s.isdecimal() else 0.0,
            http_status=status,
            body=body,
        )

    def _decode(self, content: bytes) -> tuple[Completion, Usage | None]:
        """Raises _FailedAttempt for a body that is not a chat completion, or lacks what is needed to count its cost."""
        try:
            completion = msgspec.convert(lenient_json(content), Completion)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _FailedAttempt(f"the reply is not a chat completion ({error})") from None
        try:
            usage = msgspec.convert(completion.usage, Usage)
        except msgspec.ValidationError as error:
            if self._endpoint.strict:
                raise _FailedAttempt(f"the reply is not a chat completion (usage: {error})") from None
            usage = None
        if not completion.choices or (usage and min(usage.prompt_tokens, usage.completion_tokens) < 0):
            raise _FailedAttempt("the reply holds no answer")
        return completion, usage

    def _charge(self, usage: Usage, reservation: Reservation) -> float:
        """Return what the call cost, USD. A strict endpoint that charges too much ends all calls: no cap would hold."""
        price, tokens = self._endpoint.price, (usage.prompt_tokens, usage.completion_tokens)
        if not self._endpoint.strict:
            return price.cost_usd(*tokens, usage.cached_tokens)
        usd = usage.charged_usd(price.cost_usd(*tokens, usage.cached_tokens))
        self._budget.note_charge(reservation, usd)
        listed_usd = price.cost_usd(*tokens)  # an endpoint need not give a discount
        if usd > usage.limit_usd(listed_usd):
            self._budget.close(
                f"{self._endpoint.name} charged ${usd:.6f} for a call that costs ${listed_usd:.6f} by its prices: "
                "correct input_usd_per_mtok and output_usd_per_mtok of the teacher"
            )
        return usd

    async def _keep(self, key: str, answer: CachedAnswer) -> None:
        try:
            await asyncio.to_thread(self._cache.put, key, answer)
        except OSError as error:
            if self._endpoint.strict:
                raise
            logger.warning("%s: %s", self._endpoint.name, error)

    def _refuse_while_resting(self) -> None:
        left_s = self._rests_until - time.monotonic()
        if left_s > 0:
            name = self._endpoint.name
            raise EndpointError(
                f"{name}: {self._failures_in_row} calls in a row failed, so it is not asked for another "
                f"{left_s:.1f} s ({name}.rest_s)"
            )

    def _note_outcome(self, answered: bool) -> None:
        self._failures_in_row = 0 if answered else self._failures_in_row + 1
        if self._failures_in_row >= _FAILURES_BEFORE_REST:
            self._rests_until = time.monotonic() + self._endpoint.rest_s

    def _pause_s(self, attempt: int, retry_after_s: float) -> float:
        """Full jitter below a doubling bound. The endpoint's Retry-After counts, up to the longest pause."""
        endpoint = self._endpoint
        bound_s = backoff_s(attempt, first_s=endpoint.retry_base_s, longest_s=endpoint.retry_max_s)
        return max(min(retry_after_s, endpoint.retry_max_s), random.uniform(bound_s / 2, bound_s))


def http_client(endpoint: Endpoint) -> httpx.AsyncClient:
    """Return a client with the endpoint's key, deadlines and proxy."""
    headers = {"Content-Type": "application/json", "User-Agent": "composer-prime"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    # A proxy leads out of this machine: what runs on it would not be found there.
    trust_env = endpoint.proxied and not _is_loopback(endpoint.base_url)
    return httpx.AsyncClient(
        headers=headers,
        verify=_tls_context(trust_env),
        # Connecting ends before the whole attempt does, which may have been charged for.
        timeout=httpx.Timeout(endpoint.timeout_s, connect=min(endpoint.timeout_s / 2, _CONNECT_S)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=endpoint.max_concurrent),
        follow_redirects=True,
        trust_env=trust_env,
    )


@functools.cache
def _tls_context(trust_env: bool) -> ssl.SSLContext:
    """Return the context that all clients share: reading the certificates takes 40 ms.

    SSL_CERT_FILE and SSL_CERT_DIR count in both. Without them httpx trusts the public authorities only, while endpoints
    without a proxy may be certified by an authority of the system's store.
    """
    return httpx.create_ssl_context() if trust_env else ssl.create_default_context()


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _brief(error: BaseException | str) -> str:
    return json.dumps(str(error) or type(error).__name__)[1:-1][:_SHOWN_CHARS]
