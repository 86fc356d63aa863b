"""A group's plan, its finished rollouts, and the group as it leaves dispatch: structs, which the journal writes.

`score_group` decides what a group is worth. The functions at the end read a rollout's messages as a tree.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from composer_prime.channels.policy import AdvantageScaling
from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import NonFiniteError
from composer_prime.wire.types import HintedTurn, Sample, VersionSpan, flags, floats, pack_flags, pack_floats
from orchestrator.workers.pool import MessageRecord, RolloutFailure, RolloutReply

_ODD = 0x9E3779B1
_SEED_MASK = (1 << 31) - 1
SUCCESS = 0.5
"""From this reward on a task is solved, for hints (as in SDPO and SRPO)."""
MIN_GROUP = 2
"""Finished rollouts that a group needs: an advantage compares two."""
_STD_FLOOR = 1e-4


def derive_seed(*parts: object) -> int:
    """Return a 31-bit seed from the parts' text: the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _SEED_MASK


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which task the G siblings play, and with which seeds."""

    group: int
    """From 0, in order of dispatch, kept over resumes."""
    source: str
    task_index: int
    seed: int
    size: int
    """G."""

    @property
    def group_id(self) -> str:
        return f"g{self.group:06d}"

    def rollout_id(self, sibling: int, attempt: int) -> str:
        """Unique for each attempt: late answers must not enter the next one's record."""
        return f"{self.group_id}-{sibling}" + (f"r{attempt}" if attempt else "")

    def rollout_seed(self, sibling: int, attempt: int) -> int:
        """Different for all siblings and attempts."""
        return (self.seed + (attempt * self.size + sibling) * _ODD) & _SEED_MASK


class GroupOutcome(StrEnum):
    READY = "ready"
    """In the buffer, or in a batch."""
    DISTILLED = "distilled"
    """Equal rewards, but hinted turns: joins a batch for SDPO alone, and counts as filtered."""
    FILTERED = "filtered"
    """Equal rewards: nothing to learn."""
    FAILED = "failed"
    """Fewer than two rollouts finished."""
    STALE = "stale"
    """Its tokens are too old for any batch."""


class FinishedRollout(RolloutReply, frozen=True, kw_only=True, tag=False):
    """A rollout's last attempt, and what the orchestrator adds."""

    sibling: int
    seed: int
    advantage: float | None = None
    hints: dict[str, int] = msgspec.field(default_factory=dict)
    """Counts of what the hint stage did with it (orchestrator/hints/stage.py)."""
    failed_attempts: list[RolloutFailure] = msgspec.field(default_factory=list)
    version_min: int | None = None
    version_max: int | None = None
    prompt_tokens: int | None = None
    """Tokens of its samples that the policy did not sample; None for a rollout that gave no sample."""
    sampled_tokens: int = 0
    """Tokens that the policy sampled in this attempt."""
    nodes: list[str] = msgspec.field(default_factory=list)
    """The inference nodes that sampled it, in order of their first answers."""
    turn_nodes: list[int] = msgspec.field(default_factory=list)
    """By turn number of its samples (TurnSpan): which of `nodes` sampled it."""


CompiledRollout = tuple[FinishedRollout, list[Sample]]


class FinishedGroup(msgspec.Struct, frozen=True, kw_only=True):
    plan: GroupPlan
    outcome: GroupOutcome
    rollouts: list[FinishedRollout]
    samples: list[Sample] = []
    """Empty unless the outcome is READY or DISTILLED."""

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def version_min(self) -> int:
        """Oldest policy version of its tokens; of groups with samples only."""
        return min(sample.version_min for sample in self.samples)

    @property
    def version_max(self) -> int:
        return max(sample.version_max for sample in self.samples)

    def without_stale_tokens(self, oldest: int) -> FinishedGroup:
        """Return the group with tokens of versions before `oldest` as context only, without samples that train none."""
        if not self.samples or self.version_min >= oldest:
            return self
        samples = [fresh for sample in self.samples if (fresh := _without_stale_tokens(sample, oldest)) is not None]
        return msgspec.structs.replace(self, samples=samples)

    def trains_since(self, oldest: int) -> bool:
        """Tell whether a token since `oldest` is trained, or a hinted turn of a DISTILLED group. Copies no token."""
        is_distilled = self.outcome is GroupOutcome.DISTILLED
        return any(_trains_since(sample, oldest, with_hinted=is_distilled) for sample in self.samples)

    def without_samples(self, outcome: GroupOutcome) -> FinishedGroup:
        return msgspec.structs.replace(self, outcome=outcome, samples=[])


