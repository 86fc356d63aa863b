"""vLLM's settings for a node: environment of the child and arguments of its engine, with the reason for each."""

from __future__ import annotations

import os
import secrets

from composer_prime.config.inference import InferenceConfig

_CPU_BLOCK_TOKENS = 32
"""vLLM's default on CPU is 128: a conversation's next turn would recompute up to 127 tokens. Below 32 it slows down."""


def environment(config: InferenceConfig) -> dict[str, str]:
    """The child's environment: this process's, with vLLM kept in one process, offline and unbound from cores."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def arguments(model: str, max_context: int, config: InferenceConfig, *, on_cpu: bool) -> list[str]:
    """Command-line arguments of vLLM's engine; `extra_args` come last and so win."""
    dtype = config.dtype if config.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    eager = config.vllm.enforce_eager if config.vllm.enforce_eager is not None else on_cpu
    pairs = {
        "--model": model,
        "--dtype": dtype,
        "--max-model-len": max_context,
        "--max-num-seqs": config.vllm.max_num_seqs,
        "--tensor-parallel-size": config.vllm.tensor_parallel,
        # Logprobs of the distribution that was sampled from, as the trainer recomputes it.
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "inference.engines.vllm.worker_extension.WeightLoader",
        # For requests without a seed: two nodes must not draw the same noise.
        "--seed": secrets.randbits(31),
    }
    # Without a step in flight a swap falls exactly between two tokens.
    flags = ["--no-async-scheduling", "--disable-log-stats"]
    if on_cpu:
        pairs["--kv-cache-memory-bytes"] = config.vllm.cpu_kv_cache_gib << 30
        pairs["--block-size"] = _CPU_BLOCK_TOKENS
        # A seeded request whose prompt is prefilled in parts stops the whole engine on CPU (its generator has no
        # offset to rewind), so prompts are prefilled whole.
        pairs["--max-num-batched-tokens"] = max(max_context, config.vllm.max_num_seqs, 2048)
        flags.append("--no-enable-chunked-prefill")
    else:
        pairs["--gpu-memory-utilization"] = config.vllm.gpu_memory_utilization
    flags.append("--enforce-eager" if eager else "--no-enforce-eager")
    return [str(part) for pair in pairs.items() for part in pair] + flags + config.vllm.extra_args
