"""One rollout: its request, permit, deadline, token record, and training samples.

    RunRollout -> RolloutRunner.run: [permit] -> worker -> reply, records -> finish_rollout (thread) -> samples

`RolloutRunner` alone opens and takes gateway records, so none is left behind. `Permits` bounds concurrency for training
and evaluation together:

    hold(taskset, order) -> waits -> granted, lowest order first within its task set -> released

While both wait, evaluation gets at most `eval_share` of the limit; one that waits alone may take all of it.

Samples are made by token ids alone:

    record k:  prompt_k | completion_k          one answered generate request
    merge:     prompt_{k+1} extends prompt_k + completion_k exactly  ->  same sample, the new prompt tokens masked
    break:     it does not (history rewritten, sub-agent, re-tokenized)  ->  a new branch, one sample each

Nothing is tokenized here. A completion is appended to one branch with mask 1; where its tokens recur, in a prompt, the
mask is 0. So each sampled token is trained exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import DeadlineError, RolloutError
from composer_prime.run.retry import backoff_s
from composer_prime.wire.node_messages import POLICY, joined
from composer_prime.wire.types import Sample, TurnSpan, VersionSpan, pack_flags, pack_floats, pack_ints
from orchestrator.gateway import Gateway
from orchestrator.gateway.http import GenerationRecord, Redraw
from orchestrator.rollouts.groups import CompiledRollout, FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.workers.pool import EVAL, TRAIN, MessageRecord, RolloutFailure, RolloutReply, RunRollout, WorkerPool

EVAL_SHARE = 0.25
"""Of the permits, while training rollouts wait."""
_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


class Permits:
    """Rollouts that may run at once, by task set."""

    def __init__(self, limit: int, eval_share: float = EVAL_SHARE) -> None:
        self.eval_share = eval_share
        self.running: dict[str, int] = {TRAIN: 0, EVAL: 0}
        self.limit = limit
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {TRAIN: [], EVAL: []}
        """Heaps of (order, ticket, future)."""
        self._ticket = itertools.count()

    @contextlib.asynccontextmanager
    async def hold(self, taskset: str, order: int) -> AsyncIterator[None]:
        """Hold a permit; lower `order` goes first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[taskset], (order, next(self._ticket), future))
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(taskset)
            raise
        try:
            yield
        finally:
            self._release(taskset)

    def _release(self, taskset: str) -> None:
        self.running[taskset] -= 1
        self._grant()

    def waiting(self, taskset: str) -> int:
        return sum(not future.done() for _, _, future in self._waiting[taskset])

    def _grant(self) -> None:
        while sum(self.running.values()) < self.limit and (taskset := self._next_taskset()) is not None:
            future = heapq.heappop(self._waiting[taskset])[2]
            self.running[taskset] += 1
            future.set_result(None)

    def _next_taskset(self) -> str | None:
        for waiters in self._waiting.values():
            while waiters and waiters[0][2].done():
                heapq.heappop(waiters)
        train, evaluation = self._waiting[TRAIN], self._waiting[EVAL]
        if train and evaluation:
            return EVAL if self.running[EVAL] < self.eval_share * self.limit else TRAIN
        return TRAIN if train else EVAL if evaluation else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRunner:
    """Has workers play rollouts, with the run's sampling settings, seeds and deadlines."""

    config: OrchestratorConfig
    gateway: Gateway
    pools: Mapping[str, WorkerPool]
    permits: Permits
    seed: int
    grace_s: float = 5.0
    """What a worker gets beyond a rollout's own limit to report that the limit was reached."""

    def training_request(self, plan: GroupPlan, sibling: int, attempt: int) -> RunRollout:
        return self._request(
            plan.source,
            rollout_id=plan.rollout_id(sibling, attempt),
            task_index=plan.task_index,
            taskset=TRAIN,
            seed=plan.rollout_seed(sibling, attempt),
        )

    def eval_request(self, source: str, *, step: int, task_index: int, sample: int, attempt: int) -> RunRollout:
        """Return the request; its seed does not depend on the step."""
        name = f"eval{step}-{source}-{task_index}-{sample}" + (f"r{attempt}" if attempt else "")
        return self._request(
            source,
            rollout_id=name,
            task_index=task_index,
            taskset=EVAL,
            seed=derive_seed(self.seed, "eval", source, task_index, sample, attempt),
        )

    def _request(self, source: str, *, rollout_id: str, task_index: int, taskset: str, seed: int) -> RunRollout:
        settings = next(candidate for candidate in self.config.source if candidate.name == source)
        sampling = self.config.sampling
        return RunRollout(
            rollout_id=rollout_id,
            task_index=task_index,
            model=POLICY,
            gateway_url=f"{self.gateway.http_url}/v1",
            timeout_s=settings.timeout_s,
            taskset=taskset,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )

    async def run(
        self, source: str, request: RunRollout, *, order: int, oldest_version: int = 0, redraw: Redraw | None = None
    ) -> tuple[RolloutReply, Sequence[GenerationRecord]]:
        """Return how `request` ended. Past its deadline, or where audits fail, that is a failure.

        Only nodes with `oldest_version` or newer weights answer it. `redraw`: the rollout that it repeats first. It
        waits for audits without its permit.
        """
        audits = self.gateway.audits
        async with self.permits.hold(request.taskset, order):
            self.gateway.records.open(request.rollout_id, oldest_version, redraw)
            try:
                reply = await self._within_deadline(source, request)
            except BaseException:
                if audits is not None:
                    audits.forget(request.rollout_id)
                raise
            finally:
                records = self.gateway.records.take(request.rollout_id)
        objection = await audits.cleared(request.rollout_id) if audits is not None else None
        return (reply if objection is None else request.failed("audit", objection)), records

    async def play_with_retries(
        self,
        play: Callable[[int, list[RolloutFailure]], Awaitable[CompiledRollout]],
        *,
        source: str,
        failures: FailureLog,
        step: Callable[[], int],
        group: int | None = None,
    ) -> CompiledRollout:
        """Return the first good try of a rollout, or its last failed one.

        `play` gets the number of the try and earlier failures. A displaced try counts as none.
        """
        earlier: list[RolloutFailure] = []
        for number in itertools.count():
            rollout, samples = await play(number, earlier)
            if rollout.failure is None:
                break
            if rollout.failure.kind == "displaced":
                await asyncio.sleep(_RETRY_S)
                continue
            failures.note_try(source, rollout.rollout_id, rollout.failure)
            if not rollout.failure.retryable or len(earlier) == self.config.max_retries:
                await asyncio.to_thread(failures.note_end, step(), source, rollout, group)
                break
            await asyncio.sleep(backoff_s(len(earlier), first_s=_RETRY_S, longest_s=_LONGEST_RETRY_S))
            earlier.append(rollout.failure)
        return rollout, samples

    async def _within_deadline(self, source: str, request: RunRollout) -> RolloutReply:
        deadline_s, loop = request.timeout_s + self.grace_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                return await self.pools[source].run(
                    request, on_begin=lambda: deadline.reschedule(loop.time() + deadline_s)
                )
        except DeadlineError as error:
            return request.failed("worker", str(error))
        except TimeoutError:
            return request.failed("timeout", f"the worker gave no reply within {deadline_s:.0f} s")


