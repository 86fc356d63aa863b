"""Error turns by rule: what the tools answered, and what the calls' schemas say.

Whether a tool call keeps to what its tool asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from typing import Any

from orchestrator.hints.error_turn import ErrorTurn
from orchestrator.hints.templates import OTHER, Templates, json_type
from orchestrator.rollouts.groups import FinishedRollout, answers
from orchestrator.workers.protocol import ToolCall

SCHEMA_KINDS = frozenset({"tool_not_found", "bad_json", "argument_name", "argument_type"})
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def violation(call: ToolCall, tools: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """(kind, text) of the first rule that the call breaks: its name, its JSON, its argument names, their types.

    None for a good call, and where `tools` is empty. Deeper rules of JSON schema are the tool's own to check.
    """
    if not tools:
        return None
    functions = {tool.get("function", {}).get("name"): tool.get("function", {}) for tool in tools}
    if call.name not in functions:
        return "tool_not_found", f"Tool not found: {call.name}"
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return "bad_json", "Invalid JSON in the arguments"
    if not isinstance(arguments, dict):
        return "bad_json", "Invalid JSON in the arguments: they are no object"
    return _arguments(arguments, functions[call.name].get("parameters") or {})


def _arguments(arguments: dict[str, Any], parameters: dict[str, Any]) -> tuple[str, str] | None:
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return "argument_name", f"Missing argument: {name}"
    for name, value in arguments.items():
        if name in properties:
            if not _fits(value, properties[name]):
                wanted = json_type(properties[name])
                return "argument_type", f"Wrong type for argument {name}: expected {wanted}, got {_name(value)}"
        elif properties and parameters.get("additionalProperties") in (None, False):
            return "argument_name", f"Unknown argument: {name}"
    return None


def _fits(value: Any, rule: Any) -> bool:
    kinds = rule.get("type") if isinstance(rule, dict) else None
    if kinds is None:
        return True
    name = _name(value)
    wanted = kinds if isinstance(kinds, list) else [kinds]
    return name in wanted or ("number" in wanted and name == "integer") or _whole(value, wanted)


def _whole(value: Any, wanted: list[Any]) -> bool:
    """JSON schema takes 3.0 for an integer."""
    return "integer" in wanted and isinstance(value, float) and value.is_integer()


def _name(value: Any) -> str:
    return _NAMES.get(type(value), "null")


FAILED = "failed"


class RuleDetector:
    """Failed calls, exceptions and failed tests in tools' answers, calls that break their schema. No model involved."""

    name = "rules"

    def __init__(self, templates: Templates, detect: Collection[str], threads: Executor) -> None:
        """`detect`: as orchestrator.hints.detect. The work is done in `threads`."""
        self._templates, self._detect, self._threads = templates, set(detect), threads

    async def find(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.error_turns, rollout)

    def error_turns(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        """In the order of the turns, the first error of each."""
        told = {
            index: found for index, found in answers(rollout.turns).items() if rollout.turns[index].turn is not None
        }
        last = max(told, default=None)
        errors = [
            self._answered(rollout, index, found) or self._called(rollout, index) or self._failed(rollout, index, last)
            for index, found in told.items()
        ]
        return [error for error in errors if error is not None]

    def _answered(self, rollout: FinishedRollout, index: int, told: list[int]) -> ErrorTurn | None:
        calls = rollout.turns[index].tool_calls
        for number, answer in enumerate(told):
            text, kind = rollout.turns[answer].text, None
            if rollout.turns[answer].error is not None and "tool_error" in self._detect:
                kind = self._templates.kind_of(text)
            kind = kind or self._templates.detected(text, self._detect)
            if kind == OTHER and (broken := self._called(rollout, index)) is not None:
                return broken  # no template knows the tool's words, but the call itself shows what is wrong
            if kind is not None:
                tool = calls[number].name if number < len(calls) else None
                return _error(rollout, index, kind, text, tool)
        return None

    def _called(self, rollout: FinishedRollout, index: int) -> ErrorTurn | None:
        if "schema" not in self._detect:
            return None
        for call in rollout.turns[index].tool_calls:
            broken = violation(call, tools_of(rollout, index))
            if broken is not None:
                return _error(rollout, index, broken[0], broken[1], call.name)
        return None

    def _failed(self, rollout: FinishedRollout, index: int, last: int | None) -> ErrorTurn | None:
        """The last turn of a rollout that got no reward from its environment."""
        reward = rollout.task_reward
        if "failed" not in self._detect or index != last or reward is None or reward > 0:
            return None
        return _error(rollout, index, FAILED, "The task was not solved.", None)


def _error(rollout: FinishedRollout, index: int, kind: str, text: str, tool: str | None) -> ErrorTurn:
    return ErrorTurn(
        message=index, turn=rollout.turns[index].turn, kind=kind, text=text, tool=tool, tools=tools_of(rollout, index)
    )


def tools_of(rollout: FinishedRollout, index: int) -> list[dict]:
    """The tools on offer in the conversation of message `index`."""
    session = rollout.turns[index].session
    return rollout.sessions[session].tools if session < len(rollout.sessions) else []
