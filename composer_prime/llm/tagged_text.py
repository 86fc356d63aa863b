"""Thinking and tool calls that stand between tags in the text of an answer.

Two places differ on purpose. inference/model_server.py removes closed <think> blocks only, because its clients split
the rest. traces/replay/actions/text_actions.py looks for the beginnings of calls in any agent's notation.
"""

from __future__ import annotations

import json
import re
from typing import Any

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""A closed call; group 1 is what should be JSON."""
TOOL_CALL_OR_REST = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)
"""A call whose closing tag may be missing: then it reaches to the end."""
_THINK_TAG = re.compile(r"<think(?:ing)?>|</think(?:ing)?>\s*")
_LOOK_BACK = 200
"""Characters before a tag that tell whether it is quoted."""


def split_thinking(text: str) -> tuple[str, str]:
    """Return (visible text, thinking) of a text with <think> blocks, in time linear in its length.

    Templates of DeepSeek-R1 and Qwen3 write the opening tag into the prompt, so an answer whose first tag is a closing
    one began with a thought. An answer that was cut within its first thought is all thought. A quoted tag is text.
    """
    if "think" not in text:
        return text, ""
    visible: list[str] = []
    thoughts: list[str] = []
    done, opened = 0, None
    for tag in _THINK_TAG.finditer(text):
        if _is_quoted(text, tag):
            continue
        if not tag[0].startswith("</"):
            opened = tag if opened is None else opened
        elif opened is not None or not thoughts:
            start, inner = (done, done) if opened is None else opened.span()
            visible.append(text[done:start])
            thoughts.append(text[inner : tag.start()])
            done, opened = tag.end(), None
    if opened is not None and not thoughts and not text[: opened.start()].strip():
        return "", text[opened.end() :].strip()
    return "".join([*visible, text[done:]]), "\n\n".join(thought.strip() for thought in thoughts)


def read_tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (name, arguments) of the JSON object between a tool call's tags, or None for anything else."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _is_quoted(text: str, tag: re.Match[str]) -> bool:
    """Tell whether the same quote stands on both sides. A backtick that closes earlier text does not count."""
    quote = text[max(tag.start() - 1, 0) : tag.start()]
    if quote != text[tag.end() : tag.end() + 1] or quote not in ("`", "'", '"'):
        return False
    line = text.rfind("\n", max(tag.start() - _LOOK_BACK, 0), tag.start()) + 1
    return quote != "`" or text.count("`", max(line, tag.start() - _LOOK_BACK, 0), tag.start()) % 2 == 1
