"""[inference]: the nodes that sample, and their engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.import_path import PartConfig, one_of


class LocalEngineConfig(BaseConfig):
    """The transformers engine: continuous batching with a slot KV cache."""

    max_batch: int = Field(default=64, ge=1)
    """Sequences that decode together; others wait in a queue."""
    kv_cache_gib: float = Field(default=4.0, gt=0)
    """Maximum size of the KV cache, in GiB, taken at the start: two places of model.max_context tokens for each
    of max_batch. It limits how many sequences decode together; an auditor takes two places."""


class VllmEngineConfig(BaseConfig):
    """vLLM's engine in a child process, reached over a private socket pair."""

    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Fraction of GPU memory for weights and KV cache."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one model copy."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that decode together."""
    extra_args: list[str] = []
    """Additional command-line arguments for vLLM's engine; they override the settings here."""

    @field_validator("extra_args")
    @classmethod
    def _keeps_context(cls, words: list[str]) -> list[str]:
        if any(word.replace("_", "-").startswith("--max-model-len") for word in words):
            raise ValueError(
                f"inference.vllm.extra_args is {words}: a context other than model.max_context cuts answers "
                "short; set model.max_context instead"
            )
        return words


class InferenceConfig(BaseConfig):
    engine: Annotated[PartConfig, one_of("inference.engine", "local", "vllm")] = PartConfig(name="local")
    """`local` (the default) needs only transformers; `vllm` is for production. Or `module:Class` of your own, with the
    methods of inference.engines.base.Engine."""
    nodes: int = Field(default=1, ge=0)
    """Nodes to start on this machine; 0 waits for nodes that join with `inference join`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the nodes on this machine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of a node."""
    max_concurrent: int = Field(default=128, ge=1, le=16384)
    """Concurrent requests per node."""
    local: LocalEngineConfig = LocalEngineConfig()
    """Settings of the local engine."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Settings of the vLLM engine."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Interval between a node's heartbeats."""
    lost_after_s: float = Field(default=10.0, gt=0)
    """Silence after which a node counts as gone, and its requests go to another."""
    connect_timeout_s: float = Field(default=120.0, gt=0)
    """How long a node tries to reach the gateway before it gives up. A joined one then starts again, for as long
    as `inference join --wait` says."""
    max_restarts: int = Field(default=5, ge=0)
    """Maximum restarts of a crashed node; ten minutes without a crash reset the count."""
    usd_per_hour: float | None = Field(default=None, ge=0, le=1e6)
    """Price of a node's machine in dollars per hour, besides run.usd_per_hour; `inference join --price` sets it
    for one node. None: unknown."""

    @model_validator(mode="after")
    def _loss_after_heartbeats(self) -> InferenceConfig:
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"inference.lost_after_s is {self.lost_after_s}, inference.heartbeat_s is {self.heartbeat_s}: "
                f"one late heartbeat would drop a healthy node; set lost_after_s >= {2 * self.heartbeat_s}"
            )
        return self

    def canary_limit(self, *, on_cuda: bool) -> float:
        """Return the canary's tolerance in nats. bfloat16 rounds a large model's logits by tenths."""
        return 0.5 if self.dtype_used(on_cuda=on_cuda) == "bfloat16" else 0.05

    def dtype_used(self, *, on_cuda: bool) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if on_cuda else "float32"
