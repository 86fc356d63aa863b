"""A renderer for any model whose folder has a chat template, SmolLM2 among them.

It is renderers' DefaultRenderer with three differences:

1. A message without content renders as an empty one; SmolLM2's own template cannot print None.
2. The next turn's prompt extends the tokens of the last one, wherever the template keeps history as it was written.
   Re-tokenising what was sampled could give other ids than were sampled, and so another conversation to train on.
3. Tool calls written as `<tool_call>{"name": …, "arguments": {…}}</tool_call>` are read.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jinja2
from renderers.base import (
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolSpec,
    extract_message_tool_names,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer, _decode_tool_call_arguments

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ChatTemplateRenderer(DefaultRenderer):
    """renderers' DefaultRenderer, made fit for training on conversations (the three differences are above)."""

    config_class = DefaultRendererConfig
    _MARK = "\u2063<think>\nabc\n</think>\n\nxyz\u2063"

    @property
    def supports_tools(self) -> bool:
        """Whether the template knows of tools."""
        return self._tool_parser is not None or "tools" in (self._tokenizer.chat_template or "")

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        """Content and tool calls of a completion; what is no well-formed call stays in the content."""
        parsed = super().parse_response(token_ids, **options)
        if options.get("tools") and self._tool_parser is None:
            calls = [(block, _read_call(block[1])) for block in _CALL.finditer(parsed.content)]
            parsed.tool_calls = [call for _, call in calls if call is not None]
            if parsed.tool_calls:
                broken = "".join(block[0] for block, call in calls if call is None)
                parsed.content = _CALL.sub("", parsed.content) + broken
        return parsed

    def _apply(self, messages: list[Message], **options: Any) -> list[int]:
        return super()._apply([_with_content(message) for message in messages], **options)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt: the previous ids, then the template's text for `new_messages`. None means render anew."""
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        stop = self._tokenizer.eos_token_id
        previous = trim_to_turn_close(previous_prompt_ids, previous_completion_ids, {stop}, synthesize_close=stop)
        pieces = self._pieces(new_messages, tools) if previous is not None else None
        if pieces is None:
            return None
        ids, owners = list(previous), [-1] * len(previous)
        for index, piece in enumerate(pieces):
            new_ids = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += new_ids
            owners += [index if index < len(new_messages) else -1] * len(new_ids)
        return RenderedTokens(
            token_ids=ids,
            message_indices=owners,
            message_roles=[message.get("role") or "" for message in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _pieces(self, new_messages: list[Message], tools: list[ToolSpec] | None) -> list[str] | None:
        """The template's text after an assistant turn's stop token: one piece a new message, then the opening of the
        answer. None where the template does not simply append."""
        opening = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": self._MARK}]
        messages = opening + [_with_content(message) for message in new_messages]
        try:
            texts = [self._text(messages[: len(opening) + count + 1], tools) for count in range(len(new_messages))]
            texts.append(self._text(messages, tools, add_generation_prompt=True))
        except jinja2.TemplateError:
            return None
        _, mark, tail = texts[0].partition(self._MARK)
        if not mark or not tail.startswith(self._tokenizer.eos_token):
            return None
        pieces = [tail[len(self._tokenizer.eos_token) :]]
        for shorter, longer in itertools.pairwise(texts):
            if not longer.startswith(shorter):
                return None
            pieces.append(longer[len(shorter) :])
        return pieces

    def _text(self, messages: list[Message], tools: list[ToolSpec] | None, add_generation_prompt: bool = False) -> str:
        options = {**(self.config.model_extra or {}), "add_generation_prompt": add_generation_prompt}
        messages = _decode_tool_call_arguments(messages)
        return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def _with_content(message: Message) -> Message:
    return message if message.get("content") is not None else {**message, "content": ""}


def _read_call(text: str) -> ParsedToolCall | None:
    """The call in the text between the tags, None where it is no JSON object with a name and arguments."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ParsedToolCall(raw=text, name=name, arguments=arguments)
