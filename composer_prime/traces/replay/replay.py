"""Replay: states in, votes and pairs out. Read this file first.

    states ──> [ concurrent_states at a time ]
                 longer than a training step holds? refused
                 voters (never the trace's own family, cheapest first)
                 vote ── settled? no ── next vote ...
                 pairs ── length ──> ReplayRecords
               too many failed calls, budget ──> stop: what is in flight ends, the rest stays for the next replay

A replay continues where an earlier one was: done states are skipped, paid answers come from the cache.

Exit status of `composer replay`: 0 replayed, 2 wrong input, 3 stopped by a cap or failing calls or nothing decided,
130 by Ctrl-C or SIGTERM. The first Ctrl-C waits for the calls in flight, which may be charged; a second drops them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.config import Config
from composer_prime.config.layers import read_layers
from composer_prime.config.load import resolve
from composer_prime.config.teachers import TeachersConfig
from composer_prime.console import INTERRUPTED, ProgressLines, fail
from composer_prime.data.pairs import Pair
from composer_prime.errors import CapError, ComposerError, ConfigError, TeacherError
from composer_prime.llm.cache import Message
from composer_prime.llm.client import Budget
from composer_prime.model_source import resolve_model
from composer_prime.traces.records import (
    RULES,
    UNDECIDED,
    ReplayRecords,
    StateRecord,
    TraceState,
    count_selected,
    digest,
    figures_of,
    only_writer,
    read_records,
    read_states,
    same_file,
    selected_states,
    votes_beside,
)
from composer_prime.traces.replay.teacher_pool import (
    Teacher,
    TeacherPool,
    check_teachers,
    cost_line,
    models_at,
    teacher_budget,
)
from composer_prime.traces.replay.voting import Ballot, canonical, length_ratio, pairs_of, without_thinking

if TYPE_CHECKING:
    from tokenizers import Tokenizer


logger = logging.getLogger(__name__)

NO_MODEL = "none"
"""The model.path of a replay without a run."""
_MAX_LENGTH_RATIO = 4.0
"""A longer answer over this times the shorter one would teach length: the pair is dropped."""
_KNOWN_TEXTS = 4096
"""Texts whose length is remembered: a trace's states repeat their context."""
MAX_REASONS = 50
"""Reasons for missing votes that are counted separately."""
MOST_FAILED, FEWEST_CALLS = 0.25, 20
"""A replay stops when more than this share of its calls failed after all retries, once it made so many."""


@asynccontextmanager
async def open_replay(
    config: Config, *, pairs: Path, votes: Path, costs: Path, server: Sequence[str] = ()
) -> AsyncIterator[Replay]:
    """Open a replay with all that it needs: files, budget, local models, teachers.

    `server`: the command that serves local models where none does. Raises ConfigError, RoleFailedError, DeadlineError.
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
        """Count why a teacher gave no vote, with a bound: endpoints word their errors in any way."""
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
    """What answers from the cache cost when first asked for."""
    stopped: str | None = None
    """Why it stopped early."""
    refusals: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    """States whose id another state has."""
    why_left_out: str | None = None
    """Of the first of them."""

    @property
    def price_usd(self) -> float:
        """Paid now, and what answers from the cache cost when first asked for."""
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
        self._seen: dict[tuple[str, str], str | None] = {}  # (trace, state) -> digest
        self._writing = asyncio.Lock()

    async def run(self, states: Iterable[TraceState] | AsyncIterator[TraceState]) -> ReplayProgress:
        """Replay until the states end or something stops it, which `progress.stopped` names.

        Raises OSError for a record that cannot be written, and the errors of `states`, after the calls in flight.
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
            # A canceled replay leaves calls in flight, counted at what is held for them.
            self.progress.usd = self._budget.spent_usd + self._budget.held_usd - self._spent_before_usd
        if self._broke is not None:
            raise self._broke
        if self.progress.stopped is not None:
            self._budget.note_stop(self.progress.stopped)
        return self.progress

    async def _take(self, source: AsyncIterator[TraceState], running: set[asyncio.Task[None]]) -> None:
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
        """Return whether to vote on a state. Count one that was done, or has another's id."""
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
                f"trace {state.trace_id!r} has another state {state.state_id!r}, here or in "
                f"{self._records.votes_path}: give each state its own id, or write to another pairs file"
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
            # A replay with a larger cap takes it up again.
            self.stop(str(error))
        except Exception as error:  # the other states need the disk too
            self._break_off(error)
        finally:
            self._places.release()

    async def _voted(self, state: TraceState) -> tuple[StateRecord, list[Pair], int]:
        """Return what came of a state, its pairs to write and the number dropped. Raises CapError and OSError."""
        ballot: Ballot | None = None
        made, broken = list[Pair](), False
        try:
            excess = await asyncio.to_thread(self._limits.excess, state) if self._limits is not None else None
            if excess is not None:
                raise TeacherError(excess)  # no step could train on a pair of the state
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

    def _ballot(self, state: TraceState) -> tuple[Ballot, list[Teacher]]:
        """Return (ballot, voters). Raises TeacherError."""
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
            self.stop(f"{progress.votes.failed} of {progress.votes.calls} calls failed: see why, and repeat")


