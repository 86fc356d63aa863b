"""The RL half of diloco_quality.py: Streaming DiLoCo against data-parallel training on toolsmith, with the tiny model.

Every cell is real: `diloco rendezvous` and two clusters over loopback, each `trainer @ configs/a1.toml @
configs/diloco/peer.toml` with its own orchestrator, node and trainer. Data-parallel is one cluster that takes both
clusters' rollouts at every step. All cells of a seed see the same number of rollouts a step. Better models write longer
trajectories, so tokens differ. Data-parallel is evaluated every EVALUATE_EVERY steps, which gives both gaps. Reported:

    reward      held-out, of the global model at the end, and its gaps to data-parallel of the same seed: at equal
                rollouts (its end) and at equal trained tokens (linear between its evaluations; its end when it had
                fewer)
    KL, clip    policy/mismatch_kl, policy/clip_fraction and, because a1's correction (dppo) drops tokens where others
                clip their ratio, policy/masked_fraction; mean over steps and clusters
    bytes       what one peer sent (diloco/bytes_sent, headers and heartbeats included); for data-parallel a
                bfloat16 gradient every step, which is not really sent here

Finished cells stay in the results file and are not run again, so an interrupted benchmark continues. A cell of the
default matrix (24 steps of 2 x 32 rollouts, 51 cells) takes about two minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks._shared import running
from benchmarks.rl_throughput_sides.processes import ROOT, SideFailedError, environment, start, watch
from composer_prime.model_source import resolve_model
from composer_prime.plan.footprint import ModelShape
from diloco.transport.messages import JointKey

DATA_PARALLEL = "data-parallel"
GRADIENT_BITS = 16
EVALUATE_EVERY = 2
"""Steps of data-parallel between evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    scheme: str
    every: int
    """H; 1 for data-parallel."""
    seed: int
    steps: int
    groups: int
    """Of each cluster, a step; data-parallel's one cluster has twice as many."""
    eval_tasks: int
    delay: int = 0
    """tau: inner steps while a fragment is on its way."""
    mixing: float | str = 0.0
    """What becomes of those steps; a setting of a delay alone."""

    @property
    def label(self) -> str:
        return f"{self.scheme} {self.mixing}" if self.delay else self.scheme

    @property
    def fragments(self) -> int:
        return min(2, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    reward: float
    mismatch_kl: float
    clip_fraction: float
    masked_fraction: float
    tokens: float
    """Trained, both clusters."""
    bytes_sent: float
    minutes: float
    evaluations: Sequence[Sequence[float]]
    """(trained tokens, held-out reward), in order; of a cluster that evaluates at its end, one."""

    def reward_at(self, tokens: float) -> float:
        """Held-out, after so many trained tokens: linear between evaluations, the nearest one outside of them."""
        points, rewards = zip(*self.evaluations, strict=True)
        return float(np.interp(tokens, points, rewards))


def cells(words: argparse.Namespace) -> list[Cell]:
    """Raises SystemExit where --steps ends between two synchronizations."""
    if odd := [every for every in words.sync_every if words.steps % every]:
        raise SystemExit(f"--steps {words.steps} is no multiple of --sync-every {odd[0]}: the last steps would be lost")
    found = []
    for seed in range(words.seeds):
        fixed = {"seed": seed, "steps": words.steps, "groups": words.groups, "eval_tasks": words.eval_tasks}
        found.append(Cell(scheme=DATA_PARALLEL, every=1, **fixed))
        schedules = [(delay, mixing) for delay in words.delays for mixing in (words.mixings if delay else [0.0])]
        for scheme, every, (delay, mixing) in itertools.product(words.schemes, words.sync_every, schedules):
            found.append(Cell(scheme=scheme, every=every, delay=delay, mixing=mixing, **fixed))
    return found


def run(words: argparse.Namespace) -> int:
    done = finished(words.results)
    todo = [cell for cell in cells(words) if cell not in done]
    print(f"{len(todo)} cell(s) to run, {len(done)} in {words.results}", flush=True)
    words.results.parent.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(todo, 1):
        folder = Path(tempfile.mkdtemp(prefix="diloco-quality-"))
        try:
            outcome = play(cell, folder, words.timeout_s)
        except SideFailedError as error:
            print(f"{cell}: {error}\nlogs are in {folder}", file=sys.stderr)
            return 1
        shutil.rmtree(folder)
        done[cell] = outcome
        with words.results.open("a") as file:
            file.write(json.dumps({"cell": asdict(cell), "outcome": asdict(outcome)}) + "\n")
        words_of = f"{cell.label} H={cell.every} tau={cell.delay} seed {cell.seed}"
        print(f"{number}/{len(todo)} {words_of}: {outcome.minutes:.1f} min", flush=True)
    print(table({cell: done[cell] for cell in cells(words)}))
    return 0


def finished(path: Path) -> dict[Cell, Outcome]:
    """Of the results file; a line that an interruption cut short is left out."""
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}}")]
    return {Cell(**line["cell"]): Outcome(**line["outcome"]) for line in lines}


