"""Messages between inference nodes or auditors (DEALERs, connect outwards) and the orchestrator (ROUTER).

    node --Enroll--> gateway --Enrolled|Dismissed--> node             once, by an invite (wire/enrollment.py)
    node --NodeHello--> gateway --NodeWelcome|Dismissed--> node
    gateway --Generate|CancelGenerate|NodeWelcome|Dismissed--> node --Sampled|GenerateFailed|Status--> gateway
    node --Status--> gateway --Heard--> node                          each side learns that the other is alive
    node --ChunkRequest--> gateway --WeightPiece--> node                    weights, through the same link
    orchestrator --AuditRequest--> auditor --AuditVerdict--> orchestrator   the rest is as with nodes

Every request carries a `lease`. An answer whose lease is no longer held is dropped. After a Hello the gateway holds no
lease of that node: earlier requests are reissued. A NodeWelcome comes again for each new version. Auditors have a
listener of their own, which admits the trainer's key only: nodes do not have it.

`Answer` is the one form of what was sampled for a request, from the engine to the record and the auditor:

    engine -> node --Sampled--> gateway (checks it, joins the parts of several nodes) -> client
                                    +-> record -> samples, audits
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from composer_prime.wire.types import INT, VersionSpan, floats, ints, pack_floats, pack_ints

PROTOCOL = 7
"""Raised with every change of messages that an older release would misread."""
POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""
GATEWAY_TOKEN_VARIABLE = "COMPOSER_GATEWAY_TOKEN"
"""Environment variable with the gateway's bearer token."""
RUNNING = "running"
"""The finish reason of tokens after which more come."""
MAX_PLACES = 1 << 14
"""Requests that a node may hold at a time."""

Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=2000)]
"""Words of a node for logs, cut by `cut_text`."""
Word = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[ -~]*$")]
Key = Annotated[bytes, Meta(min_length=40, max_length=40)]


def context_overflow(num_prompt: int, max_context: int, num_new: int = 1) -> str:
    """Return how the error of a prompt begins that leaves no room for `num_new` tokens. Clients know these words."""
    return f"Prompt length ({num_prompt}) exceeds maximum context length ({max_context}) less {num_new} for the reply"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: all of a request, or a part of them."""

    token_ids: bytes = b""
    """int32 [T], the stop token included when one ended the turn."""
    logprobs: bytes = b""
    """float32 [T], under the sampling distribution (after temperature, top-k, top-p)."""
    version_spans: list[VersionSpan] = []
    """In order, covering [0, T) without gap or overlap."""
    finish_reason: str = RUNNING
    """stop | length | cancelled; RUNNING while more tokens come."""
    prompt_cached: int = 0
    """Prompt tokens whose keys and values were cached."""
    sampled_by: list[tuple[str, int]] = []
    """Nodes in order, each with the number of tokens that it sampled. The gateway knows; nodes say nothing."""
    record_id: str = ""
    """The gateway's name for it, by which a worker's turn finds its record."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: list[VersionSpan],
        finish_reason: str = RUNNING,
        prompt_cached: int = 0,
    ) -> Answer:
        return Answer(
            token_ids=pack_ints(token_ids),
            logprobs=pack_floats(logprobs),
            version_spans=version_spans,
            finish_reason=finish_reason,
            prompt_cached=prompt_cached,
        )

    def __len__(self) -> int:
        return len(self.token_ids) // INT.itemsize

    @property
    def ids(self) -> np.ndarray:
        """int32 [T], a read-only view."""
        return ints(self.token_ids)

    @property
    def token_logprobs(self) -> np.ndarray:
        """float32 [T], a read-only view."""
        return floats(self.logprobs)

    @property
    def newest_version(self) -> int:
        """Policy version of the last token; 0 without one."""
        return self.version_spans[-1].version if self.version_spans else 0

    @property
    def node_id(self) -> str:
        """The node that sampled the last token."""
        return self.sampled_by[-1][0] if self.sampled_by else ""

    def then(self, more: Answer) -> Answer:
        """Return the answer that continues with `more`, and ends as it does."""
        if not self.token_ids:
            return more
        start = len(self)
        later = (VersionSpan(start + span.start, start + span.end, span.version) for span in more.version_spans)
        sampled_by = list(self.sampled_by)
        for node_id, count in more.sampled_by:
            if sampled_by and sampled_by[-1][0] == node_id:
                count += sampled_by.pop()[1]
            sampled_by.append((node_id, count))
        return msgspec.structs.replace(
            more,
            token_ids=self.token_ids + more.token_ids,
            logprobs=self.logprobs + more.logprobs,
            version_spans=joined(self.version_spans, later),
            sampled_by=sampled_by,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the body of vLLM's /inference/v1/generate, with version spans."""
        ids, logprobs = self.ids.tolist(), self.token_logprobs.tolist()
        # Renderers' client checks the form of `token`.
        content = [{"token": f"token_id:{i}", "logprob": value} for i, value in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": self.finish_reason,
            "logprobs": {"content": content},
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in self.version_spans
            ],
        }
        return {"request_id": self.record_id, "choices": [choice], "version_spans": self.version_spans}


NO_TOKENS = Answer()


