"""A conversation with a served model and with the tools of an environment's task. The terminal and the page share it.

    say -> messages -> gateway (the model's own chat template) -> Entry (assistant)
               ^                                                    | tool calls, with an environment
               +---- Entry (tool) <---- the environment's tools <---+

One conversation is under way at a time, so every token that the engine samples belongs to it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from composer_prime.config import Config
from composer_prime.config.load import make_importable
from composer_prime.console import tell_waits
from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EngineError, RolloutError
from composer_prime.model_source import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOOL_ROUNDS = 8
"""Answers to tool calls, one after the other, before you have the word again."""
_REQUEST_S = 600.0
"""Longest wait for an answer of the model, or of one tool."""
_NO_NODE_S = 30.0
"""Longest wait for a model that is gone: it is not restarted."""
_STOPPED = "Stopped by the user."


class ChatSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the user chose, in a form in which equal system messages are equal."""

    temperature: float
    max_tokens: int
    system: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that no engine takes."""
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ConfigError(f"the temperature is {self.temperature:g}: choose one from 0 (greedy) to 100")
        if self.max_tokens < 1:
            raise ConfigError(f"the longest answer is {self.max_tokens} tokens: choose 1 or more")
        self.system = (self.system or "").replace("\r\n", "\n").replace("\r", "\n").strip() or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A message, and what is known of it."""

    message: dict[str, Any]
    sampled: list[tuple[int, str, float]] = field(default_factory=list)
    """Token ids, texts (an end of turn has none) and log-probabilities; empty where the engine does not tell them while
    it samples."""
    usage: dict[str, int] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls` or `cancelled`; None for what the model did not write."""
    error: str | None = None
    """Of a tool's answer that reports a failed call."""


class Conversation:
    """Holds the messages. Use it from one task at a time; make it with `open_conversation`."""

    def __init__(
        self,
        url: str,
        token: str,
        settings: ChatSettings,
        *,
        environment: Any,
        tokenizer: Tokenizer | None,
        on_token: Callable[[], None],
    ) -> None:
        """`url`, `token`: the gateway's. `environment`: None without tools. `on_token` is called after each `take`."""
        self.settings = settings
        self.environment = environment
        self.entries: list[Entry] = []
        self.tools: Any = None
        """ToolExecutor of the task."""
        self.task: int | None = None
        self.question = ""
        """What the task asks."""
        self.doing = ""
        """What is waited for; empty while nobody waits."""
        self._url = url
        self._token = token
        self._tokenizer = tokenizer
        self._on_token = on_token
        self._session = ""
        """Of the newest request to the model."""
        self._sampled: list[tuple[int, str, float]] = []
        self._episode = AsyncExitStack()

    def take(self, session: str, token: int, logprob: float) -> None:
        """Add a token that the engine sampled. One of a request that was given up is dropped."""
        if session == self._session:
            decode = self._tokenizer.decode if self._tokenizer is not None else None
            text = f"#{token}" if decode is None else decode([token], skip_special_tokens=False)
            self._sampled.append((token, text, logprob))
            self._on_token()

    async def close(self) -> None:
        async with _environment_errors(f"the end of task {self.task}"):
            await self._episode.aclose()

    async def restart(self) -> None:
        """Forget the messages, and restart the task. Raises what use_task raises."""
        await self.use_task(self.task) if self.task is not None else self._forget()

    async def use_task(self, index: int) -> None:
        """Forget the messages, and take the tools of a task.

        Raises ConfigError where there is no such task, and RolloutError or DeadlineError for one that does not begin;
        then there are no tools.
        """
        if self.environment is None:
            raise ConfigError("there are no tasks without an environment: start again with --env ENV")
        from orchestrator.environments.tool_loop.harness import tools_outside_a_rollout

        async with _environment_errors(f"task {index}"):
            try:
                _, question = self.environment.describe(index)
            except IndexError:
                count = self.environment.num_tasks
                raise ConfigError(f"there is no task {index}; there are {count}, counted from 0") from None
            self.tools = None
            self._forget()
            await self._episode.aclose()
            tools = self.environment.tools(index)
            addition = await self._episode.enter_async_context(tools_outside_a_rollout(tools))
        self.tools, self.task, self.question = tools, index, f"{question}\n\n{addition}" if addition else question

    def _forget(self) -> None:
        system = self.settings.system
        self.entries = [Entry(message={"role": "system", "content": system})] if system else []

    async def say(self, text: str) -> AsyncIterator[Entry]:
        """Yield the answer to `text`, with the tool calls and their answers before it, each as it is there.

        Cancelled, it keeps what was sampled. A question without any answer is forgotten. Raises EngineError,
        RolloutError (a tool failed) or DeadlineError.
        """
        self.entries.append(Entry(message={"role": "user", "content": text}))
        asked = len(self.entries)
        try:
            for _ in range(TOOL_ROUNDS):
                self.entries.append(entry := await self._ask())
                yield entry
                calls = entry.message.get("tool_calls") or []
                if not calls or self.tools is None:
                    return
                for call in calls:
                    self.entries.append(entry := await self._call(call))
                    yield entry
        except asyncio.CancelledError:
            if (entry := self.partial()) is not None:
                self.entries.append(entry)
            raise
        finally:
            self.doing = ""
            self._sampled.clear()
            self._answer_open_calls()
            if len(self.entries) == asked:
                self.entries.pop()

    def partial(self) -> Entry | None:
        """Return what the model has sampled of an answer that is under way; None before its first token."""
        if not self._sampled:
            return None
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode([token for token, *_ in self._sampled], skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        return Entry(message=message, sampled=self._told(), finish_reason="cancelled")

    def _told(self) -> list[tuple[int, str, float]]:
        """Return what was sampled. Special tokens at its end have no text: they end the turn and say nothing."""
        told = list(self._sampled)
        for place in reversed(range(len(told))):
            token, _, logprob = told[place]
            if self._tokenizer is None or self._tokenizer.decode([token], skip_special_tokens=True):
                break
            told[place] = token, "", logprob
        return told

    def _answer_open_calls(self) -> None:
        """Answer the calls that will get no other answer: a chat template accepts no call without one."""
        answers = len(list(itertools.takewhile(lambda entry: entry.message["role"] == "tool", reversed(self.entries))))
        asking = self.entries[-1 - answers].message
        for call in (asking.get("tool_calls") or [])[answers:] if self.tools is not None else []:
            message = {"role": "tool", "tool_call_id": call["id"], "content": _STOPPED}
            self.entries.append(Entry(message=message, error=_STOPPED))

    async def _ask(self) -> Entry:
        import httpx

        from composer_prime.wire.turns import POLICY

        self._sampled.clear()
        self._session = secrets.token_hex(8)
        self.doing = "the model"
        body = {
            "model": POLICY,
            "messages": [entry.message for entry in self.entries],
            "tools": self.tools.schemas if self.tools is not None else None,
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }
        headers = {"Authorization": f"Bearer {self._token}", "X-Session-ID": self._session}
        try:
            async with httpx.AsyncClient(timeout=_REQUEST_S, trust_env=False) as client:
                reply = await client.post(f"{self._url}/v1/chat/completions", json=body, headers=headers)
        except httpx.TimeoutException:
            raise DeadlineError(f"waited {_REQUEST_S:g} s for the model's answer") from None
        except httpx.HTTPError as error:
            raise EngineError(f"the model is gone: {type(error).__name__}: {error}") from error
        if reply.status_code != 200:
            raise EngineError(json.loads(reply.text)["error"]["message"])
        answer = reply.json()
        choice = answer["choices"][0]
        sampled = self._told()
        if [token for token, *_ in sampled] != choice["token_ids"]:  # Another engine than the local one.
            sampled = []
        self._sampled.clear()
        return Entry(
            message=choice["message"], sampled=sampled, usage=answer["usage"], finish_reason=choice["finish_reason"]
        )

    async def _call(self, call: dict[str, Any]) -> Entry:
        from orchestrator.workers.verifiers_adapter import tool_error

        function = call["function"]
        self.doing = f"the tool {function['name']}"
        async with _environment_errors(self.doing):
            text = await self.tools.call(function["name"], function["arguments"])
        message = {"role": "tool", "tool_call_id": call["id"], "content": text}
        return Entry(message=message, error=tool_error(None, text))


@asynccontextmanager
async def _environment_errors(what: str) -> AsyncIterator[None]:
    """Limit the time of `what` an environment does, which may raise anything. Raises RolloutError or DeadlineError."""
    try:
        async with asyncio.timeout(_REQUEST_S) as limit:
            yield
    except ComposerError:
        raise
    except Exception as error:
        if limit.expired():
            raise DeadlineError(f"waited {_REQUEST_S:g} s for {what}") from error
        raise RolloutError(f"{what} failed: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def open_conversation(
    config: Config, settings: ChatSettings, *, with_tools: bool, on_token: Callable[[], None]
) -> AsyncIterator[Conversation]:
    """Load the model, and the environment `with_tools`. Yield a conversation.

    `on_token` is called after each token that the local engine samples. Raises what `serve` raises, or ConfigError for
    an environment that cannot be loaded.
    """
    from composer_prime.cli.served_model import serve
    from composer_prime.run.scratch import Scratch
    from composer_prime.wire.turns import GATEWAY_TOKEN_VARIABLE

    orchestrator = config.orchestrator.model_copy(update={"no_node_timeout_s": _NO_NODE_S})
    config = config.model_copy(update={"orchestrator": orchestrator})
    scratch = Scratch("chat")
    try:
        async with AsyncExitStack() as stack:
            with tell_waits(f"loading {config.model.path}"):
                environment = await asyncio.to_thread(_environment, config) if with_tools else None
                served = serve(config, scratch.path / "served", lambda *sampled: talk.take(*sampled))
                gateway, _ = await stack.enter_async_context(served)
            talk = Conversation(
                gateway.http_url,
                os.environ[GATEWAY_TOKEN_VARIABLE],
                settings,
                environment=environment,
                tokenizer=_tokenizer(config),
                on_token=on_token,
            )
            try:
                yield talk
            finally:
                await talk.close()
    finally:
        scratch.close()


def _tokenizer(config: Config) -> Tokenizer | None:
    """Return the model's tokenizer; None without a tokenizer.json."""
    from tokenizers import Tokenizer

    file = resolve_model(config.model.path) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _environment(config: Config) -> Any:
    """Load the environment in this process. Raises ConfigError."""
    from orchestrator.chat_renderer import build_renderer
    from orchestrator.tasks.sources import source_spec
    from orchestrator.workers.protocol import TRAIN
    from orchestrator.workers.verifiers_adapter import Environment

    make_importable(config)
    folder = str(resolve_model(config.model.path))
    chosen, _ = build_renderer(folder, config.model.renderer)
    spec = source_spec(
        config.orchestrator.source[0], model_path=folder, renderer=None, max_context=config.model.max_context
    )
    return Environment(spec, TRAIN, chosen)
