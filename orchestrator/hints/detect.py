"""Find error turns: by rule in the tools' answers and the calls' schemas.

An own detector is a class in `orchestrator.hints.detect`, by import path. It is built once, as `Class(**settings)`, and
called with each finished rollout: `async def __call__(self, rollout) -> list[ErrorTurn]`. `error_turn` builds one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set

from orchestrator.hints.generate import OTHER, ErrorTurn, Templates
from orchestrator.rollouts.groups import FinishedRollout, tool_replies
from orchestrator.workers.call_schema import violation

FAILED = "failed"

Detector = Callable[[FinishedRollout], Awaitable[list[ErrorTurn]]]
"""Finds turns that went wrong, at most one error a turn."""


async def find_by_rules(templates: Templates, detect: Set[str], rollout: FinishedRollout) -> list[ErrorTurn]:
    return await asyncio.to_thread(find_errors, templates, detect, rollout)


def find_errors(templates: Templates, detect: Set[str], rollout: FinishedRollout) -> list[ErrorTurn]:
    """Return the first error of each turn, in the order of the turns.

    Errors are failed calls, exceptions and failed tests in tools' answers, and calls that break their schema. `detect`:
    as orchestrator.hints.detect.
    """
    turns = rollout.turns
    replies_to = {index: replies for index, replies in tool_replies(turns).items() if turns[index].turn is not None}
    errors = []
    for index, replies in replies_to.items():
        error = _in_answers(templates, detect, rollout, index, replies)
        if "schema" in detect and (error is None or error.kind == OTHER):
            # No template knows the tool's words, but the call itself may show what is wrong.
            error = _in_calls(rollout, index) or error
        errors.append(error)
    # The last turn is to blame where the environment gave no reward.
    if errors and errors[-1] is None and "failed" in detect and rollout.reward is not None and rollout.reward <= 0:
        errors[-1] = error_turn(rollout, max(replies_to), FAILED, "The task was not solved.")
    return [error for error in errors if error is not None]


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
