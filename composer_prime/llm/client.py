"""The one client of OpenAI-compatible endpoints: a question in, an answer out, paid for at most once.

    cache ── hit ──> answer, free
      └─ miss ─> [ place, pace, reserve, POST, settle ] ── retried ──> keep, answer
                                                             └──> NoAnswerError

Each attempt has a reservation of its own. A reply costs what it states, else what its token counts say. Its reservation
stays spent where it has neither, or is unreadable, cut short or lost: the endpoint may have charged for it. An error
status is free unless a proxy gave up waiting, and so is an attempt without a connection.

    reserve (refused: CapError) ──> call ──> settle(cost)        the difference is free again
                                          └──> no reply          all that was held stays spent

The cap is checked with everything that is held for calls in flight. So charges up to the bounds stay within it,
whatever the order of replies. A charge above its bound closes the budget: only such charges, for calls then in flight,
can exceed the cap. An endpoint that has not yet kept to a bound gets one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from composer_prime.address import is_loopback
from composer_prime.errors import CapError, EndpointError
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.prices import Price
from composer_prime.llm.reply import Completion, answer_of, lenient_json
from composer_prime.run.retry import backoff_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    call: str
    state: str
    teacher: str
    usd: float
    """The most that the call should cost."""


class Budget:
    """Used by one event loop."""

    def __init__(self, cap_usd: float, record: Callable[..., None], spent_usd: float, setting: str) -> None:
        """`record(kind, **values)` writes down what is "reserved", "settled" and "stopped". `spent_usd`: by earlier
        runs. `setting`: where users set the cap."""
        self._cap_usd = cap_usd
        self._setting = setting
        self._record = record
        self.spent_usd = spent_usd
        self._kept = set[str]()
        """Endpoints that kept to the bound of a call."""
        # Summed each time: a running sum would keep rounding errors.
        self._in_flight: dict[str, Reservation] = {}
        self._by_state: dict[str, float] = defaultdict(float)
        self._settled = asyncio.Event()
        self._closing = asyncio.Event()
        self.closed: str | None = None
        """Why no call is made any more."""

    @property
    def in_flight(self) -> int:
        """Calls that are not settled."""
        return len(self._in_flight)

    @property
    def held_usd(self) -> float:
        return sum(each.usd for each in self._in_flight.values())

    def close(self, reason: str) -> None:
        """Refuse every further call, waiting ones too."""
        self.closed = self.closed or reason
        self._settled.set()
        self._closing.set()

    async def pause(self, seconds: float) -> None:
        """Wait before a call, no longer once the budget is closed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def reserve(self, *, state: str, teacher: str, usd: float) -> Reservation:
        """Hold `usd`, the bound of a call. Raises CapError when it does not fit.

        Waits while only calls in flight stand in the way, or while an endpoint makes its first call.
        """
        while True:
            self._check(teacher, usd)
            fits = not usd or self.spent_usd + self.held_usd + usd <= self._cap_usd
            if fits and not self._waits_for_the_first(teacher, usd):
                break
            self._settled.clear()
            await self._settled.wait()
        held = Reservation(call=secrets.token_hex(8), state=state, teacher=teacher, usd=usd)
        self._record("reserved", call=held.call, state=state, teacher=teacher, usd=usd)
        self._in_flight[held.call] = held
        return held

    def _waits_for_the_first(self, teacher: str, usd: float) -> bool:
        """Return whether a call has to wait for another of an endpoint not known to keep to its bounds."""
        if not usd or teacher in self._kept:
            return False
        return any(each.usd > 0 and each.teacher not in self._kept for each in self._in_flight.values())

    def _check(self, teacher: str, usd: float) -> None:
        """Raise CapError where a call may not be made, whatever those in flight cost."""
        if self.closed is not None:
            raise CapError(self.closed)
        if usd and self.spent_usd + usd > self._cap_usd:
            left = max(self._cap_usd - self.spent_usd, 0.0)
            raise CapError(
                f"a call to {teacher} may cost ${usd:.4f}, but ${left:.4f} of {self._setting} = ${self._cap_usd:g} "
                f"is left: raise {self._setting}, or leave this endpoint out"
            )

    def note_charge(self, held: Reservation, usd: float) -> None:
        """Close the budget when an endpoint charged more than the call's bound. Call it before the call is settled."""
        if usd > held.usd:
            self.close(
                f"{held.teacher} charged ${usd:.6f} for a call that may cost ${held.usd:.6f}: check that the "
                "endpoint keeps to max_tokens and counts tokens rightly, and correct its input_usd_per_mtok and "
                "output_usd_per_mtok"
            )

    def settle(self, held: Reservation, usd: float, *, status: str, **facts: object) -> None:
        """End a call that cost `usd`. `status` is ok where it was answered."""
        del self._in_flight[held.call]
        if usd <= held.usd and (status == "ok" or usd > 0):
            self._kept.add(held.teacher)
        self.spent_usd += usd
        self._by_state[held.state] += usd
        self._settled.set()
        self._record("settled", call=held.call, teacher=held.teacher, usd=usd, status=status, **facts)

    def note_stop(self, reason: str) -> None:
        self._record("stopped", reason=reason)

    def take_state(self, state: str) -> float:
        """Return what calls on this state cost since the last question."""
        return self._by_state.pop(state, 0.0)


