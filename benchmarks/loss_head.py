"""Compare the fused head with other ways to get log-probabilities, entropies and divergences: memory, time, error.

    python benchmarks/loss_head.py                         N = 2048 and 8192, V = 49152 and 151936
    python benchmarks/loss_head.py --rows 1024 2048 4096 8192 --vocabulary 49152      scaling in N
    python benchmarks/loss_head.py --task divergence --rows 2048

Each variant runs in a process of its own. Peak memory is the rise of its resident size above its inputs. Time is
processor time (which other work on the machine hardly changes) of the best of `--repeats` forward and backward passes.
The error is the largest difference from float64 over 64 rows, of log-probabilities (or divergences) and of hidden
states' gradients. A variant that needs more memory than is free is left out, with a note.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks._shared import peak_bytes, reset_peak

HIDDEN = {49152: 576, 151936: 1024}
"""Hidden sizes of SmolLM2-135M and Qwen3-0.6B."""
CHECKED = 64
GIB = 1 << 30
Statistics = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], targets [N], teacher hidden [N, H]) -> [N] with gradient."""


def _dense_chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs = F.log_softmax(hidden @ weight.T, dim=-1)
    with torch.no_grad():  # by few rows, as trainers do it
        for piece in logprobs.detach().split(128):
            torch.special.entr(piece.exp()).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1)


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return _dense_chunk(hidden, weight, targets)


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    pieces = zip(hidden.split(256), targets.split(256), strict=True)
    return torch.cat([checkpoint(_dense_chunk, h, weight, t, use_reentrant=False) for h, t in pieces])


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("entropy",))[0]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    from trainer.head import Head, token_statistics

    return token_statistics(Head(weight_VH=weight), hidden, targets).logprobs_R


def dense_jsd(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
    from composer_prime.channels.sdpo import divergence

    with torch.no_grad():
        other = teacher @ weight.T
    return divergence(hidden @ weight.T, other, _sdpo(), targets)


def trl_jsd(hidden: Tensor, weight: Tensor, _: Tensor, teacher: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    return ChunkedDivergenceFunction.apply(hidden, weight, None, teacher, weight.detach(), None, 0.5)[0]


def ours_jsd(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
    from composer_prime.channels.sdpo import divergence
    from trainer.head import Head, HeadTeacher, token_statistics

    measure = lambda student, other, wanted: divergence(student, other, _sdpo(), wanted)
    taught = HeadTeacher(hidden_DH=teacher, head=Head(weight_VH=weight.detach()), divergence=measure)
    return token_statistics(Head(weight_VH=weight), hidden, targets, None, taught).divergence_D


def _sdpo():
    from composer_prime.config.channels import SdpoConfig

    return SdpoConfig(weight=1.0)


VARIANTS: dict[str, dict[str, Statistics]] = {
    "logprobs": {"dense": dense, "torch checkpoint (256)": checkpointed, "TRL 1.16 chunked": trl, "ours": ours},
    "divergence": {"dense": dense_jsd, "TRL 1.16 chunked": trl_jsd, "ours": ours_jsd},
}


def measure(task: str, name: str, rows: int, vocabulary: int, repeats: int) -> dict[str, float]:
    """One variant in this process."""
    width, draw = HIDDEN.get(vocabulary, 512), torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) / width**0.5).requires_grad_()
    targets, coming = torch.randint(0, vocabulary, (rows,), generator=draw), torch.randn(rows, generator=draw)
    teacher = hidden.detach() + 0.3 * torch.randn(rows, width, generator=draw)
    compute = VARIANTS[task][name]
    compute(hidden[:2], weight, targets[:2], teacher[:2]).sum().backward()  # imports and thread pools
    times, values = [], torch.zeros(0)
    hidden.grad = weight.grad = None
    reset_peak()
    before = psutil.Process().memory_info().rss
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        started = time.process_time()
        values = compute(hidden, weight, targets, teacher)
        values.backward(coming)
        times.append(time.process_time() - started)
    peak = peak_bytes() - before
    checked = slice(0, CHECKED)
    wide = [tensor.detach()[checked].double() for tensor in (hidden, targets, teacher, coming)]
    exact_hidden = wide[0].requires_grad_()
    exact = VARIANTS[task]["dense"](exact_hidden, weight.detach().double(), targets[checked], wide[2])
    exact.backward(wide[3])
    return {
        "peak_bytes": peak,
        "time_s": min(times),
        "error": (values.detach()[checked] - exact).abs().max().item(),
        "grad_error": (hidden.grad[checked] - exact_hidden.grad).abs().max().item(),
    }


def run(task: str, name: str, rows: int, vocabulary: int, options: argparse.Namespace) -> dict[str, float] | str:
    """One variant in a process of its own, or why it was not run."""
    copies = (3.1 if task == "logprobs" else 10) if name == "dense" else 1  # of [N, V] at once
    wanted = copies * 4 * rows * vocabulary + 2 * GIB
    free = psutil.virtual_memory().available
    if wanted > free:
        return f"not run: needs about {wanted / GIB:.0f} GiB, {free / GIB:.0f} GiB are free"
    wanted_of = {"task": task, "one": name, "rows": rows, "vocabulary": vocabulary, "repeats": options.repeats,
                 "threads": options.threads}  # fmt: skip
    command = [sys.executable, __file__]
    for key, value in wanted_of.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.timeout_s)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    return json.loads(done.stdout)


def table(task: str, rows: int, vocabulary: int, options: argparse.Namespace) -> None:
    width = HIDDEN.get(vocabulary, 512)
    print(f"\n{task}, N = {rows}, V = {vocabulary}, H = {width}, float32, {options.threads} thread(s)")
    print("| variant | peak MiB | of dense | CPU s | of dense | error | gradient error |")
    print("|---|---|---|---|---|---|---|")
    base: dict[str, float] | None = None
    for name in ("dense", "ours") if options.quick else VARIANTS[task]:
        found = run(task, name, rows, vocabulary, options)
        if isinstance(found, str):
            print(f"| {name} | {found} | | | | | |", flush=True)
            continue
        base = found if name == "dense" else base
        ratios = [f"{found[key] / base[key]:.2f}" if base else "" for key in ("peak_bytes", "time_s")]
        print(
            f"| {name} | {found['peak_bytes'] / 2**20:.0f} | {ratios[0]} | {found['time_s']:.2f} | {ratios[1]} | "
            f"{found['error']:.1e} | {found['grad_error']:.1e} |",
            flush=True,
        )
    liger = "is not installed" if importlib.util.find_spec("liger_kernel") is None else "needs a GPU"
    if not torch.cuda.is_available():
        print(f"| Liger-Kernel | not run: it {liger}, and this machine has no GPU for its Triton kernels | | | | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=[*VARIANTS], default="logprobs")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one variant")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="few rows and a small vocabulary: whether it works")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.vocabulary, options.repeats = [128], [4096], 1
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.task, options.one, options.rows[0], options.vocabulary[0], options.repeats)))
        return
    for vocabulary in options.vocabulary:
        for rows in options.rows:
            table(options.task, rows, vocabulary, options)


if __name__ == "__main__":
    main()