def trained_by_node(groups: Iterable[FinishedGroup]) -> Counter[str]:
    """Count the tokens of each node that the policy loss trains. Copies none."""
    tokens: Counter[str] = Counter()
    for group in groups:
        rollouts = {rollout.rollout_id: rollout for rollout in group.rollouts}
        for sample in group.samples:
            rollout = rollouts.get(sample.sample_id.rpartition("/")[0])
            if rollout is None or not rollout.turn_nodes:
                continue
            for span in sample.turns:
                node_id = rollout.nodes[rollout.turn_nodes[span.turn]]
                tokens[node_id] += sample.loss_mask.count(1, span.start, span.end)
    return tokens


def with_advantage(sample: Sample, advantage: float) -> Sample:
    return msgspec.structs.replace(sample, advantages=pack_floats(flags(sample.loss_mask) * np.float32(advantage)))


def sdpo_only(sample: Sample) -> Sample:
    """Return `sample` with mask and advantage 0, for SDPO alone. Log-probabilities stay, for its importance weights."""
    zeros = np.zeros(sample.num_tokens)
    return msgspec.structs.replace(sample, loss_mask=pack_flags(zeros), advantages=pack_floats(zeros))


def _trains_since(sample: Sample, oldest: int, *, with_hinted: bool) -> bool:
    if any(
        span.version >= oldest and sample.loss_mask.find(1, span.start, span.end) >= 0 for span in sample.version_spans
    ):
        return True
    stale = [span for span in sample.version_spans if span.version < oldest]
    return with_hinted and any(not _overlaps(turn, stale) for turn in sample.distillations)


def _overlaps(turn: HintedTurn, spans: Iterable[VersionSpan]) -> bool:
    return any(span.start < turn.end and turn.start < span.end for span in spans)


def _without_stale_tokens(sample: Sample, oldest: int) -> Sample | None:
    """Mask tokens of versions before `oldest`, and leave out hinted turns with one. None: nothing trains."""
    stale = [span for span in sample.version_spans if span.version < oldest]
    if not stale:
        return sample
    mask, advantages = flags(sample.loss_mask).copy(), floats(sample.advantages).copy()
    for span in stale:
        mask[span.start : span.end] = 0
        advantages[span.start : span.end] = 0
    hinted = [turn for turn in sample.distillations if not _overlaps(turn, stale)]
    if not mask.any() and not hinted:
        return None
    return msgspec.structs.replace(
        sample,
        loss_mask=pack_flags(mask),
        advantages=pack_floats(advantages),
        version_spans=[span for span in sample.version_spans if span.version >= oldest],
        distillations=hinted,
    )


# -- the end of a group: pure functions that run in a thread -------------------------------------------------------


def score_group(
    plan: GroupPlan, ended: list[CompiledRollout], config: OrchestratorConfig, channels: ChannelsConfig
) -> FinishedGroup:
    """Return the group as READY, FAILED (too few finished), FILTERED or DISTILLED (no advantage).

    A DISTILLED group keeps its hinted samples with mask 0. So do rollouts that were cut short without
    `config.train_truncated`; their rewards still count in the advantages. Samples of side calls are left out.
    """
    rewards = [rollout.reward for rollout, _ in ended if rollout.reward is not None]
    if len(rewards) < MIN_GROUP:
        return FinishedGroup(plan=plan, outcome=GroupOutcome.FAILED, rollouts=[rollout for rollout, _ in ended])
    advantages_G = group_advantages(rewards, channels.policy.advantage_scaling)
    ended = _with_advantages(ended, advantages_G, config)
    if channels.sdpo.route == "failed":
        ended = [(rollout, _routed(rollout, samples)) for rollout, samples in ended]
    rollouts = sorted((rollout for rollout, _ in ended), key=lambda rollout: rollout.sibling)
    samples = [sample for _, rollout_samples in ended for sample in rollout_samples]
    signal = has_signal(advantages_G) or not config.filter_zero_advantage
    if signal and any(sample.num_trained for sample in samples):
        return FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=rollouts, samples=samples)
    hinted = _hinted_only(samples)
    outcome = GroupOutcome.DISTILLED if hinted else GroupOutcome.FILTERED
    return FinishedGroup(plan=plan, outcome=outcome, rollouts=rollouts, samples=hinted)


