"""What crosses process boundaries: samples, micro-batches and their headers.

Arrays travel as little-endian bytes inside msgpack (`ints`, `floats`, `flags` below read them back without a copy),
so a batch of a million tokens decodes in microseconds and nothing is ever unpickled.

Checksums of micro-batches: a batch of another run, step or rank, or with a flipped bit, is refused by name.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from composer_prime.errors import ChecksumError, RunMismatchError

INT, FLOAT, FLAG = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


def pack_ints(values) -> bytes:
    """Token or position ids [T] as little-endian int32 bytes."""
    return np.ascontiguousarray(values, dtype=INT).tobytes()


def pack_floats(values) -> bytes:
    """Log-probabilities, advantages or rewards [T] as little-endian float32 bytes."""
    return np.ascontiguousarray(values, dtype=FLOAT).tobytes()


def pack_flags(values) -> bytes:
    """A boolean mask [T] as bytes of 0 and 1."""
    return np.ascontiguousarray(values, dtype=FLAG).tobytes()


def ints(raw: bytes) -> np.ndarray:
    """int32 [T], read-only view of `raw`."""
    return np.frombuffer(raw, dtype=INT)


def floats(raw: bytes) -> np.ndarray:
    """float32 [T], read-only view of `raw`."""
    return np.frombuffer(raw, dtype=FLOAT)


def flags(raw: bytes) -> np.ndarray:
    """uint8 [T] of 0 and 1, read-only view of `raw`."""
    return np.frombuffer(raw, dtype=FLAG)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a sequence were sampled by policy `version`."""

    start: int
    end: int
    version: int


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a sample are the assistant turn number `turn` of its rollout (from 0)."""

    start: int
    end: int
    turn: int


class HintedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Channel 2's target for one turn of a sample: the same turn ids after a context that holds a hint.

    teacher_ids[teacher_start : teacher_start + (end - start)] equals input_ids[start : end] of the sample, id by id.
    """

    start: int
    end: int
    """The turn is tokens [start, end) of the sample (thinking included), all sampled by the policy."""
    teacher_ids: bytes
    """int32 [U]: hinted context, then the turn's own ids; nothing after them."""
    teacher_start: int
    """Where the turn begins in `teacher_ids`; at least 1."""
    weight: float = 1.0
    """Factor of the turn's divergence."""
    turn: int
    """The rollout's turn number, as in TurnSpan."""
    error: str
    """Kind of error that the hint answers (orchestrator/hints)."""


