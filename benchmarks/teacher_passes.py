"""Measure how the layout of a row's teacher documents grows with their number.

    uv run python -m benchmarks.teacher_passes

A row of --tokens is one long sample with a hint at each of n turns, so its n teacher documents begin alike: what a long
session of an agent gives. `cut` finds the passes that read them (trainer/data.py); `layouts` lays each longer pass out
anew, which is the rule as it reads and gives the same passes. Both are timed in turn, in CPU seconds. The exit status
is 1 when the layouts take less than four times as long at the largest number of hints.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from benchmarks._verdicts import conclude
from composer_prime.packing.pack import Row, pack, prefix_layout
from composer_prime.wire.types import HintedTurn, Sample, VersionSpan, pack_flags, pack_floats, pack_ints
from trainer.data import _teacher_passes

TURN, HINT = 64, 32
LEAST_RATIO = 4.0


def make_row(tokens: int, hints: int) -> Row:
    ids = np.random.default_rng(0).integers(0, 50_000, tokens).astype(np.int32)
    starts = np.linspace(TURN, tokens - TURN, hints).astype(int).tolist()
    turns = [
        HintedTurn(
            start=start, end=start + TURN, weight=1.0, turn=number, error="none", teacher_start=start + HINT,
            teacher_ids=pack_ints(np.r_[ids[:start], np.full(HINT, number), ids[start : start + TURN]]),
        )
        for number, start in enumerate(starts)
    ]  # fmt: skip
    zeros = pack_floats(np.zeros(tokens))
    sample = Sample(
        sample_id="s/0", group_id="g", source="none", task_id="t", input_ids=pack_ints(ids), temperature=1.0,
        loss_mask=pack_flags(np.arange(tokens) >= TURN), logprobs=zeros, advantages=zeros, reward=0.5,
        version_spans=[VersionSpan(TURN, tokens, 0)], turns=[], distillations=turns,
    )  # fmt: skip
    ((batch,),) = pack([sample], run_id="r", step=1, world_size=1, max_tokens=2 * tokens)
    return Row.of(batch)


def passes_by_layout(row: Row, max_tokens: int) -> list[range]:
    passes: list[range] = []
    for teacher in row.teachers():
        longer = range(passes[-1].start if passes else teacher, teacher + 1)
        if passes and len(prefix_layout([row.tokens(each) for each in longer]).kept) <= max_tokens:
            passes[-1] = longer
        else:
            passes.append(range(teacher, teacher + 1))
    return passes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="of the sample")
    parser.add_argument("--hints", type=int, nargs="+", default=[15, 30, 60], help="turns with a hint")
    parser.add_argument("--quick", action="store_true", help="a short row: whether it works")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.hints = 4000, [5, 20]
    ratio = 0.0
    for hints in options.hints:
        row, seconds = make_row(options.tokens, hints), []
        for find in (lambda row: _teacher_passes(row, share=True, max_tokens=options.tokens),
                     lambda row: passes_by_layout(row, options.tokens)):  # fmt: skip
            started = time.process_time()
            passes = find(row)
            seconds.append((time.process_time() - started, passes))
        (cut_s, ours), (layouts_s, theirs) = seconds
        if ours != theirs:
            raise SystemExit(f"{hints} hints: the passes differ: {ours} and {theirs}")
        ratio = layouts_s / cut_s
        print(f"{options.tokens:,} tokens, {hints:3} hints, {len(ours)} passes: cut {cut_s:.3f} CPU s, layouts "
              f"{layouts_s:.3f} CPU s")  # fmt: skip
    said = f"{options.hints[-1]} hints: layouts take {ratio:.0f} times as long, at least {LEAST_RATIO:g}"
    return conclude([(said, ratio >= LEAST_RATIO)], is_quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