def play(cell: Cell, folder: Path, timeout_s: float) -> Outcome:
    """Run one cell in `folder`. Raises SideFailedError."""
    began, names, cores = time.monotonic(), _names(cell), sorted(os.sched_getaffinity(0))
    with rendezvous(cell, folder) as address:
        argv = {name: _trainer(cell, name, folder, address) for name in names}
        logs = [folder / f"{name}.log" for name in names]
        started = [start(argv[name], cores, log, environment()) for name, log in zip(names, logs, strict=True)]
        watch(started, logs, timeout_s=timeout_s)
    runs = [_metrics(folder / f"run/{name}" if name else folder / "run") for name in names]
    return _outcome(cell, runs, (time.monotonic() - began) / 60)


def _names(cell: Cell) -> Sequence[str]:
    return ("",) if cell.scheme == DATA_PARALLEL else ("a", "b")


@contextmanager
def rendezvous(cell: Cell, folder: Path) -> Iterator[str]:
    """Run `diloco rendezvous` and yield its address; data-parallel has none. Raises SideFailedError."""
    if cell.scheme == DATA_PARALLEL:
        yield ""
        return
    JointKey.create(folder / "joint.key")
    argv = [sys.executable, "-m", "diloco.main", "rendezvous", "--run", "quality", "--start-peers", "2",
            "--min-peers", "2", "--bind", "tcp://127.0.0.1:0", "--key-file", str(folder / "joint.key")]  # fmt: skip
    path, pipe = folder / "rendezvous.log", subprocess.PIPE
    with path.open("wb") as log, running(argv, cwd=ROOT, env=environment(), stdout=pipe, stderr=log, text=True) as side:
        address = side.stdout.readline().rpartition(" at ")[2].strip()
        if not address:
            raise SideFailedError(path.read_text())
        yield address


def _trainer(cell: Cell, name: str, folder: Path, rendezvous: str) -> list[str]:
    clusters = 1 if cell.scheme == DATA_PARALLEL else 2
    evaluate = EVALUATE_EVERY if clusters == 1 else 0 if name == "b" else cell.steps
    argv = [sys.executable, "-m", "trainer.main", "@", "configs/a1.toml"]
    values: dict[str, object] = {
        "run.name": "run", "run.output_dir": folder, "run.max_steps": cell.steps,
        "run.seed": 2 * cell.seed + (name == "b"), "orchestrator.groups_per_step": cell.groups * 2 // clusters,
        "orchestrator.eval.every_steps": evaluate, "orchestrator.eval.tasks": cell.eval_tasks,
        "orchestrator.filter_zero_advantage": False, "trainer.checkpoint.every_steps": 0,
        "trainer.schedule.warmup_steps": cell.steps // 8,
    }  # fmt: skip
    if name:
        argv += ["@", "configs/diloco/peer.toml"]
        values |= {
            "diloco.rendezvous": rendezvous, "diloco.run": "quality", "diloco.peer-id": name,
            "diloco.delay": cell.delay, "diloco.mixing": cell.mixing,
            "diloco.key-file": folder / "joint.key", "diloco.sync-every": cell.every,
            "diloco.fragments": cell.fragments, "diloco.codec.type": cell.scheme,
        }  # fmt: skip
    return argv + [word for key, value in values.items() for word in (f"--{key}", str(value).lower()
                   if isinstance(value, bool) else str(value))]  # fmt: skip


