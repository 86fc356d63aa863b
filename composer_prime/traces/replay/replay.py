"""Replay: states in, votes and pairs out. Read this file first.

    states ──> [ concurrent_states at a time ]
                 voters (never the trace's own family, cheapest first)
                 vote ── settled? no ── worth it? yes ── next vote ...
                 candidates ── length, duplicates ── text by the base's likelihood ──> Records
               kill switch, budget ──> stop: what is in flight ends, the rest stays for the next replay

A replay that was interrupted, killed or stopped goes on where it was: done states are skipped, answers that were paid
for come from the cache, and what the kill switch and the value of information had seen is read from votes and costs.

A replay with all that it needs, opened and closed again: local models, teachers, budget, files.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_prime.config import Config
from composer_prime.config.teachers import TeachersConfig
from composer_prime.errors import ConfigError, ModelNotFoundError, TeacherError
from composer_prime.llm.budget import Budget
from composer_prime.traces.pairs import Pair, PairState
from composer_prime.traces.replay.actions.canonical import RULES, Canonical, canonical
from composer_prime.traces.replay.actions.edits import Files
from composer_prime.traces.replay.consensus import Candidate, candidates, length_ratio, without_thinking
from composer_prime.traces.replay.gate.running_gate import RunningGate
from composer_prime.traces.replay.kill_switch import KillSwitch, Situation, ValueOfInformation
from composer_prime.traces.replay.records import UNDECIDED, ReplayRecords, StateRecord, content_of, digest, only_writer
from composer_prime.traces.replay.teachers.local import models_at
from composer_prime.traces.replay.teachers.pool import TeacherPool, check_pool
from composer_prime.traces.replay.teachers.scoring import KeptScorer, Scorer, ServedScorer, likeliest
from composer_prime.traces.replay.teachers.teacher import Teacher
from composer_prime.traces.replay.voting import Ballot, Voting, vote_record
from composer_prime.traces.state import TraceState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReplayProgress:
    """What a replay did so far."""

    states: int = 0
    resumed: int = 0
    """States that an earlier replay had done already."""
    outcomes: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    cached: int = 0
    failed: int = 0
    usd: float = 0.0
    """Paid now, also on states that were not finished."""
    cached_usd: float = 0.0
    """What answers from the cache cost when they were asked for."""
    with_entropy: int = 0
    """States whose trace tells how uncertain the student was."""
    stopped: str | None = None
    """Why it stopped early."""
    refusals: Counter[str] = field(default_factory=Counter)
    without_vote: Counter[str] = field(default_factory=Counter)
    """Why teachers gave no vote."""
    left_out: int = 0
    """States whose id another state has."""
    why_left_out: str | None = None
    """Of the first of them."""

    @property
    def price_usd(self) -> float:
        """As usd, with answers from the cache at their first price."""
        return self.usd + self.cached_usd


class Replay:
    def __init__(
        self,
        config: TeachersConfig,
        pool: TeacherPool,
        budget: Budget,
        records: ReplayRecords,
        scorer: Scorer | None = None,
        *,
        seed: int = 0,
        gate: RunningGate | None = None,
    ) -> None:
        """`gate` measures the pairs as they come, where they are trained while the replay goes on."""
        self.config, self.progress = config, ReplayProgress()
        self._pool, self._budget, self._records, self._scorer = pool, budget, records, scorer
        self._spent_before_usd = budget.spent_usd
        self._voi = ValueOfInformation(config.voi, seed)
        self._voting = Voting(config, pool, self._voi, self.progress.without_vote)
        self._switch = KillSwitch(config.kill, usd_by_trace=dict(budget.by_trace))
        self.gate = gate
        self._stopping = asyncio.Event()
        self._taken: dict[tuple[str, str], str | None] = {}
        """(trace, state) -> digest of the states that this replay saw."""
        self._writing = asyncio.Lock()
        for record in records.history:
            self._recall(record)

    async def run(self, states: Iterable[TraceState] | AsyncIterator[TraceState]) -> ReplayProgress:
        """Replay until the states end or something stops it; `progress.stopped` says what.

        Raises OSError when a record cannot be written, and what `states` raise, once the calls in flight have ended.
        """
        running = set[asyncio.Task[None]]()
        try:
            await self._take(_each(states), running)
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running -= _ended(done)
        except Exception as error:
            self._budget.close(f"the replay broke off: {error}")  # what is in flight may be charged: it is waited for
            await asyncio.gather(*running, return_exceptions=True)
            raise
        finally:
            await _cancelled(running)
            self.progress.usd = self._budget.spent_usd - self._spent_before_usd
        if self.progress.stopped is not None:
            self._budget.stopped(self.progress.stopped)
        return self.progress

    async def _take(self, source: AsyncIterator[TraceState], running: set[asyncio.Task[None]]) -> None:
        """Begin states, so many at a time, until there is none or something stops the replay."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        upcoming: asyncio.Task[TraceState | None] | None = None
        try:
            # A source may wait for its next state for ever: what stops the replay must not have to wait with it.
            while self.progress.stopped is None:
                if upcoming is None and len(running) < self.config.concurrent_states:
                    upcoming = asyncio.ensure_future(_next(source))
                waited = {*running, stopping, *(() if upcoming is None else (upcoming,))}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                running -= _ended(done & running)
                if upcoming is not None and upcoming.done():
                    state, upcoming = upcoming.result(), None
                    if state is None:
                        return
                    self._begin(state, running)
        finally:
            await _cancelled({stopping} if upcoming is None else {stopping, upcoming})

    def stop(self, reason: str) -> None:
        """End soon: no further call is made, those in flight are waited for and their answers kept."""
        self.progress.stopped = self.progress.stopped or reason
        self._budget.close(reason)
        self._stopping.set()

    @property
    def in_flight(self) -> int:
        """Calls whose answers are not there yet."""
        return self._budget.in_flight

    def _recall(self, record: StateRecord) -> None:
        """Take in what an earlier replay saw; its costs are in the ledger."""
        self._note(record, usd=0.0)
        if record.expected_usd is not None:
            self._voi.expect(record.expected_usd)
        self._learn(record)

    def _learn(self, record: StateRecord) -> None:
        """Whether the votes on a state, if they came to an end, gave a pair."""
        if record.outcome not in ("agreed", "overruled", "no_majority", "cannot_run") or not record.votes:
            return
        minority = record.outcome == "agreed" and any(not vote.agrees for vote in record.votes)
        before = Situation(error=record.error, entropy=record.entropy)
        after = replace(before, cheap_disagrees=not record.votes[0].agrees)
        for situation in (before, after):
            self._voi.learn(situation, minority or record.outcome == "overruled")

    def _begin(self, state: TraceState, running: set[asyncio.Task[None]]) -> None:
        place, content = (state.trace_id, state.state_id), _content(state)
        known = self._taken.setdefault(place, self._records.done.get(place))
        if known is not None:
            self._known(state, known in ("", content))
            return
        self._taken[place] = content
        self.progress.stopped = self.progress.stopped or self._switch.tripped()
        if self.progress.stopped is None:
            running.add(asyncio.ensure_future(self._one(state)))

    def _known(self, state: TraceState, same: bool) -> None:
        """A state of this id was there before: this very one, or another, which nobody could tell from it later."""
        if same:
            self.progress.resumed += 1
            return
        self.progress.left_out += 1
        if self.progress.why_left_out is None:
            self.progress.why_left_out = (
                f"trace {state.trace_id!r} has another state {state.state_id!r}, in this file or in "
                f"{self._records.votes_path}: give each state an id of its own, or write to another pairs file"
            )
            logger.warning("left out of the replay: %s", self.progress.why_left_out)

    async def _one(self, state: TraceState) -> None:
        """Vote on one state and write down what came of it. What nobody expected fails this state alone."""
        ballot, pairs, dropped, broken = None, [], Counter[str](), False
        try:
            try:
                ballot, voters = self._ballot(state)
            except TeacherError as error:
                outcome, reason = "refused", str(error)
            else:
                outcome, reason = await self._voting.vote(ballot, voters)
            if outcome == "run_budget":
                # Not done: a replay with a larger cap takes it up again, its votes from the cache.
                self.progress.stopped = self.progress.stopped or reason
                return
            if ballot is not None and outcome not in UNDECIDED:
                pairs, dropped = await self._pairs(ballot)
        except OSError:  # of the disk, which the other states need too
            raise
        except Exception as error:
            logger.exception("state %s of trace %s failed", state.state_id, state.trace_id)
            outcome, reason, pairs, dropped, broken = "failed", f"{type(error).__name__}: {error}", [], Counter(), True
            self._voting.say_why(reason)
        record = self._record(state, ballot, outcome, reason, pairs, dropped, broken=broken)
        async with self._writing:
            written = await asyncio.to_thread(self._records.add, record, pairs)
            if self.gate is not None:
                self.gate.note(record, written)
        self._count(record, len(pairs))
        if self.gate is not None and self.progress.stopped is None:
            await self.gate.measure_when_due()

    def _record(
        self,
        state: TraceState,
        ballot: Ballot | None,
        outcome: str,
        reason: str | None,
        pairs: list[Pair],
        dropped: Counter[str],
        *,
        broken: bool,
    ) -> StateRecord:
        usd, seconds = self._budget.take_state(state.state_id), ballot.seconds if ballot else 0.0
        return StateRecord(
            trace=state.trace_id,
            state=state.state_id,
            step=state.step,
            family=self._pool.family_of(state),
            outcome=outcome,
            reason=reason,
            planned=ballot.planned if ballot else 0,
            votes=[vote_record(vote, ballot.student) for vote in ballot.votes] if ballot else [],
            student_form=digest(ballot.student) if ballot else None,
            error=state.error is not None,
            entropy=state.entropy,
            failed_calls=ballot.failed if ballot else 0,
            broken=broken,
            cost_usd=usd,
            expected_usd=ballot.expected_usd if ballot else None,
            seconds=seconds,
            price_usd=usd + (ballot.cached_usd if ballot else 0.0),
            vote_s=seconds + (ballot.cached_s if ballot else 0.0),
            content=_content(state),
            pairs=[self._records.written_as(pair) or pair.pair_id for pair in pairs],
            dropped=dict(dropped),
            rules=RULES,
        )

    def _ballot(self, state: TraceState) -> tuple[Ballot, list[Teacher]]:
        """(ballot, voters). Raises TeacherError where nobody can judge the state."""
        files = Files(state.messages)
        student = canonical(without_thinking(state.student_action), state.tools, files)
        if student is None:
            raise TeacherError("the student's action is empty")
        voters = self._pool.voters(state)
        return Ballot(state=state, files=files, student=student, planned=min(self.config.voters, len(voters))), voters

    async def _pairs(self, ballot: Ballot) -> tuple[list[Pair], Counter[str]]:
        """The pairs that are kept, and why others are not."""
        kept: list[Pair] = []
        dropped: Counter[str] = Counter()
        student = without_thinking(ballot.state.student_action)
        for candidate in candidates(ballot.votes, student, ballot.student, ballot.planned, ballot.runs):
            pair = await self._pair(ballot, candidate)
            known = self._records.written_as(pair) is not None
            if length_ratio(pair.chosen, pair.rejected) > self.config.max_length_ratio:
                dropped["length"] += 1
            elif content_of(pair) in self._records.contents and not known:
                dropped["duplicate"] += 1
            else:
                self._records.contents.add(content_of(pair))
                kept.append(pair)
        return kept, dropped

    async def _pair(self, ballot: Ballot, candidate: Candidate) -> Pair:
        state = ballot.state
        chosen, how = await likeliest(self._scorer, state.messages, state.tools, candidate.chosen)
        votes = {
            vote.teacher: {"family": vote.family, "form": digest(vote.form), "answer": vote.key}
            | {"for": _side(vote.form, candidate)}
            for vote in ballot.votes
        }
        return Pair(
            trace=state.trace_id,
            state=PairState(state_id=state.state_id, messages=state.messages, tools=state.tools),
            chosen=chosen,
            rejected=candidate.rejected,
            epsilon=candidate.epsilon,
            teachers={
                "votes": votes,
                "planned": ballot.planned,
                "chosen_by": how,
                "rejected_form": digest(candidate.rejected_form),
            },
            cost_usd=sum(vote.price_usd for vote in ballot.votes),
        )

    def _count(self, record: StateRecord, pairs: int) -> None:
        progress = self.progress
        progress.states += 1
        progress.outcomes[record.outcome] += 1
        progress.pairs += pairs
        progress.dropped.update(record.dropped)
        paid = sum(not vote.cached for vote in record.votes)
        progress.calls += paid + record.failed_calls
        progress.cached += len(record.votes) - paid
        progress.failed += record.failed_calls
        progress.usd = self._budget.spent_usd - self._spent_before_usd
        progress.cached_usd += record.price_usd - record.cost_usd
        progress.with_entropy += record.entropy is not None
        if record.outcome == "refused":
            progress.refusals[record.reason or ""] += 1
        self._note(record, usd=record.cost_usd)
        self._learn(record)
        progress.stopped = progress.stopped or self._budget.closed or self._switch.tripped()

    def _note(self, record: StateRecord, *, usd: float) -> None:
        """Show the kill switch a state."""
        calls = sum(not vote.cached for vote in record.votes) + record.failed_calls
        self._switch.note(
            record.trace, usd, record.seconds, calls=calls, failed=record.failed_calls, broken=record.broken
        )


