"""The family of a model, by its name. A teacher never judges a trace of its own family.

Models of one family share training data and habits. Names come in every spelling (`us.anthropic.claude-3`,
`Qwen2.5-7B-GPTQ`), so whole words are searched behind the last slash. The part before it names the server; it counts
only if the rest tells nothing. A name that no rule matches, or that two families share, is UNKNOWN: replay refuses it.
"""

from __future__ import annotations

import os
import re

UNKNOWN = "unknown"
_NAMES: dict[str, str] = {
    "deepseek": r"deepseek",
    "claude": r"claude",
    "gpt": r"(?:chat)?gpt|codex|davinci|(?<![\w-])o[134](?!\d)",
    "gemini": r"gemini|(?:code|pali|med|shield|recurrent)?gemma|palm",
    "qwen": r"(?:code)?qwen|qwq|qvq|tongyi",
    "llama": r"(?:code|tiny|open)?llama",
    "mistral": r"mistral|mixtral|codestral|devstral|magistral|ministral|pixtral",
    "kimi": r"kimi|moonshot",
    "glm": r"(?:chat)?glm",
    "minimax": r"minimax|abab",
    "grok": r"grok",
    "nova": r"nova",
    "command": r"command-[ar]",
    "phi": r"phi-?\d",
    "smollm": r"smollm",
    "nemotron": r"nemotron",
    "granite": r"granite",
    # `seed` alone is a random seed more often than a model.
    "seed": r"doubao|seed-(?:oss|coder|\d\.\d)",
}
_PROVIDERS: dict[str, str] = {
    # Not `openai/`: it stands before every model behind an OpenAI-compatible endpoint.
    "claude": r"anthropic",
    "llama": r"meta",
    "mistral": r"mistralai",
    "kimi": r"moonshotai",
    "glm": r"zai|zai-org|z-ai|thudm",
    "minimax": r"minimaxai",
    "grok": r"xai|x-ai",
    "nova": r"amazon",
    "command": r"cohere|coherelabs",
    "smollm": r"huggingfacetb",
    "granite": r"ibm-granite",
    "seed": r"bytedance-seed",
}
_MAKERS = {
    "openai": "gpt",
    "google": "gemini",
    "alibaba": "qwen",
    "zhipu": "glm",
    "nvidia": "nemotron",
    "ibm": "granite",
}
"""Companies that people name for their models."""


def _words(pattern: str) -> re.Pattern[str]:
    """Match whole words: no letter before or behind, but perhaps a digit (`qwen3`)."""
    return re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.IGNORECASE)


_NAMED = {family: _words(pattern) for family, pattern in _NAMES.items()}
_HINTED = {family: _words("|".join(filter(None, (_NAMES[family], _PROVIDERS.get(family))))) for family in _NAMES}
_TINY = re.compile(r"^tiny(?:/(\w+))?$")


def family_of(model: str | None) -> str:
    """Return a family such as `claude`, `tiny-teacher_a` for an embedded model, or UNKNOWN."""
    if not model:
        return UNKNOWN
    tiny = _TINY.match(model)
    if tiny:
        return f"tiny-{tiny[1] or 'policy'}"
    whole = model.rstrip("/")
    # A name without a slash is a model's, whatever folder has it.
    return _of(whole, folder=whole.startswith(("/", "~", ".")) or ("/" in whole and os.path.isdir(whole)))


def is_foreign(asked: str, family: str, answered: str) -> bool:
    """Return whether a reply's model is another than asked for, of a known other family."""
    named_alike = asked.rpartition("/")[2] == answered.rpartition("/")[2]
    return not named_alike and UNKNOWN != family_of(answered) != family


def family_named(word: str) -> str:
    """Return the family that a person or a trace calls `word`: `Claude` and `anthropic` are `claude`.

    A word that no rule matches is a family of its own, an empty one UNKNOWN.
    """
    word = word.strip().lower()
    if not word or word == UNKNOWN:
        return UNKNOWN
    family = family_of(word) if _TINY.match(word) else _of(word, folder=False)
    return _MAKERS.get(word, word) if family == UNKNOWN else family


def _of(name: str, *, folder: bool) -> str:
    """Return the family of a name, which may begin with its server unless it is a folder."""
    own_name = name.rpartition("/")[2]
    families = [family for family, pattern in _NAMED.items() if pattern.search(own_name)]
    if not families and not folder:
        families = [family for family, pattern in _HINTED.items() if pattern.search(name)]
    return families[0] if len(families) == 1 else UNKNOWN