def _metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _outcome(cell: Cell, runs: Sequence[list[dict]], minutes: float) -> Outcome:
    steps = [[line for line in run if "loss/total" in line] for run in runs]
    every = [line for lines in steps for line in lines]
    scores = _evaluations(runs)
    parameters = ModelShape.read(resolve_model("tiny")).parameters
    sent = steps[0][-1].get("diloco/bytes_sent", parameters * GRADIENT_BITS / 8 * cell.steps)
    return Outcome(
        reward=scores[-1][1],
        mismatch_kl=statistics.mean(line["policy/mismatch_kl"] for line in every),
        clip_fraction=statistics.mean(line["policy/clip_fraction"] for line in every),
        masked_fraction=statistics.mean(line["policy/masked_fraction"] for line in every),
        tokens=sum(line["tokens/trained"] for line in every),
        bytes_sent=sent,
        minutes=minutes,
        evaluations=scores,
    )


def _evaluations(runs: Sequence[list[dict]]) -> list[tuple[float, float]]:
    """Tokens of all clusters up to an evaluation's step, and its reward."""
    name = "eval/toolsmith/reward_mean"
    spent = {line["step"]: 0.0 for line in runs[0] if name in line}
    for line in itertools.chain(*runs):
        for step in spent:
            spent[step] += line.get("tokens/trained", 0.0) * (line["step"] <= step)
    return [(spent[line["step"]], line[name]) for line in runs[0] if name in line]


def table(outcomes: dict[Cell, Outcome]) -> str:
    """One row a scheme, H and delay, means over seeds; the gap to data-parallel is paired by seed."""
    lines = ["scheme         H tau  held-out reward  equal rollouts   equal tokens  mismatch KL"
             "  clipped   masked    Mtok   MB sent  times fewer"]  # fmt: skip
    base = {cell.seed: outcome for cell, outcome in outcomes.items() if cell.scheme == DATA_PARALLEL}
    kinds = dict.fromkeys((cell.label, cell.every, cell.delay) for cell in outcomes)
    for label, every, delay in kinds:
        kind = (label, every, delay)
        rows = {cell.seed: each for cell, each in outcomes.items() if (cell.label, cell.every, cell.delay) == kind}
        gaps = [each.reward - base[seed].reward for seed, each in rows.items()]
        fair = [each.reward - base[seed].reward_at(each.tokens) for seed, each in rows.items()]

        def mean(name: str, rows: dict[int, Outcome] = rows) -> float:
            return statistics.mean(getattr(each, name) for each in rows.values())

        fewer = statistics.mean(each.bytes_sent for each in base.values()) / mean("bytes_sent")
        lines.append(
            f"{label:<13} {every:2d} {delay:3d}  {mean('reward'):15.3f}  {_spread(gaps)}  {_spread(fair)}  "
            f"{mean('mismatch_kl'):11.2e}  {mean('clip_fraction'):7.2%}  "
            f"{mean('masked_fraction'):7.3%}  "
            f"{mean('tokens') / 1e6:6.3f}  {mean('bytes_sent') / 1e6:8.2f}  {fewer:11.1f}"
        )
    return "\n".join(lines)


def _spread(gaps: Sequence[float]) -> str:
    """Mean +- standard deviation over seeds."""
    return f"{statistics.mean(gaps):+.3f} +- {statistics.stdev(gaps) if len(gaps) > 1 else 0.0:.3f}"
