"""From the gateway's records to the trainer's samples, by token ids alone.

    record k:  prompt_k | completion_k          one answered generate request
    merge:     prompt_{k+1} extends prompt_k + completion_k exactly  ->  same sample, the new prompt tokens masked
    break:     it does not (history rewritten, sub-agent, re-tokenized)  ->  a new branch, one sample each

Nothing is tokenized here. Each record's completion is appended to exactly one branch with mask 1. Wherever its tokens
recur they stand in a prompt, with mask 0. So every sampled token is trained exactly once, whatever branches share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from composer_prime.errors import RolloutError
from composer_prime.wire.answer import joined
from composer_prime.wire.types import Sample, TurnSpan, VersionSpan, flags, pack_flags, pack_floats, pack_ints
from orchestrator.gateway.generation import GenerationRecord
from orchestrator.rollouts.groups import CompiledRollout, GroupPlan
from orchestrator.rollouts.rollout import RolloutResult, finished_rollout, score_failure
from orchestrator.workers.protocol import MessageRecord, RolloutFailure, RolloutReply


def finish_rollout(
    plan: GroupPlan,
    result: RolloutResult,
    *,
    sibling: int = 0,
    seed: int,
    earlier: Sequence[RolloutFailure] = (),
) -> CompiledRollout:
    """Return a rollout that ended, with numbered turns, and its samples; none for a failed one.

    `earlier`: failures of the tries before this one.
    """
    samples: list[Sample] = []
    sampled_by: list[str] = []
    failure = score_failure(result)
    try:
        if failure is None:
            reply = msgspec.structs.replace(result.reply, turns=numbered_turns(result.reply, result.records))
            samples = compile_rollout(plan, reply, result.records)
            sampled_by = turn_nodes(reply, result.records)
            result = replace(result, reply=reply)
    except RolloutError as error:
        failure = RolloutFailure(kind="tokens", message=str(error), retryable=True)
    rollout = finished_rollout(
        result,
        sibling=sibling,
        seed=seed,
        samples=samples,
        failure=failure,
        earlier=earlier,
        turn_nodes=sampled_by,
    )
    return rollout, samples


def compile_rollout(plan: GroupPlan, reply: RolloutReply, records: Sequence[GenerationRecord]) -> list[Sample]:
    """Return the samples of one rollout, advantages still zero. Branches without a sampled token give none.

    Leaves out sessions that the environment marks as not trainable (a user simulator, a judge). A rollout that a limit
    cut short keeps what it sampled.

    Raises RolloutError when the records contradict themselves or the worker's turns.
    """
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
    """A token sequence that grows turn by turn."""

    tokens: np.ndarray
    """int32 [T]."""
    temperature: float
    mask: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[TurnSpan] = field(default_factory=list)

    def continues_in(self, record: GenerationRecord) -> bool:
        """Tell whether the record's prompt begins with all of this branch and was sampled at its temperature."""
        length = len(self.tokens)
        return (
            self.temperature == record.sampling.temperature
            and length <= len(record.prompt_ids)
            and np.array_equal(self.tokens, record.prompt_ids[:length])
        )

    def extend(self, record: GenerationRecord, turn: int) -> None:
        """Append what the record's prompt adds to this branch (mask 0) and its completion (mask 1)."""
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
    """Return the branches of one conversation, in the order in which they began.

    A record joins the longest branch that its prompt extends exactly. Its turn number is its place in the order.
    Raises what `check_record` raises.
    """
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
    """Refuse a record whose tokens must not reach the loss.

    Raises RolloutError when logprobs or version spans do not match its tokens, or when it was sampled from another
    distribution than the trainer's softmax.
    """
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


def with_advantage(sample: Sample, advantage: float) -> Sample:
    """Return `sample` with `advantage` on each trained token."""
    return msgspec.structs.replace(sample, advantages=pack_floats(flags(sample.loss_mask) * np.float32(advantage)))


def sdpo_only(sample: Sample) -> Sample:
    """Return `sample` with mask and advantage 0 on every token, so that only SDPO trains on it.

    Log-probabilities stay: the importance weights of its hinted turns need them.
    """
    zeros = np.zeros(sample.num_tokens)
    return msgspec.structs.replace(sample, loss_mask=pack_flags(zeros), advantages=pack_floats(zeros))


# -- records and the worker's turns ---------------------------------------------------------------------------------


def numbered_turns(reply: RolloutReply, records: Sequence[GenerationRecord]) -> list[MessageRecord]:
    """Return the worker's messages; those that the policy sampled get turn number, finish reason and surprisal.

    The turn number is the one in TurnSpan. Raises RolloutError as `compile_rollout` does.
    """
    kept = [record for session in matched_records(reply, records).values() for record in session]
    numbers = {record.answer.record_id: (number, record) for number, record in enumerate(kept)}
    turns = []
    for turn in reply.turns:
        if turn.record_id in numbers:
            number, record = numbers[turn.record_id]
            reason, surprisal = record.answer.finish_reason, _surprisal(record)
            turn = msgspec.structs.replace(turn, turn=number, finish_reason=reason, surprisal=surprisal)
        turns.append(turn)
    return turns


def _surprisal(record: GenerationRecord) -> float | None:
    """Return the mean of -log p over the record's tokens, in nats; None without tokens or with a NaN log-prob."""
    mean = -float(np.mean(record.answer.token_logprobs)) if len(record.answer) else float("nan")
    return round(max(mean, 0.0), 4) if np.isfinite(mean) else None


def matched_records(reply: RolloutReply, records: Iterable[GenerationRecord]) -> dict[str, list[GenerationRecord]]:
    """Return of each session the records that became turns of the rollout.

    A reply that was lost on its way to the worker is recorded and then asked for again. The rollout never saw it, so
    its tokens have no part in the reward. Raises RolloutError when the gateway has no record of a turn.
    """
    sampled = {turn.record_id: turn for turn in reply.turns if turn.call is not None}
    by_session: dict[str, list[GenerationRecord]] = {}
    for record in records:
        if not sampled or record.answer.record_id in sampled:
            by_session.setdefault(record.session, []).append(record)
    counts = {record.answer.record_id: len(record.answer) for kept in by_session.values() for record in kept}
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
    return by_session


def turn_nodes(reply: RolloutReply, records: Sequence[GenerationRecord]) -> list[str]:
    """Return the node that sampled each turn, by turn number. Raises RolloutError as `compile_rollout` does."""
    return [record.answer.node_id for matched in matched_records(reply, records).values() for record in matched]
