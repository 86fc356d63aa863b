"""From what the gateway recorded to what the trainer learns from, by token ids alone.

    record k:  prompt_k | completion_k          one answered generate request
    merge:     prompt_{k+1} extends prompt_k + completion_k exactly  ->  same sample, the new prompt tokens masked
    break:     it does not (history rewritten, sub-agent, re-tokenised)  ->  a new branch, one sample each

Nothing is tokenised here. Each record's completion is appended to exactly one branch with mask 1; wherever its tokens
recur they stand in a prompt, with mask 0. So every sampled token is trained exactly once, whatever branches share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from composer_prime.errors import RolloutError
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import Sample, TurnSpan, VersionSpan, flags, pack_flags, pack_floats, pack_ints
from orchestrator.rollouts.groups import GroupPlan
from orchestrator.workers.protocol import MessageRecord, RolloutReply


class Generation(Protocol):
    """What is read of a gateway record (orchestrator/gateway/records.py, GenerationRecord)."""

    @property
    def session(self) -> str: ...
    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [T_prompt]."""
        ...

    @property
    def completion_ids(self) -> np.ndarray:
        """int32 [T_new]."""
        ...

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [T_new]."""
        ...

    @property
    def version_spans(self) -> Sequence[VersionSpan]:
        """Cover [0, T_new)."""
        ...

    @property
    def sampling(self) -> Sampling: ...
    @property
    def finish_reason(self) -> str:
        """stop | length."""
        ...


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

    @classmethod
    def starting_with(cls, record: Generation) -> Branch:
        branch = cls(tokens=np.empty(0, np.int32), temperature=record.sampling.temperature)
        branch._unsampled(record.prompt_ids)
        return branch

    def continues_in(self, record: Generation) -> bool:
        """Whether the record's prompt begins with all of this branch, sampled alike."""
        length = len(self.tokens)
        return (
            self.temperature == record.sampling.temperature
            and length <= len(record.prompt_ids)
            and np.array_equal(self.tokens, record.prompt_ids[:length])
        )

    def extend(self, record: Generation, turn: int) -> None:
        """Append what the record's prompt adds to this branch (mask 0) and its completion (mask 1)."""
        self._unsampled(record.prompt_ids[len(self.tokens) :])
        start, count = len(self.tokens), len(record.completion_ids)
        self.tokens = np.concatenate([self.tokens, record.completion_ids])
        self.mask.append(np.ones(count, np.uint8))
        self.logprobs.append(np.asarray(record.logprobs, np.float32))
        for span in record.version_spans:
            self._add_span(VersionSpan(start + span.start, start + span.end, span.version))
        if count:
            self.turns.append(TurnSpan(start, start + count, turn))

    def _unsampled(self, token_ids: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, np.asarray(token_ids, np.int32)])
        self.mask.append(np.zeros(len(token_ids), np.uint8))
        self.logprobs.append(np.zeros(len(token_ids), np.float32))

    def _add_span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.end == span.start and last.version == span.version:
            self.spans[-1] = VersionSpan(last.start, span.end, span.version)
        elif span.end > span.start:
            self.spans.append(span)


def merge(records: Iterable[Generation], first_turn: int = 0) -> list[Branch]:
    """Branches of one conversation, in the order in which they began.

    A record goes to the longest branch that its prompt extends exactly; the turn number is its place in the order.
    Raises RolloutError for a record whose logprobs or version spans do not match its tokens, or that was sampled from
    another distribution than the trainer's softmax.
    """
    branches: list[Branch] = []
    for turn, record in enumerate(records, start=first_turn):
        check_records(record)
        fitting = [branch for branch in branches if branch.continues_in(record)]
        if fitting:
            branch = max(fitting, key=lambda branch: len(branch.tokens))
        else:
            branch = Branch.starting_with(record)
            branches.append(branch)
        branch.extend(record, turn)
    return branches


def check_records(record: Generation) -> None:
    """Raises RolloutError when the record contradicts itself: such tokens must not reach the loss."""
    count = len(record.completion_ids)
    where = f"session {record.session!r}, a turn of {count} sampled tokens"
    if len(record.prompt_ids) == 0:
        raise RolloutError(f"{where} came without a prompt: its first token has nothing to be predicted from")
    if len(record.logprobs) != count:
        raise RolloutError(f"{where} came with {len(record.logprobs)} log-probabilities")
    if not np.isfinite(record.logprobs).all():
        raise RolloutError(f"{where} holds a log-probability that is not finite")
    how = record.sampling
    if how.temperature <= 0 or how.top_p < 1 or how.top_k > 0:
        raise RolloutError(
            f"{where} was sampled with temperature {how.temperature:g}, top_p {how.top_p:g}, top_k {how.top_k}: the "
            "trainer's policy is the full softmax at a temperature above 0; mark this agent as not trainable or let it "
            "sample as the orchestrator asks"
        )
    end = 0
    for span in record.version_spans:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != count or (record.version_spans and record.version_spans[-1].end != count):
        raise RolloutError(f"{where} has version spans {list(record.version_spans)}, which do not cover it")


