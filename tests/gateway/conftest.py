"""A gateway on loopback around a test. Coroutine tests run in an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_config import MODEL, config_with

from composer_prime.keys import ClientKeys, RunKeys
from composer_prime.weights.store import WeightStore
from orchestrator.gateway import Gateway

OpenGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


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
    async def run(**sections: dict[str, Any]) -> AsyncIterator[Gateway]:
        gateway = Gateway(config_with(**sections), keys, "run-1", store, model_dir=MODEL)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.close()

    return run
