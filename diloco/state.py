"""What one rank holds of a joint run. Read `Replica` first.

    inner steps     prepare ........ due (delay steps later) ........ now, when the outcome is here
                        | mixed, as in arXiv 2501.18512 | carried on whole

    counted      local <- alpha due + (1 - alpha) global + (now - due)
    missed       local <- global + (now - global before)      the next delta holds all that was not delivered
    replaced     local <- global                              the delta was rejected, or local values are not finite
    predecessor  local <- global                              an earlier process delivered in this peer's name

In time, now is due and `counted` is the paper's equation, bit for bit.
With mixing = "carry", due is when the delta was prepared and alpha is 0.
A delta weighs what was trained on in the inner steps that it holds.

A checkpoint keeps all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError
from composer_prime.run.weights import safetensors_header
from diloco.codec import ErrorFeedback, shared_bytes
from diloco.fragments import Fragment, Ranks, parameter_layout
from diloco.global_model import GlobalModel
from diloco.transport.messages import PROTOCOL, DeltaHeader, layout_hash


class LocalWork(msgspec.Struct, frozen=True, kw_only=True):
    """What inner steps were trained on, over all ranks of a peer."""

    steps: float = 0.0
    tokens: float = 0.0

    def plus(self, other: LocalWork, times: float = 1.0) -> LocalWork:
        """Return self + times other."""
        return LocalWork(steps=self.steps + times * other.steps, tokens=self.tokens + times * other.tokens)


DeltaStatus = Literal["counted", "missed", "replaced", "predecessor"]


def delta_status(
    peer: str, offered: DeltaHeader | None, headers: Sequence[DeltaHeader], rejected: Collection[str]
) -> DeltaStatus:
    counted = next((header for header in headers if header.peer == peer), None)
    if counted is None:
        return "missed"
    if counted != offered:
        return "predecessor"
    return "replaced" if peer in rejected else "counted"


@dataclass(slots=True, kw_only=True)
class PendingDelta:
    """The delta on offer. What it lacks by mixing or by lateness is carried on whole."""

    header: DeltaHeader
    body: memoryview
    residual_n: Tensor
    work: LocalWork
    """What it holds."""
    due: LocalWork | None = None
    due_n: Tensor | None = field(default=None, repr=False)
    """Local values, float32 [numel]: work on top of them is carried on whole."""
    late: bool = False
    """Its outcome was due and not there."""


class Replica:
    """What one rank holds of a joint run, from the start of the run to its checkpoints."""

    def __init__(self, fragments: Sequence[Fragment], config: DilocoConfig, ranks: Ranks) -> None:
        """Take the parameters as they are as outer step 0."""
        self.global_model = GlobalModel(fragments, config.outer)
        self.feedback = ErrorFeedback([fragment.numel for fragment in fragments])
        self.pending: PendingDelta | None = None
        """The delta on offer, if any."""
        self.inner = 0
        """Inner steps since the last completion."""
        self.due = 0
        """The number of them after which the outcome of `pending` is due."""
        self.held = [LocalWork() for _ in fragments]
        """By fragment: what local values have and global values lack."""
        self.totals = {"missed": 0, "carried": 0.0, "overwritten": 0.0}
        """Since this peer began: rounds without its work; tokens carried on, and given up."""
        self._mixing = config.mixing
        self.ranks = ranks

    def count(self, work: LocalWork) -> None:
        """Add work to every fragment."""
        self.held = [held.plus(work) for held in self.held]

    def offer(self, pending: PendingDelta, due: int) -> None:
        """Note that this delta was prepared now; `due`: after how many inner steps its outcome is."""
        self.pending, self.due = pending, due
        if self._mixing == "carry":
            self._carry_from_now(pending)

    def mark_late(self, pending: PendingDelta) -> None:
        """Note that the outcome is late: what is trained from now on is carried on whole."""
        pending.late = True
        if pending.due is None:
            self._carry_from_now(pending)

    def _carry_from_now(self, pending: PendingDelta) -> None:
        fragment = pending.header.fragment
        pending.due, pending.due_n = self.held[fragment], self.global_model.fragments[fragment].read()

    def install(
        self, fragment: int, status: DeltaStatus, pending: PendingDelta | None, before_n: Tensor | None
    ) -> None:
        """Give the parameters their values after a round. A collective.

        `pending`: this process's delta where counted or shut out by a predecessor.
        `before_n`: the fragment's global values before the round, where missed.
        """
        model = self.global_model
        values_n = model.masters[fragment]
        if status == "counted" and pending is not None:
            values_n = model.mixed(fragment, self._share_kept, pending.due_n)
        elif status == "missed" and before_n is not None:
            values_n = model.rebased(fragment, before_n)
        if not self.ranks.all(bool(torch.isfinite(values_n).all())):
            values_n, status = model.masters[fragment], "replaced"
        model.fragments[fragment].write(values_n)
        self._settle(fragment, status, pending)

    @property
    def _share_kept(self) -> float:
        """alpha: of the local values."""
        return self._mixing if isinstance(self._mixing, float) else 0.0

    def _settle(self, fragment: int, status: DeltaStatus, pending: PendingDelta | None) -> None:
        held, share, totals = self.held[fragment], self._share(fragment), self.totals
        remaining = LocalWork()
        if status == "missed":
            totals["missed"] += held.steps > 0
            totals["carried"] += held.tokens * share
            remaining = held
        elif status == "counted" and pending is not None:
            due = pending.due or held
            mixed, since = due.plus(pending.work, -1.0), held.plus(due, -1.0)
            totals["carried"] += since.tokens * share
            totals["overwritten"] += (1 - self._share_kept) * mixed.tokens * share
            remaining = since.plus(mixed, self._share_kept)
        elif status == "replaced" or (status == "predecessor" and pending is not None):
            totals["overwritten"] += held.tokens * share
        self.held[fragment] = remaining

    def _share(self, fragment: int) -> float:
        sizes = [each.numel for each in self.global_model.fragments]
        return sizes[fragment] / max(1, sum(sizes))

    def tokens_held(self) -> float:
        return sum(held.tokens * self._share(fragment) for fragment, held in enumerate(self.held))

    def restart_interval(self) -> None:
        """Drop the delta on offer, and count inner steps from now."""
        self.pending, self.inner = None, 0

    def take_over(self, tensors: Mapping[str, Tensor], outer_step: int) -> float:
        """Hold another peer's global model; return the tokens whose work is given up for it."""
        self.global_model.load(tensors, outer_step)
        tokens_given_up = self.tokens_held()
        self.global_model.install(self.global_model.masters)
        for fragment in range(len(self.held)):
            self._settle(fragment, "replaced", None)
            self.feedback.reset(fragment)
        self.restart_interval()
        return tokens_given_up

    # -- checkpoints, and the state for others ---------------------------------------------------------------------

    def state_to_serve(self) -> tuple[memoryview, int, str]:
        """Return a packed copy of the global model, its outer step and hash; from any thread."""
        model = self.global_model
        with model.lock:
            return pack_state(model.tensors(), {}), model.outer_step, model.hash

    def packed(self) -> memoryview:
        tensors = self.global_model.tensors()
        tensors |= {f"residual.{index}": residual for index, residual in enumerate(self.feedback.residuals)}
        facts: dict[str, Any] = {
            "outer_step": self.global_model.outer_step,
            "inner": self.inner,
            "due": self.due,
            "protocol": PROTOCOL,
            "work": msgspec.to_builtins({"held": self.held, "totals": self.totals}),
            **self._identity(),
        }
        if (pending := self.pending) is not None:
            work = [pending.work, pending.due, pending.late]
            facts |= msgspec.to_builtins({"pending": pending.header, "offer": work})
            tensors |= {"pending.body": shared_bytes(pending.body), "pending.residual": pending.residual_n}
            if pending.due_n is not None:
                tensors["pending.due"] = pending.due_n
        return pack_state(tensors, facts)

    def load(self, raw: bytes | memoryview) -> None:
        """Go on from what `packed` returned. Raises CheckpointError."""
        tensors, facts = unpack_state(raw)
        identity = self._identity()
        saved_identity = {name: facts[name] for name in identity}
        if saved_identity != identity:
            raise CheckpointError(
                f"the outer state is of {saved_identity}, this is {identity}: resume with the same trainer.ranks"
            )
        self.global_model.load(tensors, facts["outer_step"])
        self.feedback.residuals = [tensors[f"residual.{index}"] for index in range(len(self.held))]
        self.inner, self.due = facts["inner"], facts["due"]
        self.held = msgspec.convert(facts["work"]["held"], list[LocalWork])
        self.totals |= facts["work"]["totals"]
        self.pending = None
        # Else the rendezvous refuses the header; its work is in the next delta.
        if "pending" in facts and facts.get("protocol") == PROTOCOL:
            work, due, late = msgspec.convert(facts["offer"], tuple[LocalWork, LocalWork | None, bool])
            self.pending = PendingDelta(
                header=msgspec.convert(facts["pending"], DeltaHeader),
                body=tensors["pending.body"].numpy().data.cast("B"),
                residual_n=tensors["pending.residual"],
                work=work,
                due=due,
                due_n=tensors.get("pending.due"),
                late=late,
            )

    def _identity(self) -> dict[str, Any]:
        layout = layout_hash(parameter_layout(self.global_model.fragments))
        return {"rank": self.ranks.rank, "ranks": self.ranks.size, "layout": layout}


