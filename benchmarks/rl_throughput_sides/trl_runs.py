"""TRL's side: start trl_side in one of several ways to use the cores, and find the fastest one."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rl_throughput_sides.plan import Plan
from benchmarks.rl_throughput_sides.processes import CpuRecord, environment, python_module, start, watch
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
    cpu = _train(plan, folder, variant, timeout_s)
    result = json.loads((folder / "result.json").read_text())
    ended = result["began"] + result["seconds"][-1]
    return SideResult(
        side="TRL",
        how=str(variant),
        start_s=result["began"] - born,
        seconds=result["seconds"],
        rewards=result["rewards"],
        spent_s=profile(result["spent_s"], result["seconds"][-1]),
        cpu_s=cpu.between(result["began"], ended),
        folders={step: folder / f"step_{step}" for step in plan.points},
    )


def _train(plan: Plan, folder: Path, variant: Variant, timeout_s: float) -> CpuRecord:
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
    role_of = lambda cmdline: "TRL"
    return watch(children, logs, role_of=role_of, timeout_s=timeout_s)


def profile(spent_s: dict[str, float], training_s: float) -> dict[str, float]:
    """TRL's own timers (the first rank's) as parts that add up to the training time."""
    generate = spent_s.get("transformers.generate", 0.0)
    prepare, loss = spent_s.get("_prepare_inputs", 0.0), spent_s.get("compute_loss", 0.0)
    return {
        "generating": generate,
        "prompts, tools, rewards": prepare - generate,
        "forward": loss,
        "backward, optimizer, rest": training_s - prepare - loss,
    }
