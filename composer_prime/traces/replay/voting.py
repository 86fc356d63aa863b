"""The votes on one state: which teacher to ask next, which pairs the answers give, and what ends a replay.

1. A majority (more than N/2 of the planned voters, of at least two families, by canonical form) beats the student,
   where they differ. A teacher that draws several answers splits its vote over them. Its family counts for a form that
   at least half of one of its teachers' votes is for.
2. A student that the majority agrees with beats each minority answer.
3. No majority gives no pair. Nor does one whose action cannot run in the state.

epsilon, the probability that a label is wrong: 1 - (k + 1/2) / (n + 1) with k of n votes for the chosen side, at most
1/2. These rules and the replay-DPO loss are this project's own.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from composer_prime.config.teachers import KillSwitchConfig, TeachersConfig
from composer_prime.errors import CapError
from composer_prime.llm.client import NoAnswerError
from composer_prime.llm.families import is_same_model
from composer_prime.stats.intervals import percentile
from composer_prime.traces.replay.actions.canonical import Canonical, Files, actions_in_text, canonical, way_of
from composer_prime.traces.replay.records import VoteRecord, digest
from composer_prime.traces.replay.teachers import NotAskedError, Teacher, TeacherPool
from composer_prime.traces.state import Message, TraceState

Times = tuple[float, float]
"""Seconds that an endpoint took: now, and when the answer was first asked for."""
_ROUNDING = 1e-9
"""Of sums of shares."""
MAX_REASONS = 50
"""Reasons for missing votes that are counted separately. Endpoints may word their errors in any way."""
_MIN_CHARS = 24
"""Shorter answers count as this long, so that one more word does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One teacher's answer, which is its vote or a share of it."""

    record: VoteRecord
    form: Canonical
    message: Message


@dataclass(slots=True)
class KillSwitch:
    """Ends a replay that costs too much, takes too long or fails too often.

    It takes in each state, those of earlier replays first. States without a call (refused, from the cache, no money
    left) count nowhere: they would lower any mean.
    """

    config: KillSwitchConfig
    seconds: list[float] = field(default_factory=list)
    """Of each state on which a call was made, ascending, so that sorting again costs nothing."""
    usd_by_trace: dict[str, float] = field(default_factory=dict)
    """Of each trace on which a call was made."""
    calls: int = 0
    failed: int = 0
    states: int = 0
    """On which a call was made, or that broke."""

    def note(
        self, trace: str, usd: float, seconds: float, *, calls: int, failed: int = 0, broken: bool = False
    ) -> None:
        """Take in one state. All calls of a `broken` state count as failed, and one where it made none."""
        if calls or usd:
            self.usd_by_trace[trace] = self.usd_by_trace.get(trace, 0.0) + usd
        if calls:
            insort(self.seconds, seconds)
        self.states += bool(calls or broken)
        self.calls += max(calls, broken)
        self.failed += max(calls, 1) if broken else failed

    def tripped(self) -> str | None:
        """Return why the replay has to stop; None while it may continue."""
        config = self.config
        if self.states < config.min_states:
            return None
        costs = self.usd_by_trace.values()
        limits = (
            ("mean_usd_per_trace", sum(costs) / max(len(costs), 1), config.mean_usd_per_trace, "$"),
            ("p95_s_per_step", percentile(self.seconds, 0.95), config.p95_s_per_step, ""),
            ("error_rate", self.failed / max(self.calls, 1), config.error_rate, ""),
        )
        for name, value, limit, unit in limits:
            if value > limit:
                return (
                    f"{name} is {unit}{value:.4g} after {self.states} states, teachers.kill.{name} is {unit}{limit:g}"
                )
        return None


@dataclass(slots=True)
class Ballot:
    """The votes on one state while they come in."""

    state: TraceState
    files: Files
    """As the trace left them."""
    student: Canonical
    planned: int
    votes: list[Vote] = field(default_factory=list)
    failed: int = 0
    """Calls that gave no vote. An answer from the cache that gives none is not one."""
    cached_usd: float = 0.0
    """What answers from the cache cost when they were first asked for."""
    seconds: float = 0.0
    """What endpoints took for the votes that were called for, without waiting for turns, places and money. Of answers
    that were asked for at once the slowest counts."""
    first_s: float = 0.0
    """As seconds, with answers from the cache at what they took when they were first asked for."""
    no_vote_reason: str | None = None
    """Of the last teacher that gave no vote."""

    def add_times(self, times: Sequence[Times]) -> None:
        """Take in what was asked for at once."""
        self.seconds += max((seconds for seconds, _ in times), default=0.0)
        self.first_s += max((first_s for _, first_s in times), default=0.0)

    def obstacle(self, form: Canonical) -> str | None:
        """Return why no action of a majority for this form can run; None where one can."""
        answers = preferred(self.votes, self.state.student_action, self.student, form)
        reasons = [obstacle(message, form, self.state) for message in answers]
        return None if None in reasons else reasons[0]


