"""Turn messages into token ids and back, for /v1/chat/completions.

For judges, probes and people: verifiers' training client renders by itself. The renderer loads on the first request,
and has a thread of its own: it is not thread-safe.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from composer_prime.errors import RequestError
from composer_prime.wire.node_messages import Answer

if TYPE_CHECKING:
    from renderers.base import ParsedResponse

T = TypeVar("T")
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class ChatFormat:
    def __init__(self, model_dir: Path, renderer: str | dict[str, Any] | None) -> None:
        self._model_dir = model_dir
        self._renderer = renderer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-format")
        self._loaded: Any = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def render(self, messages: Messages, tools: Tools) -> tuple[list[int], list[int]]:
        """Return the prompt ids up to the assistant's turn, and the ids that end that turn.

        Raises RequestError when the renderer or the chat template does not take these messages.
        """
        for index, message in enumerate(messages):
            if (problem := _message_problem(message)) is not None:
                raise RequestError(f"messages[{index}] has {problem}", param="messages")

        def work(renderer: Any) -> tuple[list[int], list[int]]:
            try:
                ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            except Exception as error:
                # A template may raise any error.
                raise RequestError(
                    f"the chat template does not take these messages: {type(error).__name__}: {error}", param="messages"
                ) from error
            return list(ids), list(renderer.get_stop_token_ids())

        return await self._run(work)

    async def parts(self, messages: Messages, tools: list[dict[str, Any]]) -> str:
        """Say how many tokens of a prompt its parts have."""
        from orchestrator.chat_renderer import prompt_parts

        async def count(messages: Messages, tools: Tools) -> int:
            return len((await self.render(messages, tools or None))[0])

        return await prompt_parts(count, messages, tools)

    async def parse(
        self, completion_ids: list[int], prompt_ids: list[int], tools: Tools, finish_reason: str
    ) -> tuple[dict[str, Any], str]:
        """Return the assistant message in OpenAI form and its finish reason."""

        def work(renderer: Any) -> tuple[dict[str, Any], str]:
            parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
            message = _to_message(parsed)
            calls = message.get("tool_calls") and finish_reason == "stop"
            return message, "tool_calls" if calls else finish_reason

        return await self._run(work)

    async def _run(self, work: Callable[[Any], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._load()))

    def _load(self) -> Any:
        if self._loaded is None:
            from orchestrator.chat_renderer import build_renderer

            _, self._loaded = build_renderer(str(self._model_dir), self._renderer)
        return self._loaded


def _message_problem(message: dict[str, Any]) -> str | None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        return f"role {role!r}, expected a string"
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            return f"a content part of type {kind!r}: this model reads text only; leave it out, or send it in words"
    if not (content is None or isinstance(content, (str, list))):
        return f"content of type {type(content).__name__}, expected text"
    return None


def _to_message(parsed: ParsedResponse) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    calls = [call for call in parsed.tool_calls if isinstance(call.name, str)]
    for call in calls:
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {})
        function = {"name": call.name, "arguments": arguments}
        message.setdefault("tool_calls", []).append(
            {"id": call.id or f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        )
    return message


def chat_reply(
    model: str, num_prompt: int, answer: Answer, token_ids: list[int], message: dict[str, Any], finish_reason: str
) -> dict[str, Any]:
    """Return a chat completion of OpenAI's, with `token_ids` and `version_spans`."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "token_ids": token_ids, "logprobs": None}
    return {
        "id": f"chatcmpl-{answer.record_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": num_prompt + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": answer.prompt_cached},
        },
        "version_spans": answer.version_spans,
    }
