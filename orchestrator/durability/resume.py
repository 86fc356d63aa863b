"""From a checkpoint's state and the journal to what was going on when the run broke off. Pure; no files, no clock.

    entries up to state.journal_seq    only the groups and batches that the state names still count
    entries after it, in order         Started -> planned      Finished -> ready       Dropped -> gone
                                       Formed  -> its groups leave the buffer

Every batch that was formed is served again as it was; groups that were in flight keep their number, task and seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_prime.errors import CheckpointError
from orchestrator.batching.batches import Batch
from orchestrator.durability.checkpoint import OrchestratorState
from orchestrator.durability.journal import Dropped, Entry, Finished, Formed, Started
from orchestrator.preferences.order import Cursor
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan
from orchestrator.tasks.sources import Sources


@dataclass(slots=True, kw_only=True)
class Resumed:
    next_group: int
    in_flight: dict[int, GroupPlan]
    """Groups to dispatch again, by number."""
    ready: dict[int, FinishedGroup] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    """Formed batches after the checkpoint's step."""
    dropped: list[FinishedGroup] = field(default_factory=list)
    """Dropped since the last formed batch."""
    pairs: Cursor | None = None
    """Where channel 3's pairs go on."""


def resume(state: OrchestratorState, entries: list[Entry], sources: Sources) -> Resumed:
    """Brings the curricula of `sources` up to date on the way.

    Raises CheckpointError when the journal lacks a group that the checkpoint or a formed batch names.
    """
    sources.load_state(state.curricula)
    groups = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished | Dropped)}
    finished = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished)}
    live = {plan.group: plan for plan in state.in_flight}
    next_group, ready, dropped = state.next_group, set(state.ready), list(state.dropped)
    batches = dict(state.batches)
    formed = {entry.step: entry for entry in entries if isinstance(entry, Formed)}
    pairs = state.pairs
    for entry in entries:
        if entry.seq <= state.journal_seq:
            continue
        if isinstance(entry, Started):
            sources.curricula[entry.plan.source].next_task()
            live[entry.plan.group] = entry.plan
            next_group = entry.plan.group + 1
        elif isinstance(entry, Finished):
            sources.observe(entry.group)
            live.pop(entry.group.plan.group, None)
            ready.add(entry.group.plan.group)
        elif isinstance(entry, Dropped):
            number = entry.group.plan.group
            if number not in ready:
                sources.observe(entry.group)
            live.pop(number, None)
            ready.discard(number)
            dropped.append(number)
        else:
            batches[entry.step] = entry.groups
            pairs = entry.pairs or pairs
            ready -= set(entry.groups)
            dropped = [number for number in dropped if number not in entry.dropped]
    _check(state, batches, ready, finished)
    return Resumed(
        next_group=next_group,
        in_flight=dict(sorted(live.items())),
        ready={number: finished[number] for number in sorted(ready)},
        batches={
            step: _batch(step, [finished[number] for number in numbers], formed.get(step))
            for step, numbers in sorted(batches.items())
        },
        dropped=[groups[number] for number in dropped if number in groups],
        pairs=pairs,
    )


def _batch(step: int, groups: list[FinishedGroup], entry: Formed | None) -> Batch:
    if entry is None:
        return Batch(step=step, groups=groups, metrics={})
    return Batch(step=step, groups=groups, metrics=entry.metrics, preferences=entry.preferences)


def formed_batches(entries: list[Entry], after: int) -> list[Batch]:
    """The batches of steps > `after` whose groups `entries` hold, by step."""
    finished = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished)}
    formed = {entry.step: entry for entry in entries if isinstance(entry, Formed) and entry.step > after}
    return [
        _batch(step, [finished[number] for number in entry.groups], entry)
        for step, entry in sorted(formed.items())
        if finished.keys() >= set(entry.groups)
    ]


def _check(
    state: OrchestratorState, batches: dict[int, list[int]], ready: set[int], finished: dict[int, FinishedGroup]
) -> None:
    wanted = ready | {number for numbers in batches.values() for number in numbers}
    missing = sorted(wanted - finished.keys())
    if missing:
        raise CheckpointError(
            f"the journal lacks groups {missing[:8]} ({len(missing)} in all), which checkpoint {state.step} or a batch "
            "after it names: restore the run directory's journal/ folder, or start a new run"
        )
    expected = list(range(state.step + 1, state.step + 1 + len(batches)))
    if sorted(batches) != expected:
        raise CheckpointError(
            f"the journal holds batches {sorted(batches)} after checkpoint {state.step}, expected {expected}"
        )
