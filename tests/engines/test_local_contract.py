"""The local engine passes the contract suite, with tied and untied embeddings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from inference.engines.local.local_engine import Computer, LocalEngine
from tests.engines import contract
from tests.engines.models import MAX_CONTEXT, make_model
from tests.engines.reference import Reference


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


def started(loop: asyncio.Runner, folder: Path) -> contract.Subject:
    config = InferenceConfig(engine="local", device="cpu", local=LocalEngineConfig(max_batch=16))
    engine = LocalEngine(folder, config, MAX_CONTEXT, type("Prefilling", (Computer,), {"prefill_tokens": 64}))
    loop.run(engine.start())
    return contract.Subject(engine=engine, reference=Reference(folder))


@pytest.fixture(scope="module")
def subject(loop, folder):
    subject = started(loop, folder)
    yield subject
    loop.run(subject.engine.close())


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, subject, loop):
    loop.run(check(subject))


def test_contract_ending(loop, folder):
    subject = started(loop, folder)
    loop.run(contract.close_fails_what_waits(subject))
    loop.run(subject.engine.close())
