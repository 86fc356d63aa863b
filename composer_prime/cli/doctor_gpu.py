"""`composer doctor --gpu`: in under ten minutes, everything that needs a GPU, each with a verdict and figures.

Each check is a process of its own with a deadline (device_checks.py), so one that fails or hangs does not stop the
others. The whole takes at most `BUDGET_S`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from typing import Literal, NamedTuple

from composer_prime.console import EXIT_USAGE, pluralize
from composer_prime.plan.machine import module_file, visible_gpus
from composer_prime.run.process import child_options, signal_session

BUDGET_S = 580.0
DEADLINES_S = {
    "step": 60.0,
    "fsdp2": 90.0,
    "attention": 60.0,
    "head": 90.0,
    "engine": 60.0,
    "memory": 90.0,
    "a1": 180.0,
    "vllm": 240.0,
}
"""The checks in their order, and the longest time of each. Their sum may exceed the budget."""
CPU_PATIENCE = 6.0
"""How much longer everything may take on the CPU, which is for trying the checks themselves."""


class Finding(NamedTuple):
    """The verdict of a check."""

    level: Literal["ok", "bad", "skip"]
    text: str
    """Figures, or the reason."""


def run_checks(device: str, names: list[str] | None = None, *, budget_s: float = BUDGET_S) -> int:
    """Print one line for each check, and return the exit status: 0 all well, 1 something is bad, 2 no GPU here.

    On the CPU everything is small and computed in seconds. `names` picks checks.
    """
    if device == "cuda" and not visible_gpus():
        print("composer doctor: no GPU is visible to the CUDA driver here, so nothing was checked", file=sys.stderr)
        return EXIT_USAGE
    began, small = time.monotonic(), device == "cpu"
    patience = CPU_PATIENCE if small else 1.0
    findings: dict[str, Finding] = {}
    for name in names or DEADLINES_S:
        left_s = budget_s * patience - (time.monotonic() - began)
        started = time.monotonic()
        findings[name] = run_check(name, device, small=small, deadline_s=min(DEADLINES_S[name] * patience, left_s))
        took = time.monotonic() - started
        print(f"{findings[name].level:<5} {name:<10} {findings[name].text} [{took:.0f} s]", flush=True)
    bad = [name for name, finding in findings.items() if finding.level == "bad"]
    skipped = [name for name, finding in findings.items() if finding.level == "skip"]
    print(
        f"\n{pluralize(len(findings) - len(skipped), 'check')} on {device} in {time.monotonic() - began:.0f} s: ",
        end="",
    )
    print(f"bad: {', '.join(bad)}" if bad else "all well", end="")
    print(f"; not run: {', '.join(skipped)}" if skipped else "")
    return 1 if bad else 0


def run_check(name: str, device: str, *, small: bool, deadline_s: float) -> Finding:
    """Run one check in a process of its own; whatever it started ends with it."""
    if name == "vllm" and module_file("vllm") is None:
        return Finding("skip", "vLLM is not installed: `uv sync --extra vllm`")
    if deadline_s <= 0:
        return Finding("skip", "no time was left")
    with (
        tempfile.TemporaryDirectory(prefix="composer-doctor-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        size = "small" if small else "full"
        words = [sys.executable, "-m", "composer_prime.cli.device_checks", name, device, size, folder]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, **child_options())
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return Finding("bad", f"not done after {deadline_s:.0f} s")
        finally:
            signal_session(process.pid, signal.SIGKILL)  # with everything that it started
            process.wait()
        if process.returncode == 0:
            return Finding(**json.loads(output.strip().splitlines()[-1]))
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no message"])[-1]
        return Finding("bad", f"ended with status {process.returncode}: {last}")
