"""Teachers: models that say what they would have done at a state, and which of them may judge which trace."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec

from composer_prime.config.teachers import MODELS_VARIABLE, BudgetConfig, TeacherConfig, TeachersConfig
from composer_prime.errors import ConfigError, DeadlineError, RoleFailedError, TeacherError
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.client import Budget, ChatClient, ChatRequest, Endpoint, NoAnswerError
from composer_prime.llm.prices import PER_MILLION, Price, listed_price
from composer_prime.model_families import UNKNOWN, family_named, is_foreign
from composer_prime.model_source import resolve_model, weight_files
from composer_prime.run.costs import spent, write_cost
from composer_prime.run.process import child_options, stop
from composer_prime.traces.records import TraceState

_PROMPT_OVERHEAD_TOKENS = 64
"""What a chat template may add around the messages."""
_BYTES_PER_TOKEN = 1.5
"""A bound; English and code have four."""
_ROUNDING = 0.01
"""Share by which OpenRouter's price may differ from the list."""
CALLS = 8
"""Calls of one teacher in flight."""
MAX_RETRIES = 4
"""After 408, 409, 429, 5xx, a lost connection, a timeout or an unreadable reply."""
START_TIMEOUT_S = 180.0
"""How long local models may take to load."""
_END_S = 10.0
_POLL_S = 0.5
_MARK_BYTES = 1 << 16


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
        """`base_url`: where a local teacher is served. Raises ConfigError without the endpoint's key."""
        self.config = config
        self.price = price
        self._shared = shared
        # A local teacher has another port each time.
        self._identity = f"local:{weights_mark(config.model)}" if config.local else config.base_url
        self._client = ChatClient(self._endpoint(base_url or config.base_url), budget, cache)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def family(self) -> str:
        return self.config.known_family

    def _question(self, state: TraceState) -> Question:
        shared, messages = self._shared, state.messages
        if shared.system_prompt and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": shared.system_prompt}, *messages]
        return Question(
            endpoint=self._identity,
            model=self.config.model,
            messages=messages,
            tools=state.tools,
            temperature=self.config.temperature_of(shared.temperature),
            max_tokens=shared.max_tokens,
        )

    async def ask(self, state: TraceState) -> tuple[CachedAnswer, str, bool]:
        """Return the answer to a state, its key in the cache, and whether it came from there.

        Raises NoAnswerError without a usable answer, CapError when the call would pass the cap.
        """
        question = self._question(state)
        prompt_bytes = len(msgspec.json.encode([question.messages, question.tools]))
        prompt_tokens = int(prompt_bytes / _BYTES_PER_TOKEN) + _PROMPT_OVERHEAD_TOKENS
        request = ChatRequest(
            question=question,
            key=question.key,
            bound_usd=self.price.bound_usd(prompt_tokens, question.max_tokens),
            state=state.state_id,
            check=self._check_model,
        )
        answer, cached = await self._client.ask(request)
        if cached:
            self._check_model(answer)  # kept under another `family` of this teacher perhaps
        return answer, request.key, cached

    def _check_model(self, answer: CachedAnswer) -> None:
        """Raise NoAnswerError for another family's answer: it may have written the trace."""
        asked = self.config.model
        if answer.model and is_foreign(asked, self.family, answer.model):
            raise NoAnswerError(
                f"an answer of {self.name} came from {answer.model}, of another family than {asked} "
                f"({self.family!r}): see to its endpoint"
            )

    async def close(self) -> None:
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
            max_concurrent=CALLS,
            max_tokens_key=config.max_tokens_key,
            extra_body={"provider": {"max_price": self._max_price()}} if config.at_openrouter else {},
            max_retries=MAX_RETRIES,
        )

    def _max_price(self) -> dict[str, float]:
        """Return USD a million tokens, above which OpenRouter asks no provider:
        https://openrouter.ai/docs/features/provider-routing#max-price."""
        per_million = (1 + _ROUNDING) / PER_MILLION
        return {
            "prompt": round(self.price.input_usd * per_million, 6),
            "completion": round(self.price.output_usd * per_million, 6),
        }


def price_of(teacher: TeacherConfig) -> Price:
    """Return the configured price, nothing for a local model, else genai-prices'. Raises ConfigError without one."""
    if teacher.input_usd_per_mtok is not None and teacher.output_usd_per_mtok is not None:
        return Price(
            input_usd=teacher.input_usd_per_mtok * PER_MILLION,
            output_usd=teacher.output_usd_per_mtok * PER_MILLION,
        )
    if teacher.local:
        return Price(input_usd=0.0, output_usd=0.0)
    try:
        return listed_price(teacher.model, teacher.base_url)
    except LookupError as error:
        place = f"{teacher.model} at {teacher.base_url}"
        raise ConfigError(
            f"genai-prices has no price for teacher {teacher.name!r} ({place}: {error}): set input_usd_per_mtok and "
            "output_usd_per_mtok"
        ) from None


