"""What is particular to the local engine: shared prompts, architectures, its limits and failures."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.errors import ConfigError, EngineError, ModelNotFoundError
from composer_prime.wire.types import VersionSpan
from inference.engines.local import local_engine
from inference.engines.local.local_engine import Computer, LocalEngine
from inference.engines.local.model import LoadedModel, check_supported
from tests.engines.models import MAX_CONTEXT, SHAPE, make_model
from tests.engines.reference import Reference, Subject, sampling

SMALL = dict(SHAPE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, initializer_range=0.15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


async def start(folder, context: int = MAX_CONTEXT, prefill_tokens: int = 4096, **options) -> Subject:
    local = LocalEngineConfig(**{"max_batch": 32, **options})
    computer = type("Prefilling", (Computer,), {"prefill_tokens": prefill_tokens})
    engine = LocalEngine(folder, InferenceConfig(device="cpu", local=local), context, computer)
    await engine.start()
    return Subject(engine=engine, reference=Reference(folder))


async def test_siblings_share_their_prompt(folder):
    # Groups of siblings compute each prompt once and get the reference's logprobs,
    # also across a swap and beside requests that share nothing.
    subject = await start(folder)
    groups = [subject.prompt(g, 150) for g in range(3)]
    wanted = [(groups[k % 3], sampling(20 + 3 * (k // 3), seed=k)) for k in range(27)]
    wanted += [(subject.prompt(90 + k, 40 + k), sampling(40, seed=k)) for k in range(4)]
    tasks = [asyncio.ensure_future(subject.generate(*pair)) for pair in wanted]
    while subject.engine.stats().running < 20:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    await subject.load(1)
    done = await asyncio.gather(*tasks)
    for (prompt, options), completion in zip(wanted, done, strict=True):
        subject.verify(prompt, options, completion)
    # The first of each group and the four strangers compute their prompts, everybody else copies.
    assert sorted(one.prompt_cached for one in done)[7] == 149
    await subject.engine.close()


async def test_a_sequence_that_does_not_fit_one_pass(folder, monkeypatch):
    # With room for 16 rows of logits no pass makes more, and the scores stay the same.
    made, forward = [], LoadedModel.forward

    def watch(self, step):
        logits = forward(self, step)
        made.append(len(logits))
        return logits

    engine = LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT)
    await engine.start()
    subject = Subject(engine=engine, reference=Reference(folder))
    longest = subject.prompt(9, MAX_CONTEXT)
    monkeypatch.setattr(LoadedModel, "forward", watch)
    whole = await engine.score(longest)
    assert made == [MAX_CONTEXT - 1]
    monkeypatch.setattr(local_engine, "_SCORED_BYTES", 4 * subject.reference.vocab * 16)
    made.clear()
    split = await engine.score(longest)
    assert max(made) == 16 and split == pytest.approx(whole, abs=1e-5)
    await engine.close()


async def test_conversations_outnumber_the_slots(folder):
    # More conversations than slots take turns: caches are evicted, never mixed up.
    subject = await start(folder, max_batch=3)

    async def talk(k: int) -> None:
        prompt = subject.prompt(7, 40) + subject.prompt(k, 5 + k)
        for turn in range(4):
            options = sampling(5 + k % 7, seed=100 * k + turn, temperature=1.1)
            done = await subject.generate(prompt, options, f"talk-{k}")
            subject.verify(prompt, options, done)
            prompt = prompt + done.ids.tolist() + subject.prompt(1000 * k + turn, 6)

    await asyncio.gather(*(talk(k) for k in range(14)))
    await subject.engine.close()


async def test_a_prompt_that_a_swap_interrupts_is_computed_again(folder):
    # 16 prompt tokens a step: the swaps fall between pieces of the prompts. An answer that claims one version is that
    # version's, prompt included, as the auditor computes it.
    subject = await start(folder, prefill_tokens=16, max_batch=4)
    for version in range(1, 5):
        wanted = [(subject.prompt(60 + k, 230), sampling(2, seed=k)) for k in range(4)]
        tasks = [asyncio.ensure_future(subject.generate(*pair)) for pair in wanted]
        while not (subject.engine.stats().kv_used or any(task.done() for task in tasks)):
            await asyncio.sleep(0)
        await subject.load(version)
        for (prompt, options), completion in zip(wanted, await asyncio.gather(*tasks), strict=True):
            subject.verify(prompt, options, completion)
    await subject.engine.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=24)),
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=12, query_pre_attn_scalar=16)),
        lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        ),
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_CONTEXT, initializer_range=0.15)
        ),
    ],
    ids=["sliding window", "windowed and full layers", "mixture of experts", "learned positions"],
)
async def test_other_architectures(make, tmp_path):
    # Any causal model that goes through transformers' attention interface is served exactly.
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    folder = make_model(tmp_path / "tokenizer", tied=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    subject = await start(tmp_path, prefill_tokens=48)
    wanted = [(subject.prompt(k, 3 + 21 * k), sampling(30, seed=k)) for k in range(8)]
    wanted += [(subject.prompt(0, 60), sampling(12 + k, seed=k)) for k in range(8)]
    done = await asyncio.gather(*(subject.generate(*pair) for pair in wanted))
    for (prompt, _), completion in zip(wanted, done, strict=True):
        assert completion.version_spans == [VersionSpan(0, len(completion), 0)]
        scores = subject.reference.score(prompt + completion.ids.tolist(), 0)[len(prompt) - 1 :]
        assert (scores - torch.tensor(completion.token_logprobs.tolist())).abs().max() < 1e-4
    await subject.engine.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_that_no_publication_fits_is_named_at_the_start(fused, caplog):
    """Tensors that are published fused have no place in memory: the start says that versions will be refused."""
    model = HrmTextForCausalLM(HrmTextConfig(**SMALL)) if fused else MistralForCausalLM(MistralConfig(**SMALL))
    check_supported(model, model.config.num_hidden_layers)
    assert (".gqkv_proj." in caplog.text and "inference.engine = 'vllm'" in caplog.text) == fused


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16)),
        lambda: GptOssForCausalLM(
            GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
        ),
        lambda: BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4)),
    ],
    ids=["soft-capped logits", "attention sinks", "own attention code"],
)
async def test_models_beyond_it_are_refused(make, tmp_path):
    # A model whose attention it cannot reproduce is refused at the start, with the way out, instead of served wrongly.
    make().save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="vllm"):
        await start(tmp_path)


async def test_wrong_settings_are_named(folder, tmp_path):
    # A context beyond the model's, a cache too small for one sequence, a missing folder and a missing GPU.
    with pytest.raises(ConfigError, match=f"{MAX_CONTEXT + 1}.*{MAX_CONTEXT}"):
        await start(folder, MAX_CONTEXT + 1)
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        await start(folder, kv_cache_gib=1e-5)
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        await start(tmp_path)
    if not torch.cuda.is_available():
        engine = LocalEngine(folder, InferenceConfig(device="cuda"), MAX_CONTEXT)
        with pytest.raises(ConfigError, match="cuda"):
            await engine.start()


async def test_close_does_not_wait_for_a_thread_that_hangs(folder, monkeypatch):
    # A step that never returns, as of a device that hangs: close returns, and what waits gets an EngineError.
    monkeypatch.setattr(local_engine, "_CLOSE_S", 0.2)
    hangs, over = threading.Event(), threading.Event()

    class Hanging(Computer):
        def _compute(self, step) -> None:
            hangs.set()
            over.wait()
            super()._compute(step)

    engine = LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT, computer=Hanging)
    await engine.start()
    work = asyncio.ensure_future(engine.generate("r", [5, 6], sampling(50), "s"))
    await asyncio.to_thread(hangs.wait, 60)
    await engine.close()
    with pytest.raises(EngineError, match="hangs"):
        await work
    over.set()


async def test_engines_that_load_at_the_same_moment(folder):
    # transformers changes its classes while it loads; neither these engines nor a later one misses its tied tensors.
    engines = [LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT) for _ in range(5)]
    await asyncio.gather(*(engine.start() for engine in engines[1:]))
    await engines[0].start()
    first, *others = [await engine.score([5, 6, 7]) for engine in engines]
    assert all(scores == pytest.approx(first, abs=1e-6) for scores in others)
    await asyncio.gather(*(engine.close() for engine in engines))


async def test_close_does_not_wait_for_a_model_that_loads(folder, caplog):
    # Large models load for minutes; the thread ends by itself once it is through.
    loads, over = threading.Event(), threading.Event()

    class Loading(Computer):
        def _load(self) -> None:
            loads.set()
            over.wait()
            super()._load()

    engine = LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT, computer=Loading)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.to_thread(loads.wait, 60)
    starting.cancel()
    await asyncio.wait_for(engine.close(), 100)
    over.set()
    await asyncio.wait_for(engine._computer.mail.ended, 60)
    assert "left behind" not in caplog.text


async def test_a_failed_compute_thread_fails_every_request(folder):
    # When the thread dies, what waits and what comes later gets an EngineError that says why; nothing hangs.
    class Breaking(Computer):
        def _compute(self, step) -> None:
            if self.sampled > 20:
                raise RuntimeError("the device is on fire")
            super()._compute(step)

    engine = LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT, computer=Breaking)
    await engine.start()
    works = [engine.generate(str(k), [5, 6], sampling(50), "s") for k in range(5)]
    ends = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(end, EngineError) and "on fire" in str(end) for end in ends)
    with pytest.raises(EngineError, match="on fire"):
        await engine.score([5, 6])
    await engine.close()


@pytest.mark.parametrize(
    ("step_fails", "allocate", "reason"),
    [(False, torch.empty, ".*bytes.*"), (True, torch.empty, ".*bytes.*"), (False, bytearray, "MemoryError")],
)
async def test_memory_that_runs_out_is_told_with_the_remedy(folder, monkeypatch, step_fails, allocate, reason):
    # A command that finds no memory ends with the reason, and the engine goes on; a step ends the engine with it.
    # Python's own error has no text, so its name is the reason.
    forward = LoadedModel.forward

    def starve(self, step):
        if step.input_ids.shape[1] == 100 and (step.places is not None) == step_fails:
            allocate(1 << 60)
        return forward(self, step)

    monkeypatch.setattr(LoadedModel, "forward", starve)
    engine = LocalEngine(folder, InferenceConfig(device="cpu"), MAX_CONTEXT)
    await engine.start()
    many, remedy = [5] * 100, rf"ran out of memory \({reason}\): lower inference.local.kv_cache_gib"
    if step_fails:
        with pytest.raises(EngineError, match=remedy):
            await engine.generate("r", many, sampling(5), "s")
        with pytest.raises(EngineError, match=remedy):
            await engine.score([5, 6])
    else:
        with pytest.raises(EngineError, match=remedy):
            await engine.score(many)
        assert len((await engine.generate("r", many, sampling(5), "s")).ids.tolist()) == 5
    await engine.close()
