"""The checks of `composer doctor --gpu`: `python -m composer_prime.cli.device_checks NAME DEVICE SIZE DIR` runs one.

Each check computes on DEVICE (cuda or cpu) at SIZE (full or small), may write into DIR, and returns a `Finding`, whose
figures are for people. It is compared with the same work on the CPU in float32, where there is such work. The last line
on stdout is the finding as JSON. doctor_gpu.py starts the checks.
"""

from __future__ import annotations

import asyncio
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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from composer_prime.cli.doctor_gpu import Finding
from composer_prime.config import Config
from composer_prime.config.inference import InferenceConfig
from composer_prime.console import gib
from composer_prime.model_source import resolve_model
from composer_prime.packing.pack import pack, totals
from composer_prime.plan.footprint import ModelShape, rank_need
from composer_prime.run.process import end_with_parent
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data.rows import PackedRow, documents_of, unpack
from trainer.model.build import build_policy
from trainer.model.policy import Policy
from trainer.optim import build_optimizer
from trainer.step import LossSettings, loss_of, train_step

GROUP = 4
"""Sibling samples of a made-up batch."""


class Task(NamedTuple):
    """Where and how large a check computes."""

    device: str
    small: bool
    folder: Path


class Lengths(NamedTuple):
    """Tokens of a made-up batch: `GROUP` samples of each of two groups."""

    prompt: int
    reply: int


def make_config(task: Task, model: Path, *, device: str, dtype: str, row_tokens: int = 4096) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "check", "output_dir": str(task.folder)},
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
            mask = [0] * lengths.prompt + [1] * lengths.reply
            samples.append(
                Sample(
                    sample_id=f"{group}-{sibling}/0", group_id=str(group), source="check", task_id=str(group),
                    input_ids=pack_ints(ids), loss_mask=pack_flags(mask),
                    logprobs=pack_floats(np.full(len(ids), -np.log(vocabulary))),
                    advantages=pack_floats(rng.normal(0, 1, 1).repeat(len(ids))), reward=0.0, temperature=1.0,
                    version_spans=[VersionSpan(lengths.prompt, len(ids), 0)], turns=[],
                )
            )  # fmt: skip
    return samples


def rows_for(
    samples: list[Sample], policy: Policy, world: worlds.World, *, share: bool, tokens: int
) -> list[PackedRow]:
    """Return this rank's rows."""
    ranks = pack(samples, run_id="check", step=1, world_size=world.size, max_tokens=tokens)
    found = [documents_of(batch, policy.vocabulary) for batch in ranks[world.rank]]
    return [unpack(documents, world.device, share=share) for documents in found]


@contextmanager
def joined_world(config: Config) -> Iterator[worlds.World]:
    try:
        yield worlds.join(config.trainer)
    finally:
        worlds.leave()


def gradient_of(task: Task, *, device: str, dtype: str, lengths: Lengths) -> tuple[float, torch.Tensor]:
    """Return loss and gradient, all parameters in one float64 vector on the CPU, of the tiny model."""
    config = make_config(task, resolve_model("tiny"), device=device, dtype=dtype)
    # With tis the ratio is 1 in value, so that rounding moves gradients and no clip.
    config.channels.policy.correction = "tis"
    with joined_world(config) as world:
        policy = build_policy(config, resolve_model("tiny"), world)
        samples = make_samples(policy.vocabulary, lengths)
        loss = 0.0
        for row in rows_for(samples, policy, world, share=False, tokens=4096):
            settings = LossSettings(channels=config.channels, max_length=lengths.reply)
            parts, _ = loss_of(policy, row, totals(samples), settings)
            parts.total.backward()
            loss += parts.total.item()
        gradients = [p.grad.full_tensor() for p in policy.parameters() if isinstance(p.grad, DTensor)]
        return loss, torch.cat([gradient.double().cpu().flatten() for gradient in gradients])


def check_step(task: Task) -> Finding:
    """One step's loss and gradient in bfloat16 on the device, against float32 on the CPU."""
    lengths = Lengths(24, 40)
    loss, gradient = gradient_of(task, device=task.device, dtype="bfloat16", lengths=lengths)
    exact_loss, exact = gradient_of(task, device="cpu", dtype="float32", lengths=lengths)
    cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0).item()
    norms = gradient.norm().item(), exact.norm().item()
    same = cosine > 0.99 and abs(norms[0] / norms[1] - 1) < 0.05
    text = (
        f"gradients point alike to {cosine:.4f} (cosine), norms {norms[0]:.4g} and {norms[1]:.4g}, losses {loss:.4g} "
        f"and {exact_loss:.4g} (bfloat16 on {task.device}, float32 on the CPU)"
    )
    return Finding("ok" if same else "bad", text)


