"""Answer tool calls: with a number, or with the text of an error.

An error is data for the model, never an exception. The conversation goes on, and the model may try again. The texts are
short and do not reveal the repair; hints do that.
"""

import json
from typing import Any

from orchestrator.environments.toolsmith.episode import BY_KEY, Episode, Tool

INVALID_JSON = "Invalid JSON in tool call"
_TOOL_NOT_FOUND = "Tool not found: "
_MISSING = "Missing argument: "
_UNKNOWN = "Unknown argument: "
_WRONG_TYPE = "Wrong type for argument "
_NOT_A_NUMBER = "Not a number: "
_OUT_OF_RANGE = "Number out of range: "
ERROR_STARTS = (INVALID_JSON, _TOOL_NOT_FOUND, _MISSING, _UNKNOWN, _WRONG_TYPE, _NOT_A_NUMBER, _OUT_OF_RANGE)
"""The beginnings of all error texts. No result begins like one of them."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_DIGITS_LIMIT = 12
_ECHO_LIMIT = 40


def is_error(text: str) -> bool:
    """Tell whether a tool's reply is one of this module's errors."""
    return text.startswith(ERROR_STARTS)


def run_call(episode: Episode, name: str, arguments_json: str) -> str:
    """Return the reply to one tool call: the result in decimal, or an error text.

    `arguments_json` is the arguments object as the model wrote it.
    """
    tool = next((tool for tool in episode.tools if tool.name == name), None)
    if tool is None:
        return _TOOL_NOT_FOUND + _echo(name)
    try:
        arguments = json.loads(arguments_json)
    except (ValueError, RecursionError):
        return INVALID_JSON
    if not isinstance(arguments, dict):
        return INVALID_JSON
    error = _argument_error(tool, arguments)
    if error is not None:
        return error
    result = BY_KEY[tool.operation].apply(*(int(arguments[argument]) for argument in tool.arguments))
    return str(result)


def _argument_error(tool: Tool, arguments: dict[str, Any]) -> str | None:
    for name in arguments:
        if name not in tool.arguments:
            return _UNKNOWN + _echo(name)
    for name in tool.arguments:
        if name not in arguments:
            return _MISSING + name
        value = arguments[name]
        json_type = _JSON_TYPES.get(type(value), "null")
        if json_type != tool.argument_type:
            return f"{_WRONG_TYPE}{name}: expected {tool.argument_type}, got {json_type}"
        digits = str(value)[: _DIGITS_LIMIT + 1]
        if not (digits.isascii() and digits.isdigit()):
            return _NOT_A_NUMBER + _echo(digits)
        if len(digits) > _DIGITS_LIMIT:
            return _OUT_OF_RANGE + digits
    return None


def _echo(text: str) -> str:
    return text if len(text) <= _ECHO_LIMIT else text[:_ECHO_LIMIT] + "..."
