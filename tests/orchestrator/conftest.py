"""A whole orchestrator on loopback around a test, with a node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from audit_peers import serve_audits
from orch_peers import MODEL, RUN_ID, PeerTrainer, RunNode, ScriptedPool

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from orchestrator.pipeline import Pipeline
from tests.waiting import until


@dataclass(slots=True, kw_only=True)
class Running:
    """An orchestrator under way."""

    pipeline: Pipeline
    task: asyncio.Task[None]
    run_dir: RunDir
    node: RunNode | None

    @property
    def step_endpoint(self) -> str:
        return json.loads(self.run_dir.endpoints.read_text())["step"]

    def lines(self, role: str = "orchestrator") -> list[dict]:
        found = [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]
        return [line for line in found if line["role"] == role]

    @asynccontextmanager
    async def trainer(self, step: int, **options: int) -> AsyncIterator[PeerTrainer]:
        """A trainer that is attached after `step`."""
        async with PeerTrainer(self.run_dir, self.step_endpoint, **options) as trainer:
            await trainer.attach(step)
            yield trainer

    async def rollouts(self, step: int) -> list[dict]:
        """The log of a batch; written beside its delivery, so wait for it."""
        path = self.run_dir.rollouts(step)
        await until(path.exists)
        return [json.loads(line) for line in path.read_text().splitlines()]


OpenRun = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "orch-test")
    RunKeys.create(found.keys)
    return found


@pytest.fixture
def open_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> OpenRun:
    @asynccontextmanager
    async def opened(
        config: Config,
        pool: ScriptedPool | None = None,
        *,
        pools: Mapping[str, ScriptedPool] = {},
        node: bool = True,
        **node_options: float,
    ) -> AsyncIterator[Running]:
        run_dir.endpoints.unlink(missing_ok=True)
        pool = pool or ScriptedPool()
        monkeypatch.setattr("orchestrator.batching.batches.POLL_S", 0.3)
        for name, value in {"TICK_S": 0.05, "REPORT_S": 0.5, "FAREWELL_S": 0.3}.items():
            monkeypatch.setattr(f"orchestrator.pipeline.{name}", value)
        played = {source.name: pools.get(source.name, pool) for source in config.orchestrator.source}
        monkeypatch.setattr("orchestrator.pipeline.worker_pools", lambda *_: played)
        pipeline = Pipeline(config, run_dir, RUN_ID, MODEL)
        task = asyncio.create_task(pipeline.run())
        async with asyncio.timeout(60):
            while not run_dir.endpoints.exists():
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
        peer = RunNode(pipeline.gateway.node_endpoint, RunKeys(run_dir.keys), **node_options) if node else None
        try:
            async with peer or nullcontext():
                yield Running(pipeline=pipeline, task=task, run_dir=run_dir, node=peer)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return opened


@pytest.fixture
def audited(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[tuple]]:
    """`async with audited(**settings) as (audits, trust, connect)`: see serve_audits."""
    return partial(serve_audits, tmp_path)
