"""Time a live teacher's documents in the samples' row and apart, and compare with the trainer's rule.

    python benchmarks/hinted_rows.py
    python benchmarks/hinted_rows.py --shapes 64:96 1024:48 --model smollm2 --repeats 5

A shape is CONTEXT:TURN in tokens: samples with a context of their own and one turn, which the teacher reads again
after a hint of 16 tokens. The benchmark times what a step does with one row of them: the teacher's pass, if apart, then
the forward and backward pass with policy and SDPO. Both places take turns, one step each. The figure is the median
processor time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from composer_prime.config import Config
from composer_prime.config.channels import ChannelsConfig
from composer_prime.model_source import resolve_model
from composer_prime.packing.pack import pack, totals
from composer_prime.packing.row import Row
from composer_prime.wire.types import HintedTurn, Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data.rows import checked_row, unpack
from trainer.model.build import build_policy
from trainer.model.policy_model import Policy
from trainer.step import LossSettings, loss_of
from trainer.teacher.self_teacher import ReadCost, SelfTeacher, teachers_in_row

HINT = 16
ROW_TOKENS = 2048
"""Samples are added to the row up to about this many tokens; teacher documents come on top."""
PLACES = {True: "row", False: "apart"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    policy: Policy
    teacher: SelfTeacher
    settings: LossSettings
    channels: ChannelsConfig
    cost: ReadCost
    device: torch.device


def samples_of(context: int, turn: int, vocabulary: int) -> list[Sample]:
    """As many as fit the row, at least one; ids are drawn at random."""
    rng = np.random.default_rng(0)
    return [_sample(rng, index, context, turn, vocabulary) for index in range(max(1, ROW_TOKENS // (context + turn)))]


def _sample(rng: np.random.Generator, index: int, context: int, turn: int, vocabulary: int) -> Sample:
    ids, length = rng.integers(0, vocabulary, context + turn), context + turn
    teacher = np.r_[ids[:context], rng.integers(0, vocabulary, HINT), ids[context:]]
    hinted = HintedTurn(start=context, end=length, teacher_ids=pack_ints(teacher), teacher_start=context + HINT,
                          turn=0, error="benchmark")  # fmt: skip
    return Sample(
        sample_id=f"{index}/0", group_id=str(index), source="benchmark", task_id=str(index), input_ids=pack_ints(ids),
        loss_mask=pack_flags([0] * context + [1] * turn), logprobs=pack_floats(np.full(length, -np.log(vocabulary))),
        advantages=pack_floats(np.full(length, rng.normal())), reward=0.0, temperature=1.0,
        version_spans=[VersionSpan(context, length, 0)], turns=[], distillations=[hinted],
    )  # fmt: skip


def measure(bench: Bench, context: int, turn: int, repeats: int) -> None:
    """One line of the table."""
    samples = samples_of(context, turn, bench.policy.vocabulary)
    budget = sum(2 * (context + turn) + HINT for _ in samples)
    ((batch,),) = pack(samples, run_id="benchmark", step=1, world_size=1, max_tokens=budget)
    found = checked_row(batch, bench.policy.vocabulary)
    flops = dict(zip((True, False), bench.cost.of_teachers(found, share=True), strict=True))
    (taken,) = teachers_in_row([found], bench.channels, bench.cost, share=True)
    times: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for in_row in times:
            seconds = one_step(bench, found, samples, in_row)
            if repeat:  # the first warms up
                times[in_row].append(seconds)
    medians = {in_row: statistics.median(values) for in_row, values in times.items()}
    faster = medians[True] < medians[False]
    print(
        f"| {len(samples)} x {context}:{turn} | {flops[True] / 1e9:.2f} | {flops[False] / 1e9:.2f} | "
        f"{medians[True]:.3f} | {medians[False]:.3f} | {PLACES[taken]} | {PLACES[faster]} | "
        f"{medians[not taken] / medians[taken]:.2f} |",
        flush=True,
    )


def one_step(bench: Bench, found: Row, samples: list[Sample], in_row: bool) -> float:
    """Processor seconds."""
    row = unpack(found, bench.settings.terms, bench.device, share=True, teacher_in_row=in_row)
    bench.policy.zero_grad()
    begun = time.process_time()
    (auxiliary,) = bench.teacher.prepare([row])
    parts, _ = loss_of(bench.policy, row, totals(samples), bench.settings, auxiliary=auxiliary)
    parts.total.backward()
    return time.process_time() - begun


def build(model: str, output: Path) -> Bench:
    folder = resolve_model(model)
    config = Config.model_validate(
        {
            "run": {"name": "benchmark", "output_dir": str(output)},
            "model": {"path": str(folder)},
            "orchestrator": {"source": [{"name": "none", "taskset": {"id": "none"}}], "hints": {}},
            "trainer": {"device": "cpu"},
            "channels": {"sdpo": {"weight": 0.5, "teacher": {"kind": "live"}}},
        }
    )
    world = worlds.join(config.trainer)
    policy = build_policy(config, folder, world)
    return Bench(
        policy=policy,
        teacher=SelfTeacher(policy, config.channels, None),
        settings=LossSettings(terms=config.channels.terms(64)),
        channels=config.channels,
        cost=ReadCost.of(policy.lm.config, config.trainer),
        device=world.device,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["64:96", "384:96", "384:256", "1536:48", "1536:512"]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="CONTEXT:TURN")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one shape, once: whether it works")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.repeats = ["64:96"], 1
    print("| samples | GFLOP in the row | apart | CPU s in the row | apart | the rule takes | faster | saves |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as output:
        bench = build(options.model, Path(output))
        for shape in options.shapes:
            context, turn = map(int, shape.split(":"))
            measure(bench, context, turn, options.repeats)
    worlds.leave()


if __name__ == "__main__":
    main()