class Voting:
    def __init__(self, config: TeachersConfig, pool: TeacherPool, no_vote_reasons: Counter[str]) -> None:
        """`no_vote_reasons` counts why teachers gave no vote."""
        self._config = config
        self._pool = pool
        self._no_vote_reasons = no_vote_reasons

    async def vote(self, ballot: Ballot, voters: list[Teacher]) -> tuple[str, str | None]:
        """Fill the ballot. Return (outcome, reason), the outcome as in StateRecord or `run_budget`.

        After an error the ballot holds the votes so far.
        """
        try:
            await self._all(ballot, voters) if self._config.voting == "all" else await self._sequence(ballot, voters)
        except CapError as error:
            if error.scope == "run":
                return "run_budget", str(error)
            self.count_no_vote(str(error))
            return "budget", str(error)
        form = majority(ballot.votes, ballot.planned)
        if form is None:
            alone = len({vote.record.family for vote in ballot.votes}) < 2
            failed = alone and ballot.no_vote_reason is not None
            return "failed" if failed else "no_majority", ballot.no_vote_reason if failed else None
        reason = ballot.obstacle(form)
        if reason is not None:
            return "cannot_run", f"the majority's action cannot run: {reason}"
        return "agreed" if form == ballot.student else "overruled", None

    async def _sequence(self, ballot: Ballot, voters: list[Teacher]) -> None:
        """Ask for one vote after another, while the majority is open."""
        for teacher in voters:
            if settled(ballot.votes, ballot.planned):
                return
            ballot.add_times([await self._ask(ballot, teacher)])

    async def _all(self, ballot: Ballot, voters: list[Teacher]) -> None:
        """Ask for all planned votes at once. Where one fails, ask the next teacher."""
        first = voters[: ballot.planned]
        results = await asyncio.gather(*(self._ask(ballot, teacher) for teacher in first), return_exceptions=True)
        order = [teacher.name for teacher in first]  # votes come in any order, and which is the first must not vary
        ballot.votes.sort(key=lambda vote: order.index(vote.record.teacher))
        ballot.add_times([each for each in results if not isinstance(each, BaseException)])
        _raise_worst(results)
        for teacher in voters[ballot.planned :]:
            if _voted(ballot.votes) >= ballot.planned:
                return
            ballot.add_times([await self._ask(ballot, teacher)])

    async def _ask(self, ballot: Ballot, teacher: Teacher) -> Times:
        """Add one vote, split over the teacher's answers, and return what the slowest took. Raises CapError.

        An answer that is cut short, filtered or empty is not a vote.
        """
        draws = (self._answer(ballot, teacher, sample) for sample in range(self._config.samples))
        results = await asyncio.gather(*draws, return_exceptions=True)
        drawn = [each for each in results if not isinstance(each, BaseException)]
        votes = [vote for vote, _, _ in drawn if vote is not None]
        for vote in votes:
            record = vote.record if len(votes) == 1 else msgspec.structs.replace(vote.record, share=1 / len(votes))
            ballot.votes.append(replace(vote, record=record))
        _raise_worst(results)
        return max(seconds for _, seconds, _ in drawn), max(first_s for _, _, first_s in drawn)

    async def _answer(self, ballot: Ballot, teacher: Teacher, sample: int) -> tuple[Vote | None, float, float]:
        """Return (answer number `sample` as a whole vote, *Times)."""
        state = ballot.state
        try:
            reply = await self._pool.ask(teacher, state, sample)
        except NotAskedError as error:
            self._no_vote(ballot, str(error), called=False)
            return None, 0.0, 0.0
        except NoAnswerError as error:
            self._no_vote(ballot, str(error), called=True)
            return None, error.seconds, error.seconds
        answer = reply.answer
        first_s = answer.seconds if reply.cached else reply.seconds
        ballot.cached_usd += answer.cost_usd * reply.cached
        form = canonical(answer.message, state.tools, ballot.files)
        fault = "is empty" if form is None else None
        asked, other = teacher.config.model, None
        if answer.model and not is_same_model(asked, answer.model):
            other = answer.model
        if answer.finish_reason == "length":
            fault = f"was cut at teachers.max_tokens = {self._config.max_tokens}"
        elif answer.finish_reason == "content_filter":
            fault = "was filtered by its endpoint (finish_reason content_filter)"
        if form is None or fault is not None:
            self._no_vote(ballot, f"an answer of {teacher.name} {fault}", called=not reply.cached)
            return None, reply.seconds, first_s
        record = VoteRecord(
            teacher=teacher.name,
            family=teacher.family,
            form=digest(form),
            agrees=form == ballot.student,
            answer=reply.key,
            cached=reply.cached,
            cost_usd=reply.cost_usd,
            seconds=reply.seconds,
            price_usd=answer.cost_usd,
            answer_s=answer.seconds,
            model=other,
        )
        return Vote(record=record, form=form, message=answer.message), reply.seconds, first_s

    def _no_vote(self, ballot: Ballot, reason: str, *, called: bool) -> None:
        ballot.failed += called
        ballot.no_vote_reason = reason
        self.count_no_vote(reason)

    def count_no_vote(self, reason: str) -> None:
        reasons = self._no_vote_reasons
        reasons[reason if reason in reasons or len(reasons) < MAX_REASONS else "other reasons"] += 1


