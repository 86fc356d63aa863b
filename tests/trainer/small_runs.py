"""Samples, configurations and run directories that the trainer's tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_process import RankProcess, start_ranks

from composer_prime.channels.policy import PolicyConfig, PolicyTerm
from composer_prime.channels.replay_dpo import ReplayDpoConfig
from composer_prime.channels.sdpo import SdpoConfig
from composer_prime.channels.sft import SftConfig
from composer_prime.config import Config, load
from composer_prime.packing.pack import pack
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.wire.types import MicroBatch, Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from tests.configs_made import config_of
from trainer.data import PackedRow, checked_row, unpack

VOCABULARY = 96

torch.set_num_threads(1)


def make_samples(step: int, count: int = 12, *, version: int | None = None, temperature: float = 1.0) -> list[Sample]:
    """Reproducible samples of step `step`: prompts and completions of random ids, every fourth with two turns."""
    rng = np.random.default_rng(step)
    return [_sample(rng, step, index, step - 1 if version is None else version, temperature) for index in range(count)]


def _sample(rng: np.random.Generator, step: int, index: int, version: int, temperature: float) -> Sample:
    prompt, reply = int(rng.integers(3, 12)), int(rng.integers(2, 20))
    mask = [0] * prompt + [1] * reply
    if index % 4 == 3:
        mask += [0] * 3 + [1] * 4
    length = len(mask)
    return Sample(
        sample_id=f"s{step}-{index}/0",
        group_id=f"g{step}-{index // 4}",
        source="test",
        task_id="task",
        input_ids=pack_ints(rng.integers(0, VOCABULARY, length)),
        loss_mask=pack_flags(mask),
        logprobs=pack_floats((np.log(1 / VOCABULARY) + rng.normal(0, 0.3, length)) * mask),
        advantages=pack_floats(np.full(length, rng.normal()) * mask),
        reward=0.5,
        temperature=temperature,
        version_spans=[VersionSpan(prompt, prompt + reply, version)],
        turns=[],
    )


def rows_of(samples, device: torch.device, budget: int = 4096, pairs=(), **options) -> list[PackedRow]:
    """All rows of `samples` (and preference pairs) on one rank; `options` as for `row_of`."""
    (batches,) = pack(samples, pairs, run_id="r", step=1, world_size=1, max_tokens=budget)
    return [row_of(batch, device, **options) for batch in batches]


def row_of(
    batch: MicroBatch, device: torch.device, vocabulary: int = VOCABULARY, *, distil: bool = False,
    prefer: bool = False, imitate: bool = False, **options,
) -> PackedRow:  # fmt: skip
    """`batch` for the policy loss, and SDPO, replay-DPO or SFT; other options as for `unpack`."""
    others = {SdpoConfig: distil, ReplayDpoConfig: prefer, SftConfig: imitate}
    policy = PolicyTerm(PolicyConfig(), 64)
    terms = [policy, *(make().term(policy) for make, is_on in others.items() if is_on)]
    return unpack(checked_row(batch, vocabulary), terms, device, **options)


def make_config(folder: Path, output: Path, **sections: dict[str, Any]) -> Config:
    """A small configuration; `sections` override whole keys, for example trainer={"ranks": 2}."""
    values: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(output), "max_steps": 3},
        "model": {"path": str(folder), "max_context": 64},
        "orchestrator": {"sampling": {"max_tokens": 32}, "hints": {}},
        "trainer": {"device": "cpu", "micro_batch_tokens": 128, "optim": {"lr": 1e-3}},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    if values.get("channels", {}).get("replay_dpo", {}).get("weight"):
        values["orchestrator"]["preferences"] = {"pairs_per_step": 1}
    return config_of(**values)


@dataclass(frozen=True, slots=True)
class Run:
    """A prepared run directory whose trainer ranks can be started."""

    dir: RunDir
    config: Config

    def write(self, config: Config) -> Run:
        write_atomic(self.dir.config, load.dump(config).encode())
        return Run(self.dir, config)

    def start(self, ranks: int = 1, file_limit_bytes: int | None = None) -> list[RankProcess]:
        return start_ranks([self.dir.root] * ranks, file_limit_bytes)

    def train(
        self, ranks: int = 1, timeout_s: float = 120, file_limit_bytes: int | None = None
    ) -> tuple[list[int], list[str]]:
        """Exit codes and outputs of all ranks."""
        started = self.start(ranks, file_limit_bytes)
        return [rank.wait(timeout_s) for rank in started], [rank.output for rank in started]
