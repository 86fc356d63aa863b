"""What the trainer gets: samples, preference pairs, micro-batches with their checksums, and the messages around them.

    every rank --StepRequest--> orchestrator      asks for its micro-batches of one step
    orchestrator --StepReply | BatchNotReady | RunFinished--> rank
    rank 0 --StepDone--> orchestrator             a step is taken and its weights are published; repeated until ...
    orchestrator --StepNoted--> rank 0            ... it is noted: a lost link costs seconds, not the run
    rank 0 --CheckpointRequest--> orchestrator --CheckpointSaved--> rank 0

Ranks are DEALERs, the orchestrator's step server is a ROUTER (sockets.py).

Arrays travel as little-endian bytes inside msgpack, and are read back without a copy. `verify_batch` refuses a
micro-batch of another run, step or rank, or with a flipped bit.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from composer_prime.errors import ChecksumError, RunMismatchError

INT, FLOAT, FLAG = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


def pack_ints(values) -> bytes:
    """Return token or position ids [T] as little-endian int32 bytes."""
    return np.ascontiguousarray(values, dtype=INT).tobytes()


def pack_floats(values) -> bytes:
    """Return log-probabilities, advantages or rewards [T] as little-endian float32 bytes."""
    return np.ascontiguousarray(values, dtype=FLOAT).tobytes()


def pack_flags(values) -> bytes:
    """Return a boolean mask [T] as bytes of 0 and 1."""
    return np.ascontiguousarray(values, dtype=FLAG).tobytes()


def ints(raw: bytes) -> np.ndarray:
    """Return int32 [T], a read-only view of `raw`."""
    return np.frombuffer(raw, dtype=INT)


def floats(raw: bytes) -> np.ndarray:
    """Return float32 [T], a read-only view of `raw`."""
    return np.frombuffer(raw, dtype=FLOAT)


def flags(raw: bytes) -> np.ndarray:
    """Return uint8 [T] of 0 and 1, a read-only view of `raw`."""
    return np.frombuffer(raw, dtype=FLAG)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a sequence were sampled by policy `version`."""

    start: int
    end: int
    version: int


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a sample are the assistant turn number `turn` of its rollout, from 0."""

    start: int
    end: int
    turn: int


class HintedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """SDPO's target for one turn of a sample: the same turn ids after a context that holds a hint.

    teacher_ids[teacher_start : teacher_start + (end - start)] equals input_ids[start : end] of the sample, id by id.
    """

    start: int
    end: int
    """The turn is tokens [start, end) of the sample, thinking included, all sampled by the policy."""
    teacher_ids: bytes
    """int32 [U]: hinted context, then the turn's own ids; nothing after them."""
    teacher_start: int
    """Where the turn begins in `teacher_ids`; at least 1."""
    weight: float = 1.0
    """Factor on the turn's divergence."""
    turn: int
    """The rollout's turn number, as in TurnSpan."""
    error: str
    """Kind of error that the hint addresses."""


class TermUnit(msgspec.Struct, frozen=True, kw_only=True):
    """Documents that a loss term trains besides the samples: a demonstration, or both sides of a preference pair."""

    term: str
    """The term's table in [channels]."""
    name: str
    """For messages: `pair ID`, or `row FILE:LINE`."""
    documents: list[bytes]
    """int32 [T_i] each."""
    masks: list[bytes]
    """uint8 [T_i] each: 1 where the term reads the token; never the first."""
    value: float = 0.0
    """The term's own figure of the unit (replay_dpo: epsilon)."""

    @property
    def num_trained(self) -> int:
        return sum(int(flags(mask).sum()) for mask in self.masks)


class TokenArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens in order, and other arrays with an entry a token."""

    input_ids: bytes
    """int32 [T]: prompt, sampled and tool tokens."""
    loss_mask: bytes
    """uint8 [T]: 1 where the policy sampled the token and it is to be trained."""
    logprobs: bytes
    """float32 [T]: log-probability of token t under the sampling distribution; 0 where the policy did not sample it.

    A sampled token with mask 0 keeps its own: SDPO computes importance weights from it.
    """
    advantages: bytes
    """float32 [T]: advantage of token t; 0 where mask is 0."""


LARGEST_REWARD = 1e30
"""A reward beyond it is a failure: what the loss makes of one must fit into float32."""


class Sample(TokenArrays, frozen=True, kw_only=True):
    """One root-to-leaf token sequence of a rollout; the trainer trains on samples.

    Sampled tokens have mask 1 in exactly one sample of their rollout, however many branches share them.
    """

    sample_id: str
    """`<rollout id>/<branch>`: unique within the run, the key of the exactly-once ledger."""
    group_id: str
    """The group of sibling rollouts that the advantage was computed in."""
    source: str
    task_id: str
    reward: float
    temperature: float
    version_spans: list[VersionSpan]
    """Which policy version sampled which tokens; covers exactly the sampled tokens."""
    turns: list[TurnSpan]
    distillations: list[HintedTurn] = []
    """SDPO: error turns of this sample that got a hint. They do not overlap."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids) // INT.itemsize

    @property
    def num_trained(self) -> int:
        return int(flags(self.loss_mask).sum())

    @property
    def version_min(self) -> int:
        return min(span.version for span in self.version_spans)

    @property
    def version_max(self) -> int:
        return max(span.version for span in self.version_spans)


