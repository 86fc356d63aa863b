"""Hint templates: patterns that name an error, and hints with fields. templates.toml documents the format."""

from __future__ import annotations

import asyncio
import json
import logging
import string
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import regex

from composer_prime.errors import ConfigError
from orchestrator.hints.error_turn import ErrorTurn, HintRequest

OTHER = "tool_error"
"""The kind of an error that matches no pattern."""
_HEAD, _TAIL = 2_000, 6_000
_SEARCH_S = 0.25
"""Longest search of one pattern in one answer, in seconds."""

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    hint: str
    pattern: str | None = None
    detects: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    template: list[_Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTemplate:
    """One [[template]] of a file."""

    kind: str
    hint: string.Template
    pattern: regex.Pattern[str] | None
    detects: str | None
    """The setting of orchestrator.hints.detect under which the pattern alone makes an answer an error."""

    def search(self, text: str) -> regex.Match[str] | None:
        """Return the pattern's match, or None, also where the search takes longer than a quarter of a second.

        `re` would hold the interpreter, and with it the event loop, for as long as a pattern backtracks.
        """
        if self.pattern is None:
            return None
        try:
            return self.pattern.search(text, timeout=_SEARCH_S, concurrent=True)
        except TimeoutError:
            logger.warning(
                "hint template of kind %r: searching %d characters for %r took more than %g s and was given up; bound "
                "its repetitions", self.kind, len(text), self.pattern.pattern, _SEARCH_S,
            )  # fmt: skip
            return None


class Templates:
    """All templates, in the order in which they are tried. This is the layer `template`."""

    name = "template"

    def __init__(self, templates: list[HintTemplate]) -> None:
        self._templates = templates

    @property
    def kinds(self) -> set[str]:
        """The kinds that templates name, and the kind of all other errors."""
        return {OTHER, *(template.kind for template in self._templates)}

    @classmethod
    def load(cls, extra: Path | None = None) -> Templates:
        """Load the user's file `extra`, then the shipped templates. Raises ConfigError."""
        shipped = resources.files("orchestrator.hints").joinpath("templates.toml").read_text()
        users = _parse(_read(extra), str(extra)) if extra is not None else []
        return cls(users + _parse(shipped, "orchestrator/hints/templates.toml"))

    def kind_of(self, text: str) -> str:
        """Return the kind of error that `text` reports."""
        part = excerpt(text)
        return next((template.kind for template in self._templates if template.search(part)), OTHER)

    def detected(self, text: str, allowed: set[str]) -> str | None:
        """Return the kind of error in an answer that the environment does not call an error, or None."""
        part = excerpt(text)
        detecting = (template for template in self._templates if template.detects in allowed)
        return next((template.kind for template in detecting if template.search(part)), None)

    async def hint(self, request: HintRequest) -> str | None:
        return await asyncio.to_thread(self.fill, request.error)

    def fill(self, error: ErrorTurn) -> str | None:
        """Return the hint of the first template of the error's kind that can be filled in."""
        part, fields = excerpt(error.text), _fields(error)
        for template in self._templates:
            if template.kind != error.kind:
                continue
            match = template.search(part)
            if template.pattern and match is None:
                continue
            named = {key: value.strip() for key, value in match.groupdict("").items()} if match else {}
            try:
                return template.hint.substitute({key: value for key, value in (fields | named).items() if value})
            except KeyError:
                continue
        return None


def excerpt(text: str) -> str:
    """Return beginning and end of a long answer: errors stand there, and searching stays cheap."""
    return text if len(text) <= _HEAD + _TAIL else text[:_HEAD] + "\n" + text[-_TAIL:]


def _fields(error: ErrorTurn) -> dict[str, str]:
    functions = [tool.get("function", {}) for tool in error.tools]
    called = next((function for function in functions if function.get("name") == error.tool), None)
    parameters = (called or {}).get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {
        "tool_names": ", ".join(str(function.get("name")) for function in functions),
        "tool": error.tool or "",
        "arguments": ", ".join(f"{name} ({json_type(rule)})" for name, rule in properties.items()),
        "schema": json.dumps(parameters) if parameters else "",
        "error": next((line.strip() for line in error.text.splitlines() if line.strip()), "")[:300],
    }


def json_type(rule: Any) -> str:
    """Return the type in a property's schema, in words."""
    kind = rule.get("type") if isinstance(rule, dict) else None
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"orchestrator.hints.templates_file is {path}, which cannot be read: {error}") from None


def _parse(text: str, origin: str) -> list[HintTemplate]:
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).template
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{origin} is no file of hint templates: {error}") from None
    return [_template(entry, f"{origin}, template {number}") for number, entry in enumerate(entries, start=1)]


def _template(entry: _Entry, where: str) -> HintTemplate:
    try:
        pattern = regex.compile(entry.pattern) if entry.pattern is not None else None
    except regex.error as error:
        raise ConfigError(f"{where}: pattern {entry.pattern!r} is no regular expression: {error}") from None
    hint = string.Template(entry.hint)
    if not hint.is_valid():
        raise ConfigError(f"{where}: hint {entry.hint!r} has a lone $; write $$ for a dollar sign")
    if entry.detects not in (None, "exception", "test_failure") or (entry.detects and pattern is None):
        raise ConfigError(
            f"{where}: detects is {entry.detects!r}; set 'exception' or 'test_failure', together with a pattern"
        )
    fields = {"tool_names", "tool", "arguments", "schema", "error", *(pattern.groupindex if pattern else ())}
    unknown = sorted(set(hint.get_identifiers()) - fields)
    if unknown:
        raise ConfigError(f"{where}: hint uses {unknown}, which is no field; there are {', '.join(sorted(fields))}")
    return HintTemplate(kind=entry.kind, hint=hint, pattern=pattern, detects=entry.detects)
