"""The votes on one state: whom to ask next, and what their answers decide.

The votes on one state while they come in, and as they are written down.

Whether an action could be carried out where it would be trained: a pair must not teach one that cannot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from composer_prime.config.teachers import TeachersConfig
from composer_prime.errors import CapError
from composer_prime.traces.replay.actions.canonical import Canonical, canonical
from composer_prime.traces.replay.actions.edits import Files
from composer_prime.traces.replay.actions.text_actions import way_of, written
from composer_prime.traces.replay.consensus import Cast, Vote, majority, preferred, settled
from composer_prime.traces.replay.kill_switch import Situation, ValueOfInformation
from composer_prime.traces.replay.records import VoteRecord, digest
from composer_prime.traces.replay.teachers.pool import TeacherPool
from composer_prime.traces.replay.teachers.teacher import NoAnswerError, NotAskedError, Teacher
from composer_prime.traces.state import Message, TraceState


def why_not(message: Message, form: Canonical, state: TraceState) -> str | None:
    """Why an action of this form cannot run in the state; None where it can, as far as its form tells.

    A call must be whole and name a tool of the state. Where the agent acts in its text, an action must be written in
    the way that it uses.
    """
    if "broken" in (form[0], *(part[0] for part in form[1:] if isinstance(part, tuple) and part)):
        return "the call is broken"
    names = {(tool.get("function") or {}).get("name") for tool in state.tools}
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in names:
            return "the call names a tool that the state lacks"
    acts = None if state.tools else written(message.get("content") or "")
    way = None if acts is None else way_of([state.student_action, *state.messages])
    return None if acts is None or way in (None, acts.way) else f"it is written as {acts.way}, the trace's as {way}"


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


MAX_REASONS = 50
"""Endpoints word their errors as they like: so many are told apart."""


class Voting:
    def __init__(
        self, config: TeachersConfig, pool: TeacherPool, voi: ValueOfInformation, without_vote: Counter[str]
    ) -> None:
        """`without_vote` counts why teachers gave no vote."""
        self._config, self._pool, self._voi, self._without_vote = config, pool, voi, without_vote

    async def vote(self, ballot: Ballot, voters: list[Teacher]) -> tuple[str, str | None]:
        """Fill the ballot; (outcome, reason), the outcome as in StateRecord or `run_budget`.

        What it raises leaves in the ballot what came in until then.
        """
        try:
            await self._all(ballot, voters) if self._config.voting == "all" else await self._sequence(ballot, voters)
        except CapError as error:
            if error.scope == "run":
                return "run_budget", str(error)
            self.say_why(str(error))
            return "budget", str(error)
        if ballot.stopped_by is not None:
            return "not_worth_it", ballot.stopped_by
        form = majority(ballot.cast, ballot.planned)
        if form is None:
            alone = len({vote.family for vote in ballot.votes}) < 2
            failed = alone and ballot.without_vote is not None
            return "failed" if failed else "no_majority", ballot.without_vote if failed else None
        why_not = ballot.why_not(form)
        if why_not is not None:
            return "cannot_run", f"the majority's action cannot run: {why_not}"
        return "agreed" if form == ballot.student else "overruled", None

    async def _sequence(self, ballot: Ballot, voters: list[Teacher]) -> None:
        """One vote after another, while the majority is open and the next ones are worth their price."""
        if self._config.voi.enabled:
            ballot.expected_usd = sum(self._pool.expected_usd(each, ballot.state) for each in voters[: ballot.planned])
            self._voi.expect(ballot.expected_usd)
        for index, teacher in enumerate(voters):
            if settled(ballot.cast, ballot.planned):
                return
            left = max(ballot.planned // 2 + 1 - len(ballot.votes), 1)
            price = 0.0
            if self._config.voi.enabled:
                price = sum(self._pool.price_usd(each, ballot.state) for each in voters[index : index + left])
            situation = _situation(ballot)
            if not self._voi.worth(situation, price):
                chance = self._voi.chance(situation)
                ballot.stopped_by = f"P(pair) = {chance:.3f} is not worth votes for ${price:.5f}"
                return
            ballot.seconds += await self._ask(ballot, teacher)

    async def _all(self, ballot: Ballot, voters: list[Teacher]) -> None:
        """All planned votes at once; where one fails, the next teacher is asked."""
        first = voters[: ballot.planned]
        asked = await asyncio.gather(*(self._ask(ballot, teacher) for teacher in first), return_exceptions=True)
        order = [teacher.name for teacher in first]  # votes come in any order, and which is the first must not vary
        ballot.votes.sort(key=lambda vote: order.index(vote.teacher))
        ballot.seconds += max((each for each in asked if isinstance(each, float)), default=0.0)
        failures = [each for each in asked if isinstance(each, BaseException)]
        if failures:  # a broken disk ends the replay, a cap may end this state alone: the worst is told
            raise min(failures, key=lambda each: (not isinstance(each, OSError), isinstance(each, CapError)))
        for teacher in voters[ballot.planned :]:
            if len(ballot.votes) >= ballot.planned:
                return
            ballot.seconds += await self._ask(ballot, teacher)

    async def _ask(self, ballot: Ballot, teacher: Teacher) -> float:
        """Add one vote; how long the endpoint took, in seconds. An answer that is cut short, filtered or empty is none.

        Raises CapError.
        """
        state = ballot.state
        try:
            asked = await self._pool.ask(teacher, state)
        except NotAskedError as error:
            self._no_vote(ballot, str(error), called=False)
            return 0.0
        except NoAnswerError as error:
            self._no_vote(ballot, str(error), called=True)
            return error.seconds
        if asked.cached:
            ballot.cached_usd += asked.answer.cost_usd
            ballot.cached_s += asked.answer.seconds
        form = canonical(asked.answer.message, state.tools, ballot.files)
        unusable = _unusable(form, asked.answer.finish_reason, self._config.max_tokens)
        if form is None or unusable is not None:
            self._no_vote(ballot, f"an answer of {teacher.name} {unusable}", called=not asked.cached)
            return asked.seconds
        ballot.votes.append(
            Vote(
                teacher=teacher.name,
                family=teacher.family,
                tier=teacher.config.tier,
                form=form,
                message=asked.answer.message,
                key=asked.key,
                cached=asked.cached,
                cost_usd=asked.cost_usd,
                seconds=asked.seconds,
                price_usd=asked.answer.cost_usd,
                answer_s=asked.answer.seconds,
            )
        )
        return asked.seconds

    def _no_vote(self, ballot: Ballot, reason: str, *, called: bool) -> None:
        ballot.failed += called
        ballot.without_vote = reason
        self.say_why(reason)

    def say_why(self, reason: str) -> None:
        """Count why there is no vote."""
        reasons = self._without_vote
        reasons[reason if reason in reasons or len(reasons) < MAX_REASONS else "other reasons"] += 1


def _situation(ballot: Ballot) -> Situation:
    state, votes = ballot.state, ballot.votes
    disagrees = votes[0].form != ballot.student if votes else None
    return Situation(error=state.error is not None, entropy=state.entropy, cheap_disagrees=disagrees)


def _unusable(form: Canonical | None, finish_reason: str, max_tokens: int) -> str | None:
    """Why an answer is no vote; None where it is one."""
    if finish_reason == "length":
        return f"was cut at teachers.max_tokens = {max_tokens}"
    if finish_reason == "content_filter":
        return "was filtered by its endpoint (finish_reason content_filter)"
    return "is empty" if form is None else None
