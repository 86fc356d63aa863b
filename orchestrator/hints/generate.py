"""Find error turns, and write the text of a hint for each: from templates, the error, a model, or a sibling.

An own detector is a class in `orchestrator.hints.detect`, by import path. It is built once, as `Class(**settings)`, and
called with each finished rollout: `async def __call__(self, rollout) -> list[ErrorTurn]`. `error_turn` builds one.

A model is asked through a `ChatEndpoint`: text in, text out, within one budget for the run. Only usable answers are
cached. The cost of all is in costs.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import string
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import regex

from composer_prime.config.hints import EndpointConfig
from composer_prime.errors import ConfigError, EndpointError
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.client import Budget, ChatClient, ChatRequest, Endpoint
from composer_prime.llm.prices import PER_MILLION, Price
from composer_prime.run.costs import spent, write_cost
from orchestrator.rollouts.groups import SUCCESS, FinishedRollout, messages_before, tool_replies
from orchestrator.workers.call_schema import json_type, violation
from orchestrator.workers.pool import MessageRecord

logger = logging.getLogger(__name__)

OTHER = "tool_error"
"""The kind of an error that matches no pattern."""
ENDS = ("gave_up", "failed", "every")
"""Kinds of the last turn of a rollout, by the rules that find them; of several the first counts."""
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
_BYTES_PER_TOKEN = 2
"""Prompts are reserved for with this few bytes a token; hardly any text has fewer."""
_NAME = "orchestrator.hints.llm"
_TEMPERATURE = 0.0
_CALLS = 8
"""Calls in flight."""
_CUT_THOUGHT = ("<think>", "<thinking>")
"""What an answer begins with whose second thought was cut: its first one was taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTurn:
    """An assistant turn that went wrong."""

    message: int
    """Its position in the rollout's `turns`."""
    turn: int
    """Its number in TurnSpan."""
    kind: str
    """tool_not_found, bad_json, argument_name, argument_type, test_failure, exception, tool_error, repeated, gave_up,
    failed, every, or a kind of the user's templates."""
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


Detector = Callable[[FinishedRollout], Awaitable[list[ErrorTurn]]]
"""Finds turns that went wrong, at most one error a turn."""
HintLayer = Callable[[HintRequest], Awaitable[str | None]]
"""Writes the text of a hint, or returns None. Raises EndpointError where it asks a model. Named as detectors are."""


# -- templates -----------------------------------------------------------------------------------------------------


class HintTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table [[orchestrator.hints.template]]."""

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

    def filled(self, text: str, fields: dict[str, str]) -> str | None:
        """Return the hint; None where the pattern does not match, or a field is empty."""
        match = self.search(text)
        if self.pattern and match is None:
            return None
        named = {key: value.strip() for key, value in match.groupdict("").items()} if match else {}
        try:
            return self.hint.substitute({key: value for key, value in (fields | named).items() if value})
        except KeyError:
            return None


class Templates:
    """All templates, in the order in which they are tried. `hint` is the layer `template`."""

    def __init__(self, templates: list[HintTemplate]) -> None:
        self._templates = templates

    @property
    def kinds(self) -> set[str]:
        """The kinds that templates name, and the kind of all other errors."""
        return {OTHER, *(template.kind for template in self._templates)}

    @classmethod
    def load(cls, tables: Sequence[Mapping[str, str]] = ()) -> Templates:
        """Load the user's `tables`, then the shipped templates. Raises ConfigError."""
        shipped = tomllib.loads(resources.files("orchestrator.hints").joinpath("templates.toml").read_text())
        return cls(_made(tables) + _made(shipped["template"]))

    def kind_of(self, text: str) -> str:
        """Return the kind of error that `text` reports."""
        part = excerpt(text)
        return next((template.kind for template in self._templates if template.search(part)), OTHER)

    def detected(self, text: str, allowed: Set[str]) -> str | None:
        """Return the kind of error in an answer that the environment does not call an error, or None."""
        part = excerpt(text)
        detecting = (template for template in self._templates if template.detects in allowed)
        return next((template.kind for template in detecting if template.search(part)), None)

    async def hint(self, request: HintRequest) -> str | None:
        return await asyncio.to_thread(self.fill, request.error)

    def fill(self, error: ErrorTurn) -> str | None:
        """Return the hint of the first template of the error's kind that can be filled in."""
        part, fields = excerpt(error.text), _fields(error)
        of_kind = (template for template in self._templates if template.kind == error.kind)
        hints = (template.filled(part, fields) for template in of_kind)
        return next((hint for hint in hints if hint is not None), None)


