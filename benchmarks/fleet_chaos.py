"""Train on eight joined nodes that fail at random: python benchmarks/fleet_chaos.py [--steps 60] [--seed 0] [--network]

    calm      trainer @ configs/a1.toml without nodes of its own, and --nodes x `inference join`
    chaos     the same, and after every --every steps, some seconds into the next one, one of the nodes
                  kill    kill -9; a new process joins under its name RETURN_S later
                  leave   SIGTERM: it drains and leaves; a new process joins RETURN_S later
                  freeze  SIGSTOP for FREEZE_S, then SIGCONT
                  hang    its engine hangs while its heartbeats go on; killed after FREEZE_S, joins RETURN_S later
    --network     each node in a network namespace, behind a wire of --mbit that drops --loss of all packets (root)

Both sides evaluate the same tasks at their end. The benchmark ends with status 1 when a sample was trained twice, a
group is missing or torn (rollouts whose tokens are all older than max_staleness allows are counted, not missed), a node
was turned away for good or ended by itself, the chaotic side's reward is below the calm one's by more than a 95 %
interval over tasks allows, or more than MOST_LOST of its sampled tokens were lost. Lost are tokens that a node's engine
drew and no accepted answer holds, those of the run's end included. The nodes count them in shared memory, which
outlives kill -9.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.diloco_link_sides.wires import LossyStar
from benchmarks.rl_throughput_sides.processes import ROOT, SideFailedError, end, environment, tails
from composer_prime.monitor.metrics_file import Tail
from composer_prime.monitor.rollouts import read_rollouts
from composer_prime.run.ledger import check_ledger, effective

KINDS = ("kill", "leave", "freeze", "hang")
RETURN_S, FREEZE_S, MOST_DELAY_S = 5.0, 20.0, 20.0
MOST_LOST = 0.05
START_S = 600.0
MAX_STALENESS = 1
"""Of configs/a1.toml, in versions."""
COUNTER_BYTES = 8
SETTINGS = "[inference]\nengine = 'local'\nthreads = 1\nmax_concurrent = 32\n[inference.local]\nmax_batch = 32\n"


# ---- one node, in its own process ------------------------------------------------------------------------------------


def serve(counter: Path, words: list[str]) -> int:
    """Run `inference` with `words`. Count drawn tokens in `counter`; SIGUSR1 hangs the engine for good."""
    from inference.engines.local.compute import Computer
    from inference.main import main

    hung = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hung.set())
    with counter.open("r+b") as file:
        tokens = memoryview(mmap.mmap(file.fileno(), COUNTER_BYTES)).cast("q")
    append, compute = Computer._append, Computer._compute

    def counted(self: Computer, slot: int, token: int, logprob: float) -> None:
        tokens[0] += 1
        append(self, slot, token, logprob)

    def hanging(self: Computer, step: Any) -> None:
        while hung.is_set():
            time.sleep(1)
        compute(self, step)

    Computer._append, Computer._compute = counted, hanging
    sys.argv = ["inference", *words]
    return main()


# ---- one side --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    name: str
    counter: Path
    process: subprocess.Popen | None = None
    busy: bool = False
    """Whether a failure is under way."""
    due: list[tuple[float, str]] = field(default_factory=list)
    """What happens to it next: (monotonic time, action), in order."""

    @property
    def tokens(self) -> int:
        return int.from_bytes(self.counter.read_bytes(), "little")


class Side:
    """A run and its nodes, in `folder`."""

    def __init__(self, options: argparse.Namespace, folder: Path, star: LossyStar | None, chaos: bool) -> None:
        self.options, self.folder, self.star = options, folder, star
        self.run_dir, self.random = folder / "run", random.Random(options.seed)
        self.nodes = [Node(f"node-{index}", folder / f"node-{index}.tokens") for index in range(options.nodes)]
        self.failures: Counter[str] = Counter()
        self.chaos, self.load = chaos, 0.0
        self._run: subprocess.Popen | None = None
        self._step = 0

    def play(self) -> None:
        """Run to the end. Raises SideFailedError."""
        (self.folder / "nodes.toml").write_text(SETTINGS)
        host = self.star.address("run") if self.star else "127.0.0.1"
        self._run = self._start(
            "run", [sys.executable, "-m", "trainer.main", "@", "configs/a1.toml", *self._words(host)]
        )
        try:
            address = self._address(host)
            for node in self.nodes:
                node.counter.write_bytes(bytes(COUNTER_BYTES))
                self._join(node, address)
            self._watch(address)
        finally:
            for node in self.nodes:
                if node.process is not None and node.process.poll() is None:
                    os.kill(node.process.pid, signal.SIGCONT)
            end([each for each in (self._run, *(node.process for node in self.nodes)) if each is not None])

    def _words(self, host: str) -> list[str]:
        values = {
            "run.name": "run", "run.output_dir": self.folder, "run.max_steps": self.options.steps,
            "run.seed": self.options.seed, "monitor.view": "plain", "inference.nodes": 0,
            "orchestrator.node_address": f"tcp://{host}:0", "orchestrator.filter_zero_advantage": "false",
            "orchestrator.eval.every_steps": self.options.steps, "orchestrator.eval.tasks": self.options.tasks,
            "orchestrator.groups_per_step": self.options.groups, "trainer.checkpoint.every_steps": 0,
            "orchestrator.worker_start_timeout_s": START_S,
        }  # fmt: skip
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]

    def _start(self, end_name: str, argv: list[str]) -> subprocess.Popen:
        inside = self.star.enter(end_name) if self.star else []
        with (self.folder / f"{end_name}.log").open("ab") as log:
            return subprocess.Popen(
                [*inside, *argv], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _address(self, host: str) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (self.run_dir / "endpoints.json").is_file():
                return json.loads((self.run_dir / "endpoints.json").read_text())["node"]
            self._check(self._run)
            time.sleep(0.5)
        raise SideFailedError(f"the run opened no port for nodes at {host} within {START_S:g} s\n{self._tail('run')}")

    def _join(self, node: Node, address: str) -> None:
        words = ["join", address, "--model", "tiny", "--name", node.name, "--settings", str(self.folder / "nodes.toml"),
                 "--max-context", "384", "--token-file", str(self.run_dir / "keys/node.token")]  # fmt: skip
        argv = [sys.executable, "-m", "benchmarks.fleet_chaos", "--as-node", str(node.counter), *words]
        node.process, node.busy = self._start(node.name, argv), False

    def _watch(self, address: str) -> None:
        tail, deadline = Tail(self.run_dir / "metrics.jsonl"), time.monotonic() + self.options.timeout_s
        assert self._run is not None
        while self._run.poll() is None:
            if time.monotonic() > deadline:
                raise SideFailedError(f"not done after {self.options.timeout_s} s (--timeout-s)\n{self._tail('run')}")
            for line in tail.read():
                if "loss/total" in line:
                    self._step = int(line["step"])
                    self._strike()
            for node in self.nodes:
                self._go_on(node, address)
            time.sleep(0.2)
        self._check(self._run)
        self.load = os.getloadavg()[1]

    def _strike(self) -> None:
        """Let a node fail after every --every steps; at least half of the nodes stay untouched."""
        healthy = [node for node in self.nodes if not node.busy]
        if not self.chaos or self._step % self.options.every or len(healthy) <= len(self.nodes) // 2:
            return
        if self._step >= self.options.steps:
            return
        node, kind = self.random.choice(healthy), KINDS[sum(self.failures.values()) % len(KINDS)]
        delay_s = self.random.uniform(0, MOST_DELAY_S)
        print(f"  step {self._step} + {delay_s:.0f} s: {kind} {node.name}", flush=True)
        self.failures[kind] += 1
        node.busy, now = True, time.monotonic()
        actions = {
            "kill": [(0, "KILL"), (RETURN_S, "join")],
            "leave": [(0, "TERM"), (RETURN_S, "join")],
            "freeze": [(0, "STOP"), (FREEZE_S, "CONT")],
            "hang": [(0, "USR1"), (FREEZE_S, "KILL"), (FREEZE_S + RETURN_S, "join")],
        }[kind]
        node.due = [(now + delay_s + wait_s, action) for wait_s, action in actions]

    def _go_on(self, node: Node, address: str) -> None:
        assert node.process is not None
        if not node.busy and node.process.poll() is not None and self._step < self.options.steps:
            raise SideFailedError(f"{node.name} ended by itself\n{self._tail(node.name)}")
        while node.due and node.due[0][0] <= time.monotonic():
            _, action = node.due.pop(0)
            if action != "join":
                node.process.send_signal(signal.Signals[f"SIG{action}"])
                node.busy = action != "CONT"
            elif node.process.poll() is None:  # it still drains
                node.due.insert(0, (time.monotonic() + 1.0, "join"))
                return
            else:
                self._join(node, address)

    def _check(self, process: subprocess.Popen | None) -> None:
        if process is not None and process.poll():
            raise SideFailedError(f"the run ended with exit status {process.returncode}\n{self._tail('run')}")

    def _tail(self, name: str) -> str:
        return tails([self.folder / f"{name}.log"])

    # -- what came of it -------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Return what the ledger shows that must not be."""
        groups, siblings = self.options.groups, 8
        found = check_ledger(self.run_dir / "ledger.jsonl")
        steps = effective(self.run_dir / "ledger.jsonl")
        if sorted(steps) != list(range(1, self.options.steps + 1)):
            found.append(f"{len(steps)} steps were trained, expected 1 to {self.options.steps}")
        step_of: dict[str, int] = {}
        for step, samples in steps.items():
            rollouts = {sample.rpartition("/")[0] for sample in samples}
            members = Counter(rollout.rpartition("-")[0] for rollout in rollouts | self.stale(step))
            found += [f"group {group} was trained in steps {step_of[group]} and {step}" for group in members
                      if group in step_of]  # fmt: skip
            found += [f"group {group} of step {step} has {count} of {siblings} rollouts"
                      for group, count in members.items() if count != siblings]  # fmt: skip
            step_of |= dict.fromkeys(members, step)
            if len(members) != groups:
                found.append(f"step {step} has {len(members)} groups, expected {groups}")
        return found

    def stale(self, step: int) -> set[str]:
        """Return the rollouts of a batch that is trained without their tokens, which are all too old for it.

        Such a group waited for a sibling on a node that failed.
        """
        oldest = step - 1 - MAX_STALENESS
        lines = read_rollouts(self.run_dir / f"rollouts/step_{step:06d}.jsonl")
        return {
            line["rollout_id"] for line in lines if line["status"] == "trained" and line["policy_versions"][1] < oldest
        }

    def reward(self) -> tuple[float, float]:
        """Return the held-out mean at the end and its standard error over tasks."""
        line = [line for line in self._lines() if "eval/toolsmith/reward_mean" in line][-1]
        mean = line["eval/toolsmith/reward_mean"]
        return mean, math.sqrt(max(mean * (1 - mean), 1e-3) / self.options.tasks)

    def tokens(self) -> tuple[int, int]:
        """Return how many tokens the nodes drew, and how many accepted answers hold."""
        accepted = max(int(line.get("gateway/tokens", 0)) for line in self._lines())
        return sum(node.tokens for node in self.nodes), accepted

    def counters(self) -> dict[str, int]:
        last = {"stale_rollouts": sum(len(self.stale(step)) for step in range(1, self.options.steps + 1))}
        for line in self._lines():
            last |= {name[8:]: int(value) for name, value in line.items()
                     if name in ("gateway/reissued", "gateway/late_answers", "gateway/bad_answers")}  # fmt: skip
        return last

    def seconds(self) -> float:
        times = [line["time"] for line in self._lines() if "loss/total" in line]
        return times[-1] - times[0]

    def _lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


