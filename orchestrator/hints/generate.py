"""Write the text of a hint for an error turn: from templates, the error itself, a model, or a sibling.

templates.toml documents the format of templates: patterns that name an error, and hints with fields.
"""

from __future__ import annotations

import asyncio
import json
import logging
import string
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import regex

from composer_prime.errors import ConfigError
from orchestrator.hints.endpoint import ChatEndpoint
from orchestrator.rollouts.groups import FinishedRollout, messages_before, tool_replies
from orchestrator.workers.call_schema import json_type
from orchestrator.workers.protocol import MessageRecord

logger = logging.getLogger(__name__)

OTHER = "tool_error"
"""The kind of an error that matches no pattern."""
_HEAD, _TAIL = 2_000, 6_000
_SEARCH_S = 0.25
"""Longest search of one pattern in one answer, in seconds."""
_FIELDS = {"tool_names", "tool", "arguments", "schema", "error"}
_MESSAGE_CHARS = 1_500
_TOTAL_CHARS = 12_000
_WRITE = (
    "You coach a software agent. It is about to take the turn shown last, which will go wrong as shown. Write one "
    "short reminder that it should have read just before that turn: the fact or rule that it missed. Do not solve the "
    "task, do not write the turn for it, do not mention this conversation. Reply with the reminder only."
)
_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTurn:
    """An assistant turn that went wrong."""

    message: int
    """Its position in the rollout's `turns`."""
    turn: int
    """Its number in TurnSpan."""
    kind: str
    """tool_not_found, bad_json, argument_name, argument_type, test_failure, exception, tool_error, failed, or a kind of
    the user's templates."""
    text: str
    """Describes the error: the tool's answer, or the broken rule of the schema."""
    tool: str | None = None
    """The tool that was called."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools on offer, as OpenAI function definitions; empty where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRequest:
    error: ErrorTurn
    rollout: FinishedRollout
    siblings: Sequence[FinishedRollout] = ()
    """The other rollouts of the group."""


HintLayer = Callable[[HintRequest], Awaitable[str | None]]
"""Writes the text of a hint, or returns None. Raises EndpointError where it asks a model.

An own one is a class in `orchestrator.hints.layers`, by import path. It is built once, as `Class(**settings)`.
"""


# -- templates -----------------------------------------------------------------------------------------------------


class HintTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One [[template]] of a file."""

    kind: str
    hint: string.Template
    pattern: regex.Pattern | None = None
    detects: Literal["exception", "test_failure"] | None = None
    """The setting of orchestrator.hints.detect under which the pattern alone makes an answer an error."""

    def __post_init__(self) -> None:
        if not self.hint.is_valid():
            raise ValueError(f"hint {self.hint.template!r} has a lone $; write $$ for a dollar sign")
        if self.detects and self.pattern is None:
            raise ValueError(f"detects is {self.detects!r}: set it together with a pattern")
        fields = _FIELDS | set(self.pattern.groupindex if self.pattern else ())
        unknown = sorted(set(self.hint.get_identifiers()) - fields)
        if unknown:
            raise ValueError(f"hint uses {unknown}, which is not a field; there are {', '.join(sorted(fields))}")

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


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    template: list[HintTemplate]


class Templates:
    """All templates, in the order in which they are tried. `hint` is the layer `template`."""

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
        users = []
        if extra is not None:
            try:
                users = _parse(extra.expanduser().read_text(), str(extra))
            except (OSError, UnicodeDecodeError) as error:
                message = f"orchestrator.hints.templates_file is {extra}, which cannot be read: {error}"
                raise ConfigError(message) from None
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


def _parse(text: str, origin: str) -> list[HintTemplate]:
    try:
        return msgspec.convert(tomllib.loads(text), _File, dec_hook=_compiled).template
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{origin} is not a file of hint templates: {error}") from None


def _compiled(kind: type, value: Any) -> string.Template | regex.Pattern:
    text = msgspec.convert(value, str)
    if kind is string.Template:
        return string.Template(text)
    try:
        return regex.compile(text)
    except regex.error as error:
        raise ValueError(f"pattern {text!r} is not a regular expression: {error}") from None


def excerpt(text: str) -> str:
    """Return beginning and end of a long answer: errors stand there, and searching stays cheap."""
    return text if len(text) <= _HEAD + _TAIL else text[:_HEAD] + "\n" + text[-_TAIL:]


def _fields(error: ErrorTurn) -> dict[str, str]:
    """Return the value of each of _FIELDS, "" for one without a value."""
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


# -- other layers --------------------------------------------------------------------------------------------------


async def raw_error(request: HintRequest) -> str | None:
    """Quote the tool's error."""
    error = " ".join(excerpt(request.error.text).split())
    return f"Reminder: The next step can lead to this error: {cut(error, _ERROR_CHARS)}" if error else None


async def model_hint(endpoint: ChatEndpoint, request: HintRequest) -> str | None:
    """Ask a model, which reads the conversation, the turn and the error."""
    turns, position = request.rollout.turns, request.error.message
    conversation = _transcript(messages_before(turns, position))
    error = f"What went wrong ({request.error.kind}):\n{request.error.text[:1000]}"
    content = f"{conversation}\n\nThe turn:\n{_message_text(turns[position])}\n\n{error}"
    text = await endpoint.ask([{"role": "system", "content": _WRITE}, {"role": "user", "content": content}])
    return " ".join(text.split()) or None


async def sibling_demonstration(request: HintRequest) -> str | None:
    """Show the calls of the group's best rollout if its reward is higher than this rollout's."""
    reward = max(request.rollout.reward or 0.0, 0.0)
    better = [sibling for sibling in request.siblings if (sibling.reward or 0.0) > reward]
    best = max(better, key=lambda sibling: (sibling.reward, -sibling.sibling), default=None)
    return None if best is None else f"Reminder: This worked before: {_steps(best)}"


def _steps(rollout: FinishedRollout) -> str:
    """Return the calls that were answered without an error, and the last reply."""
    steps = [
        f"{call.name} {call.arguments}"
        for index, replies in tool_replies(rollout.turns).items()
        for call in rollout.turns[index].tool_calls
        if not any(rollout.turns[reply].error for reply in replies)
    ]
    last = next((turn.text.strip() for turn in reversed(rollout.turns) if turn.role == "assistant"), "")
    return "; then ".join([*steps, *([last] if last else [])])


# -- texts ---------------------------------------------------------------------------------------------------------


def _transcript(turns: Sequence[MessageRecord]) -> str:
    """Return one paragraph a message, without the middle of long messages and of a long conversation."""
    return _without_middle("\n\n".join(map(_message_text, turns)), _TOTAL_CHARS)


def _message_text(turn: MessageRecord) -> str:
    """Return role, text and calls of a message."""
    parts = [turn.text.strip(), *(f"calls {call.name} {call.arguments}" for call in turn.tool_calls)]
    return "\n".join([f"[{turn.role}]", *(_without_middle(part, _MESSAGE_CHARS) for part in parts if part)])


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str, limit: int) -> str:
    """Return the beginning of `text`, at most `limit` characters, ending at a word."""
    if len(text) <= limit:
        return text
    return text[: limit - 3].rsplit(" ", 1)[0] + "..."
