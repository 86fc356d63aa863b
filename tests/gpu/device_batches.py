"""Made-up batches for the checks on a device; as a program, one rank of a step: python device_batches.py DEVICE DIR."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from composer_prime.config import Config
from composer_prime.config.channels import ChannelsConfig
from composer_prime.model_source import resolve_model
from composer_prime.packing.pack import pack, totals
from composer_prime.run.process import end_with_parent
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data import PackedRow, checked_row, unpack
from trainer.model.build import build_policy
from trainer.model.policy_model import Policy
from trainer.optim import build_optimizer
from trainer.train import train_step

GROUP = 4
"""Sibling samples of a made-up batch."""


class Lengths(NamedTuple):
    """Tokens of a made-up batch: `GROUP` samples of each of two groups."""

    prompt: int
    reply: int


def make_config(folder: Path, model: Path, *, device: str, dtype: str, row_tokens: int = 4096) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "check", "output_dir": str(folder)},
            "model": {"path": str(model), "max_context": row_tokens},
            "orchestrator": {"source": [{"name": "none", "taskset": {"id": "none"}}], "sampling": {"max_tokens": 64}},
            "trainer": {"device": device, "compute_dtype": dtype, "micro_batch_tokens": row_tokens},
        }
    )


def make_samples(vocabulary: int, lengths: Lengths, groups: int = 2) -> list[Sample]:
    """Return groups of siblings that share a prompt, with random tokens and advantages."""
    rng, samples = np.random.default_rng(0), []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, lengths.prompt)
        for sibling in range(GROUP):
            ids = np.r_[prompt, rng.integers(0, vocabulary, lengths.reply)]
            sample = Sample(
                sample_id=f"{group}-{sibling}/0",
                group_id=str(group),
                source="check",
                task_id=str(group),
                input_ids=pack_ints(ids),
                loss_mask=pack_flags([0] * lengths.prompt + [1] * lengths.reply),
                logprobs=pack_floats(np.full(len(ids), -np.log(vocabulary))),
                advantages=pack_floats(rng.normal(0, 1, 1).repeat(len(ids))),
                reward=0.0,
                temperature=1.0,
                version_spans=[VersionSpan(lengths.prompt, len(ids), 0)],
                turns=[],
            )
            samples.append(sample)
    return samples


def rows_for(
    samples: list[Sample], policy: Policy, world: worlds.World, *, share: bool, tokens: int
) -> list[PackedRow]:
    """Return this rank's rows."""
    ranks = pack(samples, run_id="check", step=1, world_size=world.size, max_tokens=tokens)
    documents = [checked_row(batch, policy.vocabulary) for batch in ranks[world.rank]]
    return [unpack(row, ChannelsConfig().terms(64), world.device, share=share) for row in documents]


@contextmanager
def joined_world(config: Config) -> Iterator[worlds.World]:
    try:
        yield worlds.join(config.trainer)
    finally:
        worlds.leave()


def rank_step(device: str, folder: Path) -> dict[str, float]:
    """Take one step as one of the ranks that torchrun's environment describes; return its figures."""
    model, lengths = resolve_model("tiny"), Lengths(24, 40)
    config = make_config(folder, model, device=device, dtype="float32")
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        optimizer = build_optimizer(policy, config.trainer.optim)
        samples = make_samples(policy.vocabulary, lengths)
        rows = rows_for(samples, policy, world, share=False, tokens=4 * sum(lengths))
        settings = config.channels.terms(lengths.reply)
        metrics = train_step(policy, optimizer, rows, totals(samples), settings, step=1)
        squares = [p.full_tensor().double().square().sum() for p in policy.parameters() if isinstance(p, DTensor)]
        return {"grad_norm": metrics["optim/grad_norm"], "weights": torch.stack(squares).sum().sqrt().item()}


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    print(json.dumps(rank_step(sys.argv[1], Path(sys.argv[2]))), flush=True)
