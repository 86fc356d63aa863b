"""Mask secrets in a trace before anything else reads it: keys, tokens, passwords, e-mail addresses, home folders.

    secret_patterns.py  secrets that their form, a header, a URL or a command gives away
    named_values.py     values beside a telling name, in text and in JSON
    personal.py         what names a person

Three choices:

1. Entropy detectors stay off. Commit hashes and ids fill agent traces, and masking them would change the actions.
2. A pattern runs only where a literal occurs that every match must hold. Ordinary text costs almost nothing.
3. The time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from composer_prime.traces.ingest.masking import named_values, personal
from composer_prime.traces.ingest.masking.secret_patterns import RULES

_LITERALS = [(literal, number) for number, (_, literals, _) in enumerate(RULES) for literal in literals]
"""A flat list of (literal, rule number). Most texts hold no literal, and this scan is their whole cost."""
_PLACEHOLDER = re.compile(
    r"<.*>.*|\{.*\}.*|\$.*|%[sd]|%\(.*|\*+|[xX]{3,}|.{0,16}\.\.\.|(?i:pass(?:word|wd)?|pwd|token|secret)"
)
_RULE = r"\w+(?::[\w,]+)?"
_PLAIN_VALUE = re.compile(
    r"(?:[A-Za-z_.\s-]|:(?=\s|\Z))*|\W*|<masked:.*"
    r"|(?=\S*\s)(?:[\s.,:;!?()'/-]|[A-Za-z]+(?:32|64|128|256|384|512)?(?!\w))*"
    r"|(?=.*\b(?:characters|chars|digits|bytes|bits|must|at least|at most)\b)[\w\s.,:;!?()'/-]*"
    rf"|(?=(?:{_RULE}\|)*(?:required|nullable|sometimes|min|max|string|confirmed|encrypted|hashed)\b){_RULE}(?:\|{_RULE})*"
)
"""Values in quotes beside a name that hold no secret: words, punctuation, masked values, validation
rules (`required|min:8`), and sentences without a number or about password rules. Pass phrases have numbers."""


class Masker:
    """Mask text, and count the masked secrets by kind in `counts`."""

    def __init__(self, counts: Counter[str], enabled: bool = True) -> None:
        self.counts = counts
        self._enabled = enabled

    def text(self, text: str) -> str:
        """Replace every secret in `text` by `<masked:kind>`, and the owner of a home folder or file by `user`."""
        if not self._enabled or len(text) < 6:
            return text
        for number in sorted({number for literal, number in _LITERALS if literal in text}):
            kind, _, pattern = RULES[number]
            text = pattern.sub(self._replacer(kind), text)
        lowered = lower(text)
        if any(stem in lowered for stem in named_values.STEMS) and any(quote in text for quote in "'\"`"):
            text = self._mask(text, named_values.quoted_spans(text), _is_value)
            lowered = lower(text)
        if any(word in lowered for word in named_values.WORDS):
            text = self._mask(text, named_values.value_spans(text, lowered), named_values.is_secret)
        if "@" in text or "%40" in text:
            text = self._mask(text, personal.addresses(text), kind="email")
        if "home" in text or "Users" in text:
            text = self._mask(text, personal.owners(text), kind="home-folder")
        if "r--" in text or "rwx" in text or "rw-" in text:
            text = self._mask(text, personal.file_owners(text), kind="file-owner")
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Mask all strings of a JSON value, keys of objects included. `name` is the name beside the value."""
        if not self._enabled:
            return value
        if isinstance(value, str):
            masked = self.text(value)
            kind, spans = named_values.secrets(name, masked)
            return self._mask(masked, spans, kind=kind)
        if isinstance(value, list):
            return [self.value(item, beside) for beside, item in named_values.beside_items(value, name)]
        if isinstance(value, dict):
            return self._members(value)
        return value

    def _members(self, members: dict[str, Any]) -> dict[str, Any]:
        """Mask the members of an object. Keys that become equal are numbered, so that none is lost."""
        masked, alike = dict[str, Any](), Counter[str]()
        for key, beside, item in named_values.beside_members(members):
            name = shown = self.text(key)
            while shown in masked:
                alike[name] += 1
                shown = f"{name} {alike[name] + 1}"
            masked[shown] = self.value(item, beside)
        return masked

    def _replacer(self, kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            start, end = match.span("secret" if "secret" in match.re.groupindex else 0)
            if _PLACEHOLDER.fullmatch(match.string, start, end):
                return match[0]
            self.counts[kind] += 1
            return f"{match.string[match.start() : start]}<masked:{kind}>{match.string[end : match.end()]}"

        return replace

    def _mask(
        self,
        text: str,
        spans: Iterable[tuple[int, int]],
        is_secret: Callable[[str], bool] = bool,
        kind: str = "password",
    ) -> str:
        """Mask the values at `spans` that are secrets. Of two overlapping spans the first is masked."""
        parts, done = [], 0
        for start, end in sorted(spans):
            if start >= done and is_secret(text[start:end]):
                parts += [text[done:start], "user" if kind in ("home-folder", "file-owner") else f"<masked:{kind}>"]
                done = end
                self.counts[kind] += 1
        return "".join([*parts, text[done:]]) if parts else text


def lower(text: str) -> str:
    """Return `text` in lower case with the same length. The few letters with a longer lower case stay."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def _is_value(value: str) -> bool:
    """Check whether a value in quotes beside a name can be a secret."""
    return len(value) >= 6 and not _PLAIN_VALUE.fullmatch(value)
