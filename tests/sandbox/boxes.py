"""What tests of boxes share: small limits, and the skip where bubblewrap does not work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.plan.sandboxes import probe


class SmallLimits(SandboxLimits):
    file_mb = 8
    output_kb = 16
    output_mb = 1


LIMITS = SmallLimits(wall_s=30, cpu_s=8, memory_gb=0.4, processes=32, disk_mb=32, files=2000)
SMALL = RuntimeConfig(type="bubblewrap", limits=LIMITS)


def need_bubblewrap() -> None:
    if not probe("bubblewrap").works:
        pytest.skip(probe("bubblewrap").text)


def start_times(pids: Iterable[int]) -> dict[int, str]:
    """Return when each process began, as the kernel's clock says. Those that have ended are left out."""
    return {pid: began for pid in pids if (began := _start_time(pid))}


def still_there(started: dict[int, str]) -> list[int]:
    """Return which of these processes exist. Another one that got the same pid since is none of them."""
    return [pid for pid, began in started.items() if _start_time(pid) == began]


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