def finished_rollout(
    reply: RolloutReply,
    records: Sequence[GenerationRecord],
    *,
    sibling: int,
    seed: int,
    samples: list[Sample],
    earlier: Sequence[RolloutFailure] = (),
    turn_nodes: Sequence[str] = (),
) -> FinishedRollout:
    versions = [span.version for record in records for span in record.answer.version_spans]
    nodes = list(dict.fromkeys(record.answer.node_id for record in records))
    return FinishedRollout(
        **msgspec.structs.asdict(reply),
        sibling=sibling,
        seed=seed,
        failed_attempts=list(earlier),
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        prompt_tokens=sum(sample.num_tokens - sample.num_trained for sample in samples) if samples else None,
        sampled_tokens=sum(len(record.answer) for record in records),
        nodes=nodes,
        turn_nodes=[nodes.index(node_id) for node_id in turn_nodes],
    )


# -- its samples -----------------------------------------------------------------------------------------------------


def finish_rollout(
    plan: GroupPlan,
    reply: RolloutReply,
    records: Sequence[GenerationRecord],
    *,
    sibling: int = 0,
    seed: int,
    earlier: Sequence[RolloutFailure] = (),
    with_tokens: bool = False,
) -> CompiledRollout:
    """Return a rollout with numbered turns, and its samples; none for a failed one."""
    samples: list[Sample] = []
    matched: list[GenerationRecord] = []
    try:
        if reply.failure is None:
            samples = compile_rollout(plan, reply, records)
            matched = [each for session in matched_records(reply, records).values() for each in session]
            reply = msgspec.structs.replace(reply, turns=numbered_turns(reply.turns, matched, with_tokens))
    except RolloutError as error:
        failure = RolloutFailure(kind="tokens", message=str(error), retryable=True)
        reply = msgspec.structs.replace(reply, failure=failure, reward=None)
    rollout = finished_rollout(
        reply,
        records,
        sibling=sibling,
        seed=seed,
        samples=samples,
        earlier=earlier,
        turn_nodes=[record.answer.node_id for record in matched],
    )
    return rollout, samples


