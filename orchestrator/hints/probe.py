"""What hints do before any training: failed turns are drawn again without a hint, with their own, with another task's.

groups of rollouts -> HintStage -> hinted turns -> redraws: the rollout repeats up to the turn, the turn is drawn
anew, and the rest is played without a hint -> reward by kind of error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from composer_prime.config import Config
from composer_prime.errors import ConfigError
from composer_prime.wire.types import Sample, ints
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.http import GenerationRecord, Redraw
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout import Permits, RolloutRunner, finish_rollout
from orchestrator.workers.pool import WorkerPool

NONE, OWN, OTHER = "no hint", "own hint", "another task's"
ARMS = (NONE, OWN, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HintedTurn:
    """A turn that went wrong, and what a redraw of it needs."""

    plan: GroupPlan
    sibling: int
    kind: str
    hint: str
    turn: int
    records: Sequence[GenerationRecord]
    sample: Sample
    role: str
    """Of the message before the turn."""


@dataclass(slots=True, kw_only=True)
class KindOfHint:
    """What came of the redrawn turns of one kind of error, by arm and task."""

    rewards: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {arm: {} for arm in ARMS})
    errors: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {arm: {} for arm in ARMS})
    """1 where the redrawn turn is an error again, else 0."""
    turns: set[tuple[int, int]] = field(default_factory=set)
    """Those that were redrawn: group and sibling."""
    lost: int = 0
    """Redraws without a reward: the environment did not repeat the rollout, or it failed."""

    def note(self, arm: str, turn: _HintedTurn, redrawn: tuple[FinishedRollout, bool] | None) -> None:
        """Count a redraw of `turn`: the rollout, and whether the turn is an error again; None for one that is lost."""
        self.turns.add((turn.plan.group, turn.sibling))
        if redrawn is None or (reward := redrawn[0].reward) is None:
            self.lost += 1
            return
        for figures, value in ((self.rewards, reward), (self.errors, float(redrawn[1]))):
            figures[arm].setdefault(redrawn[0].task_id, []).append(value)


async def probe(
    config: Config,
    pools: Mapping[str, WorkerPool],
    gateway: Gateway,
    stage: HintStage,
    groups: int,
    draws: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, KindOfHint]:
    """Play `groups` groups, and redraw each hinted turn `draws` times in each arm. Return the kinds by name.

    Raises ConfigError when no rollout has a hinted turn.
    """
    settings, seed = config.orchestrator, config.run.seed
    permits = Permits(settings.max_concurrent, eval_share=1.0)
    runner = RolloutRunner(config=settings, gateway=gateway, pools=pools, permits=permits, seed=seed)
    source = next(source.name for source in settings.source if source.weight > 0)
    plans = [
        GroupPlan(
            group=number, source=source, seed=derive_seed(seed, "probe", number), size=settings.group_size,
            task_index=derive_seed(seed, "probe task", number) % pools[source].num_tasks("train"),
        )
        for number in range(groups)
    ]  # fmt: skip
    found = [*chain(*await asyncio.gather(*(_hinted_turns(runner, stage, plan) for plan in plans)))]
    if not found:
        raise ConfigError(
            f"none of {groups * settings.group_size} rollouts has a hinted turn: name rules that find what goes "
            "wrong (orchestrator.hints.detect), or play more groups (--groups)"
        )
    kinds = {turn.kind: KindOfHint() for turn in found}
    done, count = 0, len(found) * len(ARMS) * draws

    async def redraw(turn: _HintedTurn, arm: str, number: int) -> None:
        nonlocal done
        if (hint := _hint_of(turn, arm, found)) is not None:
            kinds[turn.kind].note(arm, turn, await _redrawn(runner, stage, turn, hint, number=number))
        done += 1
        on_progress(done, count)

    numbers = [(arm, 1 + ARMS.index(arm) * draws + draw) for arm in ARMS for draw in range(draws)]
    await asyncio.gather(*(redraw(turn, arm, number) for turn in found for arm, number in numbers))
    return kinds


async def _hinted_turns(runner: RolloutRunner, stage: HintStage, plan: GroupPlan) -> list[_HintedTurn]:
    """Play a group, and return the first hinted turn of each rollout that one session sampled."""

    async def play(sibling: int):
        request = runner.training_request(plan, sibling, 0)
        reply, records = await runner.run(plan.source, request, order=plan.group)
        return finish_rollout(plan, reply, records, sibling=sibling, seed=request.seed or 0), records

    played = await asyncio.gather(*(play(sibling) for sibling in range(plan.size)))
    hinted = await stage.attach([rollout for rollout, _ in played])
    turns = (_hinted_turn(plan, *ended, records) for ended, (_, records) in zip(hinted, played, strict=True))
    return [turn for turn in turns if turn is not None]


def _hinted_turn(
    plan: GroupPlan, rollout: FinishedRollout, samples: list[Sample], records: Sequence[GenerationRecord]
) -> _HintedTurn | None:
    made = [(turn, sample) for sample in samples for turn in sample.distillations]
    if not made or len({record.session for record in records}) > 1:
        return None
    turn, sample = min(made, key=lambda each: each[0].turn)
    message = next(message for message in rollout.turns if message.hint)
    role = "user" if message.parent is None else rollout.turns[message.parent].role
    return _HintedTurn(
        plan=plan, sibling=rollout.sibling, kind=turn.error, hint=message.hint or "", turn=turn.turn, records=records,
        sample=sample, role=role,
    )  # fmt: skip


def _hint_of(turn: _HintedTurn, arm: str, turns: Sequence[_HintedTurn]) -> str | None:
    """Return the hint of an arm, "" for none; None where no other task has a hint for this kind."""
    if arm != OTHER:
        return turn.hint if arm == OWN else ""
    others = [
        other.hint for other in turns if other.kind == turn.kind and other.plan.task_index != turn.plan.task_index
    ]
    return others[derive_seed(turn.plan.seed, turn.sibling) % len(others)] if others else None


async def _redrawn(
    runner: RolloutRunner, stage: HintStage, turn: _HintedTurn, hint: str, *, number: int
) -> tuple[FinishedRollout, bool] | None:
    """Play the rollout again with its turn drawn anew; is that an error again? None where the hint has no place."""
    hinted_ids: np.ndarray | None = None
    if hint:
        spans = [span for span in turn.sample.turns if span.turn == turn.turn]
        made = await asyncio.to_thread(
            stage.placer.place, turn.sample, spans, hint, role=turn.role, weight=1.0, kind=turn.kind
        )
        if isinstance(made, str):
            return None
        hinted_ids = ints(made[0].teacher_ids)[: made[0].teacher_start]
    redraw = Redraw(records=turn.records, turn=turn.turn, hinted_ids=hinted_ids, draw=number)
    request = runner.training_request(turn.plan, turn.sibling, 0)
    request = msgspec.structs.replace(request, rollout_id=f"{request.rollout_id}d{number}")
    reply, records = await runner.run(turn.plan.source, request, order=turn.plan.group, redraw=redraw)
    rollout, _ = finish_rollout(turn.plan, reply, records, seed=request.seed or 0)
    errors = [error for find in stage.detectors.values() for error in await find(rollout)]
    return rollout, any(error.turn == turn.turn for error in errors)
