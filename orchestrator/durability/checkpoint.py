"""The orchestrator's part of a checkpoint: checkpoints/step_N/orchestrator/state.json.

Small on purpose: the groups themselves lie in the journal, the state says which of them counted at that moment. It is
taken in one step of the event loop, together with the journal's sequence number, so the two never disagree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import CheckpointError
from composer_prime.run.run_dir import RunDir, write_atomic
from orchestrator.batching.buffer import Versions
from orchestrator.preferences.order import Cursor
from orchestrator.rollouts.groups import GroupPlan

FORMAT = 1


class OrchestratorState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about step `step` that can't be derived from the configuration."""

    run_id: str
    step: int
    seed: int
    """run.seed; every random draw derives from it and from group numbers, so there is no other generator to save."""
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
    pairs: Cursor | None = None
    """Where channel 3's pairs go on; None where none are mixed in."""
    versions: Versions | None = None
    """None: written before versions could stand for several steps; version = step."""
    format: int = FORMAT


def state_path(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoint(step) / "orchestrator" / "state.json"


def save_state(run_dir: RunDir, state: OrchestratorState) -> None:
    """Write atomically. Raises CheckpointError, for example when the disk is full."""
    path = state_path(run_dir, state.step)
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free some space") from error


def load_state(run_dir: RunDir, step: int, run_id: str) -> OrchestratorState:
    """Raises CheckpointError when the state is missing, unreadable or of another run."""
    path = state_path(run_dir, step)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=OrchestratorState)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {run_dir.checkpoint(step)} has a COMPLETE marker but no orchestrator state: "
            "remove that folder to go on from the one before it"
        ) from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not an orchestrator state: {error}") from None
    if state.run_id != run_id:
        raise CheckpointError(f"{path} belongs to run {state.run_id!r}, this is run {run_id!r}")
    if state.format != FORMAT:
        raise CheckpointError(f"{path} has format {state.format}, not {FORMAT}: use the release that wrote it")
    return state