def check_fsdp2(task: Task) -> Finding:
    """FSDP2 over two ranks where there are two devices, against one: gradient norm and the weights after a step."""
    ranks = 2 if task.device == "cpu" else min(2, torch.cuda.device_count())
    one, many = _spawn_ranks(task, 1), _spawn_ranks(task, ranks)
    apart = max(abs(many[key] / one[key] - 1) for key in ("grad_norm", "weights"))
    backend = "gloo" if task.device == "cpu" else "NCCL"
    text = f"{ranks} ranks over {backend}: gradient norm {many['grad_norm']:.6g}, 1 rank {one['grad_norm']:.6g}"
    if ranks == 1:
        text = f"1 rank over {backend}: gradient norm {one['grad_norm']:.6g}; one GPU, so nothing went between two"
    return Finding("ok" if apart < 1e-3 else "bad", f"{text}; step {many['step_s']:.2f} s")


def _spawn_ranks(task: Task, count: int) -> dict[str, float]:
    words = [sys.executable, "-m", "composer_prime.cli.device_checks", "rank", task.device]
    words += ["small" if task.small else "full", str(task.folder)]
    return json.loads(run_ranks(words, count, task.folder).strip().splitlines()[-1])


def run_ranks(words: list[str], count: int, folder: Path) -> str:
    """Return what rank 0 of `count` equal processes prints, once all have ended.

    One that fails ends the others, which would wait for it. Raises RuntimeError with its last message.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    printed, said = ([folder / f"rank-{rank}.{kind}" for rank in range(count)] for kind in ("out", "err"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            variables = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with printed[rank].open("wb") as output, said[rank].open("wb") as errors:
                processes.append(subprocess.Popen(words, env=variables, stdout=output, stderr=errors))
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, status in enumerate(statuses) if status]
    last_lines = [
        (said[rank].read_text(errors="replace").strip().splitlines() or ["no message"])[-1] for rank in failed
    ]
    if failed:
        ends = zip(failed, last_lines, strict=True)
        raise RuntimeError("; ".join(f"rank {rank} ended with status {statuses[rank]}: {line}" for rank, line in ends))
    return printed[0].read_text()


def rank_step(task: Task) -> dict[str, float]:
    """Take one step as one of the ranks that torchrun's environment describes; return its figures."""
    model, lengths = resolve_model("tiny"), Lengths(24, 40)
    config = make_config(task, model, device=task.device, dtype="float32")
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        optimizer = build_optimizer(policy, config.trainer.optim)
        samples = make_samples(policy.vocabulary, lengths)
        rows = rows_for(samples, policy, world, share=False, tokens=4 * sum(lengths))
        settings = LossSettings(channels=config.channels, max_length=lengths.reply)
        began = time.monotonic()
        metrics = train_step(policy, optimizer, rows, totals(samples), settings, step=1, ratio=1.0)
        took = time.monotonic() - began
        squares = [p.full_tensor().double().square().sum() for p in policy.parameters() if isinstance(p, DTensor)]
        weights = torch.stack(squares).sum().sqrt().item()
    return {"grad_norm": metrics["optim/grad_norm"], "weights": weights, "step_s": took}


def check_attention(task: Task) -> Finding:
    """Rows with and without shared prefixes: equal log-probabilities, and the time of a forward and backward pass."""
    model = resolve_model("tiny")
    lengths = Lengths(48, 16) if task.small else Lengths(2048, 256)
    tokens = 2 * GROUP * sum(lengths)
    config = make_config(task, model, device=task.device, dtype="float32", row_tokens=tokens)
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        samples = make_samples(policy.vocabulary, lengths)
        settings = LossSettings(channels=config.channels, max_length=lengths.reply)
        logprobs, seconds = [], []
        for share in (False, True):
            (row,) = rows_for(samples, policy, world, share=share, tokens=tokens)
            logprobs.append(policy(row).logprobs_R.detach().float().cpu())

            def both_ways(row: PackedRow = row) -> None:
                parts, _ = loss_of(policy, row, totals(samples), settings)
                parts.total.backward()

            seconds.append(timed(both_ways, task.device))
    apart = (logprobs[0] - logprobs[1]).abs().max().item()
    text = (
        f"{policy.attention}: at most {apart:.1e} nats apart; {2 * GROUP} documents of {lengths.prompt} + "
        f"{lengths.reply} tokens take {seconds[1] * 1e3:.1f} ms shared, {seconds[0] * 1e3:.1f} ms apart"
    )
    return Finding("ok" if apart < 1e-2 else "bad", text)


