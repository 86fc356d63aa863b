"""What hints do before any training: failed turns are drawn again without a hint, with their own, with another task's.

groups of rollouts -> HintStage -> hinted turns -> redraws: the rollout repeats up to the turn, the turn is drawn
anew, and the rest is played without a hint -> reward by kind of error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from composer_prime.config import Config
from composer_prime.errors import ConfigError
from orchestrator.gateway.gateway import Gateway
from orchestrator.hints.redraws import FailedTurn, failed_turn, redrawn
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout import Permits, RolloutRunner, finish_rollout
from orchestrator.workers.pool import WorkerPool

NONE, OWN, OTHER = "no hint", "own hint", "another task's"
ARMS = (NONE, OWN, OTHER)


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
    drawn: dict[tuple[int, int], dict[str, list[float]]] = field(default_factory=dict)
    """Rewards by arm, of each turn that was redrawn: by group and sibling."""

    def note(self, arm: str, turn: FailedTurn, again: FinishedRollout | None, is_error: bool) -> None:
        """Count a redraw of `turn`: the rollout, None for one that is lost, and whether the turn is an error again."""
        self.turns.add((turn.plan.group, turn.rollout.sibling))
        if again is None or (reward := again.reward) is None:
            self.lost += 1
            return
        of_turn = self.drawn.setdefault((turn.plan.group, turn.rollout.sibling), {})
        of_turn.setdefault(arm, []).append(reward)
        for figures, value in ((self.rewards, reward), (self.errors, float(is_error))):
            figures[arm].setdefault(again.task_id, []).append(value)

    def pairs(self) -> list[tuple[float, float]]:
        """Return a pair for each turn, in their order: its mean reward with its own hint, and without one."""
        turns = [by_arm for _, by_arm in sorted(self.drawn.items()) if {OWN, NONE} <= by_arm.keys()]
        return [(fmean(by_arm[OWN]), fmean(by_arm[NONE])) for by_arm in turns]


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

    async def redraw(turn: FailedTurn, arm: str, draw: int) -> None:
        nonlocal done
        if (hint := _hint_of(turn, arm, found)) is not None:
            number = 1 + ARMS.index(arm) * draws + draw
            again = await redrawn(runner, stage, turn, hint, number)
            kinds[turn.kind].note(arm, turn, again, turn.turn in await _error_turns(stage, again))
        done += 1
        on_progress(done, count)

    await asyncio.gather(*(redraw(turn, arm, draw) for turn in found for arm in ARMS for draw in range(draws)))
    return kinds


async def _hinted_turns(runner: RolloutRunner, stage: HintStage, plan: GroupPlan) -> list[FailedTurn]:
    """Play a group, and return the first hinted turn of each rollout that one session sampled."""

    async def play(sibling: int):
        request = runner.training_request(plan, sibling, 0)
        reply, records = await runner.run(plan.source, request, order=plan.group)
        return finish_rollout(plan, reply, records, sibling=sibling, seed=request.seed or 0), records

    played = await asyncio.gather(*(play(sibling) for sibling in range(plan.size)))
    hinted = await stage.attach([rollout for rollout, _ in played])
    turns = (failed_turn(plan, ended, records) for ended, (_, records) in zip(hinted, played, strict=True))
    return [turn for turn in turns if turn is not None]


def _hint_of(turn: FailedTurn, arm: str, turns: Sequence[FailedTurn]) -> str | None:
    """Return the hint of an arm, "" for none; None where no other task has a hint for this kind."""
    if arm != OTHER:
        return turn.hint if arm == OWN else ""
    others = [
        other.hint for other in turns if other.kind == turn.kind and other.plan.task_index != turn.plan.task_index
    ]
    return others[derive_seed(turn.plan.seed, turn.rollout.sibling) % len(others)] if others else None


async def _error_turns(stage: HintStage, rollout: FinishedRollout | None) -> list[int]:
    return [each.turn for find in stage.detectors.values() if rollout for each in await find(rollout)]
