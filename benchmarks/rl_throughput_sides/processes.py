"""Child processes of the benchmark: pinned to their CPUs, with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TICK_S = 0.25


class SideFailedError(RuntimeError):
    """A side ended with an error or not at all; the message ends with its log."""


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
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all have ended well and calls `tick` meanwhile. Raises SideFailedError, leaving none behind."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise SideFailedError(f"not done after {timeout_s:.0f} s (--timeout-s)\n{tails(logs)}")
            tick()
            time.sleep(TICK_S)
    finally:
        end(processes)
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SideFailedError(f"ended with exit status {codes}\n{tails(logs)}")


def end(processes: Sequence[subprocess.Popen[Any]]) -> None:
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