class HintedTurnInRow(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [student, student + count) of a row are a turn; its teacher document ends with the same ids.

    The document is the first `shared` tokens of the turn's sample, then `tail`.
    """

    student: int
    count: int
    weight: float
    shared: int
    tail: bytes
    """int32 [U - shared]: what the teacher reads after the shared beginning; the hint, and then at least the turn."""
    kind: str = ""
    """Of the error that the hint addresses."""


class UnitInRow(msgspec.Struct, frozen=True, array_like=True):
    """A loss term's unit in a row."""

    term: str
    name: str
    document: int
    """The first of its documents in the row."""
    spans: list[list[tuple[int, int]]]
    """Of each document: tokens [start, end) of the row that the term reads."""
    value: float


class MicroBatch(TokenArrays, frozen=True, kw_only=True):
    """Samples laid end to end in one row of N tokens; block-diagonal attention keeps them apart.

    A row holds first the samples, in the order of `sample_ids`, then the documents of each unit. Only samples have
    mask, logprobs and advantages. SDPO's hinted contexts are not part of the row: `turns` has what they add.

    A dummy (no `sample_ids`) holds one masked token. It keeps the ranks' counts equal.
    """

    run_id: str
    step: int
    """The optimizer step (from 1) that it belongs to."""
    rank: int
    index: int
    """Position within the rank's list of the step."""
    versions: tuple[int, int]
    """The oldest and newest policy version that sampled its tokens."""
    lengths: list[int]
    """Token count of each document in the row; sums to N."""
    temperatures: list[float]
    """Sampling temperature of each document: those of units have 1."""
    sample_ids: list[str]
    task_ids: list[str] = []
    """The task of each sample, for messages."""
    turns: list[HintedTurnInRow] = []
    """SDPO: which tokens of the row learn from which teacher document."""
    units: list[UnitInRow] = []
    """What other loss terms train."""
    checksum: str = ""
    """blake2b-128 over every other field; set by `seal_batch`, checked by `verify_batch`."""


class StepTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A step's counts over all ranks and micro-batches: the losses' denominators, fixed before any backward pass."""

    samples: int
    """B: samples with at least one trained token."""
    tokens: int
    """Trained tokens (mask 1)."""
    distilled_tokens: int = 0
    """SDPO: tokens of all hinted turns."""
    distilled_turns: int = 0
    hint_kinds: tuple[str, ...] = ()
    """SDPO: kinds of error of the hinted turns, sorted."""
    units: dict[str, int] = {}
    """Units by term; replay_dpo's are preference pairs."""
    unit_tokens: dict[str, int] = {}
    """Tokens that units train, by term; sft's are those that are imitated."""
    own: dict[str, int] = {}
    """What terms of the user's count in rows (Term.count), filled in by the trainer."""
    micro_batches: int = 1
    """M: micro-batches that hold samples; dummies do not count."""


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
    held_out: list[MicroBatch] = []
    """Demonstrations to score, where an evaluation is due; equal in number on all ranks."""


class StepPart(msgspec.Struct, frozen=True, kw_only=True, tag="step_part"):
    """Bytes of an encoded StepReply, in a frame of their own, in order. A whole one may be larger than a message, or
    take longer than a rank waits for a word."""

    step: int
    at: int
    size: int
    """Of the whole reply."""


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

    version = step, but with [diloco] the number of the global model's full sweeps.
    """

    run_id: str
    step: int
    version: int
    sample_ids: list[str]
    """Every sample of the step, for the ledger check; none when a trainer attaches after `step`."""
    session: str
    """Identifies one start of the trainer: (session, step) tells a repeated message."""
    divergence: dict[str, float] = {}
    """SDPO: mean divergence of a token in the step, in nats, by kind of error."""
    last_step: int | None = None
    """The step that ends a joint run for this cluster, as known now: it follows the outer steps, which others may
    have taken before. None where run.max_steps is the end."""


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


FromTrainer = StepRequest | StepDone | CheckpointRequest
ToTrainer = StepReply | StepPart | BatchNotReady | RunFinished | StepNoted | CheckpointSaved | StepRefused


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def batch_checksum(batch: MicroBatch) -> str:
    """Return the hexadecimal blake2b-128 of every field of `batch` except the checksum itself."""
    payload = _ENCODER.encode(msgspec.structs.replace(batch, checksum=""))
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def seal_batch(batch: MicroBatch) -> MicroBatch:
    """Return `batch` with its checksum filled in."""
    return msgspec.structs.replace(batch, checksum=batch_checksum(batch))


def verify_batch(batch: MicroBatch, *, run_id: str, step: int, rank: int, versions: tuple[int, int]) -> None:
    """Refuse a micro-batch that is not the one asked for.

    `versions`: the oldest and newest policy version that it may hold tokens of. Raises RunMismatchError when run, step,
    rank or policy versions differ, ChecksumError when the content differs from its checksum.
    """
    for name, expected in {"run_id": run_id, "step": step, "rank": rank}.items():
        actual = getattr(batch, name)
        if actual != expected:
            raise RunMismatchError(f"micro-batch has {name} {actual!r}, this trainer rank asked for {expected!r}")
    (oldest, newest), (first, last) = versions, batch.versions
    if batch.sample_ids and not oldest <= first <= last <= newest:
        raise RunMismatchError(
            f"micro-batch of step {step} holds policy versions {first}..{last}; "
            f"allowed are {oldest}..{newest} (raise orchestrator.max_staleness to accept older rollouts)"
        )
    checksum = batch_checksum(batch)
    if checksum != batch.checksum:
        raise ChecksumError(
            f"micro-batch {batch.index} of step {step} has checksum {checksum}, its header says {batch.checksum}: "
            "the payload was damaged on the way; restart with --resume"
        )
