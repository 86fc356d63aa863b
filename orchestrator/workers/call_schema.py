"""Whether a tool call fits its tool's schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.workers.pool import ToolCall

SCHEMA_KINDS = frozenset({"tool_not_found", "bad_json", "argument_name", "argument_type"})
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def violation(call: ToolCall, tools: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """Return (kind, text) of the first rule that the call breaks."""
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
                expected = json_type(properties[name])
                return "argument_type", f"Wrong type for argument {name}: expected {expected}, got {_name(value)}"
        elif properties and parameters.get("additionalProperties") in (None, False):
            return "argument_name", f"Unknown argument: {name}"
    return None


def _fits(value: Any, rule: Any) -> bool:
    kinds = rule.get("type") if isinstance(rule, dict) else None
    if kinds is None:
        return True
    name = _name(value)
    allowed = kinds if isinstance(kinds, list) else [kinds]
    if name in allowed or ("number" in allowed and name == "integer"):
        return True
    # JSON schema takes 3.0 for an integer.
    return "integer" in allowed and isinstance(value, float) and value.is_integer()


def _name(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def json_type(rule: Any) -> str:
    """Return the type in a property's schema, in words."""
    kind = rule.get("type") if isinstance(rule, dict) else None
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")