class TrainingLimits:
    """Which states a training step can hold: teachers are paid for no other."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int, row_tokens: int) -> None:
        """`row_tokens`: both sides of a pair share one row (trainer.micro_batch_tokens)."""
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._row_tokens = row_tokens
        self._length = lru_cache(_KNOWN_TEXTS)(self._count)

    def excess(self, state: TraceState) -> str | None:
        """Return why no pair of this state can be trained, if so.

        Every pair holds the context and, on one side, the student's action. A chat template adds more still.
        """
        context = sum(self._tokens(message) for message in state.messages)
        side = context + self._tokens(state.student_action)
        for tokens, what, setting, limit in (
            (side, "its context and action have", "model.max_context", self._max_context),
            (context + side, "both sides of its pairs have", "trainer.micro_batch_tokens", self._row_tokens),
        ):
            if tokens > limit:
                return (
                    f"{what} more tokens than {setting} = {limit}, so no step could train on its pairs: "
                    f"raise {setting}, or ingest shorter sessions"
                )
        return None

    def _tokens(self, message: Message) -> int:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        texts = [message.get("content"), *(text for call in calls for text in (call["name"], call["arguments"]))]
        return sum(self._length(text) for text in texts if text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def training_limits(config: Config) -> TrainingLimits | None:
    """Return a run's limits; None without a run, and, with a warning, without its tokenizer."""
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


SERVER = (sys.executable, "-m", "inference.model_server")
_NO_SOURCE = [{"name": "toolsmith", "taskset": {"id": "orchestrator.environments.toolsmith"}}]
NO_RUN = {
    "--run.name": "replay",
    "--orchestrator.source": json.dumps(_NO_SOURCE),
    "--model.path": NO_MODEL,
    "--model.max_context": str(1 << 30),
    "--trainer.micro_batch_tokens": str(1 << 31),
    "--teachers.online": "false",
}
"""What stands for the run where only teachers are given."""
STOPPED = 3
INTERRUPTION = "interrupted: repeat the command to continue"
_SHOW_S = 0.2
_SAME_S = 0.3
"""One signal can arrive twice: from the terminal's process group, and passed on by `composer`."""
USAGE = """\
usage: composer replay STATES -o PAIRS.jsonl @ FILE.toml [--states N] [--per-trace K] [--teachers.key VALUE ...]

Ask the teachers of [teachers] for an action at each state and write preference pairs, and beside them
PAIRS.votes.jsonl (every vote) and PAIRS.costs.jsonl (every call). Repeat the command to continue.

A teacher file is enough. With a run's file before it, states that are too long for its steps are skipped.

options:
  -h, --help              show this help message and exit
  -o PAIRS.jsonl          file of pairs to write
  --states N              states at most, those followed by errors first
  --per-trace K           states of a trace at most
  --teachers.key VALUE    a setting of [teachers]"""
_SHORT = {"--states": "--teachers.select.states", "--per-trace": "--teachers.select.per_trace"}


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    try:
        states, pairs, config = parse_arguments(words)
        progress = asyncio.run(replay(states, pairs, config, SERVER))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(INTERRUPTION, file=sys.stderr)
        return INTERRUPTED
    except (ComposerError, OSError) as error:
        fail(error, command="composer replay")
    print("\n".join(replay_summary(progress, pairs)))
    if progress.stopped == INTERRUPTION:
        return INTERRUPTED
    return STOPPED if progress.stopped else 0