def joined(spans: Iterable[VersionSpan], later: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Return all spans, one for each run of equal versions, without empty ones."""
    result = list(spans)
    for span in later:
        last = result[-1] if result else None
        if last is not None and (last.end, last.version) == (span.start, span.version):
            result[-1] = VersionSpan(last.start, span.end, span.version)
        elif span.end > span.start:
            result.append(span)
    return result


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
    """Tokens at the prompt's end that another node sampled of the answer. A stop string may begin in them."""


class ComputeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says that it computes on, unchecked."""

    name: Annotated[str, Meta(max_length=100)]
    """As its driver names it; `cpu` without a GPU."""
    count: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """GPUs, or CPU threads."""
    memory_gib: Annotated[float, Meta(ge=0, le=1 << 20)] | None = None
    """Of all of them; None when it does not say."""
    dtype: Annotated[str, Meta(max_length=20)] = ""
    """The type of its activations, such as bfloat16; empty when it does not say."""


class Enroll(msgspec.Struct, frozen=True, kw_only=True, tag="enroll"):
    run_id: Annotated[str, Meta(max_length=400)]
    release: Word
    protocol: int
    key: Key
    """The node's own public key, Z85."""
    name: Word
    """The name that it would like."""
    machine: Annotated[str, Meta(max_length=4000, pattern=r"^[ -~]*$")] = msgspec.field(name="found", default="")
    """What it found where it runs, for the log. Protocol 5 had a table named `machine`: its nodes must decode, to
    hear why they are refused."""
    proof: Annotated[bytes, Meta(max_length=32)] = b""
    """That it holds the secret of `key` (wire/enrollment.py). Protocol 6 had none."""


class Enrolled(msgspec.Struct, frozen=True, kw_only=True, tag="enrolled"):
    """What a node needs besides weights."""

    node_id: str
    """The node's name from now on."""
    model: bytes
    """The signed ModelFiles (run/weights.py)."""
    manifest: bytes
    """The newest signed weight manifest, empty while none is published."""
    max_context: int
    inference: bytes
    """The run's [inference] table as JSON, without what concerns the host of the run only."""
    sources: list[str] = []
    """As in NodeWelcome."""


class NodeHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    node_id: Annotated[str, Meta(max_length=400)]
    engine: Annotated[str, Meta(pattern=r"^[\w.+-]{1,40}$")]
    run_id: Annotated[str, Meta(max_length=400)] | None
    """The run that it served before a reconnect; None on the first contact."""
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
    """Answers a Hello, and announces each new version."""

    run_id: str
    manifest: bytes
    """The newest signed manifest (run/weights.py), empty while none is published."""
    verify_key: bytes
    """ed25519 public key, 32 bytes, that signs manifests of this run."""
    heartbeat_s: float
    sources: list[str] = []
    """Copies of the weight store besides this link: http:// or https:// URLs. The host `*` stands for that of the
    gateway's address."""
    is_news: bool = False
    """Whether it announces a version to a node that is attached; else it answers a Hello."""


class Dismissed(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """Sends a node away. Protocol 5 reads its reason too."""

    reason: str
    may_return: bool = True
    """Whether the node, started again, may be let in."""
    finish_first: bool = False
    """Take no more requests, finish the current ones, then send Goodbye."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    request_id: str
    lease: int
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    session: str
    """The conversation. One node serves it while alive: its prefix cache is warm."""


class CancelGenerate(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    request_id: str
    lease: int


class Sampled(Answer, frozen=True, kw_only=True, tag="sampled"):
    """An answer; or, while its finish reason is RUNNING, a part of one, so that another node can continue it.

    A part has tokens that earlier ones lack, at least one, and not the last that max_tokens allows; only proven
    weights sampled them. The answer has all of them once more.
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
    """False for a request that no node could serve, such as one beyond the context."""
    tried: bool = True
    """False when a leaving node returns the request: neither is to blame."""


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
    """Sampled tokens per second since the last Status."""
    canary_error: float | None = None
    """Largest |logprob - manifest| of the last canary, in nats; None before the first swap."""
    weight_error: Text | None = None
    """Why the newest weights are not in use; None when they are."""
    weight_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Bytes of weights that it pulled since its process started, by any way."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """Answers a Status: the gateway is alive."""

    known: bool = True
    """False when the gateway does not know this connection (it restarted, or the node counted as lost): send
    NodeHello."""


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


class AuditRequest(Answer, frozen=True, kw_only=True, tag="audit"):
    """An answer whose tokens an auditor must score again, as the nodes sent it."""

    audit: int
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    """As the node got it, with the seed."""
    tolerance: float
    """How far a draw may lie outside of its CDF interval, as a probability."""
    timeout_s: float = math.inf
    """How long after its arrival the auditor may begin a pass with it. Then it fails."""


class PartVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one node did."""

    tokens: int
    """Tokens that were checked."""
    wrong: list[int]
    """Positions in the part, ascending, of tokens that are not the draw of the seed, or whose logprob is far off."""
    fault: str | None = None
    """What is wrong with the part as a whole: its end, or the mean error of its logprobs. None for nothing."""
    gap_mean: float = 0.0
    """Mean |claimed - own logprob|, nats."""
    gap_max: float = 0.0


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    audit: int
    parts: list[PartVerdict] = []
    """Of the tokens of each node that sampled the answer, in order."""
    seconds: float = 0.0
    """What the check took."""
    error: str | None = None
    """Why the answer could not be checked: its version is gone, or the auditor's context is too small."""
    retryable: bool = False
    """Whether another auditor may be able to: the fault is this one's, such as a full disk."""


FromNode = Enroll | NodeHello | Sampled | GenerateFailed | Status | ChunkRequest | Goodbye
ToNode = Enrolled | NodeWelcome | Dismissed | Generate | CancelGenerate | Heard | WeightPiece
FromAuditor = NodeHello | AuditVerdict | Status | ChunkRequest | Goodbye
ToAuditor = NodeWelcome | Dismissed | AuditRequest | Heard | WeightPiece
