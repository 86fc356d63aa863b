"""Replay: states in, votes and pairs out. Read this file first.

    states ──> [ concurrent_states at a time ]
                 longer than a training step holds? refused
                 voters (never the trace's own family, cheapest first)
                 vote ── settled? no ── next vote ...
                 pairs ── length ──> ReplayRecords
               too many failed calls, budget ──> stop: what is in flight ends, the rest stays for the next replay

An interrupted, killed or stopped replay continues where it was. Done states are skipped. Paid answers come from the
cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.config import Config
from composer_prime.config.teachers import TeachersConfig
from composer_prime.data.pairs import Pair
from composer_prime.errors import CapError, TeacherError
from composer_prime.llm.cache import Message
from composer_prime.llm.client import Budget
from composer_prime.model_source import resolve_model
from composer_prime.traces.replay.records import RULES, UNDECIDED, ReplayRecords, StateRecord, digest, only_writer
from composer_prime.traces.replay.teacher_pool import Teacher, TeacherPool, check_teachers, models_at, teacher_budget
from composer_prime.traces.replay.voting import Ballot, canonical, length_ratio, pairs_of, without_thinking
from composer_prime.traces.states import TraceState

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

NO_MODEL = "none"
"""The model.path of a replay without a run."""
_MAX_LENGTH_RATIO = 4.0
"""A pair whose longer answer exceeds this times the shorter one is dropped: it would teach length."""
_KNOWN_TEXTS = 4096
"""Texts whose length is remembered: the states of a trace repeat their context."""
MAX_REASONS = 50
"""Reasons for missing votes that are counted separately."""
MOST_FAILED, FEWEST_CALLS = 0.25, 20
"""A replay stops when more than this share of its calls failed after all retries, once it made so many."""


@asynccontextmanager
async def open_replay(
    config: Config, *, pairs: Path, votes: Path, costs: Path, server: Sequence[str] = ()
) -> AsyncIterator[Replay]:
    """Open a replay with all that it needs: files, budget, local models, teachers.

    `server`: the command of a server of local models, where none is served yet.

    Raises ConfigError (price, key, another replay of `pairs`, a file of something else), RoleFailedError or
    DeadlineError (local models).
    """
    teachers = config.teachers
    await asyncio.to_thread(check_teachers, teachers)  # it may convert a model
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every vote
    models = teachers.models_served()
    async with AsyncExitStack() as stack:
        stack.enter_context(only_writer(pairs))  # before reading what was spent
        records = ReplayRecords(pairs, votes)  # before anything is written: another file is left as it is
        budget = teacher_budget(teachers.budget, costs)
        url = await stack.enter_async_context(models_at(models, server)) if models else ""
        pool = await asyncio.to_thread(TeacherPool, teachers, budget, dict.fromkeys(models, url))
        stack.push_async_callback(pool.close)
        limits = await asyncio.to_thread(training_limits, config)
        yield Replay(teachers, pool, budget, records, limits=limits)


@dataclass(slots=True)
class VoteCounts:
    """How teachers voted so far."""

    calls: int = 0
    cached: int = 0
    failed: int = 0
    without_vote: Counter[str] = field(default_factory=Counter)
    """Why teachers gave no vote."""

    def count_none(self, reason: str) -> None:
        """Count why a teacher gave no vote. Endpoints may word their errors in any way."""
        known = reason in self.without_vote or len(self.without_vote) < MAX_REASONS
        self.without_vote[reason if known else "other reasons"] += 1


@dataclass(slots=True)
class ReplayProgress:
    """What a replay did so far."""

    states: int = 0
    resumed: int = 0
    """States that an earlier replay had done already."""
    outcomes: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    dropped: int = 0
    """Pairs whose answers differ too much in length."""
    votes: VoteCounts = field(default_factory=VoteCounts)
    usd: float = 0.0
    """Paid now, also on states that were not finished."""
    cached_usd: float = 0.0
    """What answers from the cache cost when they were asked for."""
    stopped: str | None = None
    """Why it stopped early."""
    refusals: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    """States whose id another state has."""
    why_left_out: str | None = None
    """Of the first of them."""

    @property
    def price_usd(self) -> float:
        """Return the price: `usd`, with answers from the cache at what they cost when they were asked for."""
        return self.usd + self.cached_usd


class Replay:
    def __init__(
        self,
        config: TeachersConfig,
        pool: TeacherPool,
        budget: Budget,
        records: ReplayRecords,
        *,
        limits: TrainingLimits | None = None,
    ) -> None:
        """States beyond `limits` are refused before any call."""
        self.config = config
        self.progress = ReplayProgress()
        self._pool = pool
        self._budget = budget
        self._records = records
        self._limits = limits
        self._spent_before_usd = budget.spent_usd
        self._places = asyncio.Semaphore(config.concurrent_states)
        self._stopping = asyncio.Event()
        self._broke: Exception | None = None
        self._seen: dict[tuple[str, str], str | None] = {}
        """(trace, state) -> digest of the states of this replay."""
        self._writing = asyncio.Lock()

    async def run(self, states: Iterable[TraceState] | AsyncIterator[TraceState]) -> ReplayProgress:
        """Replay until the states end or something stops it, which `progress.stopped` names.

        Raises OSError when a record cannot be written, and the errors of `states`, once the calls in flight have ended.
        """
        running = set[asyncio.Task[None]]()
        # A source may wait for its next state forever. A stop must not wait with it.
        taking = asyncio.create_task(self._take(_each(states), running))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
            await _cancel((taking, stopping))
            await asyncio.gather(*running)
        finally:
            await _cancel((taking, stopping, *running))
            # Only a canceled replay leaves calls in flight. They are counted at what is held for them.
            self.progress.usd = self._budget.spent_usd + self._budget.held_usd - self._spent_before_usd
        if self._broke is not None:
            raise self._broke
        if self.progress.stopped is not None:
            self._budget.note_stop(self.progress.stopped)
        return self.progress

    async def _take(self, source: AsyncIterator[TraceState], running: set[asyncio.Task[None]]) -> None:
        """Begin states, concurrent_states at a time, until none are left."""
        try:
            while True:
                await self._places.acquire()
                state = await anext(source, None)
                if state is None:
                    return
                if self._is_open(state):
                    task = asyncio.create_task(self._one(state))
                    running.add(task)
                    task.add_done_callback(running.discard)
                else:
                    self._places.release()
        except Exception as error:
            self._break_off(error)

    def stop(self, reason: str) -> None:
        """End soon: make no further call, wait for those in flight and keep their answers."""
        self.progress.stopped = self.progress.stopped or reason
        self._budget.close(reason)
        self._stopping.set()

    def _break_off(self, error: Exception) -> None:
        self._broke = self._broke or error
        self.stop(f"the replay broke off: {error}")

    @property
    def in_flight(self) -> int:
        """Calls without an answer yet."""
        return self._budget.in_flight

    def _is_open(self, state: TraceState) -> bool:
        """Return whether a state is to be voted on. Count one that was done before, or has the id of another."""
        place, content = (state.trace_id, state.state_id), _content(state)
        progress, seen = self.progress, self._seen.setdefault(place, self._records.done.get(place))
        if seen is None:
            self._seen[place] = content
            return True
        if seen == content:
            progress.resumed += 1
            return False
        progress.left_out += 1
        if progress.why_left_out is None:
            progress.why_left_out = (
                f"trace {state.trace_id!r} has another state {state.state_id!r}, in this file or in "
                f"{self._records.votes_path}: give each state an id of its own, or write to another pairs file"
            )
            logger.warning("left out of the replay: %s", progress.why_left_out)
        return False

    async def _one(self, state: TraceState) -> None:
        """Vote on one state and write down the result."""
        try:
            record, pairs, dropped = await self._voted(state)
            async with self._writing:
                await asyncio.to_thread(self._records.add, record, pairs)
            self._count(record, dropped)
        except CapError as error:
            # Not done: a replay with a larger cap takes it up again, its votes from the cache.
            self.stop(str(error))
        except Exception as error:  # the other states need the disk too
            self._break_off(error)
        finally:
            self._places.release()

    async def _voted(self, state: TraceState) -> tuple[StateRecord, list[Pair], int]:
        """Return what came of a state, with the pairs to write and how many are dropped. An unexpected error fails this
        state alone. Raises CapError and OSError."""
        ballot: Ballot | None = None
        made, broken = list[Pair](), False
        try:
            await self._check_length(state)
            ballot, voters = self._ballot(state)
            await ballot.fill(voters)
            outcome, reason = ballot.outcome()
            if outcome not in UNDECIDED:
                made = pairs_of(ballot)
        except TeacherError as error:
            outcome, reason = "refused", str(error)
        except (CapError, OSError):
            raise
        except Exception as error:
            logger.exception("state %s of trace %s failed", state.state_id, state.trace_id)
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
            ballot, broken = None, True
            self.progress.votes.count_none(reason)
        for each in ballot.without_vote if ballot else ():
            self.progress.votes.count_none(each)
        pairs = [pair for pair in made if length_ratio(pair.chosen, pair.rejected) <= _MAX_LENGTH_RATIO]
        usd = self._budget.take_state(state.state_id)
        record = StateRecord(
            trace=state.trace_id,
            state=state.state_id,
            outcome=outcome,
            reason=reason,
            votes=[vote.record for vote in ballot.votes] if ballot else [],
            failed_calls=ballot.failed if ballot else int(broken),
            cost_usd=usd,
            price_usd=usd + (ballot.cached_usd if ballot else 0.0),
            content=_content(state),
            pairs=[self._records.written_as(pair) or pair.pair_id for pair in pairs],
            rules=RULES,
        )
        return record, pairs, len(made) - len(pairs)

    async def _check_length(self, state: TraceState) -> None:
        """Raise TeacherError where no step could train on a pair of the state."""
        excess = None if self._limits is None else await asyncio.to_thread(self._limits.excess, state)
        if excess is not None:
            raise TeacherError(excess)

    def _ballot(self, state: TraceState) -> tuple[Ballot, list[Teacher]]:
        """Return (ballot, voters). Raises TeacherError if no teacher may judge the state."""
        student = canonical(without_thinking(state.student_action), state.tools)
        if student is None:
            raise TeacherError("the student's action is empty")
        voters = self._pool.voters(state)
        planned = min(self.config.voters, len(voters))
        return Ballot(state=state, student=student, planned=planned, max_tokens=self.config.max_tokens), voters

    def _count(self, record: StateRecord, dropped: int) -> None:
        progress = self.progress
        progress.states += 1
        progress.outcomes[record.outcome] += 1
        progress.pairs += len(record.pairs)
        progress.dropped += dropped
        progress.votes.calls += record.calls
        progress.votes.cached += sum(vote.cached for vote in record.votes)
        progress.votes.failed += record.failed_calls
        progress.usd = self._budget.spent_usd - self._spent_before_usd
        progress.cached_usd += record.price_usd - record.cost_usd
        if record.outcome == "refused":
            progress.refusals[record.reason or ""] += 1
        if self._budget.closed is not None:
            self.stop(self._budget.closed)
        elif progress.votes.calls >= FEWEST_CALLS and progress.votes.failed > MOST_FAILED * progress.votes.calls:
            self.stop(f"{progress.votes.failed} of {progress.votes.calls} calls failed: see the reasons, and repeat")


class TrainingLimits:
    """Which states a training step can hold: teachers are paid for no other."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int, row_tokens: int) -> None:
        """`row_tokens`: both sides of a pair share one row (trainer.micro_batch_tokens)."""
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._row_tokens = row_tokens
        self._length = lru_cache(_KNOWN_TEXTS)(self._count)

    def excess(self, state: TraceState) -> str | None:
        """Return why no pair of this state can be trained; None where one may.

        Every pair holds the context and, on one side, the student's action. Only their texts are counted: what the
        chat template adds would make them longer still.
        """
        context = sum(self._tokens(message) for message in state.messages)
        side = context + self._tokens(state.student_action)
        for tokens, what, setting, limit in (
            (side, "its context and action have", "model.max_context", self._max_context),
            (context + side, "both sides of its pairs have", "trainer.micro_batch_tokens", self._row_tokens),
        ):
            if tokens > limit:
                return (
                    f"{what} more tokens than {setting} = {limit}, so no step could train on its pairs: raise "
                    f"{setting}, or ingest shorter sessions"
                )
        return None

    def _tokens(self, message: Message) -> int:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        texts = [message.get("content"), *(text for call in calls for text in (call["name"], call["arguments"]))]
        return sum(self._length(text) for text in texts if text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def training_limits(config: Config) -> TrainingLimits | None:
    """Return the limits of a run; None without one, and, with a warning, where its tokenizer is not at hand."""
    from tokenizers import Tokenizer

    path = config.model.path
    if path == NO_MODEL:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(resolve_model(path) / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        logger.warning(
            "states are not compared with model.max_context: model.path = %s has no readable tokenizer.json (%s)",
            path,
            error,
        )
        return None
    tokenizer.no_truncation()
    return TrainingLimits(tokenizer, max_context=config.model.max_context, row_tokens=config.trainer.micro_batch_tokens)


def _content(state: TraceState) -> str:
    return digest([state.messages, state.student_action, state.tools])


async def _each(states: Iterable[TraceState] | AsyncIterator[TraceState]) -> AsyncIterator[TraceState]:
    if isinstance(states, AsyncIterator):
        async for state in states:
            yield state
    else:
        for state in states:
            yield state


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