def compile_rollout(plan: GroupPlan, reply: RolloutReply, records: Sequence[Generation]) -> list[Sample]:
    """The samples of one rollout, advantages still zero. Branches without a sampled token give none.

    Sessions that the environment marks as not trainable (a user simulator, a judge) are left out. A rollout that a
    limit cut short keeps what it sampled.

    Raises RolloutError when the records contradict themselves or the worker's account of its turns.
    """
    trainable = {session.session_id for session in reply.sessions if session.trainable}
    branches, turns = [], 0
    for session, kept in played_records(reply, _by_session(records)).items():
        if session in trainable or not reply.sessions:
            branches += merge(kept, first_turn=turns)
        turns += len(kept)
    sampled = [branch for branch in branches if branch.turns]
    return [_sample(branch, f"{reply.rollout_id}/{number}", plan, reply) for number, branch in enumerate(sampled)]


def numbered_turns(reply: RolloutReply, records: Sequence[Generation]) -> list[MessageRecord]:
    """The worker's messages; those that the policy sampled with the number that TurnSpan knows them by, their finish
    reason and their surprisal.

    Raises RolloutError as `compile_rollout` does.
    """
    turns, first = list(reply.turns), 0
    played = played_records(reply, _by_session(records))
    names = dict(enumerate([session.session_id for session in reply.sessions] or list(played)))
    for session, kept in played.items():
        shown = [
            index
            for index, turn in enumerate(turns)
            if turn.role == "assistant" and turn.call is not None and names.get(turn.session) == session
        ]
        shown.sort(key=lambda index: turns[index].call or 0)
        for number, (index, record) in enumerate(zip(shown, kept, strict=False), start=first):
            turns[index] = msgspec.structs.replace(
                turns[index], turn=number, finish_reason=record.finish_reason, surprisal=_surprisal(record)
            )
        first += len(kept)
    return turns


def _surprisal(record: Generation) -> float | None:
    """Mean of -log p over the record's tokens, nats; None where it has none, or a logprob that is no number."""
    mean = -float(np.mean(record.logprobs)) if len(record.logprobs) else float("nan")
    return round(max(mean, 0.0), 4) if np.isfinite(mean) else None


def _by_session(records: Iterable[Generation]) -> dict[str, list[Generation]]:
    by_session: dict[str, list[Generation]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    return by_session


def played_records(reply: RolloutReply, by_session: dict[str, list[Generation]]) -> dict[str, list[Generation]]:
    """Of each session, the records that became turns of the rollout, checked against the worker's account of them.

    A reply that was lost on its way to the worker was recorded and then asked for again: the rollout never saw it, so
    its tokens have no part in the reward. Raises RolloutError when the two accounts cannot be brought together.
    """
    if not reply.sessions or not reply.turns:
        return by_session
    shown: dict[str, list[MessageRecord]] = {session.session_id: [] for session in reply.sessions}
    for turn in reply.turns:
        if turn.role == "assistant" and turn.call is not None and turn.session < len(reply.sessions):
            shown[reply.sessions[turn.session].session_id].append(turn)
    played = {session: _played(session, kept, shown.get(session, [])) for session, kept in by_session.items()}
    missing = [session for session, turns in shown.items() if turns and session not in played]
    if missing:
        raise RolloutError(f"the worker shows turns of sessions {missing}, the gateway recorded nothing of them")
    return played


def _played(session: str, records: list[Generation], turns: list[MessageRecord]) -> list[Generation]:
    """Without replies that were asked for again (same prompt) and without the last ones, which came too late."""
    surplus = len(records) - len(turns)
    again = [
        any(np.array_equal(record.prompt_ids, later.prompt_ids) for later in records[number + 1 :])
        for number, record in enumerate(records if surplus > 0 else [])
    ]
    dropped = set(np.flatnonzero(again)[: max(surplus, 0)].tolist())
    kept = [record for number, record in enumerate(records) if number not in dropped][: len(turns)]
    if len(kept) < len(turns):
        raise RolloutError(
            f"the worker shows {len(turns)} turns of session {session!r}, the gateway recorded {len(records)}: the "
            "rollout's tokens are incomplete"
        )
    for record, turn in zip(kept, sorted(turns, key=lambda turn: turn.call or 0), strict=True):
        count = len(record.completion_ids)
        if turn.num_tokens is not None and turn.num_tokens != count:
            raise RolloutError(
                f"turn {turn.call} of session {session!r} has {turn.num_tokens} tokens at the worker, "
                f"{count} at the gateway"
            )
    return kept


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
    """`sample` with `advantage` on each trained token."""
    return msgspec.structs.replace(sample, advantages=pack_floats(flags(sample.loss_mask) * np.float32(advantage)))


def untrained(sample: Sample) -> Sample:
    """`sample` with mask and advantage 0 on every token: for channel 2 alone. Log-probabilities stay, as the importance
    weights of its distilled turns need them."""
    zeros = np.zeros(sample.num_tokens)
    return msgspec.structs.replace(sample, loss_mask=pack_flags(zeros), advantages=pack_floats(zeros))
