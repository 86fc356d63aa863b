"""Child processes of the benchmark: pinned to their CPUs, with a deadline and a record of their CPU use over time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TICK_S = 0.25


class SideFailedError(RuntimeError):
    """A side ended with an error or not at all; the message ends with its log."""


@dataclass(slots=True)
class CpuRecord:
    """CPU seconds by role, cumulative, sampled every TICK_S."""

    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)

    def sample(self, roots: Sequence[int], role_of: Callable[[list[str]], str]) -> None:
        for pid in roots:
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                for process in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        self._seen[process.pid] = (role_of(process.cmdline()), times.user + times.system)
        by_role: dict[str, float] = defaultdict(float)
        for role, used in self._seen.values():
            by_role[role] += used
        self.samples.append((time.time(), dict(by_role)))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds of each role from `begin` to `end` (Unix times)."""
        before = next((used for when, used in reversed(self.samples) if when <= begin), {})
        after = next((used for when, used in reversed(self.samples) if when <= end + TICK_S), {})
        spent = {role: used - before.get(role, 0.0) for role, used in after.items()}
        return {role: used for role, used in sorted(spent.items(), key=lambda item: -item[1]) if used > 0.05}


def environment(**more: str) -> dict[str, str]:
    """The environment of every child: this repository importable, one thread by default, no network."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return os.environ | fixed | more


def start(argv: Sequence[str], cores: Sequence[int], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts `argv` on `cores` (where the platform can pin), its output in `log`."""
    pin = (lambda: os.sched_setaffinity(0, cores)) if hasattr(os, "sched_setaffinity") else None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, preexec_fn=pin
        )


def watch(
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Sequence[Path],
    *,
    role_of: Callable[[list[str]], str],
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
) -> CpuRecord:
    """Waits until all have ended well and calls `tick` meanwhile. Raises SideFailedError, leaving none behind."""
    record, deadline = CpuRecord(), time.monotonic() + timeout_s
    pids = [process.pid for process in processes]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > deadline:
                raise SideFailedError(f"not done after {timeout_s:.0f} s (--timeout-s)\n{tails(logs)}")
            record.sample(pids, role_of)
            tick()
            time.sleep(TICK_S)
    finally:
        end(processes)
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SideFailedError(f"ended with exit status {codes}\n{tails(logs)}")
    return record


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the ones that still run to stop, then make them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tails(logs: Sequence[Path]) -> str:
    return "\n".join(
        line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()[-25:]
    )


def python_module(name: str, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.rl_throughput_sides.{name}", *map(str, words)]