class Preference(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of answers to one context, for channel 3."""

    pair_id: str
    chosen_ids: bytes
    """int32 [T_c]: context and chosen answer."""
    rejected_ids: bytes
    """int32 [T_r]: the same context and the rejected answer."""
    context: int
    """Tokens of the common context; at least 1. The answers are what follows."""
    epsilon: float
    """Probability that the label is wrong, in [0, 0.5]."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One root-to-leaf token sequence of a rollout: what the trainer learns from.

    Sampled tokens carry mask 1 in exactly one sample of their rollout, however many branches share them.
    """

    sample_id: str
    """`<rollout id>/<branch>`; unique within the run, the key of the exactly-once ledger."""
    group_id: str
    """The group of G sibling rollouts that the advantage was computed in."""
    source: str
    task_id: str
    input_ids: bytes
    """int32 [T]: prompt, sampled and tool tokens in order."""
    loss_mask: bytes
    """uint8 [T]: 1 where the policy sampled the token and it is to be trained."""
    logprobs: bytes
    """float32 [T]: log-probability of token t under the sampling distribution; 0 where the policy did not sample it. A
    token that it sampled keeps it with mask 0: channel 2 weighs by it."""
    advantages: bytes
    """float32 [T]: advantage of token t; 0 where mask is 0."""
    reward: float
    temperature: float
    version_spans: list[VersionSpan]
    """Which policy sampled which tokens; covers exactly the sampled tokens."""
    turns: list[TurnSpan]
    distillations: list[HintedTurn] = []
    """Channel 2: turns of this sample that went wrong and got a hint; turns don't overlap."""

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
    """Tokens [student, student + count) and [teacher, teacher + count) of a row are the same turn's ids."""

    student: int
    teacher: int
    count: int
    weight: float


class PairInRow(msgspec.Struct, frozen=True, array_like=True):
    """Both sides of a preference pair in one row: the answers are [start, end)."""

    pair_id: str
    chosen_start: int
    chosen_end: int
    rejected_start: int
    rejected_end: int
    epsilon: float


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Samples laid end to end in one row of N tokens; block-diagonal attention keeps them apart.

    The documents of a row: first the samples, in the order of `sample_ids`; then teacher documents (channel 2's hinted
    contexts with their turns), then both sides of each preference pair. Only samples have mask, logprobs, advantages.

    A dummy micro-batch (no `sample_ids`) holds one masked token: it keeps the ranks' counts equal.
    """

    run_id: str
    step: int
    """The optimizer step (from 1) that this micro-batch belongs to."""
    rank: int
    index: int
    """Position within the rank's list of the step."""
    version_min: int
    version_max: int
    input_ids: bytes
    """int32 [N]."""
    position_ids: bytes
    """int32 [N]; restarts at 0 with each sample."""
    lengths: list[int]
    """Token count of each document in the row; sums to N."""
    loss_mask: bytes
    """uint8 [N]."""
    logprobs: bytes
    """float32 [N], the sampler's."""
    advantages: bytes
    """float32 [N]."""
    temperatures: list[float]
    """Sampling temperature of each document; a teacher document has its sample's, a side of a pair 1."""
    sample_ids: list[str]
    turns: list[HintedTurnInRow] = []
    """Channel 2: which tokens of the row learn from which."""
    pairs: list[PairInRow] = []
    """Channel 3."""
    checksum: str = ""
    """blake2b-128 over every other field; set by `seal_batch`, checked by `verify`."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids) // INT.itemsize


class StepTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Global counts of a step over all ranks and micro-batches: the losses' denominators, fixed before any backward."""

    samples: int
    """B: sequences (samples) with at least one trained token."""
    tokens: int
    """Trained tokens (mask 1)."""
    distilled_tokens: int = 0
    """Channel 2: tokens of all distilled turns."""
    distilled_turns: int = 0
    pairs: int = 0
    """Channel 3: preference pairs."""
    micro_batches: int = 1
    """M: micro-batches that hold samples (dummies aside)."""


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def batch_checksum(batch: MicroBatch) -> str:
    """blake2b-128, hexadecimal, over every field of `batch` but the checksum itself."""
    payload = _ENCODER.encode(msgspec.structs.replace(batch, checksum=""))
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def seal_batch(batch: MicroBatch) -> MicroBatch:
    """`batch` with its checksum filled in."""
    return msgspec.structs.replace(batch, checksum=batch_checksum(batch))


def verify(batch: MicroBatch, *, run_id: str, step: int, rank: int, versions: tuple[int, int]) -> None:
    """Refuse a micro-batch that is not the one asked for. `versions`: oldest and newest that it may hold tokens of.

    Raises RunMismatchError (run, step, rank or policy versions differ) or ChecksumError (content differs from header).
    """
    expected = {"run_id": run_id, "step": step, "rank": rank}
    for field, want in expected.items():
        got = getattr(batch, field)
        if got != want:
            raise RunMismatchError(f"micro-batch has {field} {got!r}, this trainer rank asked for {want!r}")
    oldest, newest = versions
    if batch.sample_ids and not oldest <= batch.version_min <= batch.version_max <= newest:
        raise RunMismatchError(
            f"micro-batch of step {step} holds policy versions {batch.version_min}..{batch.version_max}; "
            f"allowed are {oldest}..{newest} (raise orchestrator.max_staleness to accept older rollouts)"
        )
    actual = batch_checksum(batch)
    if actual != batch.checksum:
        raise ChecksumError(
            f"micro-batch {batch.index} of step {step} has checksum {actual}, its header says {batch.checksum}: "
            "the payload was damaged on the way; restart with --resume"
        )
