"""What is read of a chat completion: the assistant's message, and what the call cost."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from composer_prime.llm.cache import CachedAnswer
from composer_prime.llm.tagged_text import split_thinking
from composer_prime.traces.state import Message, storable_arguments

ROUNDING = 0.01
"""By which share a charge may differ from the price list."""
_OWN_KEY_FEE = 0.05
"""What OpenRouter takes for a call by a key of one's own, as a share of its price:
https://openrouter.ai/docs/features/byok."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text; some endpoints give the object itself."""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of which those of type text count."""
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """The part of a chat completion that is read."""

    choices: list[_Choice]
    usage: Any = None


class _CostDetails(msgspec.Struct):
    upstream_inference_cost: float | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None
    """USD, where the endpoint states its charge (OpenRouter)."""
    is_byok: bool | None = None
    """Whether the model's provider charged beside that, by a key of the user's own."""
    cost_details: _CostDetails | None = None

    def charged_usd(self, listed_usd: float) -> float:
        """Return the stated charge, or the price list's where the endpoint states none."""
        if self.cost is None or self.cost < 0:
            return listed_usd
        return self.cost + self._upstream_usd

    def limit_usd(self, listed_usd: float) -> float:
        """Return the most that a call of this price may be charged with."""
        return listed_usd * (1 + ROUNDING + (_OWN_KEY_FEE if self._upstream_usd else 0.0))

    @property
    def _upstream_usd(self) -> float:
        """What the model's provider charged, where `cost` does not hold it."""
        return (self.cost_details.upstream_inference_cost if self.cost_details and self.is_byok else None) or 0.0


def reply_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's content as one text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def answer_of(completion: Completion, tokens: tuple[int, int], usd: float, seconds: float) -> CachedAnswer:
    """Return the first choice without its thinking. `tokens`: of prompt and answer."""
    choice = completion.choices[0]
    content = split_thinking(reply_text(choice.message.content))[0].strip()
    message: Message = {"role": "assistant", "content": content or None}
    if choice.message.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for index, call in enumerate(choice.message.tool_calls)
        ]
    return CachedAnswer(
        message=message,
        finish_reason=choice.finish_reason or "stop",
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        cost_usd=usd,
        seconds=seconds,
    )


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, str):
        return storable_arguments(arguments)
    return json.dumps(arguments or {}, ensure_ascii=False)


def lenient_json(content: bytes) -> Any:
    """Return a JSON value. Half a character, which JSON can escape and UTF-8 cannot hold, becomes "?"."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = json.loads(content.decode("utf-8-sig"))
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
