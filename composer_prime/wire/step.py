"""Messages between trainer ranks and the orchestrator's step server (ZMQ ROUTER/DEALER, msgpack, CURVE).

every rank --StepRequest--> orchestrator      asks for its micro-batches of one step
orchestrator --StepReply | BatchNotReady | RunFinished--> rank
rank 0 --StepDone--> orchestrator             a step is taken and its weights are published; repeated until ...
orchestrator --StepNoted--> rank 0            ... it is noted: a lost link costs seconds, not the run
rank 0 --CheckpointRequest--> orchestrator --CheckpointSaved--> rank 0
"""

from __future__ import annotations

import msgspec

from composer_prime.wire.types import MicroBatch, StepTotals


class StepRequest(msgspec.Struct, frozen=True, kw_only=True, tag="step_request"):
    """A rank asks for its micro-batches of `step`. All ranks of a step must name the same layout."""

    run_id: str
    step: int
    rank: int
    world_size: int
    max_tokens: int
    """Token budget of one micro-batch."""


class StepReply(msgspec.Struct, frozen=True, kw_only=True, tag="step_reply"):
    step: int
    rank: int
    totals: StepTotals
    micro_batches: list[MicroBatch]
    """Equal in number on all ranks."""
    metrics: dict[str, float]
    """The orchestrator's figures of this batch (reward/mean, policy/staleness_max, ...), for the trainer's line."""


class BatchNotReady(msgspec.Struct, frozen=True, kw_only=True, tag="not_ready"):
    """The batch is not complete yet: ask again. The server waits a little before it sends this, so asking is cheap."""

    step: int
    waiting_for: str


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run_finished"):
    """There will be no such step."""

    reason: str
    failed: bool


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step_done"):
    """Step `step` is trained and policy version `version`, the newest, is in the weight store.

    version = step, but in a joint run ([diloco]) the number of full sweeps that the global model has behind it.
    """

    run_id: str
    step: int
    version: int
    sample_ids: list[str]
    """Every sample of the step, for the ledger check; none when a trainer attaches after `step`."""
    session: str
    """Identifies one start of the trainer: (session, step) tells a repeated message."""


class StepNoted(msgspec.Struct, frozen=True, kw_only=True, tag="step_noted"):
    """StepDone of `step` has arrived and was handled."""

    step: int


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_request"):
    """Write the orchestrator's part of checkpoint `step` now; the trainer's part is written at the same time."""

    run_id: str
    step: int


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_saved"):
    step: int
    error: str | None = None


class StepRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The request does not belong to this run."""

    error: str
    """The reason."""


FromTrainer = StepRequest | StepDone | CheckpointRequest
ToTrainer = StepReply | BatchNotReady | RunFinished | StepNoted | CheckpointSaved | StepRefused