def _made(tables: Sequence[Mapping[str, str]]) -> list[HintTemplate]:
    try:
        return msgspec.convert(tables, list[HintTemplate], dec_hook=_compiled)
    except msgspec.ValidationError as error:
        raise ConfigError(f"orchestrator.hints.template holds no hint templates: {error}") from None


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


# -- detection -----------------------------------------------------------------------------------------------------


def find_errors(templates: Templates, detect: Set[str], rollout: FinishedRollout) -> list[ErrorTurn]:
    """Return the first error of each turn, in the order of the turns. `detect`: as orchestrator.hints.detect."""
    turns = rollout.turns
    replies_to = {index: replies for index, replies in tool_replies(turns).items() if turns[index].turn is not None}
    errors: dict[int, ErrorTurn | None] = {}
    seen: set[tuple] = set()
    for index, replies in replies_to.items():
        error = _in_answers(templates, detect, rollout, index, replies)
        if "schema" in detect and (error is None or error.kind == OTHER):
            # No template knows the tool's words, but the call itself may show what is wrong.
            error = _in_calls(rollout, index) or error
        errors[index] = error or (_repeated(rollout, index, replies, seen) if "repeated" in detect else None)
    last = max(errors, default=None)
    if last is not None and errors[last] is None:
        errors[last] = _at_the_end(detect, rollout, last, replies_to)
    return [error for error in errors.values() if error is not None]


def _repeated(rollout: FinishedRollout, index: int, replies: list[int], seen: set[tuple]) -> ErrorTurn | None:
    """Return the error of calls that got the same replies before. `seen`: those so far; gets these."""
    calls = tuple((call.name, call.arguments) for call in rollout.turns[index].tool_calls)
    exchange = (calls, *(rollout.turns[reply].text for reply in replies))
    if calls and exchange in seen:
        return error_turn(rollout, index, "repeated", "The same call gave the same reply before.", calls[0][0])
    seen.add(exchange)
    return None


def _at_the_end(
    detect: Set[str], rollout: FinishedRollout, last: int, replies_to: dict[int, list[int]]
) -> ErrorTurn | None:
    """Return what is wrong with the last sampled turn, by the rules of ENDS; all but `every` need a failed rollout."""
    if rollout.reward is None:
        return None
    failed, before = rollout.reward < SUCCESS, max((index for index in replies_to if index < last), default=last)
    after_error = any(rollout.turns[reply].error is not None for reply in replies_to[before])
    holds = failed and after_error and not rollout.turns[last].tool_calls, failed, True
    kinds = (kind for kind, is_it in zip(ENDS, holds, strict=True) if is_it and kind in detect)
    return next((error_turn(rollout, last, kind, "The task was not solved.") for kind in kinds), None)


def _in_answers(
    templates: Templates, detect: Set[str], rollout: FinishedRollout, index: int, replies: list[int]
) -> ErrorTurn | None:
    calls = rollout.turns[index].tool_calls
    for number, reply in enumerate(replies):
        text, kind = rollout.turns[reply].text, None
        if rollout.turns[reply].error is not None and "tool_error" in detect:
            kind = templates.kind_of(text)
        kind = kind or templates.detected(text, detect)
        if kind is not None:
            return error_turn(rollout, index, kind, text, calls[number].name if number < len(calls) else None)
    return None


def _in_calls(rollout: FinishedRollout, index: int) -> ErrorTurn | None:
    for call in rollout.turns[index].tool_calls:
        broken_rule = violation(call, tools_of(rollout, index))
        if broken_rule is not None:
            return error_turn(rollout, index, *broken_rule, call.name)
    return None


def error_turn(rollout: FinishedRollout, index: int, kind: str, text: str, tool: str | None = None) -> ErrorTurn:
    """Return the error `kind` of the sampled turn at position `index` of the rollout's messages.

    `text` is what a template's pattern reads. Raises ValueError for a message that was not sampled.
    """
    message = rollout.turns[index]
    if message.turn is None:
        raise ValueError(
            f"message {index} is the {message.role}'s, but only what the model sampled can be an error turn: give the "
            "index of the assistant's message"
        )
    return ErrorTurn(message=index, turn=message.turn, kind=kind, text=text, tool=tool, tools=tools_of(rollout, index))


def tools_of(rollout: FinishedRollout, index: int) -> list[dict]:
    """Return the tools on offer in the conversation of message `index`."""
    session = rollout.turns[index].session
    return rollout.sessions[session].tools if session < len(rollout.sessions) else []


# -- other layers --------------------------------------------------------------------------------------------------


async def raw_error(request: HintRequest) -> str | None:
    """Quote the tool's error."""
    error = " ".join(excerpt(request.error.text).split())
    return f"Reminder: The next step can lead to this error: {cut(error, _ERROR_CHARS)}" if error else None


