"""Reading a rollout's messages as a tree: which answers belong to which assistant turn, and what stood before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.groups import FinishedRollout
from orchestrator.workers.protocol import TurnRecord


def answers(turns: Sequence[TurnRecord]) -> dict[int, list[int]]:
    """Positions of the tool messages that answer each assistant message, by the position of that message."""
    found: dict[int, list[int]] = {index: [] for index, turn in enumerate(turns) if turn.role == "assistant"}
    for index, turn in enumerate(turns):
        asked = _asked_by(turns, index) if turn.role == "tool" else None
        if asked is not None:
            found[asked].append(index)
    return found


def _asked_by(turns: Sequence[TurnRecord], index: int) -> int | None:
    """The assistant message that the tool message at `index` answers: the one before it and its fellow answers."""
    at = turns[index].parent
    while at is not None and turns[at].role == "tool":
        at = turns[at].parent
    return at if at is not None and turns[at].role == "assistant" else None


def history(turns: Sequence[TurnRecord], index: int) -> list[TurnRecord]:
    """The messages that the one at `index` continues, oldest first, without it."""
    path = []
    at = turns[index].parent
    while at is not None:
        path.append(turns[at])
        at = turns[at].parent
    return path[::-1]


def failed_turns(turns: Sequence[TurnRecord]) -> int:
    """Assistant messages that a tool answered with an error, by the environment's own word."""
    return sum(any(turns[index].error is not None for index in told) for told in answers(turns).values())


def turn_error_rate(rollouts: Iterable[FinishedRollout]) -> float | None:
    """Share of assistant messages that a tool answered with an error; None without assistant messages."""
    failed = total = 0
    for rollout in rollouts:
        failed += failed_turns(rollout.turns)
        total += sum(turn.role == "assistant" for turn in rollout.turns)
    return failed / total if total else None
