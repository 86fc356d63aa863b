"""How long publication keeps the trainer from its next step: all of it inside the step, or all but the copy beside it.

    uv run python -m benchmarks.publication_stall

Model: SmolLM2-135M's shape with random weights, published in bfloat16 (270 MB) by one rank on the CPU. Both ways take
the same training steps in turn, one pair after another, so that a busy machine meets both alike:

    synchronous   the step waits until the version is written and announced
    background    trainer/weights/publish.py: the step waits for the copy; the next steps run beside the rest

`stall` is the time until the step continues: seconds, and CPU seconds (of the process in the synchronous way, of the
main thread in the background way), which a busy machine does not lengthen. `step` is forward, backward and update,
beside a publication in the background way; its CPU seconds include the publication's. The exit status is 1 when the
stall in the background way is above 5 % of a step by itself or of a synchronous publication, all in CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.install_memory import SHAPE
from composer_prime.config import Config
from composer_prime.packing.pack import pack, totals
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data.rows import documents_of, unpack
from trainer.model.build import build_policy
from trainer.optim import build_optimizer
from trainer.step import LossSettings, train_step
from trainer.weights.publish import Publisher

TARGET = 0.05


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
    parser.add_argument("--pairs", type=int, default=3, help="steps of each way")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each sample")
    options = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder / "model")
        config, run_dir = make_config(folder, folder / "model"), RunDir(folder / "run")
        RunKeys.create(run_dir.keys)
        world = worlds.join(config.trainer)
        policy = build_policy(config, folder / "model", world)
        optimizer = build_optimizer(policy, config.trainer.optim)
        samples = make_samples(options.samples, options.tokens)
        (batches,) = pack(samples, (), run_id="r", step=1, world_size=1, max_tokens=4096)
        rows = [unpack(documents_of(batch, SHAPE["vocab_size"]), world.device) for batch in batches]
        settings = LossSettings(channels=config.channels, max_length=2048)
        publisher = Publisher(config, run_dir, "stall", folder / "model", world, None)
        figures: dict[str, list[tuple[float, ...]]] = {"synchronous": [], "background": []}
        train_step(policy, optimizer, rows, totals(samples), settings, step=1, ratio=1.0)  # warm-up
        for step in range(1, 2 * options.pairs + 1):
            way = "synchronous" if step % 2 else "background"
            clock = time.process_time if way == "synchronous" else time.thread_time
            started, cpu_from = time.monotonic(), clock()
            size = publisher.publish(policy, step)
            if way == "synchronous":
                publisher.wait()
            stalled, stall_cpu_s = time.monotonic(), clock() - cpu_from
            cpu_s = time.process_time()
            train_step(policy, optimizer, rows, totals(samples), settings, step=step, ratio=1.0)
            cpu_s = time.process_time() - cpu_s
            figures[way].append((stalled - started, stall_cpu_s, time.monotonic() - stalled, cpu_s))
            publisher.wait()  # as the next publication would
    worlds.leave()
    print(f"{size / 1e6:.0f} MB a version, steps of {options.samples} x {options.tokens} tokens, medians of "
          f"{options.pairs}; stall in percent of the CPU seconds of a step by itself")  # fmt: skip
    medians = {way: [*map(statistics.median, zip(*of_way, strict=True))] for way, of_way in figures.items()}
    *_, alone_cpu_s = medians["synchronous"]
    for way, (stall_s, stall_cpu_s, step_s, cpu_s) in medians.items():
        print(f"  {way:12} stall {stall_s:6.2f} s, {stall_cpu_s:5.2f} CPU s = {100 * stall_cpu_s / alone_cpu_s:5.1f} %"
              f"   step {step_s:6.2f} s, {cpu_s:6.2f} CPU s")  # fmt: skip
    stall = medians["background"][1]
    shares = {"a step": stall / alone_cpu_s, "a synchronous publication": stall / medians["synchronous"][1]}
    for of, share in shares.items():
        print(f"{'met   ' if share <= TARGET else 'MISSED'} background: {share:.1%} of {of}, at most {TARGET:.0%}")
    return int(max(shares.values()) > TARGET)


if __name__ == "__main__":
    sys.exit(main())
