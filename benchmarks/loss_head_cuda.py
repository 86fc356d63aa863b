"""The GPU half of benchmarks/loss_head.py: memory, time and bandwidth, beside Liger-Kernel if it is installed.

Operands are bfloat16, logits and statistics float32. The ceiling is the bandwidth of a copy within the device's memory
in the same run. A pass's bandwidth counts the logits that it must at least read and write, so a pass that goes over
them several times shows a low figure.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_prime.config.trainer import CHUNK_LOGITS
from trainer.head.choice import choose_kernels
from trainer.head.fused import Head, token_statistics
from trainer.head.kernels import GradientInputs, LogitKernels, TorchLogitKernels

DEVICE = torch.device("cuda")
CHECKED = 64
COPIED = 1 << 30
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], targets [N]) -> [N] with gradient."""


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(wide, dim=-1).gather(1, targets[:, None]).squeeze(1)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)(weight, hidden, targets)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, kernels: LogitKernels) -> Tensor:
    return token_statistics(Head(weight_VH=weight), hidden, targets, kernels=kernels).logprobs_R


def implementations() -> dict[str, LogitKernels]:
    """Torch's, and Triton's where it is installed."""
    found: dict[str, LogitKernels] = {"torch": TorchLogitKernels()}
    if importlib.util.find_spec("triton") is not None:
        from trainer.head.triton_kernels import TritonLogitKernels

        found["Triton"] = TritonLogitKernels()
    return found


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median over `repeats`, after one that compiles and warms up."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


def ceiling_gb_s(repeats: int) -> float:
    """GB/s of a copy within the device, read and write together."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPIED / milliseconds(lambda: target.copy_(source), repeats) / 1e6


def bandwidths(vocabulary: int, ceiling: float, repeats: int) -> None:
    """Of each pass, over the logits of one chunk."""
    rows = max(1, CHUNK_LOGITS["cuda"] // vocabulary)
    print(f"\nelement-wise passes over {rows} x {vocabulary} float32 logits; a copy reaches {ceiling:.0f} GB/s")
    print("| passes | statistics ms | GB/s | of the copy | gradient ms | GB/s | of the copy |")
    print("|---|---|---|---|---|---|---|")
    logits = torch.randn(rows, vocabulary, device=DEVICE)
    targets, coming = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.ones(rows, device=DEVICE)
    for name, kernels in implementations().items():
        inputs = GradientInputs(
            targets_B=targets, temperature_B=None, log_sum_B=torch.full_like(coming, 20.0), entropy_B=coming,
            logprob_grad_B=coming, entropy_grad_B=None, divergence_grad_BV=None,
            scale=1.0, cap=None,
        )  # fmt: skip
        # a pass may write over its logits: what they hold changes no time, so they are not made again
        took = (
            milliseconds(partial(kernels.statistics, logits, targets, None, overwrite=True), repeats),
            milliseconds(partial(kernels.gradient, logits, inputs), repeats),
        )
        reached = [moved * logits.nbytes / ms / 1e6 for moved, ms in zip((1, 2), took, strict=True)]
        figures = [f"{ms:.3f} | {rate:.0f} | {rate / ceiling:.2f}" for ms, rate in zip(took, reached, strict=True)]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)


def measure(compute: Logprobs, rows: int, vocabulary: int, width: int, repeats: int) -> str:
    """Peak MiB above the inputs, milliseconds forward and backward, errors against float64, as cells of a table."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    new = partial(torch.randn, generator=draw, device=DEVICE)
    hidden = new(rows, width).bfloat16().requires_grad_()
    weight = (new(vocabulary, width) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=draw, device=DEVICE)
    coming = new(rows)
    values = torch.zeros(0)

    def work() -> None:
        nonlocal values
        hidden.grad = weight.grad = None
        values = compute(hidden, weight, targets)
        values.backward(coming.to(values.dtype))

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(work, repeats)
    peak = torch.cuda.max_memory_allocated() - before
    exact_hidden = hidden.detach()[:CHECKED].double().requires_grad_()
    exact = dense(exact_hidden, weight.detach().double(), targets[:CHECKED])
    exact.backward(coming[:CHECKED].double())
    error = (values.detach()[:CHECKED] - exact).abs().max().item()
    grad_error = (hidden.grad[:CHECKED] - exact_hidden.grad).abs().max().item()
    return f"{peak / 2**20:.0f} | {ms:.2f} | {error:.1e} | {grad_error:.1e}"


def table(rows: int, vocabulary: int, width: int, repeats: int) -> None:
    variants: dict[str, Logprobs] = {"dense": dense}
    variants |= {f"ours, {name}": partial(ours, kernels=kernels) for name, kernels in implementations().items()}
    if importlib.util.find_spec("liger_kernel") is not None:
        variants["Liger-Kernel fused linear cross entropy (no entropies)"] = liger
    print(f"\nlogprobs on {torch.cuda.get_device_name()}, N = {rows}, V = {vocabulary}, H = {width}, bfloat16")
    print("| variant | peak MiB | ms | error | gradient error |")
    print("|---|---|---|---|---|")
    for name, compute in variants.items():
        try:
            cells = measure(compute, rows, vocabulary, width, repeats)
        except torch.OutOfMemoryError:
            cells = "out of memory | | |"
        print(f"| {name} | {cells} |", flush=True)
    if importlib.util.find_spec("liger_kernel") is None:
        print("| Liger-Kernel | not installed | | | |")


def report(rows: list[int], vocabularies: dict[int, int], repeats: int) -> None:
    """All tables; `vocabularies` maps each to its hidden size."""
    ceiling = ceiling_gb_s(repeats)
    for vocabulary, width in vocabularies.items():
        bandwidths(vocabulary, ceiling, repeats)
        chosen = choose_kernels("auto", torch.empty(0, width, device=DEVICE, dtype=torch.bfloat16), vocabulary)
        print(f"`auto` takes {chosen.name} here")
        for count in rows:
            table(count, vocabulary, width, repeats)
