"""Messages between an inference node (DEALER, connects outwards) and the orchestrator's gateway (ROUTER).

    node --Enroll--> gateway --Enrolled|Rejected--> node             once, by an invite (wire/enrollment.py)
    node --NodeHello--> gateway --NodeWelcome|Rejected--> node
    gateway --Generate|CancelGenerate|NewVersion|Drain--> node --Sampled|GenerateFailed|Status--> gateway
    node --Status--> gateway --Heard--> node                          each side learns that the other is alive
    node --ChunkRequest--> gateway --WeightPiece--> node                    weights, through the same link

Every request carries a `lease`. An answer whose lease is no longer held (the request was reissued) is dropped. After a
Hello the gateway holds no lease of that node: earlier requests are reissued.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from composer_prime.wire.answer import RUNNING, Answer
from composer_prime.wire.enrollment import PROTOCOL, Enroll, Enrolled

MAX_PLACES = 1 << 14
"""Requests that a node may hold at a time."""

Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=2000)]
"""Words of a node, which go into logs. Nodes cut theirs (`cut_text`)."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. The returned logprobs are those of the distribution after temperature, top-k and top-p."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    seed: int | None = None
    stop: list[str] = []
    """Stop strings: generation ends with the token that completes one."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    resumed: int = 0
    """So many tokens at the end of the prompt belong to the answer: another node sampled them. A stop string may begin
    in them."""


class ComputeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says that it computes on. Nothing checks it."""

    name: Annotated[str, Meta(max_length=100)]
    """As its driver names it; `cpu` without a GPU."""
    count: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """GPUs, or CPU threads."""
    memory_gib: Annotated[float, Meta(ge=0, le=1 << 20)] | None = None
    """Of all of them; None when it does not say."""
    dtype: Annotated[str, Meta(max_length=20)] = ""
    """The type of its activations, such as bfloat16; empty when it does not say."""


class NodeHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    node_id: Annotated[str, Meta(max_length=400)]
    engine: Annotated[str, Meta(pattern=r"^[\w.+-]{1,40}$")]
    run_id: Annotated[str, Meta(max_length=400)] | None
    """The run this node served before a reconnect; None on the first contact."""
    version: int
    max_concurrent: int
    instance: Annotated[str, Meta(max_length=64)] = ""
    """Random, drawn at process start: tells a node that reconnects from another one of the same name."""
    protocol: int = PROTOCOL
    max_context: int | None = None
    """Tokens of prompt and answer together that it can hold, at least the run's; None when it does not say."""
    device: ComputeDevice | None = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """What its machine costs, as its operator says (`--price`); None when unknown."""


class NodeWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    run_id: str
    manifest: bytes
    """The newest signed manifest (composer_prime.run.weights), empty while none is published."""
    verify_key: bytes
    """ed25519 public key, 32 bytes, that signs manifests of this run."""
    heartbeat_s: float
    sources: list[str] = []
    """Copies of the weight store besides this link: http:// or https:// URLs. The host `*` stands for the one that the
    node reaches the gateway at."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    reason: str
    may_return: bool
    """Whether the node, started again, may be let in."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    request_id: str
    lease: int
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    session: str
    """The conversation. Its requests go to one node while that is alive, because the prefix cache is warm there."""


class CancelGenerate(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    request_id: str
    lease: int


class NewVersion(msgspec.Struct, frozen=True, kw_only=True, tag="new_version"):
    manifest: bytes
    sources: list[str] = []
    """As in NodeWelcome."""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take no more requests, finish the current ones, then send Goodbye."""

    reason: str


class Sampled(Answer, frozen=True, kw_only=True, tag="sampled"):
    """An answer; or, while its finish reason is RUNNING, a part of one, so that another node can continue it.

    A part leaves out the tokens of earlier parts. It has at least one, and not the last that max_tokens allows; only
    proven weights sampled them. The answer has all of them once more.
    """

    request_id: str
    lease: int
    start: int = 0
    """Tokens of earlier parts."""

    @property
    def is_part(self) -> bool:
        return self.finish_reason == RUNNING


class GenerateFailed(msgspec.Struct, frozen=True, kw_only=True, tag="generate_failed"):
    request_id: str
    lease: int
    error: Text
    retryable: bool
    """False for a request that no node could serve (for example a prompt longer than the context)."""
    tried: bool = True
    """False when a node that is about to leave returns the request: neither is to blame."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Heartbeat; also sent at once after a weight swap. Figures out of range do not decode."""

    version: Annotated[int, Meta(ge=0)]
    running: Count
    waiting: Count
    kv_used: Share
    """Share of the KV cache in use, 0..1."""
    kv_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Tokens that its KV cache holds; 0 when it does not say."""
    tokens_per_s: Annotated[float, Meta(ge=0)]
    canary_error: float | None
    """Largest |logprob - manifest| of the last canary, in nats; None before the first swap."""
    weight_error: Text | None = None
    """Why the newest weights are not in use; None when they are."""
    weight_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Bytes of weights that it pulled since its process started, by any way."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """Answers a Status: the gateway is alive."""

    known: bool = True
    """False when the gateway does not know this connection (it restarted, or the node counted as lost): send NodeHello.
    Then it answers any message."""


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True, tag="chunk_request"):
    sha256: Annotated[str, Meta(max_length=64)]
    offset: int
    """Resume position within the chunk."""


class WeightPiece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """Answers a ChunkRequest."""

    sha256: str
    offset: int
    data: bytes | None = None
    """None when the gateway lacks the chunk, or gives no more."""
    last: bool = False
    refusal: str | None = None
    """Why the node gets no more through this link for now: what it pulled, what it may, and the remedy."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    reason: Text


def cut_text(error: object) -> str:
    """Return the text of `error`, no longer than a message may have it."""
    return str(error)[:2000]


FromNode = Enroll | NodeHello | Sampled | GenerateFailed | Status | ChunkRequest | Goodbye
ToNode = Enrolled | NodeWelcome | Rejected | Generate | CancelGenerate | NewVersion | Drain | Heard | WeightPiece
