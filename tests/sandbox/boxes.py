"""What tests of boxes share: small limits, and the skip where bubblewrap does not work."""

from __future__ import annotations

import pytest

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.plan.sandboxes import probe_bubblewrap


class SmallLimits(SandboxLimits):
    file_mb = 8
    output_kb = 16
    output_mb = 1


LIMITS = SmallLimits(wall_s=30, cpu_s=8, memory_gb=0.4, processes=32, disk_mb=32, files=2000)
SMALL = RuntimeConfig(type="bubblewrap", limits=LIMITS)


def need_bubblewrap() -> None:
    if not probe_bubblewrap().works:
        pytest.skip(probe_bubblewrap().text)
