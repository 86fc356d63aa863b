"""What tests of boxes share: small limits, and the reason where bubblewrap does not work."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.errors import SandboxError
from orchestrator.sandbox.box import open_box

LIMITS = SandboxLimits(
    wall_s=30, cpu_s=8, memory_gb=0.4, processes=32, file_mb=8, disk_mb=32, files=2000, output_kb=16, output_mb=1
)
SMALL = RuntimeConfig(type="bubblewrap", limits=LIMITS)


@functools.cache
def why_no_bubblewrap() -> str:
    """Return why boxes cannot be opened here; "" where they can."""

    async def opened() -> None:
        await (await open_box(SMALL)).close()

    try:
        asyncio.run(opened())
    except SandboxError as error:
        return str(error)
    return ""


def need_bubblewrap() -> None:
    if why_no_bubblewrap():
        pytest.skip(why_no_bubblewrap())


def children_of_this_process() -> set[int]:
    """Return the pids of running bwrap processes that this process started."""
    pids = set()
    for thread in os.listdir("/proc/self/task"):
        for word in Path(f"/proc/self/task/{thread}/children").read_text().split():
            if "bwrap" in Path(f"/proc/{word}/comm").read_text():
                pids.add(int(word))
    return pids
