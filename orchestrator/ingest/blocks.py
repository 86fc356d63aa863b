"""Content of messages, in the several shapes that formats write it."""

from __future__ import annotations

from typing import Any


def text_of(content: Any) -> str:
    """The text of a string, a block, or a list of either; what is not text becomes a short mark such as [image]."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part for block in content if (part := text_of(block)))
    if not isinstance(content, dict):
        return ""
    kind = content.get("type")
    if kind in ("text", "input_text", "output_text") or (kind is None and "text" in content):
        text = content.get("text")
        return text if isinstance(text, str) else text_of(text) if isinstance(text, list) else ""
    if kind in ("image", "image_url", "document", "input_image"):
        return f"[{kind}]"
    return text_of(content["content"]) if isinstance(content.get("content"), str | list) else ""


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; nothing where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str | None:
    """`value` where it is a string."""
    return value if isinstance(value, str) else None