def teacher_budget(config: BudgetConfig, path: Path) -> Budget:
    """Return the budget over one costs.jsonl, with what earlier runs spent. Raises LedgerError for an unclear file."""
    return Budget(config.usd_per_run, partial(write_cost, path), spent(path).usd, "teachers.budget.usd_per_run")


def check_teachers(config: TeachersConfig) -> None:
    """Raise ConfigError for an unknown price, key or model, before anything is loaded."""
    for teacher in config.teacher:
        price_of(teacher)
        if teacher.local:
            resolve_model(teacher.model)
        else:
            teacher.api_key()


def cost_line(config: TeachersConfig) -> str:
    """Return what a replay may cost. Raises ConfigError for an unknown price."""
    if all(price_of(teacher).bound_usd(1, 1) == 0 for teacher in config.teacher):
        return "cost: nothing, all teachers are local"
    return f"cost: at most ${config.budget.usd_per_run:g}, while no call is charged above its bound"


class TeacherPool:
    """The teachers that may judge a trace, in their order."""

    def __init__(self, config: TeachersConfig, budget: Budget, addresses: Mapping[str, str] | None = None) -> None:
        """`addresses`: where each local model is served. Takes seconds. Raises ConfigError, UnwritableError."""
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
        self.teachers.sort(key=lambda teacher: teacher.price.output_usd)

    def voters(self, state: TraceState) -> list[Teacher]:
        """Return the teachers that may judge this state, cheapest first, one of each family before a second of any.

        Raises TeacherError for an unknown writer, or fewer than two other families.
        """
        writer = family_named(state.source_family)
        if writer == UNKNOWN:
            writer = self.config.assume_family or UNKNOWN
        if writer == UNKNOWN:
            raise TeacherError(
                "it is not known which model wrote the trace, so no family can be left out: ingest it with --model "
                "or --family, or set teachers.assume_family"
            )
        allowed = [teacher for teacher in self.teachers if teacher.family != writer]
        families = {teacher.family for teacher in allowed}
        if len(families) < 2:
            names = ", ".join(sorted(families)) or "none"
            raise TeacherError(
                f"the trace was written by family {writer!r}, which leaves {names} to judge it: add teachers, for "
                "two families are needed"
            )
        seen, rank = Counter[str](), dict[str, int]()
        for teacher in allowed:
            rank[teacher.name] = seen[teacher.family]
            seen[teacher.family] += 1
        return sorted(allowed, key=lambda teacher: rank[teacher.name])

    async def close(self) -> None:
        """Close every teacher, then the cache, whatever one of them raises."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._cache.close)
            for teacher in self.teachers:
                stack.push_async_callback(teacher.close)


def weights_mark(model: str) -> str:
    """Return a digest of the sizes, headers and ends of a model's weight files. Raises ModelNotFoundError."""
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(resolve_model(model)):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_MARK_BYTES))
            file.seek(max(size - _MARK_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


@asynccontextmanager
async def models_at(models: Sequence[str], server: Sequence[str]) -> AsyncIterator[str]:
    """Give the base URL of `models`: the launcher's, else of a process that ends with this context.

    `server`: the command of a model server, empty where none may be started. Raises RoleFailedError or DeadlineError,
    and ConfigError without either.
    """
    url = os.environ.get(MODELS_VARIABLE)
    if url is not None:
        await _until_served(url, set(models))
        yield url
    elif server:
        async with _local_models(models, server) as url:
            yield url
    else:
        raise ConfigError(
            f"{', '.join(models)} are local teachers, and {MODELS_VARIABLE} names no server of them: start the run "
            "with `trainer`, which serves them, or set the variable"
        )


async def _until_served(url: str, models: set[str]) -> None:
    timeout_s, status = START_TIMEOUT_S, "nothing answers there"
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while True:
                try:
                    listed = {model["id"] for model in (await client.get("/models")).json()["data"]}
                    if models <= listed:
                        return
                    status = f"it serves {', '.join(sorted(listed))}"
                except (httpx.HTTPError, ValueError, LookupError, TypeError):
                    pass
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DeadlineError(
            f"waited {timeout_s:g} s for {', '.join(sorted(models))} at {url}, and {status}: see logs/teachers.log"
        ) from None


@asynccontextmanager
async def _local_models(models: Sequence[str], server: Sequence[str]) -> AsyncIterator[str]:
    command = [*server, *(word for model in models for word in ("--model", model))]
    # In a session of its own: Ctrl-C must not end the models while their last answers are waited for.
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, **child_options(environment)
    )
    assert process.stdout is not None
    names = ", ".join(models)
    try:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineError(f"waited {START_TIMEOUT_S:g} s for local models ({names}) to load") from None
        if not line:
            status = await process.wait()
            raise RoleFailedError(f"the server of local models ({names}) ended with status {status}; see above")
        yield json.loads(line)["url"]
    finally:
        await stop(process, _END_S)
