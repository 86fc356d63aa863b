"""Renderers that keep broken tool calls visible.

The stock Qwen3 renderer parses a completion into content and tool calls. Verifiers then drops every call without a
name, and its text with it. The rest looks like an empty answer. Here a call that cannot be run stays in the content as
the text that the model wrote, `<tool_call>...</tool_call>`. So the tool loop can answer it, the trace shows it, and
rendering the message again gives the same tokens.

Name the class in the client's configuration:

    renderer = { name = "custom", import_path = "orchestrator.environments.tool_loop.renderer.ToolQwen3Renderer" }
"""

import json
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

RUNNABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
"""Calls to pass on. The tool loop answers an unknown name."""


class VisibleCallsQwen3Renderer(Qwen3Renderer):
    """The Qwen3 renderer, for models with the official chat template."""

    config_class = Qwen3RendererConfig

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        """Parse like the base class, but move each call that cannot be run into the content."""
        try:
            parsed = super().parse_response(token_ids, **options)
        except (ValueError, RecursionError):
            # json.loads fails on absurd numbers and nesting with errors that the base class does not expect.
            return ParsedResponse(content=self._text(token_ids))
        runnable = [call for call in parsed.tool_calls if _runnable(call)]
        broken = [call for call in parsed.tool_calls if not _runnable(call)]
        if broken and not runnable:
            # The whole reply as it was written, white space and all, so that it renders to the same tokens again.
            parsed.content = self._text(token_ids)
        for call in broken if runnable else ():
            start, end = call.token_span or (0, 0)
            parsed.content += self._text(token_ids[start:end])
        parsed.tool_calls = runnable
        return parsed

    def _text(self, token_ids: list[int]) -> str:
        stops = set(self.get_stop_token_ids())
        return self._tokenizer.decode([i for i in token_ids if i not in stops], skip_special_tokens=False)


class ToolQwen3Renderer(VisibleCallsQwen3Renderer):
    """For models that never think, such as the tiny ones that ship here: no turn gets an empty think block."""

    @staticmethod
    def _last_query_index(messages: list[Any]) -> int:
        return len(messages)


def _runnable(call: ParsedToolCall) -> bool:
    if call.status not in RUNNABLE or not isinstance(call.name, str):
        return False
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
