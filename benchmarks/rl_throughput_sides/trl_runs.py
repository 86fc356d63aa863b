"""TRL's side: start trl_side in one of several ways to use the cores, and find the fastest one."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rl_throughput_sides.plan import Plan
from benchmarks.rl_throughput_sides.processes import environment, python_module, start, watch
from benchmarks.rl_throughput_sides.report import SideResult
from composer_prime.address import free_port


@dataclass(frozen=True)
class Variant:
    """A way to use the cores."""

    ranks: int
    threads: int
    """CPU threads of each rank."""

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.threads} thread{'s' * (self.threads > 1)}"


def variants(cores: int) -> list[Variant]:
    """One thread; all cores as threads; all cores as data-parallel ranks."""
    return list(dict.fromkeys([Variant(1, 1), Variant(1, cores), Variant(cores, 1)]))


def fastest(plan: Plan, folder: Path, steps: int, timeout_s: float) -> tuple[Variant, dict[str, float]]:
    """The variant with the most samples a second over a few steps after the first, and all variants' figures."""
    short = dataclasses.replace(plan, steps=steps, points=())
    rates = {}
    for variant in variants(len(plan.cores)):
        result = run(short, folder / f"try_{variant.ranks}x{variant.threads}", variant, timeout_s)
        rates[variant] = result.steady_per_s(short)
    best = max(rates, key=lambda variant: rates[variant])
    return best, {str(variant): rate for variant, rate in rates.items()}


def run(plan: Plan, folder: Path, variant: Variant, timeout_s: float) -> SideResult:
    """Raises SideFailedError."""
    folder.mkdir(parents=True)
    born = time.time()
    _train(plan, folder, variant, timeout_s)
    result = json.loads((folder / "result.json").read_text())
    return SideResult(
        how=str(variant),
        start_s=result["began"] - born,
        seconds=result["seconds"],
        folders={step: folder / f"step_{step}" for step in plan.points},
    )


def _train(plan: Plan, folder: Path, variant: Variant, timeout_s: float) -> None:
    file = plan.write(folder / "plan.json")
    argv = python_module("trl_side", file, folder, "--threads", str(variant.threads))
    logs = [folder / f"rank_{rank}.log" for rank in range(variant.ranks)]
    port = str(free_port())
    children = []
    for rank, log in enumerate(logs):
        env = environment(OMP_NUM_THREADS=str(variant.threads))
        if variant.ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(variant.ranks)}
            env |= {"LOCAL_WORLD_SIZE": str(variant.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children.append(start(argv, plan.cores, log, env))
    watch(children, logs, timeout_s=timeout_s)
