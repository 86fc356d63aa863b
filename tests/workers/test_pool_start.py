"""A pool whose workers cannot even be started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from composer_prime.errors import EnvironmentWorkerError
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import SourceSpec


async def test_whatever_ends_a_supervisor_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    """A name that no log file can have is no error of ours: it reaches the caller, who would wait for ever."""
    spec = SourceSpec(name="na\0me", tasksets={"train": {"id": "x"}}, harness={"id": "x"}, model_path="m")
    async with asyncio.timeout(20):
        with pytest.raises(EnvironmentWorkerError, match="ValueError: embedded null"):
            await WorkerPool(spec, workers=2, log_dir=tmp_path).start()
