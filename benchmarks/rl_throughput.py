"""Compare this trainer with TRL's GRPOTrainer: samples a second, and seconds to the same held-out reward.

    python benchmarks/rl_throughput.py            # both cases, under 15 minutes on two quiet cores
    python benchmarks/rl_throughput.py --quick    # a smoke test
    python benchmarks/rl_throughput.py --cases multi-turn --seed 1

Two cases on the tiny model and toolsmith's episodes: single-turn (the reward is for the first call) and multi-turn (the
whole episode, with tools: the verifiers harness here, TRL's own tool loop there). Both sides run one after the other as
processes of their own on the same CPUs, with the same tasks in the same order, rollouts a step, token limits, sampling,
loss (dr_grpo), optimizer and float32 weights. TRL gets its fastest way to use the cores, found by short runs (--trl
chooses one). The times exclude evaluation: the weights of some steps are kept, and one evaluator that belongs to
neither side scores them all afterwards. Differences that remain are printed as notes.

The exit status is 0 whoever wins, and 1 when a side fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rl_throughput_sides import ours, trl_runs
from benchmarks.rl_throughput_sides.plan import CASES, Case, Plan
from benchmarks.rl_throughput_sides.processes import SideFailedError, environment, python_module, start, watch
from benchmarks.rl_throughput_sides.report import SideResult, figures, table
from benchmarks.rl_throughput_sides.trl_tools import NOTES

ROLLOUT_TOKENS, TURN_TOKENS, CONTEXT = 256, 64, 512
TRY_STEPS = 3


def plan_of(case: Case, args: argparse.Namespace, seed: int) -> Plan:
    multi = case == "multi-turn"
    every = max(1, args.steps // args.points)
    points = tuple(range(every, args.steps, every)) if args.points > 1 else ()
    return Plan(
        case=case,
        steps=args.steps,
        groups=args.groups,
        group_size=args.group_size,
        max_tokens=TURN_TOKENS,
        max_turns=6 if multi else 1,
        max_completion=ROLLOUT_TOKENS if multi else TURN_TOKENS,
        max_context=CONTEXT,
        lr=args.lr,
        seed=seed,
        num_tasks=4096,
        max_difficulty=args.max_difficulty,
        points=(*points[: args.points - 1], args.steps),
        heldout=args.heldout,
        cores=tuple(args.cores),
    )


def run_case(case: Case, args: argparse.Namespace, folder: Path) -> tuple[Plan, SideResult, SideResult]:
    """(the plan, our result, TRL's). Raises SideFailedError."""
    plan = plan_of(case, args, args.seed)
    folder.mkdir()
    say(f"\n== {case}: {plan.steps} steps of {plan.groups} tasks x {plan.group_size} rollouts ==")
    variant = choose_variant(plan, args, folder)
    say("ours trains")
    own = ours.run(plan, folder / "ours", args.timeout_s)
    say("TRL trains")
    theirs = trl_runs.run(plan, folder / "trl", variant, args.timeout_s)
    evaluate(plan, (own, theirs), folder)
    return plan, own, theirs


def choose_variant(plan: Plan, args: argparse.Namespace, folder: Path) -> trl_runs.Variant:
    if args.trl != "best":
        ranks, threads = map(int, args.trl.split("x"))
        return trl_runs.Variant(ranks, threads)
    say("TRL: which way to use the cores is the fastest?")
    best, rates = trl_runs.fastest(plan, folder / "variants", TRY_STEPS, args.timeout_s)
    say("    " + ", ".join(f"{name}: {rate:.1f} samples/s" for name, rate in rates.items()) + f" -> {best}")
    return best


def evaluate(plan: Plan, sides: tuple[SideResult, SideResult], home: Path) -> None:
    """Fills in both sides' held-out rewards; a process for each CPU works on a share of the model folders."""
    say("evaluating the kept weights of both sides")
    file = plan.write(home / "heldout.json")
    folders = [plan.model, *(path for side in sides for path in side.folders.values())]
    shares = [folders[index :: len(plan.cores)] for index in range(len(plan.cores))]
    logs = [home / f"heldout_{index}.log" for index in range(len(shares))]
    outs = [home / f"heldout_{index}.json" for index in range(len(shares))]
    children = [
        start(python_module("heldout", file, out, *share), plan.cores, log, environment())
        for share, log, out in zip(shares, logs, outs, strict=True)
    ]
    watch(children, logs, timeout_s=3600)
    scores = {folder: reward for out in outs for folder, reward in json.loads(out.read_text()).items()}
    for side in sides:
        side.heldout[0] = scores[str(plan.model)]
        side.heldout.update({step: scores[str(path)] for step, path in side.folders.items()})


def say(line: str) -> None:
    print(line, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="two small steps of one case, one TRL variant, one core")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-difficulty", type=int, default=3, help="most calls that a task needs, 1 to 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, default=4, help="evaluated steps of each run, the last one included")
    parser.add_argument("--heldout", type=int, default=256, help="held-out tasks of each evaluation")
    parser.add_argument("--trl", default="best", help="best, or RANKSxTHREADS")
    parser.add_argument("--cores", type=int, nargs="+", help="CPU numbers that a side may use; default: the first two")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest time of one side's run")
    parser.add_argument("--keep", type=Path, help="keep run directories and logs in this new folder")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.points, args.heldout, args.trl = min(args.steps, 2), 1, 16, "1x1"
        args.groups, args.group_size, args.cases = min(args.groups, 2), min(args.group_size, 4), args.cases[:1]
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    args.cores = args.cores or list(available)[: 1 if args.quick else 2]
    return args


def main() -> int:
    args = arguments()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="rl-throughput-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    load = os.getloadavg()[0]
    say(f"CPUs {args.cores}; machine load {load:.1f}" + (": other work distorts the figures" if load > 0.5 else ""))
    try:
        for case in args.cases:
            plan, own, theirs = run_case(case, args, folder / case)
            say("\n".join(["", *table(figures(plan, own, theirs))]))
    except SideFailedError as error:
        say(f"failed: {error}")
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    say("\n" + "\n".join(f"note: {note}" for note in NOTES))
    say(f"done in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