def _with_advantages(
    ended: list[CompiledRollout], advantages_G: list[float], config: OrchestratorConfig
) -> list[CompiledRollout]:
    """Failed rollouts have no samples."""
    following = iter(advantages_G)
    result: list[CompiledRollout] = []
    for rollout, samples in ended:
        if rollout.reward is None:
            result.append((rollout, []))
            continue
        advantage = next(following)
        samples = samples if config.train_side_calls else _without_side_calls(rollout, samples)
        if rollout.truncated and not config.train_truncated:
            samples = _hinted_only(samples)
        else:
            samples = [with_advantage(sample, advantage) for sample in samples]
        result.append((msgspec.structs.replace(rollout, advantage=advantage), samples))
    return result


def _without_side_calls(rollout: FinishedRollout, samples: list[Sample]) -> list[Sample]:
    on_side = {turn.turn for turn in rollout.turns if turn.on_side}
    return [sample for sample in samples if any(span.turn not in on_side for span in sample.turns)]


def _routed(rollout: FinishedRollout, samples: list[Sample]) -> list[Sample]:
    """Give hinted samples without success advantage 0; they still count (SRPO, arXiv 2604.02288)."""
    if rollout.reward is None or rollout.reward >= SUCCESS:
        return samples
    return [with_advantage(sample, 0.0) if sample.distillations else sample for sample in samples]


def group_advantages(rewards_G: Sequence[float], scaling: AdvantageScaling) -> list[float]:
    """Return the advantages of one group, [G].

        none  A_G = r_G - mean(r)                          Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
        std   A_G = (r_G - mean(r)) / (std(r) + 1e-4)      GRPO, arXiv 2402.03300; std with Bessel's correction, as TRL

    A group of one has 0. Raises NonFiniteError for a reward that is NaN or infinite.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"a group has rewards {list(rewards_G)}: mark failed rollouts as failed, do not score them"
        )
    if rewards.size < 2 or rewards.min() == rewards.max():  # a mean of equal numbers may be off by a last bit
        return [0.0] * rewards.size
    centered = rewards - rewards.mean()
    if scaling == "std":
        centered = centered / (rewards.std(ddof=1) + _STD_FLOOR)
    return centered.tolist()


def has_signal(advantages_G: Sequence[float]) -> bool:
    """Tell whether a group moves the policy: equal rewards give only zeros."""
    return any(abs(value) > 1e-12 for value in advantages_G)


def _hinted_only(samples: list[Sample]) -> list[Sample]:
    return [sdpo_only(sample) for sample in samples if sample.distillations]


# -- a rollout's messages ------------------------------------------------------------------------------------------


def tool_replies(turns: Sequence[MessageRecord]) -> dict[int, list[int]]:
    """Return where the tool messages are that answer each assistant message."""
    answers_at: dict[int, list[int]] = {index: [] for index, turn in enumerate(turns) if turn.role == "assistant"}
    for index, turn in enumerate(turns):
        caller = _caller(turns, index) if turn.role == "tool" else None
        if caller is not None:
            answers_at[caller].append(index)
    return answers_at


def _caller(turns: Sequence[MessageRecord], index: int) -> int | None:
    """Return which assistant message a tool message answers."""
    at = turns[index].parent
    while at is not None and turns[at].role == "tool":
        at = turns[at].parent
    return at if at is not None and turns[at].role == "assistant" else None


def messages_before(turns: Sequence[MessageRecord], index: int) -> list[MessageRecord]:
    """Return those that the one at `index` continues, oldest first."""
    path = []
    at = turns[index].parent
    while at is not None:
        path.append(turns[at])
        at = turns[at].parent
    return path[::-1]


def turn_error_rate(rollouts: Iterable[FinishedRollout]) -> float | None:
    """Return the share of assistant messages that a tool answered with an error."""
    turns = [
        any(rollout.turns[reply].error is not None for reply in replies)
        for rollout in rollouts
        for replies in tool_replies(rollout.turns).values()
    ]
    return sum(turns) / len(turns) if turns else None
