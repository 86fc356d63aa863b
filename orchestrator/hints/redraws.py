"""Draw a turn that went wrong again: the rollout repeats up to the turn, and the rest is free and without a hint.

In a run, pairs of redraws tell what each kind of hint is worth (composer_prime/monitor/licence.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from composer_prime.config import Config
from composer_prime.event_loop import end
from composer_prime.monitor.licence import Licence
from composer_prime.wire.types import Sample, ints
from orchestrator.gateway.http import GenerationRecord, Redraw
from orchestrator.hints.stage import HintStage
from orchestrator.rollouts.groups import CompiledRollout, FinishedRollout, GroupPlan
from orchestrator.rollouts.rollout import RolloutRunner, finish_rollout

logger = logging.getLogger(__name__)

_IN_FLIGHT = 4
"""Pairs that are drawn at a time."""
_UNREPEATED = 10  # turns in a row without a pair of rewards: that is worth a warning


@dataclass(frozen=True, slots=True)
class FailedTurn:
    """A hinted turn, and what a redraw of it needs."""

    plan: GroupPlan
    rollout: FinishedRollout
    turn: int
    kind: str
    """Of its error."""
    hint: str
    records: Sequence[GenerationRecord]
    sample: Sample
    role: str
    """Of the message before the turn."""


def failed_turn(plan: GroupPlan, ended: CompiledRollout, records: Sequence[GenerationRecord]) -> FailedTurn | None:
    """Return the first hinted turn of a rollout; None without one, or where several sessions sampled."""
    rollout, samples = ended
    message = next((message for message in rollout.turns if message.hint), None)
    if (
        message is None
        or message.turn is None
        or message.hint is None
        or len({record.session for record in records}) > 1
    ):
        return None
    sample = next((each for each in samples if any(span.turn == message.turn for span in each.turns)), None)
    if sample is None:
        return None
    role = "user" if message.parent is None else rollout.turns[message.parent].role
    return FailedTurn(plan, rollout, message.turn, message.error or "", message.hint, records, sample, role)


async def redrawn(
    runner: RolloutRunner, stage: HintStage, turn: FailedTurn, hint: str, number: int
) -> FinishedRollout | None:
    """Play the rollout again with its turn drawn anew behind `hint`, "" for none. None where that has no place.

    `number`, from 1: redraws of other numbers have other noise.
    """
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
    request = runner.training_request(turn.plan, turn.rollout.sibling, 0)
    name, seed = f"{turn.rollout.rollout_id}d{number}", turn.rollout.seed
    request = msgspec.structs.replace(request, rollout_id=name, seed=seed)
    reply, records = await runner.run(turn.plan.source, request, order=turn.plan.group, redraw=redraw)
    return (await asyncio.to_thread(finish_rollout, turn.plan, reply, records, seed=seed))[0]


class RedrawnPairs:
    """Draws pairs for the licence beside the training, within its share of the rollouts."""

    def __init__(self, licence: Licence, stage: HintStage, runner: RolloutRunner, share: float) -> None:
        """`share`: redraws per rollout, at most."""
        self.licence = licence
        self._share = share
        self._stage = stage
        self._runner = runner
        self._records: dict[int, dict[str, Sequence[GenerationRecord]]] = {}
        """Of groups in flight, by rollout."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: Counter[str] = Counter()
        """Pairs that were begun, by kind."""
        self._rollouts = self._unrepeated = 0

    def remember(self, plan: GroupPlan, rollout_id: str, records: Sequence[GenerationRecord]) -> None:
        """Keep what a rollout of a group in flight sampled."""
        self._records.setdefault(plan.group, {})[rollout_id] = records

    def forget(self, plan: GroupPlan) -> None:
        self._records.pop(plan.group, None)

    def consider(self, plan: GroupPlan, ended: Sequence[CompiledRollout]) -> None:
        """Begin to redraw a turn of each kind in a finished group, those first of which fewest were drawn."""
        records = self._records.get(plan.group, {})
        self._rollouts += len(ended)
        turns = [failed_turn(plan, each, records.get(each[0].rollout_id, ())) for each in ended]
        if not any(turns) and any(message.hint for rollout, _ in ended for message in rollout.turns):
            self._lose("hinted turns of several agents cannot be drawn again")
        of_kind = {turn.kind: turn for turn in turns if turn is not None and not self.licence.has_ended(turn.kind)}
        for kind in sorted(of_kind, key=lambda kind: self._begun[kind]):
            within = self._share * self._rollouts >= 2 * (self._begun.total() + 1)
            if not within or len(self._tasks) >= _IN_FLIGHT:
                return
            self._begun[kind] += 1
            task = asyncio.create_task(self._pair(of_kind[kind]), name=f"redraws of {plan.group_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pair(self, turn: FailedTurn) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                tasks = [
                    both.create_task(redrawn(self._runner, self._stage, turn, hint, at))
                    for at, hint in ((1, turn.hint), (2, ""))
                ]
            rewards = [each.reward for task in tasks if (each := task.result()) is not None and each.reward is not None]
            if len(rewards) == 2:
                self._unrepeated = 0
                self.licence.note_pair(turn.kind, (rewards[0], rewards[1]))
            else:
                self._lose("hints must have a place, and environments answer the same calls alike")
        except* Exception as failed:  # a redraw never ends the run
            self._lose(repr(failed.exceptions[0]))

    def _lose(self, reason: str) -> None:
        self._unrepeated += 1
        if self._unrepeated % _UNREPEATED == 0:
            said = "%d turns in a row gave no pair of redraws, the last: %s; else remove [orchestrator.hints.licence]"
            logger.warning(said, _UNREPEATED, reason)

    def metrics(self) -> dict[str, float]:
        return {"hints/redraws": 2.0 * self._begun.total(), **self.licence.metrics()}

    async def close(self) -> None:
        await end(self._tasks)


def build_redraws(
    config: Config, stage: HintStage | None, runner: RolloutRunner, path: Path, step: int
) -> RedrawnPairs | None:
    """Build the pairs of a run after `step`, with what `path` holds; None without a licence. Raises ConfigError."""
    if stage is None or stage.config.licence is None:
        return None
    settings = stage.config.licence
    licence = Licence(path, config.model.path, step, trust=settings.trust, earlier=settings.file)
    stage.weight_of = licence.weight
    return RedrawnPairs(licence, stage, runner, settings.share)
