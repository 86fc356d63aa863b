"""The votes on one state while they come in, and as they are written down."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_prime.traces import Message, TraceState
from orchestrator.teachers.canonical import Canonical
from orchestrator.teachers.consensus import Cast, Vote, preferred
from orchestrator.teachers.edits import Files
from orchestrator.teachers.records import VoteRecord, digest
from orchestrator.teachers.runnable import why_not


@dataclass(slots=True)
class Ballot:
    state: TraceState
    files: Files
    """As the trace left them."""
    student: Canonical
    planned: int
    expected_usd: float | None = None
    """What all planned votes were expected to cost, where their value was weighed against it."""
    votes: list[Vote] = field(default_factory=list)
    failed: int = 0
    """Calls that gave no vote; an answer from the cache that gives none is not one."""
    cached_usd: float = 0.0
    """What answers from the cache cost when they were asked for."""
    cached_s: float = 0.0
    seconds: float = 0.0
    """What endpoints took for the votes that were called for; turns, places and money that were waited for are ours."""
    stopped_by: str | None = None
    without_vote: str | None = None
    """Why the last teacher that gave no vote gave none."""

    @property
    def cast(self) -> list[Cast]:
        return [(vote.family, vote.form) for vote in self.votes]

    def runs(self, message: Message, form: Canonical) -> bool:
        return why_not(message, form, self.state) is None

    def why_not(self, form: Canonical) -> str | None:
        """Why nothing that a majority for this form speaks for can run; None where something can."""
        answers = preferred(self.votes, self.state.student_action, self.student, form)
        reasons = [why_not(message, form, self.state) for message in answers]
        return None if None in reasons else reasons[0]


def vote_record(vote: Vote, student: Canonical) -> VoteRecord:
    return VoteRecord(
        teacher=vote.teacher,
        family=vote.family,
        tier=vote.tier,
        form=digest(vote.form),
        agrees=vote.form == student,
        answer=vote.key,
        cached=vote.cached,
        cost_usd=vote.cost_usd,
        seconds=vote.seconds,
        price_usd=vote.price_usd,
        answer_s=vote.answer_s,
    )
