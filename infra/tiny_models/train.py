"""Supervised learning of the tiny models on demonstrations."""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infra.tiny_models.demonstrate import Demonstration
from infra.tiny_models.tokenizer import CONTEXT_LENGTH

DrawDemonstration = Callable[[random.Random], Demonstration]
"""Makes the next conversation to imitate."""
_BUCKET_BATCHES = 8
_VOCABULARY_MULTIPLE = 64
_LENGTH_MULTIPLE = 32
"""Keeps shapes few: the CPU's bfloat16 kernels are compiled, and stay in memory, for each one."""
_LOG_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Length and speed of a training."""

    steps: int
    batch: int = 16
    """Conversations per step."""
    learning_rate: float = 5e-3
    prompt_weight: float = 0.0
    """Loss weight of tokens that the model does not write (1 for those it does)."""


def new_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden_size: int = 192, intermediate_size: int = 512,
    head_dim: int = 64,
) -> Qwen3ForCausalLM:  # fmt: skip
    """Return a new model, float32. The default size has about two million parameters."""
    torch.manual_seed(seed)
    size = math.ceil(len(tokenizer) / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.get_vocab()["<|endoftext|>"],
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, draw: DrawDemonstration, schedule: Schedule, *, seed: int, label: str) -> None:
    """Train in place on fresh demonstrations, with a linear warm-up and a cosine decay to a tenth."""
    model.train()
    model.set_attn_implementation("eager")  # at these lengths, in bfloat16, twice as fast on a CPU as the fused kernel
    optimizers = _optimizers(model, schedule.learning_rate)
    schedulers = [LambdaLR(optimizer, lambda step: _rate(step, schedule.steps)) for optimizer in optimizers]
    batches = _batches(draw, schedule, seed)
    started, average = time.monotonic(), None
    for step in range(1, schedule.steps + 1):
        ids, weights = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        loss = _loss(logits, ids[:, 1:], weights[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedulers):
            part.step()
        model.zero_grad()
        average = loss.item() if average is None else average + (loss.item() - average) / 50
        if step % _LOG_EVERY == 0 or step == schedule.steps:
            print(f"{label}: step {step} loss {average:.4f} {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def _optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices (it needs a fifth of AdamW's steps here) and AdamW for embeddings and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=0.4 * learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def _loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross-entropy of logits [B, T, V] for ids and weights [B, T]."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _rate(step: int, steps: int) -> float:
    warm_up = min(100, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(steps - warm_up, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _batches(draw: DrawDemonstration, schedule: Schedule, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches (ids [B, T], weights [B, T]) of conversations of similar length, padded on the right."""
    rng = random.Random(f"batches/{seed}")
    while True:
        pool = [draw(rng) for _ in range(schedule.batch * _BUCKET_BATCHES)]
        pool.sort(key=lambda demonstration: len(demonstration.token_ids))
        starts = list(range(0, len(pool), schedule.batch))
        rng.shuffle(starts)
        for start in starts:
            yield _collate(pool[start : start + schedule.batch], schedule.prompt_weight)


def _collate(batch: list[Demonstration], prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(demonstration.token_ids) for demonstration in batch)
    longest = math.ceil(longest / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE + 1
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weights = torch.zeros(len(batch), longest)
    for row, demonstration in enumerate(batch):
        length = len(demonstration.token_ids)
        ids[row, :length] = torch.tensor(demonstration.token_ids)
        trained = torch.tensor(demonstration.trained, dtype=torch.float32)
        weights[row, :length] = trained + (1 - trained) * prompt_weight
    return ids, weights
