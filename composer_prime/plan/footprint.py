"""Estimates before a run starts: parameters, memory of each process, disk.

They read config.json and safetensors headers only, and are right within about a third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_prime.config import Config
from composer_prime.config.channels import AVERAGES, weight_sets
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.trainer import CHUNK_LOGITS, expert_count
from composer_prime.console import GIB
from composer_prime.errors import ModelNotFoundError
from composer_prime.model_source import described_model, tensor_shapes, text_settings, weight_files

_RUNTIME_BYTES = {"rank": int(0.55 * GIB), "node": int(0.55 * GIB), "orchestrator": int(0.15 * GIB)}
"""Of a process with its libraries loaded, before any tensor."""
_WORKER_BYTES = int(0.25 * GIB)
_CUDA_CONTEXT_BYTES = int(0.6 * GIB)
CHECKPOINT_BYTES_PER_S = 5e8
"""What a plain disk, or one on the network, takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    parameters: int
    """Tied embeddings count once."""
    hidden: int
    layers: int
    kv_width: int
    """Cached values of one token, layer and side."""
    mlp_width: int
    """Of a token: with experts, of those that it visits together."""
    vocabulary: int
    experts: int = 0
    """Parameters of all experts."""

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Return the shape of the model in `folder`. Raises ModelNotFoundError."""
        try:
            shape = cls.of(text_settings(folder))
        except KeyError as error:
            raise ModelNotFoundError(f"{folder}/config.json names no {error}: is it a decoder's?") from None
        files = weight_files(folder)
        if not files or not all(file.is_file() for file in files):
            return shape
        return replace(shape, parameters=sum(math.prod(sizes) for sizes in tensor_shapes(folder).values()))

    @classmethod
    def of(cls, text: dict[str, Any]) -> ModelShape:
        """Return the shape of a decoder (Llama- and Qwen-like blocks) by its config.json."""
        hidden, layers, vocabulary = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
        heads = text["num_attention_heads"]
        head = text.get("head_dim") or hidden // heads
        kv_width = text.get("num_key_value_heads", heads) * head
        mlp = text.get("intermediate_size") or 4 * hidden
        own, count = text.get("moe_intermediate_size") or mlp, expert_count(text)
        experts = layers * count * 3 * hidden * own
        attention = 2 * hidden * heads * head + 2 * hidden * kv_width
        norms = 2 * hidden + (2 * head if text.get("model_type", "").startswith("qwen3") else 0)
        embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
        return cls(
            parameters=layers * (attention + norms) + (experts or layers * 3 * hidden * mlp) + embeddings + hidden,
            hidden=hidden,
            layers=layers,
            kv_width=kv_width,
            mlp_width=own * (text.get("num_experts_per_tok") or 1) if count else mlp,
            vocabulary=vocabulary,
            experts=experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one process, by purpose."""

    role: str
    host_bytes: int
    device_bytes: int
    """On its GPU, if any."""
    parts: dict[str, int]
    """Bytes by purpose, runtime included."""


def rank_need(config: Config, shape: ModelShape, *, cuda: bool) -> Need:
    """Return the memory of a rank: float32 masters, gradients, moments (sharded), activations."""
    trainer = config.trainer
    ranks, tokens = trainer.ranks // trainer.replicas, trainer.micro_batch_tokens // trainer.context_parallel
    half = trainer.compute_dtype == "bfloat16" or (trainer.compute_dtype == "auto" and cuda)
    width = 2 if half else 4
    trained = trained_parameters(config, shape)
    per_hidden = 1.5 if trainer.activation_checkpointing else 14 + 3 * shape.mlp_width / shape.hidden
    output_layer = 4 * shape.vocabulary * shape.hidden
    # A chunk of logits and its copy; SDPO's teacher adds as much, and its output layer.
    chunk = min(tokens * shape.vocabulary, CHUNK_LOGITS["cuda" if cuda else "cpu"])
    logits = chunk * 4 * (4 if config.channels.sdpo.weight > 0 else 2)
    weights = weight_sets(config.channels)
    # In float32. Adapters keep their base anyway.
    others = weights.needed - ({"frozen"} if trainer.lora is not None else set())
    parts = {
        "masters": 4 * shape.parameters // ranks,
        "gradients": 4 * trained // ranks,
        "moments": (8 if trainer.optim.type.name == "adamw" else 5) * trained // ranks,
        "activations": int(per_hidden * tokens * shape.hidden * shape.layers * width),
        "logits": logits + (output_layer if weights.teacher is not None else 0),
        "output layer's gradient": output_layer if trainer.lora is None else 0,
        "other weights": 4 * trained * len(others) // ranks,
    }
    if half:
        gathered = shape.parameters - shape.experts + shape.experts // trainer.expert_parallel
        parts["gathered blocks"] = 2 * width * gathered // max(shape.layers, 1)
    snapshot = shape.parameters * width
    on_host = {"moments": parts["moments"], "activations": tokens * shape.hidden * shape.layers * width}
    offloaded = {name: on_host[name] for name in trainer.offload if cuda}
    parts |= {name: parts[name] - size for name, size in offloaded.items()}
    parts = {**parts, "runtime": _CUDA_CONTEXT_BYTES if cuda else _RUNTIME_BYTES["rank"] + 2 * snapshot}
    total = sum(parts.values())
    host = _RUNTIME_BYTES["rank"] + 2 * snapshot + sum(offloaded.values()) if cuda else total
    return Need(role="trainer rank", host_bytes=host, device_bytes=total if cuda else 0, parts=parts)