def report(sides: dict[str, Side]) -> int:
    print("side    steps    s  load  failures                                  reward          drawn    lost  counters")
    faults: list[str] = []
    lost_of: dict[str, float] = {}
    for name, side in sides.items():
        faults += [f"{name}: {fault}" for fault in side.faults()]
        (mean, error), (drawn, accepted) = side.reward(), side.tokens()
        lost_of[name] = 1 - accepted / drawn
        failed = ", ".join(f"{count} {kind}" for kind, count in side.failures.items()) or "none"
        held_out = f"{mean:.3f} +- {1.96 * error:.3f}"
        print(f"{name:<6} {side.options.steps:6d} {side.seconds():4.0f}  {side.load:4.0f}  {failed:<40}  {held_out}  "
              f"{drawn:7d}  {lost_of[name]:6.2%}  {side.counters()}")  # fmt: skip
    if {"calm", "chaos"} <= sides.keys():
        (calm, calm_error), (chaos, chaos_error) = sides["calm"].reward(), sides["chaos"].reward()
        half = 1.96 * math.hypot(calm_error, chaos_error)
        print(f"reward of chaos - calm: {chaos - calm:+.3f} [{chaos - calm - half:+.3f}, {chaos - calm + half:+.3f}] "
              "over tasks; the noise of training comes on top")  # fmt: skip
        if chaos - calm + half < 0:
            faults.append(f"the reward fell by {calm - chaos:.3f}, more than {half:.3f}")
    if lost_of.get("chaos", 0.0) > MOST_LOST:
        faults.append(f"{lost_of['chaos']:.1%} of the drawn tokens were lost, at most {MOST_LOST:.0%} are allowed")
    print("\n".join(faults) if faults else "every group was trained once and whole")
    return 1 if faults else 0


def main() -> int:
    if sys.argv[1:2] == ["--as-node"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=8, help="of 8 rollouts, a step")
    parser.add_argument("--tasks", type=int, default=128, help="held-out, at the end")
    parser.add_argument("--every", type=int, default=2, help="steps between failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=["calm", "chaos"], default=["calm", "chaos"])
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of each side")
    options = parser.parse_args()
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-chaos-") as folder:
        for name in options.sides:
            place = Path(folder) / name
            place.mkdir()
            print(f"{name}: {options.nodes} nodes, {options.steps} steps", flush=True)
            with ExitStack() as stack:
                names = [f"node-{index}" for index in range(options.nodes)]
                star = stack.enter_context(LossyStar(names, options.mbit, options.loss)) if options.network else None
                sides[name] = Side(options, place, star, chaos=name == "chaos")
                try:
                    sides[name].play()
                except SideFailedError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    return 1
        return report(sides)


if __name__ == "__main__":
    raise SystemExit(main())