def parse_arguments(words: Sequence[str]) -> tuple[Path, Path, Config]:
    """Return the states, the pairs and the configuration. Raises ConfigError."""
    start = next((index for index, word in enumerate(words) if word.startswith(("@", "--"))), len(words))
    files, settings = list(words[:start]), list(words[start:])
    if len(files) != 3 or files[1] not in ("-o", "--output") or not settings:
        raise ConfigError(f"give states, -o pairs and a configuration\n{USAGE}")
    if same_file(Path(files[0]), Path(files[2])):
        raise ConfigError(f"{files[0]} and {files[2]} are one file: name another file for the pairs")
    named = [(word, *word.partition("=")) for word in settings]
    settings = [_SHORT[flag] + equals + value if flag in _SHORT else word for word, flag, equals, value in named]
    layers, _ = read_layers(settings)
    if layers and not any(layer.values.keys() & {"model", "run"} for layer in layers):
        # First, so that what the user says counts.
        settings = [word for pair in NO_RUN.items() for word in pair] + settings
    config = resolve(settings)
    if not config.teachers.teacher:
        raise ConfigError("the configuration has no [[teachers.teacher]]: add at least two, of two families")
    return Path(files[0]), Path(files[2]), config


async def replay(states: Path, pairs: Path, config: Config, server: Sequence[str] = ()) -> ReplayProgress:
    """Replay the file `states` into `pairs`. Raises ConfigError for unreadable states, or where none can be judged."""
    select = config.teachers.select
    if next(read_states(states), None) is None:
        raise ConfigError(
            f"{states} holds no states: make it with `composer ingest`, whose table says what was skipped"
        )
    total = count_selected(states, select)
    costs = pairs.with_name(f"{pairs.stem}.costs.jsonl")
    async with open_replay(config, pairs=pairs, votes=votes_beside(pairs), costs=costs, server=server) as run:
        print(cost_line(config.teachers), file=sys.stderr)
        showing = asyncio.create_task(_show(run.progress, total))
        try:
            with _interruptible(run):
                progress = await run.run(selected_states(states, select))
        finally:
            showing.cancel()
    only_refused = progress.outcomes["refused"] == progress.states
    if only_refused and progress.resumed:  # a finished replay, repeated: the others were decided then
        return progress
    if progress.states and only_refused:
        reasons = "; ".join(reason for reason, _ in progress.refusals.most_common(3))
        raise ConfigError(f"all {progress.states} states were refused: {reasons}")
    if progress.states and sum(progress.outcomes[outcome] for outcome in UNDECIDED) == progress.states:
        progress.stopped = progress.stopped or "no state was decided: correct what is named above, and repeat"
    return progress


@contextmanager
def _interruptible(run: Replay) -> Iterator[None]:
    """Make Ctrl-C or SIGTERM end the replay after the calls in flight; a second one drops them."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        if run.progress.stopped is None:
            loop.call_later(_SAME_S, restore)
            run.stop(INTERRUPTION)
            print("ending: waiting for calls in flight; Ctrl-C again drops them at their reservation", file=sys.stderr)

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        restore()


async def _show(progress: ReplayProgress, total: int) -> None:
    lines = ProgressLines()

    def line() -> str:
        done = progress.states + progress.resumed
        return f"replaying: {done:,} of {total:,} states, {progress.pairs} pairs, ${progress.usd:.4f}"

    while True:
        lines.tell(line)
        await asyncio.sleep(_SHOW_S)


def replay_summary(progress: ReplayProgress, pairs: Path) -> list[str]:
    votes = progress.votes
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in progress.outcomes.most_common())
    lines = [
        f"states    {progress.states} replayed ({outcomes or 'none'}); {progress.resumed} were done before",
        f"pairs     {progress.pairs} written to {pairs}"
        + (f"; {progress.dropped} dropped" if progress.dropped else ""),
        f"votes     {votes.calls} called, {votes.cached} from the cache, {votes.failed} failed",
        f"cost      ${progress.usd:.4f} paid now, ${progress.price_usd:.4f} as first asked",
        f"a trace   {figures_of(read_records(votes_beside(pairs)))}",
    ]
    if progress.left_out:
        lines.append(f"left out  {progress.left_out}: {progress.why_left_out}")
    lines += [f"refused   {count}: {reason}" for reason, count in progress.refusals.most_common(3)]
    lines += [f"no vote   {count}: {reason}" for reason, count in votes.without_vote.most_common(3)]
    return [*lines, f"stopped   {progress.stopped}"] if progress.stopped else lines
