"""The nouns of the pipeline: a plan of a group, its finished rollouts, the group as it leaves dispatch.

Structs rather than dataclasses: the journal writes them to disk. Everything derives from (run seed, group number), so a
group that a crash cut short is dispatched again with the same task and the same seeds.

Reading a rollout's messages as a tree: which answers belong to which assistant turn, and what stood before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from composer_prime.wire.types import Sample
from orchestrator.workers.protocol import MessageRecord, RolloutFailure, SessionRecord

_ODD = 0x9E3779B1
_SEED_MASK = (1 << 31) - 1
BEHAVIOUR_PART = "behaviour/"
"""Prefix of the reward parts that orchestrator/rollouts/behaviour.py adds."""
_REWARD_DIGITS = 9


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from the parts' text: the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _SEED_MASK


def task_reward(reward: float, parts: Mapping[str, float]) -> float:
    """What the environment gave, of a reward with behaviour parts.

    Rounded where there are any: a sum that is taken apart again is off by a last bit, and 1.0 decides who passed.
    """
    added = [value for name, value in parts.items() if name.startswith(BEHAVIOUR_PART)]
    return round(reward - sum(added), _REWARD_DIGITS) if added else reward


class GroupOutcome(StrEnum):
    """What became of a group."""

    READY = "ready"
    """Waits in the buffer for a batch, or is in one."""
    DISTILLED = "distilled"
    """All rewards equal, but turns of it were hinted: it goes along with a batch, for channel 2 alone."""
    FILTERED = "filtered"
    """All rewards equal: no advantage, nothing to learn."""
    FAILED = "failed"
    """Fewer than min_group rollouts finished."""
    STALE = "stale"
    """Older than any future batch accepts."""


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Group number `group`: which task its G siblings play, and with which seeds."""

    group: int
    """From 0, in order of dispatch; unique within the run, kept over resumes."""
    source: str
    task_index: int
    seed: int
    size: int
    """G."""

    @property
    def group_id(self) -> str:
        return f"g{self.group:06d}"

    def rollout_id(self, sibling: int, attempt: int) -> str:
        """Unique for each attempt: what an abandoned attempt still generates can't get into the next one's record."""
        return f"{self.group_id}-{sibling}" + (f"r{attempt}" if attempt else "")

    def rollout_seed(self, sibling: int, attempt: int) -> int:
        """31 bits; different for all siblings and attempts of the group (an odd multiplier permutes the residues)."""
        return (self.seed + (attempt * self.size + sibling) * _ODD) & _SEED_MASK


class FinishedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout's last attempt, with or without a reward; what the rollout log shows."""

    rollout_id: str
    sibling: int
    task_id: str
    seed: int
    reward: float | None
    """None exactly when `failure` is set: a failed environment is data, never a zero reward."""
    advantage: float | None = None
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    hints: dict[str, int] = {}
    """What channel 2 did with it, counted (orchestrator/hints/stage.py)."""
    turns: list[MessageRecord] = []
    sessions: list[SessionRecord] = []
    stop_reason: str | None = None
    truncated: bool = False
    """Cut short by the context or a token limit; its samples are kept."""
    failure: RolloutFailure | None = None
    failed_attempts: list[RolloutFailure] = []
    """Earlier tries of this sibling."""
    version_min: int | None = None
    version_max: int | None = None
    prompt_tokens: int | None = None
    """Tokens of its samples that the policy did not sample; None for a rollout that gave no sample."""
    sampled_tokens: int = 0
    """Tokens that the policy sampled in this attempt."""
    cpu_s: float | None = None
    wall_s: float | None = None

    @property
    def task_reward(self) -> float | None:
        """`reward` without behaviour parts: whether the task was done, whatever that cost."""
        return None if self.reward is None else task_reward(self.reward, self.parts)


class FinishedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose rollouts have all ended."""

    plan: GroupPlan
    outcome: GroupOutcome
    rollouts: list[FinishedRollout]
    samples: list[Sample] = []
    """Empty unless the outcome is READY or DISTILLED."""

    @property
    def rewards(self) -> list[float]:
        """Of the rollouts that finished; between 0 and G of them."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def task_rewards(self) -> list[float]:
        """As `rewards`, without behaviour parts."""
        return [rollout.task_reward for rollout in self.rollouts if rollout.task_reward is not None]

    @property
    def version_min(self) -> int:
        """Oldest policy version that sampled a token of the group (groups with samples only)."""
        return min(sample.version_min for sample in self.samples)

    @property
    def version_max(self) -> int:
        return max(sample.version_max for sample in self.samples)

    def without_samples(self, outcome: GroupOutcome) -> FinishedGroup:
        return msgspec.structs.replace(self, outcome=outcome, samples=[])


def answers(turns: Sequence[MessageRecord]) -> dict[int, list[int]]:
    """Positions of the tool messages that answer each assistant message, by the position of that message."""
    found: dict[int, list[int]] = {index: [] for index, turn in enumerate(turns) if turn.role == "assistant"}
    for index, turn in enumerate(turns):
        asked = _asked_by(turns, index) if turn.role == "tool" else None
        if asked is not None:
            found[asked].append(index)
    return found


def _asked_by(turns: Sequence[MessageRecord], index: int) -> int | None:
    """The assistant message that the tool message at `index` answers: the one before it and its fellow answers."""
    at = turns[index].parent
    while at is not None and turns[at].role == "tool":
        at = turns[at].parent
    return at if at is not None and turns[at].role == "assistant" else None


def messages_before(turns: Sequence[MessageRecord], index: int) -> list[MessageRecord]:
    """The messages that the one at `index` continues, oldest first, without it."""
    path = []
    at = turns[index].parent
    while at is not None:
        path.append(turns[at])
        at = turns[at].parent
    return path[::-1]


def failed_turns(turns: Sequence[MessageRecord]) -> int:
    """Assistant messages that a tool answered with an error, by the environment's own word."""
    return sum(any(turns[index].error is not None for index in told) for told in answers(turns).values())


def turn_error_rate(rollouts: Iterable[FinishedRollout]) -> float | None:
    """Share of assistant messages that a tool answered with an error; None without assistant messages."""
    failed = total = 0
    for rollout in rollouts:
        failed += failed_turns(rollout.turns)
        total += sum(turn.role == "assistant" for turn in rollout.turns)
    return failed / total if total else None