def node_need(config: Config, shape: ModelShape, *, cuda: bool, device_bytes: int | None = None) -> Need:
    """Return the memory of a node: weights (twice during a swap) and a full KV cache.

    vLLM takes its share of `device_bytes`, whatever the model.
    """
    inference = config.inference
    vllm = inference.engine.name == "vllm"
    weights = shape.parameters * _node_width(inference, cuda=cuda)
    per_token = 2 * shape.layers * shape.kv_width * _node_width(inference, cuda=cuda)
    cache = per_token * inference.local.max_batch * config.model.max_context
    if vllm and cuda and device_bytes:
        parts = {"share of a GPU": int(inference.vllm.gpu_memory_utilization * device_bytes)}
    else:
        parts = {
            "weights": weights,
            "swap": 0 if vllm and cuda else weights,
            "KV cache": GIB if vllm else min(cache, int(inference.local.kv_cache_gib * GIB)),
            "logits": 12 * shape.vocabulary * inference.local.max_batch,
            "runtime": _CUDA_CONTEXT_BYTES if cuda else _RUNTIME_BYTES["node"] + (GIB if vllm else 0),
        }
    total = sum(parts.values())
    host = _RUNTIME_BYTES["node"] + weights if cuda else total
    return Need(role="inference node", host_bytes=host, device_bytes=total if cuda else 0, parts=parts)


def _node_width(inference: InferenceConfig, *, cuda: bool) -> int:
    return 2 if inference.dtype == "bfloat16" or (inference.dtype == "auto" and cuda) else 4


def orchestrator_need(config: Config) -> Need:
    workers = sum(source.workers for source in config.orchestrator.source)
    parts = {"workers": workers * _WORKER_BYTES, "runtime": _RUNTIME_BYTES["orchestrator"]}
    return Need(role="orchestrator", host_bytes=sum(parts.values()), device_bytes=0, parts=parts)


def disk_bytes(config: Config, shape: ModelShape, *, cuda: bool) -> dict[str, int]:
    """Return the peak disk space by purpose: a checkpoint and a version more than are kept.

    Of versions, as many older ones while nodes pull them, and an anchor.
    """
    if config.run.max_steps == 0:
        return {"weight store": 0, "checkpoints": 0, "final": 0}
    width = 2 if cuda else 4
    with_deltas = int(config.trainer.lora is None)
    return {
        "weight store": (2 * config.trainer.weights.keep + 1 + with_deltas) * shape.parameters * width,
        "checkpoints": (config.trainer.checkpoint.keep + 1) * checkpoint_bytes(config, shape),
        "final": shape.parameters * width,
    }


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Return the size of a checkpoint: float32 masters, moments and averages."""
    moments = 8 if config.trainer.optim.type.name == "adamw" else 5
    averages = 4 * len(weight_sets(config.channels).needed & {*AVERAGES})
    return (4 + moments + averages) * trained_parameters(config, shape)


def stop_timeout_s(config: Config) -> float:
    """Return the time limit of a stop, by the setting or the model's size."""
    setting, folder = config.trainer.checkpoint.stop_timeout_s, described_model(config.model.path)
    if setting is not None or folder is None:
        return 60.0 if setting is None else setting
    return 60.0 + checkpoint_bytes(config, ModelShape.read(folder)) / CHECKPOINT_BYTES_PER_S


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """Return the number of trained parameters, of the model or its adapters."""
    lora = config.trainer.lora
    if lora is None:
        return shape.parameters
    widths = 4 * shape.hidden
    widths += 2 * (shape.hidden + shape.kv_width) + 3 * (shape.hidden + shape.mlp_width)
    return shape.layers * lora.rank * widths
