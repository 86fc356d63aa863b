"""Answering one assistant message: a tool message for every call in it, well-formed or broken.

A call that the renderer could not parse reaches us as text (see `renderer.py`). It must not vanish: a policy whose
broken calls ended the conversation without a word would have found a way to hide them. So each gets an error turn.
"""

import re
from typing import Any, Protocol, runtime_checkable

INVALID_CALL = "Invalid JSON in tool call"
_BROKEN_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)


class ToolExecutor(Protocol):
    """Runs the tool calls of one rollout; may hold state between calls."""

    schemas: list[dict[str, Any]]
    """The tools on offer, as OpenAI function definitions."""

    async def call(self, name: str, arguments_json: str) -> str:
        """The text of the tool's reply. An error that the model should see is a reply too; an exception ends the
        rollout as failed."""
        ...


@runtime_checkable
class HasTools(Protocol):
    """Task data with tools. One executor is made for every rollout."""

    def tool_executor(self) -> ToolExecutor: ...


class NoTools:
    """The executor of a task without tools."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []

    async def call(self, name: str, arguments_json: str) -> str:
        return f"Tool not found: {name}"


async def answer_calls(executor: ToolExecutor, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Tool messages (OpenAI form) for an assistant message: one for each call, then one for each broken call.

    An empty list means that the message asks for no tool.
    """
    answers = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        reply = await executor.call(function["name"], function["arguments"])
        answers.append(_tool_message(call["id"], function["name"], reply))
    broken = _BROKEN_CALL.findall(message.get("content") or "")
    answers += [_tool_message(f"broken_{index}", None, INVALID_CALL) for index in range(len(broken))]
    return answers


def _tool_message(call_id: str, name: str | None, content: str) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message if name is None else {**message, "name": name}