def timed(work: Callable[[], object], device: str) -> float:
    """Return the median seconds of three calls, after one that warms up."""
    seconds = []
    for _ in range(4):
        synchronize(device)
        began = time.monotonic()
        work()
        synchronize(device)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check_head(task: Task) -> Finding:
    """The head's element-wise passes on the device against float64, and the choice that `auto` makes by its clock."""
    from trainer.head.fused import Head, token_statistics
    from trainer.head.kernels import LogitKernels, TorchLogitKernels, choose_kernels

    rows, vocabulary, width = (32, 512, 64) if task.small else (2048, 151_936, 1024)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=draw) / width**0.5
    hidden, targets = torch.randn(rows, width, generator=draw), torch.randint(0, vocabulary, (rows,), generator=draw)
    exact_hidden = hidden[:32].double().requires_grad_()
    exact = (exact_hidden @ weight.double().T).log_softmax(-1).gather(1, targets[:32, None]).squeeze(1)
    exact.sum().backward()
    kinds: dict[str, LogitKernels] = {"torch": TorchLogitKernels()}
    if task.device == "cuda":
        from trainer.head.triton_kernels import TritonLogitKernels

        kinds["triton"] = TritonLogitKernels()
    errors, ms = {}, {}
    for name, kernels in kinds.items():
        on_device = hidden.to(task.device).requires_grad_()
        head, wanted = Head(weight_VH=weight.to(task.device)), targets.to(task.device)

        def both_passes(on_device: Any = on_device, head: Any = head, wanted: Any = wanted, kernels: Any = kernels):
            on_device.grad = None
            values = token_statistics(head, on_device, wanted, kernels=kernels).logprobs_R
            values.sum().backward()
            return values

        values = both_passes().detach()[:32].cpu().double()
        assert on_device.grad is not None and exact_hidden.grad is not None
        gradients = (on_device.grad[:32].cpu().double() - exact_hidden.grad).abs().max().item()
        errors[name] = max((values - exact.detach()).abs().max().item(), gradients)
        ms[name] = timed(both_passes, task.device) * 1e3
    figures = ", ".join(f"{name} {ms[name]:.1f} ms with errors up to {errors[name]:.1e}" for name in kinds)
    chosen = choose_kernels("auto", torch.empty(1, width, device=task.device), vocabulary).name
    text = f"{rows} tokens x {vocabulary} logits: {figures}; `auto` takes {chosen}"
    if "triton" not in kinds:
        text += "; Triton needs CUDA and was not run"
    # Close calls may go either way; a rule that takes one twice as slow is broken.
    return Finding("ok" if max(errors.values()) < 1e-2 and ms[chosen] < 2 * min(ms.values()) else "bad", text)


def check_engine(task: Task) -> Finding:
    """The local engine samples, swaps its weights in mid-answer, and scores as transformers does on the CPU."""
    return asyncio.run(_run_engine(task))


async def _run_engine(task: Task) -> Finding:
    from transformers import AutoModelForCausalLM

    from inference.engines.base import build_engine

    model, count, new_tokens = resolve_model("tiny"), 4 if task.small else 32, 24 if task.small else 128
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    tied = bool(reference.config.tie_word_embeddings)
    start = {name: value for name, value in reference.state_dict().items() if not (tied and name == "lm_head.weight")}
    changed = {name: value + 0.02 * torch.randn(value.shape, generator=draw) for name, value in start.items()}
    prompts = [torch.randint(0, 500, (16,), generator=draw).tolist() for _ in range(count)]
    engine = build_engine(InferenceConfig(engine="local", device=task.device), model, 256)  # pyright: ignore
    await engine.start()
    began = time.monotonic()
    sampling = Sampling(max_tokens=new_tokens, seed=1, ignore_eos=True)
    requests = [asyncio.ensure_future(engine.generate(str(i), ids, sampling, str(i))) for i, ids in enumerate(prompts)]
    while engine.stats().running == 0 and not all(request.done() for request in requests):
        await asyncio.sleep(0)
    await engine.load_weights(1, changed)
    answers = await asyncio.gather(*requests)
    rate = sum(len(answer.token_ids) for answer in answers) / (time.monotonic() - began)
    scored = torch.tensor(await engine.score(prompts[0]))
    await engine.close()
    before = _reference_scores(reference, prompts[0])
    reference.load_state_dict(changed, strict=False)
    exact = _reference_scores(reference, prompts[0])
    apart, moved = (scored - exact).abs().max().item(), (before - exact).abs().max().item()
    crossed = sum(len(answer.version_spans) > 1 for answer in answers)
    whole = all(len(answer.token_ids) == new_tokens for answer in answers)
    allowed = InferenceConfig(device=task.device).canary_limit(on_cuda=task.device == "cuda")  # pyright: ignore
    text = (
        f"{rate:.0f} tokens/s over {count} requests; {crossed} answers went over the swap; scores after it at most "
        f"{apart:.1e} nats from transformers in float32 (allowed {allowed:g}; the swap moved them by {moved:.2g})"
    )
    near = apart < min(allowed, moved / 2)
    return Finding("ok" if whole and crossed and engine.version == 1 and near else "bad", text)