async def model_hint(endpoint: ChatEndpoint, request: HintRequest) -> str | None:
    """Ask a model, which reads the conversation, the turn and the error."""
    turns, position = request.rollout.turns, request.error.message
    conversation = _without_middle("\n\n".join(map(_message_text, messages_before(turns, position))), _TOTAL_CHARS)
    error = f"What went wrong ({request.error.kind}):\n{request.error.text[:1000]}"
    content = f"{conversation}\n\nThe turn:\n{_message_text(turns[position])}\n\n{error}"
    text = await endpoint.ask([{"role": "system", "content": _WRITE}, {"role": "user", "content": content}])
    return " ".join(text.split()) or None


async def sibling_demonstration(request: HintRequest) -> str | None:
    """Show the calls of a successful rollout of the group, another one for each failed sibling."""
    solved = [sibling for sibling in request.siblings if (sibling.reward or 0.0) >= SUCCESS]
    if not solved:
        return None
    return f"Reminder: This worked before: {_steps(solved[request.rollout.sibling % len(solved)])}"


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


def _message_text(turn: MessageRecord) -> str:
    parts = [turn.text.strip(), *(f"calls {call.name} {call.arguments}" for call in turn.tool_calls)]
    return "\n".join([f"[{turn.role}]", *(_without_middle(part, _MESSAGE_CHARS) for part in parts if part)])


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str, limit: int) -> str:
    """Return the beginning of `text`, at most `limit` characters, ending at a word."""
    return text if len(text) <= limit else text[: limit - 3].rsplit(" ", 1)[0] + "..."


# -- the model ------------------------------------------------------------------------------------------------------


class ChatEndpoint:
    """The model of orchestrator.hints.llm."""

    def __init__(self, config: EndpointConfig, run_root: Path) -> None:
        """`run_root`: keeps the answers and, in costs.jsonl, what they cost; what that holds counts as spent."""
        api_key = os.environ.get(config.api_key_var) if config.api_key_var else None
        if config.api_key_var and not api_key:
            raise ConfigError(
                f"{_NAME}.api_key_var is {config.api_key_var!r}, but the environment has no such variable: "
                "export it, or leave the setting out for an endpoint without a key"
            )
        self._config = config
        self._ledger = run_root / "costs.jsonl"
        self._cache = AnswerCache(run_root / "hints" / "llm.sqlite")
        self._price = Price(
            input_usd=config.input_usd_per_mtok * PER_MILLION, output_usd=config.output_usd_per_mtok * PER_MILLION
        )
        self._budget = Budget(config.budget_usd, self._record, spent(self._ledger).hint_usd, f"{_NAME}.budget_usd")
        endpoint = Endpoint(
            name=_NAME,
            base_url=config.base_url,
            model=config.model,
            api_key=api_key,
            price=self._price,
            timeout_s=config.timeout_s,
            max_concurrent=_CALLS,
        )
        self.client = ChatClient(endpoint, self._budget, self._cache)

    async def close(self) -> None:
        """Close the connections and the cache. Calls must have ended."""
        await self.client.close()
        await asyncio.to_thread(self._cache.close)

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """Return the answer's text. A question that was answered is not asked again.

        Raises BudgetError before a call that could pass the budget, EndpointError when no usable answer came.
        """
        config = self._config
        size = sum(len(message["content"].encode()) + 16 for message in messages)
        bound_usd = self._price.bound_usd(size // _BYTES_PER_TOKEN, config.max_tokens)
        question = Question(
            endpoint=config.base_url,
            model=config.model,
            messages=messages,
            tools=[],
            temperature=_TEMPERATURE,
            max_tokens=config.max_tokens,
        )
        request = ChatRequest(question=question, key=question.key, bound_usd=bound_usd, state=_NAME, check=self._text)
        answer, _ = await self.client.ask(request)
        return self._text(answer)

    def _text(self, answer: CachedAnswer) -> str:
        text = answer.message.get("content") or ""
        if not text or text.startswith(_CUT_THOUGHT):
            raise EndpointError(
                f"{_NAME}: the answer holds no text beside the model's thinking; its limit is "
                f"{self._config.max_tokens} tokens: raise it, or have the endpoint not think"
            )
        return text

    def _record(self, kind: str, **values: Any) -> None:
        """Write down what a call cost. A disk that refuses costs the line only."""
        if kind != "settled" or not values["usd"]:
            return
        try:
            write_cost(self._ledger, "hint", endpoint=_NAME, usd=values["usd"])
        except OSError as error:
            logger.warning("%s: a call's cost could not be kept in %s: %s", _NAME, self._ledger, error)
