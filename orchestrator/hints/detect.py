"""Error turns by rule: what the tools answered, and what the calls' schemas say."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor

from orchestrator.conversation import answers
from orchestrator.groups import FinishedRollout
from orchestrator.hints.error_turn import ErrorTurn
from orchestrator.hints.schema import violation
from orchestrator.hints.templates import OTHER, Templates

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
