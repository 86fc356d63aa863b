"""Votes on one state to preference pairs.

1. A majority (more than N/2 of the planned voters, of at least two families, by canonical form) beats the student,
   where they differ.
2. A student that the majority agrees with beats each minority answer.
3. No majority: no pair. Nor where what would be chosen cannot run (runnable.py).

epsilon, the probability that a label is wrong: 1 - (k + 1/2) / (n + 1) with k of n votes for the chosen side, at most
1/2. These rules and the third channel are this project's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.traces.replay.actions.canonical import Canonical
from composer_prime.traces.state import Message

Cast = tuple[str, Canonical]
"""(family, form) of one vote."""
_MIN_CHARS = 24
"""Answers shorter than this count as this long: a word more is no difference in length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One teacher's answer."""

    teacher: str
    family: str
    tier: str
    form: Canonical
    message: Message
    key: str
    """Of the answer in the cache."""
    cached: bool
    cost_usd: float
    """Paid now; 0 from the cache."""
    seconds: float
    """What the endpoint took now: all attempts and the pauses between them; about 0 from the cache."""
    price_usd: float
    """Paid when it was first asked for."""
    answer_s: float
    """What the endpoint took then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pair before its text is chosen: any of `chosen` would do."""

    chosen: tuple[Message, ...]
    rejected: Message
    chosen_form: Canonical
    rejected_form: Canonical
    epsilon: float


def majority(cast: Sequence[Cast], planned: int) -> Canonical | None:
    """The form that more than half of the planned voters gave, not all of one family; None where there is none (yet).

    Models of one family err together: their agreement alone decides nothing.
    """
    if not cast:
        return None
    form, count = Counter(form for _, form in cast).most_common(1)[0]
    families = {family for family, other in cast if other == form}
    return form if 2 * count > planned and len(families) > 1 else None


def settled(cast: Sequence[Cast], planned: int) -> bool:
    """Whether further votes, of whichever family, cannot change the outcome."""
    if majority(cast, planned) is not None or len(cast) >= planned:
        return True
    open_votes = planned - len(cast)
    most = max(Counter(form for _, form in cast).values(), default=0)
    return 2 * (most + open_votes) <= planned


def epsilon(agreeing: int, votes: int) -> float:
    """Probability that the label is wrong, in (0, 1/2]."""
    return min(1 - (agreeing + 0.5) / (votes + 1), 0.5)


def preferred(votes: Sequence[Vote], student: Message, student_form: Canonical, form: Canonical) -> list[Message]:
    """The actions that a majority for `form` speaks for: the student's own where that is its form, else the votes'."""
    return [student] if form == student_form else [vote.message for vote in votes if vote.form == form]


def candidates(
    votes: Sequence[Vote],
    student: Message,
    student_form: Canonical,
    planned: int,
    runs: Callable[[Message, Canonical], bool],
) -> list[Candidate]:
    """The pairs that the votes give; `runs` tells which actions may be chosen."""
    form = majority([(vote.family, vote.form) for vote in votes], planned)
    if form is None:
        return []
    chosen = tuple(message for message in preferred(votes, student, student_form, form) if runs(message, form))
    if not chosen:
        return []
    beaten = {student_form: student}
    if form == student_form:
        beaten = {vote.form: vote.message for vote in reversed(votes) if vote.form != form}
    doubt = epsilon(sum(vote.form == form for vote in votes), len(votes))
    return [
        Candidate(chosen=chosen, rejected=message, chosen_form=form, rejected_form=other, epsilon=doubt)
        for other, message in beaten.items()
    ]


def length_ratio(first: Message, second: Message) -> float:
    """Characters of the longer answer over those of the shorter, at least 1."""
    sizes = sorted(max(_size(message), _MIN_CHARS) for message in (first, second))
    return sizes[1] / sizes[0]


def without_thinking(message: Message) -> Message:
    """The message without its thinking: teachers' thinking is not known, so the student's is no part of a pair."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept


def _size(message: Message) -> int:
    calls = message.get("tool_calls") or []
    written = sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
    return len(message.get("content") or "") + written