def compile_rollout(plan: GroupPlan, reply: RolloutReply, records: Sequence[GenerationRecord]) -> list[Sample]:
    """Return samples of trainable sessions, advantages still zero. Raises RolloutError for contradicting records."""
    trainable = {session.session_id for session in reply.sessions if session.trainable}
    branches: list[Branch] = []
    num_turns = 0
    for session, session_records in matched_records(reply, records).items():
        if session in trainable or not reply.sessions:
            branches += merge(session_records, first_turn=num_turns)
        num_turns += len(session_records)
    sampled = [branch for branch in branches if branch.turns]
    return [_sample(branch, f"{reply.rollout_id}/{number}", plan, reply) for number, branch in enumerate(sampled)]


@dataclass(slots=True)
class Branch:
    """A token sequence that grows by turns."""

    tokens: np.ndarray
    """int32 [T]."""
    temperature: float
    mask: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[TurnSpan] = field(default_factory=list)

    def continues_in(self, record: GenerationRecord) -> bool:
        """Tell whether the prompt begins with this branch."""
        length = len(self.tokens)
        return (
            self.temperature == record.sampling.temperature
            and length <= len(record.prompt_ids)
            and np.array_equal(self.tokens, record.prompt_ids[:length])
        )

    def extend(self, record: GenerationRecord, turn: int) -> None:
        """Append what the prompt adds (mask 0) and the completion (mask 1)."""
        prompt_ids = record.prompt_ids[len(self.tokens) :]
        start, count = len(record.prompt_ids), len(record.answer)
        self.tokens = np.concatenate([self.tokens, prompt_ids, record.answer.ids], dtype=np.int32)
        self.mask += [np.zeros(len(prompt_ids), np.uint8), np.ones(count, np.uint8)]
        self.logprobs += [np.zeros(len(prompt_ids), np.float32), record.answer.token_logprobs]
        spans = [
            VersionSpan(start + span.start, start + span.end, span.version) for span in record.answer.version_spans
        ]
        self.spans = joined(self.spans, spans)
        if count:
            self.turns.append(TurnSpan(start, start + count, turn))


def merge(records: Iterable[GenerationRecord], first_turn: int = 0) -> list[Branch]:
    """Return a conversation's branches. A record joins the longest one that its prompt extends exactly."""
    branches: list[Branch] = []
    for turn, record in enumerate(records, start=first_turn):
        check_record(record)
        continued = [branch for branch in branches if branch.continues_in(record)]
        if continued:
            branch = max(continued, key=lambda branch: len(branch.tokens))
        else:
            branch = Branch(tokens=np.empty(0, np.int32), temperature=record.sampling.temperature)
            branches.append(branch)
        branch.extend(record, turn)
    return branches


