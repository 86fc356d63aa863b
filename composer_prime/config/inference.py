"""[inference]: the nodes that sample, and their engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig


class LocalEngineConfig(BaseConfig):
    """The transformers engine: continuous batching with a slot KV cache."""

    max_batch: int = Field(default=64, ge=1)
    """Sequences that decode together; more wait in line."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Most prompt tokens computed between two decode steps, so that long prompts do not stall decoding."""
    prefix_cache: bool = True
    """Keep a conversation's KV entries for its next turn (dropped at a weight swap) and share common prompts."""
    kv_cache_gib: float = Field(default=4.0, gt=0)
    """Ceiling of the KV cache, GiB; it grows as sequences do and bounds how many decode together."""
    kv_at_swap: Literal["keep", "recompute", "keep_conversations"] = "keep"
    """KV entries of running requests at a weight swap: keep those of the old weights, or compute them again.
    keep_conversations also keeps those that wait for their conversation's next turn, so that long sessions are not
    computed anew after each swap. Audits do not go with it (docs/explanation/routing.md)."""


class VllmEngineConfig(BaseConfig):
    """vLLM's engine in a child process, reached over a private socket pair."""

    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache."""
    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache of a CPU server, GiB."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one model copy."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that decode together."""
    enforce_eager: bool | None = None
    """Skip graph capture; None means eager on CPU and graphs on CUDA."""
    start_timeout_s: float = Field(default=600, gt=0)
    """How long the server may take to load the model and report that it serves."""
    swap_timeout_s: float = Field(default=300, gt=0)
    """How long the server may take to load a new version, or to score the canary."""
    kv_at_swap: Literal["keep", "keep_conversations"] = "keep"
    """As inference.local.kv_at_swap. A conversation without a turn between two swaps is computed anew."""
    extra_args: list[str] = []
    """Further command-line arguments of vLLM's engine; they win over the settings here."""

    @field_validator("extra_args")
    @classmethod
    def _keeps_context(cls, words: list[str]) -> list[str]:
        if any(word.replace("_", "-").startswith("--max-model-len") for word in words):
            raise ValueError(
                f"inference.vllm.extra_args is {words}: a node whose context differs from model.max_context cuts "
                "answers short; set model.max_context instead"
            )
        return words


class InferenceConfig(BaseConfig):
    engine: Literal["local", "vllm"] = "local"
    """`local` needs only transformers; `vllm` is for production."""
    nodes: int = Field(default=1, ge=0)
    """Nodes that the launcher starts on this machine; 0 waits for `inference join` from elsewhere."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where nodes started here compute."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of a node."""
    max_concurrent: int = Field(default=128, ge=1)
    """Requests a node takes at a time. A gateway allows 16384, which is what more becomes."""
    local: LocalEngineConfig = LocalEngineConfig()
    """Settings of the local engine."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Settings of the vLLM engine."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Interval of a node's heartbeats; after lost_after_s of silence its requests go to another node."""
    lost_after_s: float = Field(default=10.0, gt=0)
    """Silence after which a node counts as gone."""
    connect_timeout_s: float = Field(default=120.0, gt=0)
    """How long a node tries to reach the gateway, first or again, before it gives up."""
    chunk_timeout_s: float = Field(default=30.0, gt=0)
    """How long a node waits for one piece of a weight chunk (a few MB) before it asks again."""
    weights_from: list[str] = []
    """Of a node that joins: copies of the run's weight store that it asks beside those that the gateway names."""
    relay: str | None = None
    """Of a node that joins: HOST:PORT where it serves the weight chunks that it holds to other nodes; None serves none.
    Whoever reaches it can read them."""
    drain_timeout_s: float = Field(default=5.0, ge=0)
    """How long a node that should end lets its running requests finish."""
    max_restarts: int = Field(default=5, ge=0)
    """How often the launcher restarts one of its nodes after it died; ten minutes without a death clear the count."""
    usd_per_hour: float | None = Field(default=None, ge=0, le=1e6)
    """Price of a node's machine in dollars an hour, counted beside run.usd_per_hour; `inference join --price` sets it
    for one node. None: unknown."""
    max_usd_per_million: float | None = Field(default=None, gt=0)
    """Drain a node whose trained tokens cost more dollars a million over worth_window_s, and one that trained nothing
    in that time while others did. The last node that serves stays. None drains none."""
    worth_window_s: float = Field(default=600.0, gt=0)
    """How long max_usd_per_million looks back; longer while fewer than 3 batches were trained in that time."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference in nats between the canary's logprobs and the manifest's; None is 0.05, on CUDA or in
    bfloat16 0.5."""

    @field_validator("max_concurrent")
    @classmethod
    def _gateway_limit(cls, count: int) -> int:
        return min(count, 16384)

    @model_validator(mode="after")
    def _loss_after_heartbeats(self) -> InferenceConfig:
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"inference.lost_after_s is {self.lost_after_s}, inference.heartbeat_s is {self.heartbeat_s}: "
                f"one late heartbeat would drop a healthy node; set lost_after_s >= {2 * self.heartbeat_s}"
            )
        return self

    def canary_limit(self, *, on_cuda: bool) -> float:
        """Return the canary's tolerance in nats. bfloat16 rounds logits of a large model by tenths of a nat."""
        if self.canary_tolerance is not None:
            return self.canary_tolerance
        return 0.5 if self.dtype_used(on_cuda=on_cuda) == "bfloat16" else 0.05

    def dtype_used(self, *, on_cuda: bool) -> str:
        """Return what `dtype` stands for."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if on_cuda else "float32"
