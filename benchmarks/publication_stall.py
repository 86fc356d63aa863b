"""Measure how long a training step waits for publication: for all of it, or for the copy.

    uv run python -m benchmarks.publication_stall

Model: SmolLM2-135M's shape with random weights, published in bfloat16 (270 MB) by one rank on the CPU. The ways take
the same training steps in turn, so that a busy machine meets all alike:

    whole     the step waits until the version is written and announced
    copy      the step waits until the weights are copied, as in a run

`stall` is the time until the step begins: seconds, and CPU seconds (of the process in the first way, of the main thread
in the second). `step` is forward, backward and update, beside a publication in the second way; its CPU seconds include
the publication's. `written` is the background's writing of a whole version (hashes, chunks) and of a patch, with one
thread and with --threads, in turn. The exit status
is 1 when the stall of the copy is above 5 % of a step by itself, in CPU seconds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks._shared import conclude
from composer_prime.config import Config
from composer_prime.packing.pack import pack, totals
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import Canary, Manifest, WeightStore
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data import checked_row, unpack
from trainer.model.build import build_policy
from trainer.optim import build_optimizer
from trainer.train import train_step
from trainer.weights.publish import Publisher, VersionWriter

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TARGET = 0.05
WAYS = ("whole", "copy")


def make_config(folder: Path, model: Path) -> Config:
    return Config.model_validate({
        "run": {"name": "stall", "output_dir": str(folder), "max_steps": 100},
        "model": {"path": str(model), "max_context": 2048},
        "inference": {"dtype": "bfloat16"},
        "orchestrator": {
            "source": [{"name": "none", "taskset": {"id": "none"}}], "sampling": {"max_tokens": 64}, "hints": {},
        },
        "trainer": {"device": "cpu", "threads": 1},
    })  # fmt: skip


def make_samples(count: int, tokens: int) -> list[Sample]:
    """Random prompts of 16 tokens with completions up to `tokens`."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(count):
        ids = torch.randint(0, SHAPE["vocab_size"], (tokens,), generator=generator).tolist()
        mask = [0] * 16 + [1] * (tokens - 16)
        samples.append(
            Sample(
                sample_id=f"s{index}/0", group_id="g", source="none", task_id="t", input_ids=pack_ints(ids),
                loss_mask=pack_flags(mask), logprobs=pack_floats([-10.0 * flag for flag in mask]),
                advantages=pack_floats([float(flag) * (-1) ** index for flag in mask]), reward=0.5, temperature=1.0,
                version_spans=[VersionSpan(16, tokens, 0)], turns=[],
            )
        )  # fmt: skip
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each way")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each sample")
    parser.add_argument("--threads", type=int, default=2, help="of a publication, beside one")
    parser.add_argument("--quick", action="store_true", help="one round of two layers: whether it works")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens = 1, 64
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        shape = SHAPE | ({"num_hidden_layers": 2} if options.quick else {})
        LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(folder / "model")
        config = make_config(folder, folder / "model")
        world = worlds.join(config.trainer)
        policy = build_policy(config, folder / "model", world)
        optimizer = build_optimizer(policy, config.trainer.optim)
        run_dir = RunDir(folder / "run")
        RunKeys.create(run_dir.keys)
        publisher = Publisher(config, run_dir, "stall", folder / "model", world, None)
        samples = make_samples(options.samples, options.tokens)
        (batches,) = pack(samples, (), run_id="r", step=1, world_size=1, max_tokens=4096)
        settings = config.channels.terms(2048)
        rows = [unpack(checked_row(batch, SHAPE["vocab_size"]), settings, world.device) for batch in batches]
        figures: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
        for step in range((options.rounds + 1) * len(WAYS)):
            way = WAYS[step % len(WAYS)]
            clock = time.process_time if way == "whole" else time.thread_time
            started, cpu_from = time.monotonic(), clock()
            size = publisher.publish(policy, step)
            if way == "whole":
                publisher.settle()
            stall_cpu_s, begun, cpu_s = clock() - cpu_from, time.monotonic(), time.process_time()
            train_step(policy, optimizer, rows, totals(samples), settings, step=step)
            cpu_s, step_s = time.process_time() - cpu_s, time.monotonic() - begun
            if step >= len(WAYS):  # the first round warms up
                figures[way].append((begun - started, stall_cpu_s, step_s, cpu_s))
            publisher.settle()  # as the next publication would
        tensors = {name: parameter.full_tensor().bfloat16() for name, parameter in policy.lm.named_parameters()}
        written = write_seconds(tensors, folder, (1, options.threads), options.rounds)
    worlds.leave()
    print(f"{size / 1e6:.0f} MB a version, steps of {options.samples} x {options.tokens} tokens, medians of "
          f"{options.rounds}; stall in percent of the CPU seconds of a step by itself")  # fmt: skip
    for what in ("anchor", "delta"):
        one, more = (statistics.median(written[threads, what]) for threads in (1, options.threads))
        print(f"  {what:8} written in {one:.2f} s by 1 thread, {more:.2f} s by {options.threads}: 1 : {one / more:.2f}")
    return judge(figures, is_quick=options.quick)


def write_seconds(
    tensors: dict[str, torch.Tensor], folder: Path, threads: tuple[int, ...], rounds: int
) -> dict[tuple[int, str], list[float]]:
    """Return the seconds of each writing of a whole version and of a patch, by threads and kind of version."""
    seconds: dict[tuple[int, str], list[float]] = {(each, kind): [] for each in threads for kind in ("anchor", "delta")}
    for number in range(rounds):
        for each in threads:
            store = WeightStore(folder / f"written-{number}-{each}")
            writer = VersionWriter(store, Ed25519PrivateKey.generate(), "stall", keep=2, threads=each)
            for version, kind in enumerate(("anchor", "delta")):
                changed = {name: tensor + version * tensor.abs() * 2**-8 for name, tensor in tensors.items()}
                changed = {name: torch.where(torch.rand_like(tensor) < 0.05, changed[name], tensor)
                           for name, tensor in tensors.items()}  # fmt: skip
                manifest = Manifest(run_id="stall", version=version, kind="anchor", dtype="bfloat16", chunks=[],
                                    tensors={}, canary=Canary(token_ids=[0, 1], logprobs=[0.0]))  # fmt: skip
                started = time.monotonic()
                assert writer.write(manifest, changed).kind == kind
                seconds[each, kind].append(time.monotonic() - started)
            shutil.rmtree(store.root)
    return seconds


def judge(figures: dict[str, list[tuple[float, ...]]], *, is_quick: bool) -> int:
    medians = {way: [*map(statistics.median, zip(*of_way, strict=True))] for way, of_way in figures.items()}
    *_, alone_cpu_s = medians["whole"]
    for way, (stall_s, stall_cpu_s, step_s, cpu_s) in medians.items():
        print(f"  {way:8} stall {stall_s:7.3f} s, {stall_cpu_s:6.3f} CPU s = {100 * stall_cpu_s / alone_cpu_s:5.1f} %"
              f"   step {step_s:6.2f} s, {cpu_s:6.2f} CPU s")  # fmt: skip
    print(f"copy: {medians['copy'][1] / medians['whole'][1]:.1%} of a whole publication")
    share = medians["copy"][1] / alone_cpu_s
    return conclude([(f"copy: {share:.1%} of a step, at most {TARGET:.0%}", share <= TARGET)], is_quick=is_quick)


if __name__ == "__main__":
    sys.exit(main())
