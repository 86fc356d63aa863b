"""Which family of models a model belongs to, by its name. A teacher never judges a trace of its own family.

Two models of one family share training data and habits: their agreement says little. Names come in every spelling
(`anthropic/claude-sonnet-4`, `us.anthropic.claude-3`, `litellm_proxy/minimax-m2.7`), so words are looked for anywhere.
A name that no rule knows is UNKNOWN: replay refuses it until someone says what it is.
"""

from __future__ import annotations

import re

UNKNOWN = "unknown"
_RULES: list[tuple[str, str]] = [
    # Distilled models carry two names; who was trained on whose outputs decides, so the teacher's name comes first.
    ("deepseek", r"deepseek"),
    ("claude", r"claude|anthropic"),
    ("gpt", r"gpt|chatgpt|openai|codex|davinci|\bo[134](?:-|$|\b)"),
    ("gemini", r"gemini|gemma|palm"),
    ("qwen", r"qwen|qwq|qvq|tongyi"),
    ("llama", r"llama|meta-"),
    ("mistral", r"mistral|mixtral|codestral|devstral|magistral|ministral"),
    ("kimi", r"kimi|moonshot"),
    ("glm", r"\bglm|chatglm|zai-org|z-ai"),
    ("minimax", r"minimax|abab"),
    ("grok", r"grok|x-ai|xai"),
    ("nova", r"nova-|amazon"),
    ("command", r"command-[ar]|cohere"),
    ("phi", r"\bphi-?\d"),
    ("smollm", r"smollm"),
    ("nemotron", r"nemotron"),
    ("granite", r"granite"),
    ("seed", r"doubao|seed-"),
]
_COMPILED = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _RULES]
_TINY = re.compile(r"^tiny(?:/(\w+))?$")


def family_of(model: str | None) -> str:
    """The family of `model`: a word such as `claude`, `tiny-teacher_a` for an embedded model, or UNKNOWN."""
    if not model:
        return UNKNOWN
    tiny = _TINY.match(model)
    if tiny:
        return f"tiny-{tiny[1] or 'policy'}"
    return next((family for family, pattern in _COMPILED if pattern.search(model)), UNKNOWN)
