"""Train on eight nodes that joined by an invite and fail at random: python -m benchmarks.fleet_chaos --network

    calm      trainer @ configs/a1.toml without nodes of its own, `orchestrator invite`, and --nodes x
              `inference join STRING`, each with a state folder and a key of its own
    chaos     the same, and after every --every steps, some seconds into the next one, one of the nodes
                  kill    kill -9 of all its processes; `inference join` with its state folder RETURN_S later
                  leave   SIGTERM: it drains and leaves for good. RETURN_S later a machine that was never there joins
                  freeze  SIGSTOP for FREEZE_S, then SIGCONT
                  hang    its engine hangs while its heartbeats go on; killed after HANG_S, and restarted there
    --network     each node in a network namespace, behind a wire of --mbit that drops --loss of all packets (root)

Both sides evaluate the same tasks at their end. A failure counts when it was seen: the signal that ended the node, its
drain, its stopped processes, the step that its engine did not compute, the tokens of a new machine. Groups are read
from the ledger and the recorded rollouts. Rollouts whose tokens are all older than max_staleness allows are not in the
ledger; their group is whole with them. Lost are tokens that an engine drew and no accepted answer holds, those of the
run's end included. The nodes count them in shared memory, which outlives kill -9. The exit status is 1 when a line of
the verdict failed, or when a node or the run ended by itself.
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
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.diloco_link_sides.wires import LossyStar
from benchmarks.rl_throughput_sides.processes import ROOT, SideFailedError, environment, tails
from composer_prime.console import console_script
from composer_prime.monitor.metrics_file import Tail
from composer_prime.monitor.rollouts import Scores, eval_scores, read_rollouts, rollout_files
from composer_prime.run.keys import RunKeys
from composer_prime.run.ledger import check_ledger, effective
from composer_prime.run.process import terminate
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import difference_interval, mean_interval
from composer_prime.wire.enrollment import Invite

RETURN_S, FREEZE_S, HANG_S, MOST_DELAY_S = 5.0, 20.0, 60.0, 20.0
ROLLOUT_S = 160.0
"""orchestrator.source.timeout_s. The gateway takes the requests from a node that hangs for a quarter of this."""
LEAST_MINUTES, MOST_LOST = 10.0, 0.05
ACTIONS = {
    "kill": [(0.0, "kill"), (RETURN_S, "return")],
    "leave": [(0.0, "leave"), (0.0, "left")],
    "freeze": [(0.0, "freeze"), (FREEZE_S, "thaw")],
    "hang": [(0.0, "hang"), (HANG_S, "end hang")],
}
"""What happens to a node, and when: seconds after the first."""
KINDS = tuple(ACTIONS)
START_S, END_S = 600.0, 40.0
GROUP_SIZE, MAX_STALENESS = 8, 1
"""Of configs/a1.toml; the latter in versions."""
COUNTER_VARIABLE = "FLEET_CHAOS_COUNTER"
TOKENS, HANGS, COUNTER_BYTES = 0, 1, 16
HOOK = """import sys
if "--slot" in sys.orig_argv:
    from benchmarks.fleet_chaos import watch_engine
    watch_engine()
"""
"""sitecustomize.py of the nodes: `inference join` stays as it is. Its child with --slot has the engine."""


def watch_engine() -> None:
    """Count the drawn tokens of this process and the hangs of its engine; SIGUSR1 hangs it for good."""
    from inference.engines.local.compute import Computer

    hung = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hung.set())
    with open(os.environ[COUNTER_VARIABLE], "r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), COUNTER_BYTES)).cast("q")
    append, compute = Computer._append, Computer._compute

    def counted(self: Computer, slot: int, token: int, logprob: float) -> None:
        counts[TOKENS] += 1
        append(self, slot, token, logprob)

    def hanging(self: Computer, step: Any) -> None:
        counts[HANGS] += hung.is_set()
        while hung.is_set():
            time.sleep(1)
        compute(self, step)

    Computer._append, Computer._compute = counted, hanging


@dataclass(slots=True)
class Node:
    """A machine: what `inference join` left there, and its processes."""

    name: str
    folder: Path
    process: subprocess.Popen | None = None
    due: list[tuple[float, str]] = field(default_factory=list)
    """What happens to it next: (monotonic time, action), in order."""
    awaited: str = ""
    """What is seen as soon as it draws more than `drawn` tokens."""
    drawn: int = 0
    hangs: int = 0
    """Of its engine, before the last failure."""

    def counts(self) -> list[int]:
        """Return its TOKENS and HANGS so far."""
        path = self.folder / "counts"
        return list(memoryview(path.read_bytes()).cast("q")) if path.exists() else [0, 0]

    def processes(self) -> list[psutil.Process]:
        """Return the engine's process, then `inference join`, which would ask it to drain if it died first."""
        if self.process is None or self.process.poll() is not None:
            return []
        own = psutil.Process(self.process.pid)
        return [*own.children(recursive=True), own]

    def await_tokens(self, what: str) -> None:
        self.awaited, self.drawn = what, self.counts()[TOKENS]

    def send(self, number: signal.Signals) -> None:
        """Signal all its processes that are still there."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def engine(self) -> psutil.Process:
        """Return the process of its engine. Raises SideFailedError when there is none."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if "--slot" in process.cmdline():
                    return process
        raise SideFailedError(f"{self.name} has no engine")


