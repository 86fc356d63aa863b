"""A gateway on loopback around a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_made import MODEL, config_with

from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.weights import WeightStore
from orchestrator.gateway import Gateway

OpenGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.create(tmp_path / "keys")


@pytest.fixture
def node_keys(keys: RunKeys) -> ClientKeys:
    return keys.client("node")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


@pytest.fixture
def open_gateway(keys: RunKeys, store: WeightStore) -> OpenGateway:
    @asynccontextmanager
    async def run(*, fail: Any = None, **sections: dict[str, Any]) -> AsyncIterator[Gateway]:
        gateway = Gateway(config_with(**sections), keys, "run-1", store, model_dir=MODEL, fail=fail)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.close()

    return run
