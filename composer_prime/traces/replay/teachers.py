"""Teachers: models that are asked what they would have done at a state, and who may judge which trace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from composer_prime.config.teachers import TeacherConfig, TeachersConfig
from composer_prime.errors import ConfigError, TeacherError
from composer_prime.llm.budget import Budget
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.client import ChatAnswer, ChatClient, ChatRequest, Endpoint, NoAnswerError
from composer_prime.llm.families import UNKNOWN, family_named
from composer_prime.llm.prices import ANSWER_SHARE, BYTES_PER_TOKEN, Price, price_of
from composer_prime.llm.reply import ROUNDING, reply_text, split_thinking
from composer_prime.model_source import resolve_model
from composer_prime.traces.replay.local_models import weights_mark
from composer_prime.traces.state import Message, TraceState

_TIERS = ("cheap", "mid", "frontier")
_PROMPT_OVERHEAD_TOKENS = 64
"""What an endpoint's chat template may add around the messages."""
_NO_PROVIDER = {404, 503}
"""OpenRouter's answers where no provider meets the request's conditions:
https://openrouter.ai/docs/api-reference/errors."""
_REMEDIES = {
    "max_tokens": 'max_tokens_key = "max_completion_tokens"',
    "max_completion_tokens": 'max_tokens_key = "max_tokens"',
    "temperature": 'temperature = "omit"',
}
"""By the parameter that an endpoint does not support: https://platform.openai.com/docs/guides/reasoning."""
_PARAMETER = re.compile("|".join(sorted(_REMEDIES, reverse=True)))
_NAMED_PARAMETER = re.compile(r'"param":\s*"([^"]+)"')
_UNSUPPORTED = re.compile("unsupported|not support", re.IGNORECASE)


class NotAskedError(TeacherError):
    """No call was made."""


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
        """`base_url`: where a local teacher is served. Raises ConfigError when the endpoint's key is not set."""
        self.config = config
        self.price = price
        self._shared = shared
        self._cache = cache
        # A local teacher has another port each time: its answers depend on its weights alone.
        self._identity = f"local:{weights_mark(config.model)}" if config.local else config.base_url
        self._client = None
        if not shared.cache_only:
            self._client = ChatClient(self._endpoint(base_url or config.base_url), budget, cache)

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
        """Return the most that asking may cost, by the bytes of the question and the limit of the answer."""
        tokens = int(_size(question) / self._shared.budget.bytes_per_token) + _PROMPT_OVERHEAD_TOKENS
        return self.price.bound_usd(tokens, question.max_tokens)

    def expected_usd(self, question: Question) -> float:
        """Return about what asking will cost."""
        return self.price.cost_usd(int(_size(question) / BYTES_PER_TOKEN), int(ANSWER_SHARE * question.max_tokens))

    def knows(self, question: Question) -> bool:
        """Return whether the answer is in the cache, so that asking costs nothing."""
        return self._cache.get(question.key) is not None

    async def ask(self, question: Question, *, trace: str, state: str) -> ChatAnswer:
        """Raises NoAnswerError when there is no usable answer, NotAskedError when it may not be asked for, CapError
        when the call would pass a cap.
        """
        if self._client is None:
            stored = self._cache.get(question.key)
            if stored is None:
                raise NotAskedError(
                    f"teachers.cache_only is true, and {self._shared.cache_dir} holds no answer of {self.name} to this "
                    "state: replay with cache_only = false once"
                )
            answer = ChatAnswer(answer=stored, key=question.key, cached=True, cost_usd=0.0, seconds=0.0)
        else:
            request = ChatRequest(
                question=question, key=question.key, bound_usd=self.bound_usd(question), trace=trace, state=state
            )
            try:
                answer = await self._client.ask(request)
            except NoAnswerError as error:  # which all that wait for this answer share
                raise NoAnswerError(
                    f"{error}{self._remedy(error)}",
                    seconds=error.seconds,
                    http_status=error.http_status,
                    body=error.body,
                ) from None
        return replace(answer, answer=_without_thinking(answer.answer))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _endpoint(self, base_url: str) -> Endpoint:
        config, shared = self.config, self._shared
        return Endpoint(
            name=config.name,
            base_url=base_url,
            model=config.model,
            api_key=None if config.local else config.api_key(),
            price=self.price,
            timeout_s=shared.timeout_s,
            max_concurrent=config.max_concurrent,
            max_tokens_key=config.max_tokens_key,
            extra_body={"provider": {"max_price": self._max_price()}} if config.at_openrouter else {},
            max_retries=shared.max_retries,
            retry_base_s=shared.retry_base_s,
            retry_max_s=shared.retry_max_s,
            requests_per_minute=config.requests_per_minute,
        )

    def _max_price(self) -> dict[str, float]:
        """Return USD a million tokens, above which OpenRouter gives a request to no provider:
        https://openrouter.ai/docs/features/provider-routing#max-price."""
        per_million = 1e6 * (1 + ROUNDING)
        return {
            "prompt": round(self.price.input_usd * per_million, 6),
            "completion": round(self.price.output_usd * per_million, 6),
        }

    def _remedy(self, error: NoAnswerError) -> str:
        """Return what to set where the endpoint takes other parameters, or no provider is as cheap as the prices."""
        named = _NAMED_PARAMETER.search(error.body)
        parameter = _PARAMETER.search(named[1] if named else error.body)
        if parameter is not None and _UNSUPPORTED.search(error.body):
            return f" (set {_REMEDIES[parameter.group()]} for this teacher)"
        if not self.config.at_openrouter or error.http_status not in _NO_PROVIDER:
            return ""
        price = self._max_price()
        return (
            f" (only providers were asked that charge at most ${price['prompt']:g} for a million prompt tokens and "
            f"${price['completion']:g} for a million answer tokens; where none does, correct input_usd_per_mtok and "
            "output_usd_per_mtok of the teacher)"
        )


