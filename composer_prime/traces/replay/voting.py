"""The votes on one state: which teacher to ask next, and which pairs the answers give.

1. A majority (more than N/2 of the planned voters, of at least two families, by canonical form) beats the student,
   where they differ.
2. A student that the majority agrees with beats each minority answer.
3. No majority gives no pair. Nor does one whose action cannot run in the state.

epsilon, the probability that a label is wrong: 1 - (k + 1/2) / (n + 1) with k of n votes for the chosen side, at most
1/2. These rules and the replay-DPO loss are this project's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.data.pairs import Pair, PairState
from composer_prime.llm.cache import Message
from composer_prime.llm.client import NoAnswerError
from composer_prime.traces.replay.actions import Canonical, actions_in_text, canonical, way_of
from composer_prime.traces.replay.records import VoteRecord, digest
from composer_prime.traces.replay.teacher_pool import Teacher, TeacherAnswer
from composer_prime.traces.states import TraceState

_MIN_CHARS = 24
"""Shorter answers count as this long, so that one more word does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One teacher's answer."""

    record: VoteRecord
    form: Canonical
    message: Message


@dataclass(slots=True, kw_only=True)
class Ballot:
    """The votes on one state while they come in."""

    state: TraceState
    student: Canonical
    planned: int
    max_tokens: int
    votes: list[Vote] = field(default_factory=list)
    failed: int = 0
    """Calls that gave no vote. An answer from the cache that gives none is not one."""
    cached_usd: float = 0.0
    """What answers from the cache cost when they were first asked for."""
    without_vote: list[str] = field(default_factory=list)
    """Why teachers gave no vote."""

    async def fill(self, voters: list[Teacher]) -> None:
        """Ask one teacher after another while the majority is open. Raises CapError; the votes so far stay."""
        for teacher in voters:
            if settled(self.votes, self.planned):
                break
            try:
                self._add(teacher, await teacher.ask(self.state))
            except NoAnswerError as error:
                self.failed += 1
                self.without_vote.append(str(error))

    def _add(self, teacher: Teacher, reply: TeacherAnswer) -> None:
        """Add a teacher's vote. An answer that is cut short, filtered or empty is not one."""
        answer, form, fault = reply.answer, canonical(reply.answer.message, self.state.tools), None
        self.cached_usd += answer.cost_usd * reply.cached
        if answer.finish_reason == "length":
            fault = f"was cut at teachers.max_tokens = {self.max_tokens}"
        elif answer.finish_reason == "content_filter":
            fault = "was filtered by its endpoint (finish_reason content_filter)"
        if form is None or fault is not None:
            self.failed += not reply.cached
            self.without_vote.append(f"an answer of {teacher.name} {fault or 'is empty'}")
            return
        record = VoteRecord(
            teacher=teacher.name,
            family=teacher.family,
            form=digest(form),
            agrees=form == self.student,
            answer=reply.key,
            cached=reply.cached,
            cost_usd=0.0 if reply.cached else answer.cost_usd,
            price_usd=answer.cost_usd,
        )
        self.votes.append(Vote(record=record, form=form, message=answer.message))

    def outcome(self) -> tuple[str, str | None]:
        """Return (outcome, reason), the outcome as in StateRecord."""
        form = majority(self.votes, self.planned)
        if form is None:
            alone = len({vote.record.family for vote in self.votes}) < 2
            return ("failed", self.without_vote[-1]) if alone and self.without_vote else ("no_majority", None)
        answers = preferred(self.votes, self.state.student_action, self.student, form)
        reasons = [obstacle(message, form, self.state) for message in answers]
        if None not in reasons:
            return "cannot_run", f"the majority's action cannot run: {reasons[0]}"
        return "agreed" if form == self.student else "overruled", None


def majority(votes: Sequence[Vote], planned: int) -> Canonical | None:
    """Return the form that more than half of the planned voters gave; None without a majority (yet).

    Models of one family err together, so the agreement of one family alone decides nothing.
    """
    if not votes:
        return None
    form, count = Counter(vote.form for vote in votes).most_common(1)[0]
    families = {vote.record.family for vote in votes if vote.form == form}
    return form if 2 * count > planned and len(families) > 1 else None


def settled(votes: Sequence[Vote], planned: int) -> bool:
    """Return whether further votes, of whichever family, cannot change the outcome."""
    open_votes = planned - len(votes)
    if majority(votes, planned) is not None or open_votes <= 0:
        return True
    most = max(Counter(vote.form for vote in votes).values(), default=0)
    return 2 * (most + open_votes) <= planned


def epsilon(agreeing: int, votes: int) -> float:
    """Return the probability that the label is wrong, in (0, 1/2]."""
    return min(1 - (agreeing + 0.5) / (votes + 1), 0.5)


def preferred(votes: Sequence[Vote], student: Message, student_form: Canonical, form: Canonical) -> list[Message]:
    """Return the actions of a majority for `form`: the student's own where that is its form, else the votes'."""
    return [student] if form == student_form else [vote.message for vote in votes if vote.form == form]


def pairs_of(ballot: Ballot) -> list[Pair]:
    """Return the pairs that the votes give. Of agreeing answers that can run the first is chosen, which is the cheapest
    teacher's."""
    votes, state, form = ballot.votes, ballot.state, majority(ballot.votes, ballot.planned)
    if form is None:
        return []
    student = without_thinking(state.student_action)
    actions = preferred(votes, student, ballot.student, form)
    chosen = next((message for message in actions if obstacle(message, form, state) is None), None)
    if chosen is None:
        return []
    beaten = {ballot.student: student}
    if form == ballot.student:
        beaten = {vote.form: vote.message for vote in reversed(votes) if vote.form != form}
    pairs = []
    for other, rejected in beaten.items():
        sides = {form: "chosen", other: "rejected"}
        cast = {
            vote.record.teacher: {
                "family": vote.record.family,
                "form": vote.record.form,
                "answer": vote.record.answer,
                "for": sides.get(vote.form, "neither"),
            }
            for vote in votes
        }
        pair = Pair(
            trace=state.trace_id,
            state=PairState(state_id=state.state_id, messages=state.messages, tools=state.tools),
            chosen=chosen,
            rejected=rejected,
            epsilon=epsilon(sum(vote.form == form for vote in votes), len(votes)),
            teachers={"votes": cast, "planned": ballot.planned, "rejected_form": digest(other)},
            cost_usd=sum(vote.record.price_usd for vote in votes),
        )
        pairs.append(pair)
    return pairs


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
