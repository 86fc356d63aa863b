"""Messages to token ids and back, for /v1/chat/completions.

The training client renders for itself and never comes by here; judges, probes and people with an OpenAI client do.
Renderer and tokenizer load on the first such request and run in one thread of their own (they are not thread-safe).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from composer_prime.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from renderers.base import ParsedResponse

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class ChatFormat:
    """The model folder's way to write a conversation."""

    def __init__(self, model_dir: Path, renderer: str | dict[str, Any] | None) -> None:
        self._model_dir, self._choice = model_dir, renderer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-format")
        self._loaded: tuple[Any, Any] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def render(self, messages: Messages, tools: Tools) -> tuple[list[int], list[int]]:
        """Prompt ids up to where the assistant's turn begins, and the ids that end that turn.

        Raises RequestError when the renderer or the chat template does not take these messages.
        """
        _check_text_only(messages)

        def work(renderer: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
            del tokenizer
            try:
                ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            except Exception as error:
                # Templates raise whatever they like on messages they do not know.
                raise RequestError(
                    f"the chat template does not take these messages: {type(error).__name__}: {error}", param="messages"
                ) from error
            return list(ids), list(renderer.get_stop_token_ids())

        return await self._run(work)

    async def parse(
        self, completion_ids: list[int], prompt_ids: list[int], tools: Tools, finish_reason: str
    ) -> tuple[dict[str, Any], str]:
        """The assistant message (OpenAI form) and its finish reason: `tool_calls` where it calls tools."""

        def work(renderer: Any, tokenizer: Any) -> tuple[dict[str, Any], str]:
            del tokenizer
            parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
            message = _to_message(parsed)
            calls = message.get("tool_calls") and finish_reason == "stop"
            return message, "tool_calls" if calls else finish_reason

        return await self._run(work)

    async def texts(self, token_ids: list[int]) -> list[str]:
        """Each id's own text."""
        return await self._run(lambda _, tokenizer: [tokenizer.decode([token_id]) for token_id in token_ids])

    async def text(self, token_ids: list[int]) -> str:
        """The text of all ids together, without special tokens."""
        return await self._run(lambda _, tokenizer: tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _run(self, work: Callable[[Any, Any], T]) -> T:
        def loaded() -> T:
            if self._loaded is None:
                self._loaded = self._load()
            return work(*self._loaded)

        return await asyncio.get_running_loop().run_in_executor(self._thread, loaded)

    def _load(self) -> tuple[Any, Any]:
        from orchestrator.chat_renderer import build_renderer, read_tokenizer

        try:
            _, renderer = build_renderer(str(self._model_dir), self._choice)
            return renderer, read_tokenizer(str(self._model_dir))
        except ConfigError as error:
            raise RequestError(
                f"chat is not available: {error} (token ids at /inference/v1/generate need no chat template)",
                status=501,
                code="chat_unavailable",
            ) from error


def _check_text_only(messages: Messages) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] has role {message.get('role')!r}, expected a string",
                               param="messages")  # fmt: skip
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise RequestError(f"messages[{index}] has a content part of type {kind!r}: this model reads text only",
                                   param="messages")  # fmt: skip
        if not (content is None or isinstance(content, (str, list))):
            raise RequestError(f"messages[{index}] has content of type {type(content).__name__}, expected text",
                               param="messages")  # fmt: skip


def _to_message(parsed: ParsedResponse) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    calls = [call for call in parsed.tool_calls if isinstance(call.name, str)]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": _as_json(call.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    return message


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