def _size(question: Question) -> int:
    return len(msgspec.json.encode([question.messages, question.tools]))


def _without_thinking(stored: CachedAnswer) -> CachedAnswer:
    """Take the thinking out of answers that an older release kept with it."""
    content = split_thinking(reply_text(stored.message.get("content")))[0].strip()
    return msgspec.structs.replace(stored, message={**stored.message, "content": content or None})


def check_teachers(config: TeachersConfig) -> None:
    """Raise ConfigError for an unknown price, a key that is not set or a missing model, before anything is loaded."""
    for teacher in config.teacher:
        price_of(teacher)
        if teacher.local:
            resolve_model(teacher.model)
        elif not config.cache_only:
            teacher.api_key()


class TeacherPool:
    """The teachers of a configuration: which of them may judge a trace, in which order."""

    def __init__(self, config: TeachersConfig, budget: Budget, addresses: Mapping[str, str] | None = None) -> None:
        """`addresses`: where each local model is served.

        It takes seconds, so no event loop that has something else to do may wait for it. Raises ConfigError for an
        unknown price or a missing key, UnwritableError where answers cannot be kept.
        """
        self._cache = AnswerCache(config.cache_dir.expanduser() / "answers.sqlite")
        self.config = config
        try:
            self.teachers = [
                Teacher(each, config, price_of(each), budget, self._cache, base_url=(addresses or {}).get(each.model))
                for each in config.teacher
            ]
        except ConfigError:
            self._cache.close()
            raise
        self.teachers.sort(key=lambda teacher: (_TIERS.index(teacher.config.tier), teacher.price.output_usd))

    def family_of(self, state: TraceState) -> str:
        """Return the family that wrote the state, `assume_family` where the trace does not say."""
        family = family_named(state.source_family)
        return (self.config.assume_family or UNKNOWN) if family == UNKNOWN else family

    def voters(self, state: TraceState) -> list[Teacher]:
        """Return who may judge this state, cheapest first, one of each family before a second of any.

        Raises TeacherError when fewer than two families remain, or the state's own is unknown.
        """
        writer = self.family_of(state)
        if writer == UNKNOWN:
            raise TeacherError(
                "it is not known which model wrote the trace, so no family can be left out: ingest it with --model or "
                "--family, or set teachers.assume_family"
            )
        allowed = [teacher for teacher in self.teachers if teacher.family != writer]
        families = {teacher.family for teacher in allowed}
        if len(families) < 2:
            names = ", ".join(sorted(families)) or "none"
            raise TeacherError(
                f"the trace was written by family {writer!r}, which leaves {names} to judge it: two families are "
                "needed; add teachers of others"
            )
        rank: dict[str, int] = {}
        ranked = []
        for teacher in allowed:
            rank[teacher.family] = rank.get(teacher.family, -1) + 1
            ranked.append((rank[teacher.family], teacher))
        return [teacher for _, teacher in sorted(ranked, key=lambda entry: entry[0])]

    async def ask(self, teacher: Teacher, state: TraceState) -> ChatAnswer:
        """Raises NoAnswerError; NotAskedError, also where the teacher is of the state's own family; CapError."""
        if teacher.family == self.family_of(state):
            raise NotAskedError(
                f"{teacher.name} is of family {teacher.family!r}, which wrote the trace: it has no vote"
            )
        return await teacher.ask(self.question(teacher, state), trace=state.trace_id, state=state.state_id)

    def question(self, teacher: Teacher, state: TraceState) -> Question:
        messages, system_prompt = state.messages, self.config.system_prompt
        if system_prompt and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return teacher.question(messages, state.tools)

    def price_usd(self, teacher: Teacher, state: TraceState) -> float:
        """Return about what this teacher's vote will cost now: nothing when its answer is in the cache."""
        return 0.0 if teacher.knows(self.question(teacher, state)) else self.expected_usd(teacher, state)

    def expected_usd(self, teacher: Teacher, state: TraceState) -> float:
        """Return about what this teacher's vote would cost, were it not in the cache."""
        return teacher.expected_usd(self.question(teacher, state))

    async def close(self) -> None:
        """Close every teacher, then the cache, also where one of them raises."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._cache.close)
            for teacher in self.teachers:
                stack.push_async_callback(teacher.close)