def _content(state: TraceState) -> str:
    return digest([state.messages, state.student_action, state.tools])


def _side(form: Canonical, candidate: Candidate) -> str:
    if form == candidate.chosen_form:
        return "chosen"
    return "rejected" if form == candidate.rejected_form else "neither"


async def _each(states: Iterable[TraceState] | AsyncIterator[TraceState]) -> AsyncIterator[TraceState]:
    if isinstance(states, AsyncIterator):
        async for state in states:
            yield state
    else:
        for state in states:
            yield state


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(source: AsyncIterator[TraceState]) -> TraceState | None:
    """The next state; None after the last."""
    return await anext(source, None)


def _ended(done: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """`done`. Raises what one of them raised."""
    for task in done:
        task.result()
    return done


@asynccontextmanager
async def open_replay(
    config: Config, *, pairs: Path, votes: Path, costs: Path, gated: bool = False
) -> AsyncIterator[Replay]:
    """`gated`: measure the pairs as they come, for they are trained meanwhile.

    Raises ConfigError (price, key, base, another replay of `pairs`, a file of something else), RoleFailedError or
    DeadlineError (local models).
    """
    teachers = config.teachers
    await asyncio.to_thread(check_pool, teachers)  # it may convert a model
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every vote
    base = config.model.path
    wanted = teachers.models_served(base)
    async with AsyncExitStack() as stack:
        stack.enter_context(only_writer(pairs))  # before what was spent is read
        records = ReplayRecords(pairs, votes)  # first: what is no file of pairs is left alone
        budget = Budget(teachers.budget, costs)
        addresses: dict[str, str] = {}
        served: Scorer | None = None
        kept = _kept(teachers, base) if teachers.score else None
        if wanted:
            url = await stack.enter_async_context(
                models_at(wanted, threads=teachers.local_threads, start_timeout_s=teachers.local_start_timeout_s)
            )
            addresses = {teacher.model: url for teacher in teachers.teacher if teacher.local}
            if kept is not None:
                served = kept.inner = ServedScorer(url, base, teachers.timeout_s)
                stack.push_async_callback(served.close)
        pool = await asyncio.to_thread(TeacherPool, teachers, budget, addresses)  # it imports for seconds
        stack.push_async_callback(pool.close)
        gate = RunningGate(teachers.gate, records, served) if gated else None
        yield Replay(teachers, pool, budget, records, kept, seed=config.run.seed, gate=gate)


def _kept(teachers: TeachersConfig, base: str) -> KeptScorer:
    try:
        return KeptScorer(teachers.cache_dir.expanduser() / "scores", base)
    except ModelNotFoundError as error:
        raise ConfigError(
            f"{error}; the frozen base chooses among agreeing answers: to take the first of them instead, set "
            "teachers.score = false"
        ) from None