@torch.no_grad()
def _reference_scores(model: Any, token_ids: list[int]) -> torch.Tensor:
    logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)


def check_memory(task: Task) -> Finding:
    """The peak of a step against the plan's estimate, for a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

    from trainer.train import peak_bytes

    model, row_tokens = resolve_model("tiny"), 512
    if not task.small:  # the sizes of Qwen3-0.6B
        model, row_tokens = task.folder / "model", 4096
        settings = Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40_960,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(model)
    assert AutoConfig.from_pretrained(model)
    cuda = task.device == "cuda"
    config = make_config(task, model, device=task.device, dtype="auto", row_tokens=row_tokens)
    need = rank_need(config, ModelShape.read(model), cuda=cuda)
    lengths = Lengths(row_tokens // 4, row_tokens // 4)
    with joined_world(config) as world:
        policy = build_policy(config, model, world)
        optimizer = build_optimizer(policy, config.trainer.optim)
        samples = make_samples(policy.vocabulary, lengths, groups=1)
        settings = LossSettings(channels=config.channels, max_length=lengths.reply)
        rows = rows_for(samples, policy, world, share=False, tokens=row_tokens)
        train_step(policy, optimizer, rows, totals(samples), settings, step=1, ratio=1.0)
        measured = peak_bytes(world.device)
    estimated = need.device_bytes - need.parts["runtime"] if cuda else need.host_bytes
    ratio = measured / estimated
    text = f"a rank's step took {gib(measured)}, the plan says {gib(estimated)}: {ratio:.2f} times"
    return Finding("ok" if 1 / 2 < ratio < 3 / 2 else "bad", text)


def check_a1(task: Task) -> Finding:
    """Ten steps of configs/a1.toml with everything on the device."""
    return _run_trainer(task, "local", 2 if task.small else 10)


def check_vllm(task: Task) -> Finding:
    """Three steps of configs/a1.toml with vLLM as the engine, swaps and canaries included."""
    return _run_trainer(task, "vllm", 1 if task.small else 3)


def _run_trainer(task: Task, engine: str, steps: int) -> Finding:
    file = Path(__file__).parents[2] / "configs" / "a1.toml"
    if not file.is_file():
        return Finding("skip", f"there is no {file}: run this from a checkout of the repository")
    words = ["--run.name", engine, "--run.output_dir", str(task.folder), "--run.max_steps", str(steps)]
    words += ["--inference.engine", engine, "--inference.device", task.device, "--trainer.device", task.device]
    words += ["--orchestrator.eval.every_steps", "0", "--monitor.view", "plain"]
    words += ["--inference.vllm.gpu_memory_utilization", "0.3"]
    if task.small:
        words += ["--orchestrator.groups_per_step", "2", "--orchestrator.group_size", "4"]
    command = [sys.executable, "-m", "trainer.main", "@", str(file), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        return Finding("bad", f"ended with status {done.returncode}: {done.stdout.strip()[-600:]}")
    lines = [json.loads(line) for line in (task.folder / engine / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "optim/grad_norm" in line]
    mismatch = max(line["policy/mismatch_kl"] for line in trained)
    seconds = statistics.median(line["time/step_s"] for line in trained)
    rewards = [line["reward/mean"] for line in trained if "reward/mean" in line]
    text = (
        f"{len(trained)} steps, median {seconds:.1f} s; sampler and trainer at most {mismatch:.1e} nats a token apart "
        f"(k3); gradient norms {min(line['optim/grad_norm'] for line in trained):.2g} to "
        f"{max(line['optim/grad_norm'] for line in trained):.2g}"
    )
    text += f"; mean reward {rewards[0]:.2f} first, {rewards[-1]:.2f} last" if rewards else ""
    return Finding("ok" if len(trained) == steps and mismatch < 0.05 else "bad", text)


CHECKS: dict[str, Callable[[Task], Finding]] = {
    "step": check_step,
    "fsdp2": check_fsdp2,
    "attention": check_attention,
    "head": check_head,
    "engine": check_engine,
    "memory": check_memory,
    "a1": check_a1,
    "vllm": check_vllm,
}


def main(words: list[str]) -> int:
    end_with_parent(signal.SIGKILL)
    name, device, size, folder = words
    torch.set_num_threads(1 if size == "small" else min(8, os.cpu_count() or 1))
    task = Task(device=device, small=size == "small", folder=Path(folder))
    if name == "rank":
        print(json.dumps(rank_step(task)), flush=True)
        return 0
    finding = CHECKS[name](task)
    print(json.dumps(finding._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
