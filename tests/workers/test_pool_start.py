"""A pool whose workers cannot even be started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError, EnvironmentWorkerError
from composer_prime.model_source import resolve_model
from composer_prime.plan.sandboxes import probe_bubblewrap
from orchestrator.workers.pool import SourceSpec, WorkerPool


async def test_whatever_ends_a_supervisor_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    """A name that no log file can have is no error of ours: it reaches the caller, who would wait for ever."""
    spec = SourceSpec(name="na\0me", tasksets={"train": {"id": "x"}}, harness={"id": "x"}, model_path="m")
    async with asyncio.timeout(20):
        with pytest.raises(EnvironmentWorkerError, match="ValueError: embedded null"):
            await WorkerPool(spec, workers=2, start_timeout_s=280.0, log_dir=tmp_path).start()


@pytest.mark.process
async def test_a_source_whose_sandbox_does_not_open_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its rollouts would fail and be tried again."""
    monkeypatch.setenv("PATH", "")
    probe_bubblewrap.cache_clear()
    spec = SourceSpec(
        name="s",
        tasksets={"train": {"id": "examples.micro_code", "split": "train", "num_tasks": 2}},
        harness={"id": "orchestrator.environments.tool_loop"},
        model_path=str(resolve_model("tiny_code")),
    )
    with pytest.raises(ConfigError, match=r"'s'.*'bubblewrap', which does not work here.*apt-get install bubblewrap"):
        await WorkerPool(spec, start_timeout_s=280.0, log_dir=tmp_path).start()
    probe_bubblewrap.cache_clear()
