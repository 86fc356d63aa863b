"""Steps, attention, loss head and memory on a device, against the CPU in float32 or the plan."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config

from composer_prime.config import Config
from composer_prime.config.channels import ChannelsConfig
from composer_prime.model_source import resolve_model
from composer_prime.packing.pack import pack, totals
from composer_prime.plan.footprint import ModelShape, rank_need
from composer_prime.run.process import end_with_parent
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from tests.configs_made import config_of
from trainer import world as worlds
from trainer.data import PackedRow, checked_row, unpack
from trainer.head import Head, token_statistics
from trainer.model.build import build_policy
from trainer.model.policy_model import Policy
from trainer.optim import build_optimizer
from trainer.train import loss_of, peak_bytes, train_step

ROOT = Path(__file__).parents[2]
GROUP = 4
"""Sibling samples of a made-up batch."""


class Lengths(NamedTuple):
    """Tokens of a made-up batch: `GROUP` samples of each of two groups."""

    prompt: int
    reply: int


def make_config(folder: Path, model: Path, *, device: str, dtype: str, row_tokens: int = 4096) -> Config:
    return config_of(
        run={"name": "check", "output_dir": str(folder)},
        model={"path": str(model), "max_context": row_tokens},
        trainer={"device": device, "compute_dtype": dtype, "micro_batch_tokens": row_tokens},
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


def gradient_of(folder: Path, *, device: str, dtype: str, lengths: Lengths) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of the tiny model, all parameters in one float64 vector on the CPU."""
    model = resolve_model("tiny")
    config = make_config(folder, model, device=device, dtype=dtype)
    # With tis the ratio is 1 in value, so that rounding moves gradients and no clip.
    config.channels.policy.correction = "tis"
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        samples = make_samples(policy.vocabulary, lengths)
        loss = 0.0
        for row in rows_for(samples, policy, world, share=False, tokens=4096):
            settings = config.channels.terms(lengths.reply)
            parts, _ = loss_of(policy, row, totals(samples), settings)
            parts.total.backward()
            loss += parts.total.item()
        gradients = [p.grad.full_tensor() for p in policy.parameters() if isinstance(p.grad, DTensor)]
        return loss, torch.cat([gradient.double().cpu().flatten() for gradient in gradients])


def test_a_step_in_bfloat16_has_the_gradient_of_float32(place, tmp_path):
    lengths = Lengths(24, 40)
    _, gradient = gradient_of(tmp_path, device=place.device, dtype="bfloat16", lengths=lengths)
    _, exact = gradient_of(tmp_path, device="cpu", dtype="float32", lengths=lengths)
    assert torch.nn.functional.cosine_similarity(gradient, exact, dim=0).item() > 0.99
    assert gradient.norm().item() == pytest.approx(exact.norm().item(), rel=0.05)


def spawn_ranks(count: int, folder: Path) -> dict[str, float]:
    """Return what rank 0 of `count` equal processes prints, once all have ended. One that fails ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.gpu.test_device_training", "cuda", str(folder)]
    processes = []
    try:
        for rank in range(count):
            variables = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    assert statuses == [0] * count
    return json.loads(processes[0].communicate()[0].strip().splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.timeout(900)
def test_ranks_of_fsdp2_take_the_step_of_one_rank(tmp_path):
    # Gradient norm and weights after the step. With one GPU, NCCL runs in a group of one. For gloo: tests/trainer.
    ranks = min(2, torch.cuda.device_count())
    one, many = spawn_ranks(1, tmp_path), spawn_ranks(ranks, tmp_path)
    assert many == pytest.approx(one, rel=1e-3)


def timed(work: Callable[[], object], device: str) -> float:
    """Return the median seconds of three calls, after one that warms up."""
    seconds = []
    for _ in range(4):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])


def test_rows_that_share_a_prefix_have_equal_log_probabilities(place, tmp_path, record_property):
    model = resolve_model("tiny")
    lengths = Lengths(48, 16) if place.small else Lengths(2048, 256)
    tokens = 2 * GROUP * sum(lengths)
    config = make_config(tmp_path, model, device=place.device, dtype="float32", row_tokens=tokens)
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        samples = make_samples(policy.vocabulary, lengths)
        settings = config.channels.terms(lengths.reply)
        logprobs = []
        for share in (False, True):
            (row,) = rows_for(samples, policy, world, share=share, tokens=tokens)
            logprobs.append(policy(row).logprobs_R.detach().float().cpu())

            def both_passes(row=row) -> None:
                loss_of(policy, row, totals(samples), settings)[0].total.backward()

            record_property(f"{policy.attention}, share={share}, ms", timed(both_passes, place.device) * 1e3)
    assert (logprobs[0] - logprobs[1]).abs().max().item() < 1e-2


def test_the_head_equals_float64(place, record_property):
    rows, vocabulary, width = (32, 512, 64) if place.small else (2048, 151_936, 1024)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=draw) / width**0.5
    hidden, targets = torch.randn(rows, width, generator=draw), torch.randint(0, vocabulary, (rows,), generator=draw)
    exact_hidden = hidden[:32].double().requires_grad_()
    exact = (exact_hidden @ weight.double().T).log_softmax(-1).gather(1, targets[:32, None]).squeeze(1)
    exact.sum().backward()
    on_device = hidden.to(place.device).requires_grad_()
    head, wanted = Head(weight_VH=weight.to(place.device)), targets.to(place.device)

    def both_passes() -> torch.Tensor:
        on_device.grad = None
        values = token_statistics(head, on_device, wanted).logprobs_R
        values.sum().backward()
        return values

    values = both_passes().detach()[:32].cpu().double()
    assert (values - exact.detach()).abs().max().item() < 1e-2
    assert (on_device.grad[:32].cpu().double() - exact_hidden.grad).abs().max().item() < 1e-2
    record_property("ms", timed(both_passes, place.device) * 1e3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("offload", [[], ["activations", "moments"]], ids=["device", "host"])
def test_the_peak_of_a_step_is_near_the_plan(tmp_path, offload):
    # A model of the sizes of Qwen3-0.6B with random weights. On a CPU the process holds its libraries as well.
    model, row_tokens = tmp_path / "model", 4096
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40_960,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(model)
    config = make_config(tmp_path, model, device="cuda", dtype="auto", row_tokens=row_tokens)
    config.trainer.activation_checkpointing, config.trainer.offload = bool(offload), offload
    torch.cuda.reset_peak_memory_stats()
    need = rank_need(config, ModelShape.read(model), cuda=True)
    lengths = Lengths(row_tokens // 4, row_tokens // 4)
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        optimizer = build_optimizer(policy, config.trainer.optim, offloads=bool(offload))
        samples = make_samples(policy.vocabulary, lengths, groups=1)
        settings = config.channels.terms(lengths.reply)
        rows = rows_for(samples, policy, world, share=False, tokens=row_tokens)
        train_step(policy, optimizer, rows, totals(samples), settings, step=1)
        measured = peak_bytes(world.device)
        moments = {state["exp_avg"].device.type for part in optimizer.parts for state in part.state.values()}
    assert moments == ({"cpu"} if offload else {"cuda"})
    assert 1 / 2 < measured / (need.device_bytes - need.parts["runtime"]) < 3 / 2


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    print(json.dumps(rank_step(sys.argv[1], Path(sys.argv[2]))), flush=True)