# -- as bytes: safetensors with JSON facts in the header ---------------------------------------------------------
#
# The safetensors package copies while it holds Python's lock: other threads stood still for 1.7 s per 0.5 GB, with
# torch's copies for 0.04 s. The beats of a peer must not stop.

_TYPES = {"F32": torch.float32, "U8": torch.uint8}


def pack_state(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> memoryview:
    """Return a safetensors file of `tensors` (float32 or uint8, on the CPU), with `facts` in its metadata."""
    header = bytearray(safetensors_header(tensors, {"facts": json.dumps(facts)}))
    body = torch.empty(len(header) + sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    body[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
    end = len(header)
    for tensor in tensors.values():
        begin, end = end, end + tensor.nbytes
        body[begin:end] = tensor.detach().contiguous().flatten().view(torch.uint8)
    return body.numpy().data.cast("B")


def unpack_state(raw: bytes | bytearray | memoryview) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reverse `pack_state`; the tensors are copies. Raises CheckpointError."""
    try:
        start = 8 + int.from_bytes(raw[:8], "little")
        head = json.loads(bytes(raw[8:start]))
        facts = json.loads(head.pop("__metadata__")["facts"])
        writable = bytearray(raw) if isinstance(raw, bytes) else raw
        body = torch.frombuffer(writable, dtype=torch.uint8)[start:]
        end = max((entry["data_offsets"][1] for entry in head.values()), default=0)
        if len(body) != end:
            raise ValueError(f"its header announces {end} bytes, {len(body)} follow it")
        return {name: _tensor(body, **entry) for name, entry in head.items()}, facts
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{len(raw)} bytes are not a packed global state: {error}") from None


def _tensor(body: Tensor, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    values = body[begin:end].clone().view(_TYPES[dtype])  # a copy is aligned
    if not 0 <= begin <= end or len(values) != math.prod(shape):
        raise ValueError(f"{len(values)} values at {data_offsets} for shape {shape}")
    return values.view(shape)