class Side:
    """A run and its nodes, in `folder`."""

    def __init__(self, options: argparse.Namespace, folder: Path, chaos: bool) -> None:
        self.options, self.folder, self.chaos = options, folder, chaos
        self.run_dir, self.random = RunDir(folder / "run"), random.Random(options.seed)
        failures = (options.steps - 1) // options.every if chaos else 0
        leaves = math.ceil(failures / len(KINDS))
        names = [f"box-{index}" for index in range(options.nodes + leaves)]
        self.nodes = [Node(name, folder / name) for name in names]
        self._spare = self.nodes[options.nodes :]
        """Machines that have not joined yet."""
        self.struck: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.load = 0.0
        self._star: LossyStar | None = None
        self._run: subprocess.Popen | None = None
        self._invite, self._step = "", 0

    def play(self) -> None:
        """Run to the end. Raises SideFailedError."""
        (self.folder / "hook").mkdir(parents=True)
        (self.folder / "hook/sitecustomize.py").write_text(HOOK)
        with ExitStack() as stack:
            if self.options.network:
                names = [node.name for node in self.nodes]
                self._star = stack.enter_context(LossyStar(names, self.options.mbit, self.options.loss))
            stack.callback(self._end)
            self._run = self._start("run", [*console_script("trainer"), "@", "configs/a1.toml", *self._words()])
            self._invite = self._make_invite()
            for node in self.nodes[: self.options.nodes]:
                self._join(node, "start")
            self._watch()

    def _end(self) -> None:
        for node in self.nodes:
            node.send(signal.SIGCONT)
        runs = [psutil.Process(self._run.pid)] if self._run is not None and self._run.poll() is None else []
        terminate([*runs, *(process for node in self.nodes for process in node.processes())], END_S)

    def _words(self) -> list[str]:
        host = self._star.address("run") if self._star else "127.0.0.1"
        values = {
            "run.name": "run", "run.output_dir": self.folder, "run.max_steps": self.options.steps,
            "run.seed": self.options.seed, "monitor.view": "plain", "inference.nodes": 0,
            "inference.max_concurrent": 32, "inference.local.max_batch": 32,
            "orchestrator.node_address": f"tcp://{host}:0", "orchestrator.filter_zero_advantage": "false",
            "orchestrator.eval.every_steps": self.options.steps, "orchestrator.eval.tasks": self.options.tasks,
            "orchestrator.groups_per_step": self.options.groups, "trainer.checkpoint.every_steps": 0,
            "orchestrator.worker_start_timeout_s": START_S, "orchestrator.source.0.timeout_s": ROLLOUT_S,
        }  # fmt: skip
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]

    def _start(self, end_name: str, argv: list[str], **more: str) -> subprocess.Popen:
        inside = self._star.enter(end_name) if self._star else []
        with (self.folder / f"{end_name}.log").open("ab") as log:
            return subprocess.Popen(
                [*inside, *argv], cwd=ROOT, env=environment(**more), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _make_invite(self) -> str:
        deadline = time.monotonic() + START_S
        while not self.run_dir.endpoints.is_file():
            self._check_run()
            if time.monotonic() > deadline:
                raise SideFailedError(f"the run opened no port for nodes within {START_S:g} s\n{self._tail('run')}")
            time.sleep(0.5)
        words = ["invite", str(self.run_dir.root), "--nodes", str(len(self.nodes)), "--trust-nodes", "--quiet"]
        words += [] if self._star else ["--allow-loopback"]
        made = subprocess.run(
            [*console_script("orchestrator"), *words], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        if made.returncode:
            raise SideFailedError(f"orchestrator invite: {made.stderr}")
        return made.stdout.strip()

    def _join(self, node: Node, what: str) -> None:
        """Run `inference join`, whose first token is seen as `what`."""
        node.folder.mkdir(exist_ok=True)
        counts = node.folder / "counts"
        if not counts.exists():
            counts.write_bytes(bytes(COUNTER_BYTES))
        words = ["join", self._invite, "--state-dir", str(node.folder), "--name", node.name, "--threads", "1"]
        path = os.pathsep.join([str(self.folder / "hook"), str(ROOT)])
        more = {"PYTHONPATH": path, COUNTER_VARIABLE: str(counts)}
        node.process = self._start(node.name, [*console_script("inference"), *words], **more)
        node.await_tokens(what)

    def _watch(self) -> None:
        tail, deadline = Tail(self.run_dir.root / "metrics.jsonl"), time.monotonic() + self.options.timeout_s
        assert self._run is not None
        while self._run.poll() is None:
            if time.monotonic() > deadline:
                raise SideFailedError(f"not done after {self.options.timeout_s} s (--timeout-s)\n{self._tail('run')}")
            for line in tail.read():
                if "loss/total" in line:
                    self._step = int(line["step"])
                    self._strike()
            for node in self.nodes:
                self._go_on(node)
            time.sleep(0.2)
        self._check_run()
        self.load = os.getloadavg()[1]

    def _strike(self) -> None:
        """Let a node fail after every --every steps; at least half of the nodes stay untouched."""
        healthy = [node for node in self.nodes if node.process and not node.due and not node.awaited]
        if not self.chaos or self._step % self.options.every or len(healthy) <= self.options.nodes // 2:
            return
        if self._step >= self.options.steps:
            return
        node, kind = self.random.choice(healthy), KINDS[sum(self.struck[each] for each in KINDS) % len(KINDS)]
        begin_s = self.random.uniform(0, MOST_DELAY_S)
        print(f"  step {self._step} + {begin_s:.0f} s: {kind} {node.name}", flush=True)
        self.struck[kind] += 1
        node.due = [(time.monotonic() + begin_s + wait_s, action) for wait_s, action in ACTIONS[kind]]
        if kind == "leave":
            self.struck["join"] += 1
            self._spare.pop(0).due = [(time.monotonic() + begin_s + RETURN_S, "join")]

    def _go_on(self, node: Node) -> None:
        """See what came of the last failure, and do what is due. After the last step nodes end with the run."""
        if node.awaited and node.counts()[TOKENS] > node.drawn:
            self.seen[node.awaited] += 1
            node.awaited = ""
        if self._step >= self.options.steps:
            return
        while node.due and node.due[0][0] <= time.monotonic():
            if not self._act(node, node.due[0][1]):
                return
            del node.due[0]
        if node.process and node.process.poll() is not None and not node.due:
            raise SideFailedError(f"{node.name} ended by itself\n{self._tail(node.name)}")

    def _act(self, node: Node, action: str) -> bool:
        """Return False to be called again."""
        if action == "join" or node.process is None:
            self._join(node, "join")
            return True
        match action:
            case "kill":
                node.send(signal.SIGKILL)
            case "return":
                self.seen["kill"] += node.process.wait() == -signal.SIGKILL
                self._join(node, "back after kill")
            case "leave":
                node.process.send_signal(signal.SIGTERM)
            case "left":
                if node.process.poll() is None:
                    return False
                self.seen["leave"] += node.process.returncode == 0
                node.process = None
            case "freeze":
                node.send(signal.SIGSTOP)
            case "thaw":
                states = {process.status() for process in node.processes()}
                self.seen["freeze"] += states == {psutil.STATUS_STOPPED}
                node.send(signal.SIGCONT)
                node.await_tokens("back after freeze")
            case "hang":
                node.hangs = node.counts()[HANGS]
                node.engine().send_signal(signal.SIGUSR1)
            case "end hang":
                self.seen["hang"] += node.counts()[HANGS] > node.hangs
                node.engine().kill()
                node.await_tokens("back after hang")
        return True

    def _check_run(self) -> None:
        if self._run is not None and self._run.poll():
            raise SideFailedError(f"the run ended with exit status {self._run.returncode}\n{self._tail('run')}")

    def _tail(self, name: str) -> str:
        return tails([self.folder / f"{name}.log"])

    # -- what came of it -------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Return what the ledger and the recorded rollouts show that must not be."""
        found = check_ledger(self.run_dir.ledger)
        steps = effective(self.run_dir.ledger)
        if sorted(steps) != list(range(1, self.options.steps + 1)):
            found.append(f"{len(steps)} steps were trained, expected 1 to {self.options.steps}")
        step_of: dict[str, int] = {}
        for step, samples in steps.items():
            trained = {sample.rpartition("/")[0] for sample in samples}
            members = Counter(rollout.rpartition("-")[0] for rollout in trained | self.stale(step))
            found += [f"{group} was trained in steps {step_of[group]} and {step}" for group in members
                      if group in step_of]  # fmt: skip
            found += [f"{group} of step {step} has {count} of {GROUP_SIZE} rollouts"
                      for group, count in members.items() if count != GROUP_SIZE]  # fmt: skip
            step_of |= dict.fromkeys(members, step)
            if len(members) != self.options.groups:
                found.append(f"step {step} has {len(members)} groups, expected {self.options.groups}")
        return found + self._faults_of_records(set(step_of))

    def _faults_of_records(self, trained: set[str]) -> list[str]:
        """Compare the recorded rollouts with the groups of the ledger, and look for groups that ended nowhere."""
        times: Counter[str] = Counter()
        groups: dict[str, str] = {}
        for path in rollout_files(self.run_dir, "step").values():
            for line in read_rollouts(path):
                times[line["rollout_id"]] += 1
                groups[line["rollout_id"].rpartition("-")[0]] = line["status"]
        found = [f"{rollout} is recorded {count} times" for rollout, count in times.items() if count > 1]
        recorded = {group for group, status in groups.items() if status == "trained"}
        found += [f"{group} is in {'the ledger' if group in trained else 'the records'} only"
                  for group in sorted(recorded ^ trained)]  # fmt: skip
        numbers = {int(group[1:]) for group in groups}
        last = rollout_files(self.run_dir, "step")[self.options.steps]
        begun = min(line["group"] for line in read_rollouts(last))
        return found + [f"g{number:06d} ended nowhere" for number in range(begun) if number not in numbers]

    def stale(self, step: int) -> set[str]:
        """Return the rollouts of a batch that is trained without their tokens, which are all too old for it.

        Such a group waited for a sibling on a node that failed.
        """
        oldest = step - 1 - MAX_STALENESS
        lines = read_rollouts(self.run_dir.root / f"rollouts/step_{step:06d}.jsonl")
        return {
            line["rollout_id"] for line in lines if line["status"] == "trained" and line["policy_versions"][1] < oldest
        }

    def scores(self) -> Scores:
        return eval_scores(self.run_dir)[self.options.steps]

    def lost(self) -> float:
        """Return the share of drawn tokens that no accepted answer holds."""
        return 1 - self.accepted() / self.drawn()

    def drawn(self) -> int:
        return sum(node.counts()[TOKENS] for node in self.nodes)

    def accepted(self) -> int:
        return max(int(line.get("gateway/tokens", 0)) for line in self._lines())

    def counters(self) -> dict[str, int]:
        last = {"stale_rollouts": sum(len(self.stale(step)) for step in range(1, self.options.steps + 1))}
        for line in self._lines():
            last |= {name[8:]: int(value) for name, value in line.items()
                     if name in ("gateway/reissued", "gateway/late_answers", "gateway/bad_answers")}  # fmt: skip
        return last

    def minutes(self) -> float:
        """Return the time from the end of the first step to that of the last."""
        times = [line["time"] for line in self._lines() if "loss/total" in line]
        return (times[-1] - times[0]) / 60

    def identities(self) -> tuple[int, int, int]:
        """Return the nodes that the run knows, the uses of the invite, and the machines that got an answer."""
        registry = RunKeys(self.run_dir.keys).registry
        used = len(self.nodes) - (registry.uses_left(Invite.read(self._invite).keys.own.public) or 0)
        return len(registry.list()), used, sum(any(node.folder.glob("*/node-0.enrolled")) for node in self.nodes)

    def found_hangs(self) -> int:
        """Return how often the gateway took the requests of a node whose heartbeats went on."""
        return self.run_dir.log("orchestrator").read_text().count(", but sends heartbeats. Its ")

    def restarts(self) -> int:
        """Return how often `inference join` started an engine again."""
        logs = [self.folder / f"{node.name}.log" for node in self.nodes]
        return sum(log.read_text().count("; restarting it in ") for log in logs if log.exists())

    def _lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir.root / "metrics.jsonl").read_text().splitlines()]


