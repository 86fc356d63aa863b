"""The local engine on a device against transformers on the CPU, and short runs with everything on the device."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_prime.config.inference import InferenceConfig
from composer_prime.model_source import resolve_model
from composer_prime.wire.node_messages import Sampling
from inference.engines.base import build_engine

ROOT = Path(__file__).parents[2]


@torch.no_grad()
def scores_of(model, token_ids: list[int]) -> torch.Tensor:
    logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)


async def test_the_local_engine_swaps_weights_in_mid_answer_and_scores_as_transformers(place):
    model, count, new_tokens = resolve_model("tiny"), 4 if place.small else 32, 24 if place.small else 128
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    tied = bool(reference.config.tie_word_embeddings)
    start = {name: value for name, value in reference.state_dict().items() if not (tied and name == "lm_head.weight")}
    changed = {name: value + 0.02 * torch.randn(value.shape, generator=draw) for name, value in start.items()}
    prompts = [torch.randint(0, 500, (16,), generator=draw).tolist() for _ in range(count)]
    settings = InferenceConfig(engine="local", device=place.device)
    engine = build_engine(settings, model, 256)
    await engine.start()
    sampling = Sampling(max_tokens=new_tokens, seed=1, ignore_eos=True)
    requests = [asyncio.ensure_future(engine.generate(str(i), ids, sampling, str(i))) for i, ids in enumerate(prompts)]
    while engine.stats().running == 0 and not all(request.done() for request in requests):
        await asyncio.sleep(0)
    await engine.load_weights(1, changed)
    answers = await asyncio.gather(*requests)
    scored = torch.tensor(await engine.score(prompts[0]))
    await engine.close()
    before = scores_of(reference, prompts[0])
    reference.load_state_dict(changed, strict=False)
    exact = scores_of(reference, prompts[0])
    apart, moved = (scored - exact).abs().max().item(), (before - exact).abs().max().item()
    assert all(len(answer) == new_tokens for answer in answers) and engine.version == 1
    assert any(len(answer.version_spans) > 1 for answer in answers)
    assert apart < min(settings.canary_limit(on_cuda=place.device == "cuda"), moved / 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("engine", "steps"), [("local", 10), ("vllm", 3)])
@pytest.mark.timeout(1200)
def test_a_run_of_a1_with_everything_on_the_device(tmp_path, engine, steps):
    # Swaps and canaries included; sampler and trainer agree. On the CPU tests/e2e shows it.
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    settings = {
        "run.name": engine,
        "run.output_dir": tmp_path,
        "run.max_steps": steps,
        "inference.engine": engine,
        "inference.device": "cuda",
        "trainer.device": "cuda",
        "orchestrator.eval.every_steps": 0,
        "inference.vllm.gpu_memory_utilization": 0.3,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "trainer.main", "@", "configs/a1.toml", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (tmp_path / engine / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "optim/grad_norm" in line]
    assert len(trained) == steps and max(line["policy/mismatch_kl"] for line in trained) < 0.05
