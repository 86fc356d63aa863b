"""The tools of traces whose format does not list them: those that a file is seen to call, with the arguments and types
that it gives. A teacher can only choose among tools that it is told of, and must not be told by them what the student
chose: so every state of a file offers what the whole file uses, gathered before the first state is made. Tools that are
listed without their arguments get those that the file gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer_prime.traces.replay.actions.text_actions import may_act

if TYPE_CHECKING:
    from composer_prime.traces.ingest.turns import Turn

MAX_TOOLS, MAX_ARGUMENTS = 128, 64
"""What one agent may have; the rest of a hostile file is not described."""
_TYPES: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]


class ObservedTools:
    """What the turns of a file call, as function tools in the form of OpenAI's chat completions."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        """`mask` takes secrets out of a name: files write them into tools as well."""
        self._mask = mask
        self._arguments: dict[str, dict[str, str]] = {}
        self.too_many = False
        """Whether more are called than are described."""
        self.in_text = False
        """Whether a turn seems to act in its text."""

    @property
    def only_in_text(self) -> bool:
        """Whether nothing is called and turns act in their text: such an agent is offered no tools."""
        return self.in_text and not self._arguments

    def saw(self, turn: Turn) -> None:
        if not turn.calls and not self.in_text:
            self.in_text = any(map(may_act, turn.text))
        for call in turn.calls:
            if call.name not in self._arguments and len(self._arguments) >= MAX_TOOLS:
                self.too_many = True
                continue
            known = self._arguments.setdefault(call.name, {})
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            for argument, value in arguments.items():
                if argument not in known and len(known) < MAX_ARGUMENTS:
                    known[argument] = _type_of(value)

    def schemas(self) -> list[dict[str, Any]]:
        """In the order of their names, which says nothing of when they were called."""
        masked: dict[str, dict[str, str]] = {}
        for name, arguments in self._arguments.items():
            masked.setdefault(self._mask(name), {}).update({self._mask(key): kind for key, kind in arguments.items()})
        return [_schema(name, masked[name]) for name in sorted(masked)]


class OfferedTools:
    """The tools of one trace's states."""

    def __init__(self, observed: list[dict[str, Any]], mask: Callable[[Any], Any]) -> None:
        """`observed` in the file; `mask` takes secrets out of a JSON value."""
        self._mask, self._schemas = mask, observed
        self._observed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in observed}
        self._listed = False

    def given(self, tools: object) -> bool:
        """The format lists the tools itself; False, and nothing changes, when `tools` is no such list."""
        found = [tool for tool in tools if _is_function(tool)] if isinstance(tools, list) else []
        if not found:
            return False
        self._schemas, self._listed = [self._with_arguments(tool) for tool in self._mask(found)], True
        return True

    def schemas(self) -> list[dict[str, Any]]:
        """The same list object for all states: they share it."""
        return self._schemas

    def lacks(self, name: str) -> bool:
        """Whether a tool that was called is beyond those that were described: MAX_TOOLS others were called before."""
        return not self._listed and name not in self._observed

    def _with_arguments(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            return tool
        observed = self._observed.get(function["name"]) or _schema(function["name"], {})["function"]["parameters"]
        return {**tool, "function": {**function, "parameters": observed}}


def _schema(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {argument: {"type": kind} if kind else {} for argument, kind in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