def verdict(chaos: Side, calm: Side) -> Iterator[tuple[str, bool]]:
    """Yield what was seen with its aim, and whether it was met."""
    minutes = chaos.minutes()
    yield f"{minutes:.1f} minutes of training with failures, at least {LEAST_MINUTES:g}", minutes >= LEAST_MINUTES
    for name, side in (("calm", calm), ("chaos", chaos)):
        faults = side.faults()
        groups = side.options.steps * side.options.groups
        text = f"{name}: {groups} groups trained, each once and whole: {len(faults)} faults in ledger and records"
        yield "\n         ".join([text, *faults]), not faults
        joined, used, machines = side.identities()
        text = f"{name}: {machines} machines joined with {joined} keys and {used} uses of the invite, one each"
        yield text, joined == used == machines > 0
        started = side.seen["start"]
        yield (
            f"{name}: {started} nodes at the start drew tokens, all {side.options.nodes}",
            started == side.options.nodes,
        )
    for kind in (*KINDS, "join"):
        seen, back = chaos.seen[kind], chaos.seen[f"back after {kind}"]
        text, good = f"{kind}: seen {seen} of {chaos.struck[kind]} times, at least once", seen > 0
        if kind not in ("leave", "join"):
            text, good = f"{text}; drew tokens afterwards {back} times, at least once", good and back > 0
        yield text, good
    found, hangs = chaos.found_hangs(), chaos.struck["hang"]
    yield f"{found} times the gateway found that a node with heartbeats hung, at least once", found > 0
    yield f"{chaos.restarts()} engines were started again, at most the {hangs} that hung", chaos.restarts() <= hangs
    yield f"calm: {calm.restarts()} engines were started again, none", not calm.restarts()
    change = difference_interval(calm.scores(), chaos.scores())
    yield (
        f"reward of chaos - calm: {change.text(sign=True)} over {change.count} tasks, the interval reaches 0",
        change.high is not None and change.high >= 0,
    )
    for name, side in (("calm", calm), ("chaos", chaos)):
        yield (
            f"{name}: {side.lost():.2%} of {side.drawn()} drawn tokens lost, less than {MOST_LOST:.0%}",
            0 <= side.lost() < MOST_LOST,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--groups", type=int, default=16, help="of 8 rollouts, a step")
    parser.add_argument("--tasks", type=int, default=128, help="held-out, at the end")
    parser.add_argument("--every", type=int, default=2, help="steps between failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--timeout-s", type=float, default=7200.0, help="of each side")
    parser.add_argument("--folder", type=Path, help="an empty one, to keep both runs and their logs")
    options = parser.parse_args()
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-chaos-") as temporary:
        for name in ("chaos", "calm"):
            print(f"{name}: {options.nodes} nodes, {options.steps} steps", flush=True)
            side = sides[name] = Side(options, (options.folder or Path(temporary)).absolute() / name, name == "chaos")
            try:
                side.play()
            except SideFailedError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            print(f"  {side.minutes():.1f} minutes, load {side.load:.0f}, reward "
                  f"{mean_interval(side.scores()).text()}, {side.counters()}", flush=True)  # fmt: skip
        answers = list(verdict(sides["chaos"], sides["calm"]))
    for text, is_good in answers:
        print(f"{'passed' if is_good else 'FAILED'}   {text}")
    return int(not all(is_good for _, is_good in answers))


if __name__ == "__main__":
    raise SystemExit(main())
