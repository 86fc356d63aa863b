"""What is read of a chat completion: the assistant's message, and what the call cost.

Two places treat thinking and calls in the text otherwise on purpose: inference/model_server.py removes closed <think>
blocks only, for its clients split the rest; traces/replay/voting.py reads any agent's notation.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import msgspec

from composer_prime.llm.cache import CachedAnswer, Message
from composer_prime.llm.prices import Price

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""Group 1 is what should be JSON."""
TOOL_CALL_OR_REST = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)
"""Without a closing tag it reaches to the end."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_THINK_TAG = re.compile(r"<think(?:ing)?>|</think(?:ing)?>\s*")
_LOOK_BACK = 200
"""Characters before a tag that tell whether it is quoted."""


Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text; some endpoints give the object itself."""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts, of which texts count."""
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _CostDetails(msgspec.Struct):
    upstream_inference_cost: float | None = None


class Usage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens
    prompt_tokens_details: Any = None
    """An object with cached_tokens; an unreadable one gives no discount."""
    prompt_cache_hit_tokens: Any = None
    """DeepSeek's name for cached_tokens."""
    cost: float | None = None
    """USD, where the endpoint states its charge (OpenRouter)."""
    is_byok: bool | None = None
    """Whether the provider charged beside that, by a key of the user's own."""
    cost_details: _CostDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        listed = details.get("cached_tokens") if isinstance(details, dict) else None
        for value in (listed, self.prompt_cache_hit_tokens):
            if isinstance(value, int | float) and 0 < value < math.inf:
                return int(value)
        return 0

    def cost_usd(self, price: Price) -> float:
        """Return the stated charge, with what the provider charged beside it, else the price list's."""
        if self.cost is None or self.cost < 0:
            return price.cost_usd(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        beside = self.cost_details.upstream_inference_cost if self.cost_details and self.is_byok else None
        return self.cost + (beside or 0.0)


class Completion(msgspec.Struct):
    """The part of a chat completion that is read."""

    choices: list[_Choice]
    usage: Usage | None = None
    model: str | None = None


def reply_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's content as one text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def answer_of(completion: Completion, tokens: tuple[int, int], usd: float, seconds: float) -> CachedAnswer:
    """Return the first choice without its thinking. `tokens`: (prompt, answer)."""
    choice = completion.choices[0]
    content = split_thinking(reply_text(choice.message.content))[0].strip()
    message: Message = {"role": "assistant", "content": content or None}
    if choice.message.tool_calls:
        message["tool_calls"] = []
        for index, call in enumerate(choice.message.tool_calls):
            given = call.function.arguments
            text = storable_arguments(given) if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": text}
            message["tool_calls"].append({"id": call.id or f"call_{index}", "type": "function", "function": function})
    return CachedAnswer(
        message=message,
        finish_reason=choice.finish_reason or "stop",
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        cost_usd=usd,
        seconds=seconds,
        model=completion.model,
    )


def storable_arguments(arguments: str) -> str:
    """Return a call's arguments with "?" for each half character, which no file or tokenizer takes."""
    if not _SURROGATE.search(arguments):
        return arguments
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    whole = text.encode("utf-8", "replace").decode()
    return arguments if whole == text else whole


def lenient_json(content: bytes) -> Any:
    """Return a JSON value, with "?" for each half character."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = json.loads(content.decode("utf-8-sig"))
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def split_thinking(text: str) -> tuple[str, str]:
    """Return (visible text, thinking) of a text with <think> blocks, in linear time.

    Templates may write the opening tag into the prompt, so a first closing tag ends a thought. An answer that was cut
    within its first thought is all thought. A quoted tag is text.
    """
    if "think" not in text:
        return text, ""
    visible: list[str] = []
    thoughts: list[str] = []
    done, opened = 0, None
    for tag in [tag for tag in _THINK_TAG.finditer(text) if not _is_quoted(text, tag)]:
        if not tag[0].startswith("</"):
            opened = opened or tag
        elif opened is not None or not thoughts:
            start, inner = (done, done) if opened is None else opened.span()
            visible.append(text[done:start])
            thoughts.append(text[inner : tag.start()])
            done, opened = tag.end(), None
    if opened is not None and not thoughts and not text[: opened.start()].strip():
        return "", text[opened.end() :].strip()
    return "".join([*visible, text[done:]]), "\n\n".join(map(str.strip, thoughts))


def read_tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (name, arguments) of the JSON object between a tool call's tags, if it is one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _is_quoted(text: str, tag: re.Match[str]) -> bool:
    """Tell whether the same quote is on both sides, unless a backtick closes earlier text."""
    quote = text[max(tag.start() - 1, 0) : tag.start()]
    if quote != text[tag.end() : tag.end() + 1] or quote not in ("`", "'", '"'):
        return False
    line = text.rfind("\n", max(tag.start() - _LOOK_BACK, 0), tag.start()) + 1
    return quote != "`" or text.count("`", max(line, tag.start() - _LOOK_BACK, 0), tag.start()) % 2 == 1