def _raise_worst(results: Sequence[object]) -> None:
    """Raise the worst error among the results: a broken disk ends the replay, while a cap may end one state alone."""
    errors = [each for each in results if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda each: (not isinstance(each, OSError), isinstance(each, CapError)))


def majority(votes: Sequence[Vote], planned: int) -> Canonical | None:
    """Return the form that more than half of the planned voters gave; None without a majority (yet).

    Models of one family err together, so the agreement of one family alone decides nothing.
    """
    if not votes:
        return None
    form, count = max(_support(votes).items(), key=lambda each: each[1])
    agreeing = defaultdict[tuple[str, str], float](float)
    for vote in votes:
        agreeing[vote.record.family, vote.record.teacher] += vote.record.share * (vote.form == form)
    families = {family for (family, _), share in agreeing.items() if share >= 0.5 - _ROUNDING}
    return form if 2 * count > planned + _ROUNDING and len(families) > 1 else None


def settled(votes: Sequence[Vote], planned: int) -> bool:
    """Return whether further votes, of whichever family, cannot change the outcome."""
    open_votes = planned - _voted(votes)
    if majority(votes, planned) is not None or open_votes <= 0:
        return True
    most = max(_support(votes).values(), default=0.0)
    return 2 * (most + open_votes) <= planned + _ROUNDING


def _support(votes: Sequence[Vote]) -> Mapping[Canonical, float]:
    """Return the votes for each form."""
    support = defaultdict[Canonical, float](float)
    for vote in votes:
        support[vote.form] += vote.record.share
    return support


def _voted(votes: Sequence[Vote]) -> int:
    """Return how many teachers gave a vote: the shares of each add up to 1."""
    return round(sum(vote.record.share for vote in votes))


def epsilon(agreeing: float, votes: float) -> float:
    """Return the probability that the label is wrong, in (0, 1/2]."""
    return min(1 - (agreeing + 0.5) / (votes + 1), 0.5)


def preferred(votes: Sequence[Vote], student: Message, student_form: Canonical, form: Canonical) -> list[Message]:
    """Return the actions of a majority for `form`: the student's own where that is its form, else the votes'."""
    return [student] if form == student_form else [vote.message for vote in votes if vote.form == form]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pair before its text is chosen: any of `chosen` would do."""

    chosen: tuple[Message, ...]
    rejected: Message
    chosen_form: Canonical
    rejected_form: Canonical
    epsilon: float

    def side(self, form: Canonical) -> str:
        if form == self.chosen_form:
            return "chosen"
        return "rejected" if form == self.rejected_form else "neither"


def candidates(ballot: Ballot, student: Message) -> list[Candidate]:
    """Return the pairs that the votes give, with actions that can run as chosen ones. `student`: its own action."""
    votes, form = ballot.votes, majority(ballot.votes, ballot.planned)
    if form is None:
        return []
    actions = preferred(votes, student, ballot.student, form)
    chosen = tuple(message for message in actions if obstacle(message, form, ballot.state) is None)
    if not chosen:
        return []
    beaten = {ballot.student: student}
    if form == ballot.student:
        beaten = {vote.form: vote.message for vote in reversed(votes) if vote.form != form}
    doubt = epsilon(_support(ballot.votes)[form], _voted(ballot.votes))
    return [
        Candidate(chosen=chosen, rejected=message, chosen_form=form, rejected_form=other, epsilon=doubt)
        for other, message in beaten.items()
    ]


def obstacle(message: Message, form: Canonical, state: TraceState) -> str | None:
    """Return why an action of this form cannot run in the state; None where it can, as far as its form tells.

    A pair must not teach an action that could not be carried out. A call must be whole and name a tool of the state.
    Where the agent acts in its text, an action must be written in the way that it uses.
    """
    if "broken" in (form[0], *(part[0] for part in form[1:] if isinstance(part, tuple) and part)):
        return "the call is broken"
    names = {(tool.get("function") or {}).get("name") for tool in state.tools}
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in names:
            return "the call names a tool that the state lacks"
    acts = None if state.tools else actions_in_text(message.get("content") or "")
    way = None if acts is None else way_of([state.student_action, *state.messages])
    return None if acts is None or way in (None, acts.way) else f"it is written as {acts.way}, the trace's as {way}"


def length_ratio(first: Message, second: Message) -> float:
    """Return the characters of the longer answer over those of the shorter, at least 1."""
    sizes = sorted(max(_size(message), _MIN_CHARS) for message in (first, second))
    return sizes[1] / sizes[0]


def without_thinking(message: Message) -> Message:
    """Return the message without its thinking. That of teachers is not known, so the student's is no part of a pair."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept


def _size(message: Message) -> int:
    calls = message.get("tool_calls") or []
    call_chars = sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
    return len(message.get("content") or "") + call_chars