logger = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_PROXY_GAVE_UP = {408, 504, *range(520, 525)}
"""The endpoint behind the proxy may have charged all the same."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""The request was not sent, so not charged."""
_CONNECT_S = 10.0
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
_MAX_REPLY_BYTES = 1 << 24
_SHOWN_CHARS = 200


class NoAnswerError(EndpointError):
    """Calls were made without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    name: str
    """In messages and in the cost ledger."""
    base_url: str
    """Up to and without /chat/completions."""
    model: str
    api_key: str | None
    price: Price
    timeout_s: float
    """Of one attempt, a reply that drips in included."""
    max_concurrent: int
    max_tokens_key: str = "max_tokens"
    """What the endpoint calls the limit of an answer."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    max_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    question: Question
    key: str
    """Under which the answer is cached."""
    bound_usd: float
    state: str
    """What the cost is booked on."""
    check: Callable[[CachedAnswer], object] | None = None
    """Raises EndpointError for an answer not to be cached."""


@dataclass(eq=False)
class _FailedAttempt(Exception):
    reason: str
    status: str = ""
    """For the ledger, where it is not the reason."""
    charged: bool = True
    again: bool = True
    after_s: float = 0.0
    """The endpoint's Retry-After."""


class ChatClient:
    """One endpoint. Used by one event loop; building it takes a noticeable part of a second."""

    def __init__(self, endpoint: Endpoint, budget: Budget, cache: AnswerCache) -> None:
        self._endpoint = endpoint
        self._budget = budget
        self._cache = cache
        self._url = endpoint.base_url.rstrip("/") + "/chat/completions"
        self._http = http_client(endpoint)
        self._places = asyncio.Semaphore(endpoint.max_concurrent)
        self._failures_in_row = 0

    async def close(self) -> None:
        """Close the connections, after all calls."""
        await self._http.aclose()

    async def ask(self, request: ChatRequest) -> tuple[CachedAnswer, bool]:
        """Return the answer, and whether it came from the cache. A canceled call counts at its reservation.

        Raises CapError, and NoAnswerError without a usable answer.
        """
        stored = await asyncio.to_thread(self._cache.get, request.key)
        if stored is not None:
            return stored, True
        return await self._attempts(request), False

    async def _attempts(self, request: ChatRequest) -> CachedAnswer:
        endpoint, attempt = self._endpoint, 0
        place = f"{endpoint.name} ({endpoint.model} at {endpoint.base_url})"
        async with self._places:
            while True:
                held = await self._budget.reserve(state=request.state, teacher=endpoint.name, usd=request.bound_usd)
                try:
                    return await self._attempt(request, held, attempt)
                except _FailedAttempt as failed:
                    if self._budget.closed is not None and failed.again:
                        raise CapError(self._budget.closed) from None
                    if not failed.again or attempt == endpoint.max_retries:
                        raise NoAnswerError(f"{place} gave no answer: {failed.reason}") from None
                    if self._failures_in_row == 1:
                        logger.warning("%s failed, and is asked again: %s", place, failed.reason)
                    await self._budget.pause(_pause_s(attempt, failed.after_s))
                attempt += 1

    async def _attempt(self, request: ChatRequest, held: Reservation, attempt: int) -> CachedAnswer:
        """Make one call, which is settled however it ends. Raises _FailedAttempt."""
        start, answered = time.monotonic(), False
        usd, tokens, status = held.usd, (0, 0), "cancelled"
        try:
            completion = _decode(await self._post(request.question))
            if completion.usage is not None:
                tokens = (completion.usage.prompt_tokens, completion.usage.completion_tokens)
                # An endpoint without a price is taken to be free.
                usd = completion.usage.cost_usd(self._endpoint.price) if held.usd else 0.0
                self._budget.note_charge(held, usd)
            status = "ok"
            answer = answer_of(completion, tokens, usd, time.monotonic() - start)
            if request.check is not None:
                request.check(answer)
            await self._keep(request.key, answer)
            answered = True
            return answer
        except _FailedAttempt as failed:
            status = failed.status or failed.reason
            usd = held.usd if failed.charged else 0.0
            raise
        finally:
            self._failures_in_row = 0 if answered else self._failures_in_row + 1
            self._budget.settle(
                held,
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
        body: dict[str, Any] = {"model": question.model, "messages": question.messages}
        body[endpoint.max_tokens_key] = question.max_tokens
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
            raise _error_status(reply, content.decode(errors="replace"))
        return bytes(content)

    async def _keep(self, key: str, answer: CachedAnswer) -> None:
        try:
            await asyncio.to_thread(self._cache.put, key, answer)
        except OSError as error:  # it was paid for all the same
            logger.warning("%s: %s", self._endpoint.name, error)


def _decode(content: bytes) -> Completion:
    """Raises _FailedAttempt for a body that is not a chat completion."""
    try:
        value = lenient_json(content)
        try:
            completion = msgspec.convert(value, Completion)
        except msgspec.ValidationError:  # without readable counts the call costs its bound
            completion = msgspec.convert({**value, "usage": None}, Completion)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise _FailedAttempt(f"the reply is not a chat completion ({error})") from None
    if not completion.choices:
        raise _FailedAttempt("the reply holds no answer")
    return completion


def _error_status(reply: httpx.Response, body: str) -> _FailedAttempt:
    status = reply.status_code
    wish_s = reply.headers.get("retry-after", "")
    return _FailedAttempt(
        f"status {status}: {_brief(body)}",
        status=f"status {status}",
        charged=status in _PROXY_GAVE_UP,
        again=status in RETRIED,
        after_s=float(wish_s) if wish_s.isdecimal() else 0.0,
    )


def _pause_s(attempt: int, retry_after_s: float) -> float:
    """Return a jittered pause below a doubling bound, or the endpoint's Retry-After up to the longest."""
    bound_s = backoff_s(attempt, first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S)
    return max(min(retry_after_s, LONGEST_RETRY_S), random.uniform(bound_s / 2, bound_s))


def http_client(endpoint: Endpoint) -> httpx.AsyncClient:
    headers = {"Content-Type": "application/json", "User-Agent": "composer-prime"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    return httpx.AsyncClient(
        headers=headers,
        # Connecting ends before the attempt, which may have been charged for.
        timeout=httpx.Timeout(endpoint.timeout_s, connect=min(endpoint.timeout_s / 2, _CONNECT_S)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=endpoint.max_concurrent),
        follow_redirects=True,
        # A proxy leads out of this machine: what runs on it would not be found there.
        trust_env=not is_loopback(httpx.URL(endpoint.base_url).host),
    )


def _brief(error: BaseException | str) -> str:
    return json.dumps(str(error) or type(error).__name__)[1:-1][:_SHOWN_CHARS]
