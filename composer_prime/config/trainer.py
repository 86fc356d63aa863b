"""[trainer]: ranks, precision, optimizer, schedule, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

HeadKernels = Literal["auto", "torch", "triton"]


class OptimConfig(BaseConfig):
    type: Literal["adamw", "muon"] = "adamw"
    """Muon updates matrices of the blocks (each expert's alone where experts are fused), AdamW the rest."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW (and of everything under adamw)."""
    muon_lr: float = Field(default=2e-4, gt=0)
    """Peak learning rate of matrices under Muon."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon momentum."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm here; None never clips."""


class ScheduleConfig(BaseConfig):
    type: Literal["constant", "cosine"] = "constant"
    """Shape after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear rise from 0 to the peak; a shorter run ends during it."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step, relative to the peak (cosine)."""


class LoraConfig(BaseConfig):
    rank: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale numerator: the update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """Module names, or all-linear."""


class CheckpointConfig(BaseConfig):
    every_steps: int = Field(default=50, ge=0)
    """Write a checkpoint every this many steps, after the last one, and when the run is stopped; 0 only then."""
    stop_timeout_s: float = Field(default=60.0, ge=0)
    """After Ctrl-C or SIGTERM: how long the current step and a last checkpoint may take together; 0 writes no
    checkpoint."""
    keep: int = Field(default=2, ge=1)
    """Number of newest complete checkpoints that stay on disk."""


class WeightStoreConfig(BaseConfig):
    keep: int = Field(default=3, ge=2)
    """Number of newest policy versions that stay in the weight store."""
    anchor_every: int = Field(default=20, ge=1)
    """Versions from one whole snapshot in the store to the next. Those between are what differs from it, where that is
    less than a third of its bytes; 1 writes every version whole."""


class TrainerConfig(BaseConfig):
    address: str | None = None
    """Where the trainer runs (under torchrun), if not here; None starts it here."""
    ranks: int = Field(default=1, ge=1)
    """FSDP2 processes started here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when torch sees a GPU."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Forward and backward; masters are always float32. auto: float32 on CPU, bfloat16 on CUDA."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more compute."""
    head_kernels: HeadKernels = "auto"
    """Element-wise operations of the loss head. auto: torch on the CPU; on CUDA the faster of torch and Triton, timed
    once at first use. Both agree up to rounding."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Tokens in one packed row; a step is as many micro-batches as its samples need."""
    reduce_each_micro_batch: bool | None = None
    """Sum gradients over ranks after each micro-batch, so that a rank holds only its shard of them. Off: once a step,
    with less traffic, but 4 bytes a parameter on every rank. None: on for CUDA, off for the CPU."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all parameters; published weights are merged."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to checkpoint."""
    weights: WeightStoreConfig = WeightStoreConfig()
    """How many published versions to keep."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """How many steps in a row may be skipped because loss or gradient is NaN or infinite; one more ends the run."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of a collective between ranks."""
    orchestrator_timeout_s: float = Field(default=120.0, gt=0)
    """How long the orchestrator may stay silent; it answers every few seconds even when no batch is ready."""

    @model_validator(mode="after")
    def _lora_with_adamw(self) -> TrainerConfig:
        if self.lora is not None and self.optim.type == "muon":
            raise ValueError(
                "trainer.lora is set and trainer.optim.type is 'muon': orthogonalized updates of low-rank factors are "
                "not supported; use trainer.optim.type = 'adamw' or remove trainer.lora"
            )
        return self