def check_record(record: GenerationRecord) -> None:
    """Raise RolloutError for a record whose tokens must not reach the loss."""
    answer, count = record.answer, len(record.answer)
    where = f"session {record.session!r}, a turn of {count} sampled tokens"
    if len(record.prompt_ids) == 0:
        raise RolloutError(f"{where} came without a prompt: its first token has nothing to be predicted from")
    logprobs = answer.token_logprobs
    if len(logprobs) != count:
        raise RolloutError(f"{where} came with {len(logprobs)} log-probabilities")
    if not np.isfinite(logprobs).all():
        raise RolloutError(f"{where} holds a log-probability that is not finite")
    sampling = record.sampling
    if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise RolloutError(
            f"{where} was sampled with temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, "
            f"top_k {sampling.top_k}: the trainer's policy is the full softmax at a temperature above 0; mark this "
            "agent as not trainable or let it sample as the orchestrator asks"
        )
    edges = [0, *(span.end for span in answer.version_spans)]
    if [span.start for span in answer.version_spans] != edges[:-1] or edges != sorted(edges) or edges[-1] != count:
        raise RolloutError(f"{where} has version spans {answer.version_spans}, which do not cover it")


def _sample(branch: Branch, sample_id: str, plan: GroupPlan, reply: RolloutReply) -> Sample:
    end = branch.turns[-1].end
    return Sample(
        sample_id=sample_id,
        group_id=plan.group_id,
        source=plan.source,
        task_id=reply.task_id,
        input_ids=pack_ints(branch.tokens[:end]),
        loss_mask=pack_flags(np.concatenate(branch.mask)[:end]),
        logprobs=pack_floats(np.concatenate(branch.logprobs)[:end]),
        advantages=pack_floats(np.zeros(end)),
        reward=0.0 if reply.reward is None else reply.reward,
        temperature=branch.temperature,
        version_spans=branch.spans,
        turns=branch.turns,
    )


# -- records and the worker's turns ---------------------------------------------------------------------------------


def numbered_turns(
    turns: Sequence[MessageRecord], matched: Sequence[GenerationRecord], with_tokens: bool
) -> list[MessageRecord]:
    """Return the worker's messages; those that the policy sampled get turn number, finish reason and surprisal."""
    sampled = {
        record.answer.record_id: {
            "turn": number,
            "finish_reason": record.answer.finish_reason,
            "surprisal": _surprisal(record),
            "tokens": _tokens(record) if with_tokens else [],
        }
        for number, record in enumerate(matched)
    }
    return [msgspec.structs.replace(turn, **sampled.get(turn.record_id, {})) for turn in turns]


def _tokens(record: GenerationRecord) -> list[tuple[int, float]]:
    logprobs = np.round(record.answer.token_logprobs.astype(float), 3)
    return list(zip(record.answer.ids.tolist(), logprobs.tolist(), strict=True))


def _surprisal(record: GenerationRecord) -> float | None:
    """Return the mean of -log p, in nats; None where unknown."""
    mean = -float(np.mean(record.answer.token_logprobs)) if len(record.answer) else float("nan")
    return round(max(mean, 0.0), 4) if np.isfinite(mean) else None


def matched_records(reply: RolloutReply, records: Iterable[GenerationRecord]) -> dict[str, list[GenerationRecord]]:
    """Return by session the records that became turns.

    A reply that was lost on its way to the worker is recorded, and asked for again: its tokens have no part in the
    reward. Raises RolloutError when a turn has no record.
    """
    sampled = {turn.record_id: turn for turn in reply.turns if turn.call is not None}
    by_session: dict[str, list[GenerationRecord]] = {}
    counts = {}
    for record in records:
        if not sampled or record.answer.record_id in sampled:
            by_session.setdefault(record.session, []).append(record)
            counts[record.answer.record_id] = len(record.answer)
    _check_turns(reply, sampled, counts)
    return by_session


def _check_turns(reply: RolloutReply, sampled: dict[str, MessageRecord], counts: dict[str, int]) -> None:
    """Raise RolloutError unless each turn is recorded, with as many tokens."""
    for record_id, turn in sampled.items():
        if record_id in counts and turn.num_tokens not in (None, counts[record_id]):
            raise RolloutError(
                f"turn {turn.call} of session {reply.sessions[turn.session].session_id!r} has {turn.num_tokens} tokens "
                f"at the worker, {counts[record_id]} at the gateway"
            )
    missing = [turn for record_id, turn in sampled.items() if record_id not in counts]
    if missing:
        names = sorted({reply.sessions[turn.session].session_id for turn in missing})
        raise RolloutError(
            f"the worker shows {len(missing)} turns of sessions {names} that the gateway did not record: the rollout's "
            "tokens are incomplete"
        )
