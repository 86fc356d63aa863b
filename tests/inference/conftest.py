"""One tiny model, its later versions published into a weight store, and a started local engine."""

import pytest
import torch

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.run.keys import RunKeys
from inference.engines.local.local_engine import LocalEngine
from tests.engines.models import MAX_CONTEXT, make_model
from tests.engines.reference import Reference
from tests.inference.publisher import Publisher

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="session")
def reference(folder):
    return Reference(folder)


@pytest.fixture
def keys(tmp_path):
    return RunKeys.create(tmp_path / "keys")


@pytest.fixture
def publisher(tmp_path, keys, reference):
    return Publisher(tmp_path / "weights", keys, reference)


@pytest.fixture(autouse=True)
def patient_drain(monkeypatch):
    monkeypatch.setattr("inference.node.DRAIN_S", 30.0)


@pytest.fixture
def config():
    local = LocalEngineConfig(max_batch=8)
    return InferenceConfig(device="cpu", local=local, heartbeat_s=0.1, lost_after_s=1.0, connect_timeout_s=4.0)


@pytest.fixture(autouse=True)
def no_thread_failed(caplog):
    """No test here makes an engine fail, so none may have failed."""
    yield
    records = [record for phase in ("setup", "call") for record in caplog.get_records(phase)]
    assert not [one.getMessage() for one in records if one.name.startswith("inference.engines") and one.levelno > 30]


@pytest.fixture
async def engine(folder, config):
    engine = LocalEngine(folder, config, MAX_CONTEXT)
    await engine.start()
    yield engine
    await engine.close()
