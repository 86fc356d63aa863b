"""Find error turns: by rule in the tools' answers and the calls' schemas.

An own detector is a class in `orchestrator.hints.detect`, by import path. It is built once, as `Class(**settings)`, and
called with each finished rollout: `async def __call__(self, rollout) -> list[ErrorTurn]`. `error_turn` builds one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from orchestrator.hints.generate import OTHER, ErrorTurn, Templates
from orchestrator.rollouts.groups import FinishedRollout, tool_replies
from orchestrator.workers.call_schema import violation

FAILED = "failed"

Detector = Callable[[FinishedRollout], Awaitable[list[ErrorTurn]]]
"""Finds turns that went wrong, at most one error a turn."""


class RuleDetector:
    """Finds failed calls, exceptions and failed tests in tools' answers, and calls that break their schema."""

    def __init__(self, templates: Templates, detect: Collection[str]) -> None:
        """`detect`: as orchestrator.hints.detect."""
        self._templates = templates
        self._detect = set(detect)

    async def __call__(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        return await asyncio.to_thread(self.error_turns, rollout)

    def error_turns(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        """Return the first error of each turn, in the order of the turns."""
        turns = rollout.turns
        replies_to = {index: replies for index, replies in tool_replies(turns).items() if turns[index].turn is not None}
        last = max(replies_to, default=None)
        errors = [
            self._in_answers(rollout, index, replies)
            or self._in_calls(rollout, index)
            or self._of_failed_task(rollout, index, last)
            for index, replies in replies_to.items()
        ]
        return [error for error in errors if error is not None]

    def _in_answers(self, rollout: FinishedRollout, index: int, replies: list[int]) -> ErrorTurn | None:
        calls = rollout.turns[index].tool_calls
        for number, reply in enumerate(replies):
            text, kind = rollout.turns[reply].text, None
            if rollout.turns[reply].error is not None and "tool_error" in self._detect:
                kind = self._templates.kind_of(text)
            kind = kind or self._templates.detected(text, self._detect)
            if kind == OTHER and (call_error := self._in_calls(rollout, index)) is not None:
                return call_error  # No template knows the tool's words, but the call itself shows what is wrong.
            if kind is not None:
                tool = calls[number].name if number < len(calls) else None
                return error_turn(rollout, index, kind, text, tool)
        return None

    def _in_calls(self, rollout: FinishedRollout, index: int) -> ErrorTurn | None:
        if "schema" not in self._detect:
            return None
        for call in rollout.turns[index].tool_calls:
            broken_rule = violation(call, tools_of(rollout, index))
            if broken_rule is not None:
                return error_turn(rollout, index, *broken_rule, call.name)
        return None

    def _of_failed_task(self, rollout: FinishedRollout, index: int, last: int | None) -> ErrorTurn | None:
        """Blame the last turn of a rollout that got no reward from its environment."""
        reward = rollout.reward
        if "failed" not in self._detect or index != last or reward is None or reward > 0:
            return None
        return error_turn(rollout, index, FAILED, "The task was not solved.")


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
