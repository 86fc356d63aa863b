"""The orchestrator's part of a checkpoint (checkpoints/step_N/orchestrator/state.json) and the way back from it.

The state is small: the groups themselves are in the journal, and the state says which of them counted at that moment.
It is taken in one step of the event loop together with the journal's sequence number, so the two never disagree.

`resume` replays the journal on top of a state. It touches no file and no clock:

    entries up to state.journal_seq    only the groups and batches that the state names still count
    entries after it, in order         Started -> planned      Finished -> ready       Dropped -> gone
                                       Formed  -> its groups leave the buffer

Every batch that was formed is served again unchanged, but for samples and pairs that made a step not finite (the
trainer's ledger names them). Groups in flight keep their number, task and seeds.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import CheckpointError
from composer_prime.run.run_dir import RunDir, write_atomic, write_remedy
from orchestrator.batching.batches import Batch, Versions
from orchestrator.durability.journal import Dropped, Entry, Finished, Formed, Started
from orchestrator.preferences import PairCursor
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan
from orchestrator.tasks.sources import Sources

FORMAT = 1


class OrchestratorState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about step `step` that cannot be derived from the configuration."""

    run_id: str
    step: int
    seed: int
    """run.seed. Every random draw derives from it and from group numbers: there is no generator state to save."""
    journal_seq: int
    """Journal entries after this one happened after the checkpoint."""
    next_group: int
    """Number of the next group to be planned."""
    in_flight: list[GroupPlan]
    ready: list[int]
    """Groups in the buffer."""
    dropped: list[int]
    """Groups dropped since the last batch was formed."""
    batches: dict[int, list[int]]
    """Formed batches after `step`, each with its groups."""
    curricula: dict[str, Any]
    """By source."""
    counters: dict[str, int]
    pairs: PairCursor | None = None
    """Where the replay-DPO pairs continue; None where none are mixed in."""
    demonstrations: str = ""
    """Digest of the files that SFT reads; empty where there are none."""
    versions: Versions
    format: int = FORMAT


def state_path(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoint(step) / "orchestrator" / "state.json"


def save_state(run_dir: RunDir, state: OrchestratorState) -> None:
    """Write the state atomically. Raises CheckpointError, for example when the disk is full."""
    path = state_path(run_dir, state.step)
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; {write_remedy(error)}") from error


def load_state(run_dir: RunDir, step: int, run_id: str) -> OrchestratorState:
    """Read the state of checkpoint `step`. Raises CheckpointError when it is missing, unreadable or of another run."""
    path = state_path(run_dir, step)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=OrchestratorState)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {run_dir.checkpoint(step)} has a COMPLETE marker but no orchestrator state: "
            "remove that folder to resume from the checkpoint before it"
        ) from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not an orchestrator state: {error}") from None
    if state.run_id != run_id:
        raise CheckpointError(f"{path} belongs to run {state.run_id!r}, this is run {run_id!r}")
    if state.format != FORMAT:
        raise CheckpointError(f"{path} has format {state.format}, not {FORMAT}: use the release that wrote it")
    return state


@dataclass(slots=True, kw_only=True)
class ResumedRun:
    """What was in progress when the run broke off."""

    next_group: int
    in_flight: dict[int, GroupPlan]
    """Groups to dispatch again, by number."""
    ready: dict[int, FinishedGroup] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    """Formed batches after the checkpoint's step."""
    dropped: list[FinishedGroup] = field(default_factory=list)
    """Dropped since the last formed batch."""
    pairs: PairCursor | None = None
    """Where the replay-DPO pairs continue."""


def resume(
    state: OrchestratorState, entries: list[Entry], sources: Sources, left_out: Set[str] = frozenset()
) -> ResumedRun:
    """Replay the journal's `entries` on top of `state`; brings the curricula of `sources` up to date as well.

    `left_out`: samples and pairs (`pair ID`) that no batch serves again.
    Raises CheckpointError when the journal lacks a group that the checkpoint or a formed batch names.
    """
    sources.load_state(state.curricula)
    groups = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished | Dropped)}
    finished = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished)}
    formed = {entry.step: entry for entry in entries if isinstance(entry, Formed)}
    in_flight = {plan.group: plan for plan in state.in_flight}
    next_group = state.next_group
    ready = set(state.ready)
    dropped = list(state.dropped)
    batches = dict(state.batches)
    pairs = state.pairs
    for entry in entries:
        if entry.seq <= state.journal_seq:
            continue
        if isinstance(entry, Started):
            sources.curricula[entry.plan.source].next_task()
            in_flight[entry.plan.group] = entry.plan
            next_group = entry.plan.group + 1
        elif isinstance(entry, Finished):
            sources.observe(entry.group)
            in_flight.pop(entry.group.plan.group, None)
            ready.add(entry.group.plan.group)
        elif isinstance(entry, Dropped):
            number = entry.group.plan.group
            if number not in ready:
                sources.observe(entry.group)
            in_flight.pop(number, None)
            ready.discard(number)
            dropped.append(number)
        else:
            batches[entry.step] = entry.groups
            pairs = entry.pairs or pairs
            ready -= set(entry.groups)
            dropped = [number for number in dropped if number not in entry.dropped]
    _check_complete(state, batches, ready, finished)
    return ResumedRun(
        next_group=next_group,
        in_flight={number: sources.within(plan) for number, plan in sorted(in_flight.items())},
        ready={number: finished[number] for number in sorted(ready)},
        batches={
            step: without_left_out(_batch(step, [finished[number] for number in numbers], formed.get(step)), left_out)
            for step, numbers in sorted(batches.items())
        },
        dropped=[groups[number] for number in dropped if number in groups],
        pairs=pairs,
    )


def formed_batches(entries: list[Entry], after: int, left_out: Set[str] = frozenset()) -> list[Batch]:
    """Return the batches of steps > `after` whose groups `entries` hold, by step, without `left_out` as in `resume`."""
    finished = {entry.group.plan.group: entry.group for entry in entries if isinstance(entry, Finished)}
    formed = {entry.step: entry for entry in entries if isinstance(entry, Formed) and entry.step > after}
    return [
        without_left_out(_batch(step, [finished[number] for number in entry.groups], entry), left_out)
        for step, entry in sorted(formed.items())
        if finished.keys() >= set(entry.groups)
    ]


def _batch(step: int, groups: list[FinishedGroup], entry: Formed | None) -> Batch:
    if entry is None:
        return Batch(step=step, groups=groups, metrics={})
    groups = [group.without_stale_tokens(entry.oldest_version) for group in groups]
    return Batch(step=step, groups=groups, metrics=entry.metrics, preferences=entry.preferences)


def without_left_out(batch: Batch, left_out: Set[str]) -> Batch:
    """Return `batch` without the samples and pairs (`pair ID`) of `left_out`."""
    if not left_out:
        return batch
    groups = [
        msgspec.structs.replace(group, samples=[sample for sample in group.samples if sample.sample_id not in left_out])
        for group in batch.groups
    ]
    pairs = [pair for pair in batch.preferences if f"pair {pair.pair_id}" not in left_out]
    return replace(batch, groups=groups, preferences=pairs)


def _check_complete(
    state: OrchestratorState, batches: dict[int, list[int]], ready: set[int], finished: dict[int, FinishedGroup]
) -> None:
    required = ready | {number for numbers in batches.values() for number in numbers}
    missing = sorted(required - finished.keys())
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
