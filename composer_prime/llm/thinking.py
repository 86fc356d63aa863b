"""Thinking that stands in the text of an answer, between tags."""

from __future__ import annotations

import re

_TAG = re.compile(r"<think(?:ing)?>|</think(?:ing)?>\s*")
_LOOK_BACK = 200
"""Characters before a tag that tell whether it is quoted."""


def split_thinking(text: str) -> tuple[str, str]:
    """(what others see, what was thought) of a text with <think> blocks, in time linear in its length.

    Templates of DeepSeek-R1 and Qwen3 write the opening tag into the prompt: an answer whose first tag closes began
    with a thought. An answer that was cut within its first thought is all thought. A tag in quotes is spoken of.
    """
    if "think" not in text:
        return text, ""
    seen: list[str] = []
    thoughts: list[str] = []
    done, opened = 0, None
    for tag in _TAG.finditer(text):
        if _is_quoted(text, tag):
            continue
        if not tag[0].startswith("</"):
            opened = tag if opened is None else opened
        elif opened is not None or not thoughts:
            start, inner = (done, done) if opened is None else opened.span()
            seen.append(text[done:start])
            thoughts.append(text[inner : tag.start()])
            done, opened = tag.end(), None
    if opened is not None and not thoughts and not text[: opened.start()].strip():
        return "", text[opened.end() :].strip()
    return "".join([*seen, text[done:]]), "\n\n".join(thought.strip() for thought in thoughts)


def _is_quoted(text: str, tag: re.Match[str]) -> bool:
    """Whether the same quote stands on both sides; a backtick that closes what stands before the tag is none."""
    quote = text[max(tag.start() - 1, 0) : tag.start()]
    if quote != text[tag.end() : tag.end() + 1] or quote not in ("`", "'", '"'):
        return False
    line = text.rfind("\n", max(tag.start() - _LOOK_BACK, 0), tag.start()) + 1
    return quote != "`" or text.count("`", max(line, tag.start() - _LOOK_BACK, 0), tag.start()) % 2 == 1
