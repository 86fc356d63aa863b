"""The tools of a trace whose format does not list them: those that the agent was seen to call, with the arguments and
types that it gave. A teacher can only choose among tools that it is told of. Tools that are listed without a schema get
one of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.ingest.builder import Call

MAX_TOOLS, MAX_ARGUMENTS = 128, 64
"""What one agent may have; the rest of a hostile trace is not described."""
_TYPES: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]


class ObservedTools:
    """Function tools in the form of OpenAI's chat completions."""

    def __init__(self, mask: Callable[[Any], Any]) -> None:
        """`mask` takes secrets out of a JSON value: files write them into tools as well."""
        self._mask = mask
        self._given: list[dict[str, Any]] | None = None
        self._arguments: dict[str, dict[str, str]] = {}
        self._schemas: list[dict[str, Any]] | None = None

    def given(self, tools: object) -> bool:
        """The format lists the tools itself; False, and nothing changes, when `tools` is no such list."""
        found = [tool for tool in tools if _is_function(tool)] if isinstance(tools, list) else []
        if not found:
            return False
        self._given, self._schemas = self._mask(found), None
        return True

    def saw(self, calls: Iterable[Call]) -> None:
        for call in calls:
            called = self._mask(call.name)
            if called not in self._arguments and len(self._arguments) >= MAX_TOOLS:
                continue
            if called not in self._arguments:
                self._arguments[called], self._schemas = {}, None
            known = self._arguments[called]
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            for argument, value in arguments.items():
                name = self._mask(argument)
                if name not in known and len(known) < MAX_ARGUMENTS:
                    known[name], self._schemas = _type_of(value), None

    def schemas(self) -> list[dict[str, Any]]:
        """The same list object until a call adds to it: states of a trace share it."""
        if self._schemas is None:
            listed = [{"type": "function", "function": {"name": name}} for name in self._arguments]
            self._schemas = [self._with_schema(tool) for tool in (listed if self._given is None else self._given)]
        return self._schemas

    def _with_schema(self, tool: dict[str, Any]) -> dict[str, Any]:
        """The tool; where it says nothing of its arguments, with those that it was called with."""
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            return tool
        arguments = self._arguments.get(function["name"], {})
        properties = {argument: {"type": kind} if kind else {} for argument, kind in arguments.items()}
        return {**tool, "function": {**function, "parameters": {"type": "object", "properties": properties}}}


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
