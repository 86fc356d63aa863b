"""[trainer]: ranks, precision, optimizer, schedule, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.import_path import PartConfig, one_of

CHUNK_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Logits that the trainer's head computes at a time. Each chunk reads and writes the output layer's gradient
once, so it must not have too few rows."""


def expert_count(text: Mapping[str, Any]) -> int:
    """Return the experts of a layer by the values of a model's config.json, whatever its family calls them; 0: none."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((text[name] for name in names if text.get(name)), 0)


def is_softmax_attention(kind: str) -> bool:
    """Return whether a layer of a transformers' `layer_types` keeps documents of a row apart by its attention."""
    return kind.endswith("attention") and kind != "linear_attention"


class OptimConfig(BaseConfig):
    type: Annotated[PartConfig, one_of("trainer.optim.type", "adamw", "muon")] = PartConfig(name="adamw")
    """adamw (the default); muon for matrices of the blocks (heads and fused experts one by one), with AdamW for the
    rest; or `module:Class` of your own, a torch optimizer that takes the parameter groups and lr."""
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
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm here; None never clips."""


class ScheduleConfig(BaseConfig):
    type: Literal["constant", "cosine"] = "constant"
    """Shape after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0 to the peak; a shorter run ends during it."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step, relative to the peak (cosine)."""


class LoraConfig(BaseConfig):
    rank: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update, which is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Module names, or all-linear."""


class CheckpointConfig(BaseConfig):
    every_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints, besides the one at the end or a stop. 0 writes only that."""
    stop_timeout_s: float | None = Field(default=None, ge=0)
    """Time limit for the current step and a last checkpoint after Ctrl-C or SIGTERM; 0 writes none. None: a minute,
    and 2 s for each GB of the checkpoint."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints to keep on disk."""


class WeightStoreConfig(BaseConfig):
    keep: int = Field(default=3, ge=2)
    """Policy versions to keep in the weight store."""


class TrainerConfig(BaseConfig):
    address: str | None = None
    """Address of a trainer on another machine (under torchrun); None starts it here."""
    ranks: int = Field(default=1, ge=1)
    """FSDP2 processes to start on this machine."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the weights (HSDP): each lies on ranks / replicas processes. For several machines."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each row (Ulysses): a row may be so many times as long. They divide the model's heads."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts: tokens travel to them. Pays for large experts and short rows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if torch finds a GPU."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; master weights are float32. auto: float32 on CPU, bfloat16 on CUDA."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more compute."""
    compile: str | None = None
    """Backend of torch.compile for each block, usually inductor; its first step takes minutes. None: not compiled."""
    offload: list[Literal["activations", "moments"]] = []
    """What waits in host memory while a GPU does not use it: the inputs of blocks that are recomputed, and the moments
    of the optimizer. The results stay the same to the last bit."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Tokens in one packed row; a step uses as many micro-batches as its samples need."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    term_norms_every: int = Field(default=0, ge=0)
    """Steps between measures of each loss term's own gradient norm, at one more pass a term; 0: none."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all parameters; published weights are merged."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    weights: WeightStoreConfig = WeightStoreConfig()
    """Storage of published versions."""

    @model_validator(mode="after")
    def _offload_of_block_inputs(self) -> TrainerConfig:
        if "activations" in self.offload and not self.activation_checkpointing:
            raise ValueError(
                "trainer.offload has 'activations' and trainer.activation_checkpointing is false, which keeps far more "
                "than the inputs of blocks; set trainer.activation_checkpointing = true or leave 'activations' out"
            )
        return self

    @model_validator(mode="after")
    def _meshes_fit(self) -> TrainerConfig:
        if self.address is None and (problem := self.mesh_problem(self.ranks)):
            raise ValueError(problem)
        others = (self.lora is not None, self.optim.type.name == "muon", self.compile is not None)
        if self.expert_parallel > 1 and any(others):
            raise ValueError(
                f"trainer.expert_parallel is {self.expert_parallel}, but trainer.lora, trainer.compile and "
                "trainer.optim.type = 'muon' need all experts on one mesh: set it to 1, or leave these out"
            )
        return self

    def mesh_problem(self, ranks: int) -> str | None:
        """Return why so many ranks cannot be arranged as these settings ask."""
        for name in ("replicas", "context_parallel", "expert_parallel"):
            if ranks % (size := getattr(self, name)):
                return (
                    f"trainer.{name} is {size}, which does not divide the {ranks} ranks of the trainer: set it to a "
                    f"divisor of {ranks}, or trainer.ranks to a multiple of {size}"
                )
        return None

    def shape_problem(self, text: Mapping[str, Any]) -> str | None:
        """Return why a model with these values of its config.json cannot be cut as these settings ask."""
        ranks, heads = self.context_parallel, text.get("num_attention_heads")
        if isinstance(heads, int) and heads % ranks:
            return (
                f"trainer.context_parallel is {ranks}, which does not divide the model's num_attention_heads = "
                f"{heads}: set it to a divisor of {heads}"
            )
        experts = expert_count(text)
        if self.expert_parallel > 1 and (experts == 0 or experts % self.expert_parallel):
            return (
                f"trainer.expert_parallel is {self.expert_parallel}, but the model has {experts} experts a layer: set "
                f"it to {'a divisor of that' if experts else '1'}"
            )
        kinds = {kind for kind in text.get("layer_types") or () if not is_softmax_attention(kind)}
        if ranks > 1 and kinds:
            return (
                f"trainer.context_parallel is {ranks}, but the model has {', '.join(sorted(kinds))} layers, whose "
                "state runs along whole rows: set it to 1"
            )
        return None

    @model_validator(mode="after")
    def _lora_with_adamw(self) -> TrainerConfig:
        if self.lora is not None and self.optim.type.name == "muon":
            raise ValueError(
                "trainer.lora is set and trainer.optim.type is 'muon', which cannot update low-rank factors; "
                "use trainer.optim.type = 'adamw' or remove trainer.lora"
            )
        return self
