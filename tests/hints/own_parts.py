"""A detector and a writer of hints from outside, as a user names them by import path."""

from __future__ import annotations

from orchestrator.hints.generate import ErrorTurn, HintRequest, error_turn
from orchestrator.rollouts.groups import FinishedRollout


class LongTurns:
    def __init__(self, most: int) -> None:
        self._most = most

    async def __call__(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        return [
            error_turn(rollout, index, "too_long", "The turn was too long.")
            for index, turn in enumerate(rollout.turns)
            if turn.turn is not None and len(turn.text) > self._most
        ]


class Reminder:
    def __init__(self, text: str = "Be brief.") -> None:
        self._text = text

    async def __call__(self, request: HintRequest) -> str | None:
        return self._text if request.error.kind == "too_long" else None
