"""Time synchronizations on a thin link, beside its forecast (diloco/forecast.py): python benchmarks/diloco_link.py

    peer a (namespace) ── tbf ──┐
                                ├── switch ── tbf ── rendezvous (namespace)
    peer b (namespace) ── tbf ──┘

Two peers of the product and its rendezvous run as processes, each in a network namespace of its own. Every link has a
token bucket both ways, the rendezvous' link too. Needs root, Linux and iproute2, and takes about five minutes on two
quiet cores. It leaves nothing behind, whichever way it ends.

Measured, as medians over both peers and --syncs synchronizations:
    tau = 0   seconds that a synchronization adds to the step that ends in it
    tau = 1   seconds that a fragment's synchronization costs training, and how many of them it waited for the link
Simulated: the same figures, from the bandwidth, the parameters and the codec. The machine's work on a fragment (encode,
decode, encrypt) depends on the machine. So for each codec and tau it is measured before and after, on the same links
without buckets, and passed to the simulator. The simulator's own constants are printed beside it. Latency is not added,
because many kernels have no netem.

Exit status: 0 when every figure is within 20 % of the simulated one and training waits for nothing that the simulator
hides behind steps; 1 when not; 2 when the benchmark cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from composer_prime.config.diloco import CodecConfig
from diloco.forecast import JointRun, forecast_link
from diloco.transport.keys import JointKey

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.diloco_link_sides.namespaces import Star, StarError  # noqa: E402

TOLERANCE = 0.20
NEAR_ZERO_S = 0.1
"""Waiting for the link that counts as none."""
BLOCKS, FRAGMENTS, DELAYED_INTERVAL, AT_ONCE_STEP_S = 8, 4, 2, 0.2
CELLS = {"fp32": (1000.0,), "int4": (100.0, 20.0)}
"""Megabits a second by the codec with which a synchronization takes seconds there, not milliseconds."""


class BenchError(RuntimeError):
    """A process ended or does not answer; the message ends with its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians, in seconds."""

    cost_s: float
    """What a synchronization adds to the steps that it begins and ends in."""
    waited_s: float
    """Of that, for the link."""


class Process:
    """One end of the star: a process that answers each line with a line."""

    def __init__(self, star: Star, end: str, argv: list[str], log: Path) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.end, self._log = end, log
        self._process = star.start(end, [sys.executable, "-m", *argv], log, env)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, order: dict) -> None:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def line(self, timeout_s: float) -> str:
        """The next line. Raises BenchError when none comes."""
        try:
            if line := self._lines.get(timeout=timeout_s):
                return line
            why = "ended"
        except queue.Empty:
            why = f"was silent for {timeout_s:g} s (--timeout-s)"
        raise BenchError(f"the process at {self.end} {why}\n{self._log.read_text()[-2000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Bench:
    def __init__(self, star: Star, folder: Path, words: argparse.Namespace) -> None:
        self._star, self._folder, self._words = star, folder, words
        self._stack = ExitStack()
        self._key = folder / "joint.key"
        JointKey.create(self._key)
        self._rendezvous: Process | None = None
        self._plain_s, self._port = 0.0, 29600

    def __enter__(self) -> Bench:
        shape = [str(BLOCKS), str(self._words.width)]
        self._peers = [
            self._start(name, ["benchmarks.diloco_link_sides.peer", *shape, str(ord(name))]) for name in ("a", "b")
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, end: str, argv: list[str]) -> Process:
        process = Process(self._star, end, argv, self._folder / f"{end}.log")
        self._stack.callback(process.close)
        return process

    def join(self, run: JointRun) -> JointRun:
        """Begin a joint run with a rendezvous of its own and one synchronization; `run` with the steps' real time."""
        before, self._port = self._rendezvous, self._port + 1
        bind, key = f"tcp://{self._star.address('rendezvous')}:{self._port}", str(self._key)
        argv = ["diloco.main", "rendezvous", "--run", "link", "--key-file", key, "--bind", bind]
        self._rendezvous = self._start("rendezvous", [*argv, "--start-peers", "2", "--min-peers", "2"])
        self._rendezvous.line(self._words.timeout_s)
        for peer in self._peers:
            diloco = {
                "rendezvous": bind, "run": "link", "peer_id": peer.end, "key_file": key, "delay": run.delay,
                "sync_every": run.every, "fragments": run.fragments, "codec": {"type": run.codec.type},
            }  # fmt: skip
            peer.tell({"step_s": run.step_s, "diloco": diloco})
        replies = [json.loads(peer.line(self._words.timeout_s)) for peer in self._peers]
        self._plain_s = statistics.median(each["plain_s"] for each in replies)
        if before is not None:
            before.close()
        self.measure(run, syncs=1)
        return replace(run, step_s=run.step_s + self._plain_s)

    def measure(self, run: JointRun, syncs: int | None = None) -> Measured:
        """Run synchronizations of the joined run. Raises BenchError when the peers' global models differ."""
        interval, count = run.every // run.fragments, syncs or self._words.syncs
        for peer in self._peers:
            peer.tell({"steps": count * interval})
        steps = [json.loads(peer.line(self._words.timeout_s)) for peer in self._peers]
        ended = [[line for line in lines if "outcome" in line] for lines in steps]
        outcomes = [[line["outcome"] for line in lines] for lines in ended]
        alone = any(line["participants"] != 2 for lines in ended for line in lines)
        if outcomes[0] != outcomes[1] or len(outcomes[0]) != count or alone:
            raise BenchError(f"the peers' global models differ, or a peer went on alone: {ended}")
        costs = [
            sum(line["call_s"] - self._plain_s for line in lines[at : at + interval])
            for lines in steps
            for at in range(0, len(lines), interval)
        ]
        waited = [line["waited_s"] for lines in ended for line in lines]
        return Measured(cost_s=statistics.median(costs), waited_s=statistics.median(waited))


def joint_run(words: argparse.Namespace, codec: str, delay: int) -> JointRun:
    interval = DELAYED_INTERVAL if delay else 1
    return JointRun(
        parameters=BLOCKS * words.width**2, step_s=words.step_s if delay else AT_ONCE_STEP_S,
        every=interval * FRAGMENTS, fragments=FRAGMENTS, delay=delay, codec=CodecConfig(type=codec),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help=f"of {BLOCKS} square blocks (default: 34 M parameters)")
    parser.add_argument("--syncs", type=int, default=5, help="measured synchronizations of each kind")
    parser.add_argument("--step-s", type=float, default=2.0, help="compute time of a step, behind which tau = 1 hides")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="longest silence of a process")
    words = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Star(("a", "b", "rendezvous")) as star,
            Bench(star, Path(folder), words) as bench,
        ):
            return compare(bench, star, words)
    except (StarError, BenchError) as error:
        print(f"diloco_link: {error}", file=sys.stderr)
        return 2


def compare(bench: Bench, star: Star, words: argparse.Namespace) -> int:
    """Measure, simulate, print both; the exit status."""
    print(f"{BLOCKS * words.width**2 / 1e6:.1f} M parameters in {FRAGMENTS} fragments, two peers, {words.syncs} syncs")
    print("\n Mbit/s  codec  tau  figure                        measured  simulated   ratio")
    good = True
    for codec, speeds in CELLS.items():
        way_s = 0.0
        for delay in (0, 1):
            run = bench.join(joint_run(words, codec, delay))
            before, found = bench.measure(run), {}
            for mbit in speeds:
                star.shape(mbit)
                found[mbit] = bench.measure(run)
            star.shape(None)
            plain, own = mean(before, bench.measure(run)), run.work()
            way_s = way_s if delay else plain.waited_s  # with delay it is hidden
            round_s = min(own.round_s, way_s)
            work = replace(own, busy_s=plain.cost_s - plain.waited_s, round_s=round_s, handling_s=way_s - round_s)
            print(
                f"      -  {codec:<5}  {delay:3d}  without buckets: {work.busy_s:.2f} s on the training thread, "
                f"{way_s:.2f} s on the way (by the constants: {own.busy_s:.2f}, {own.handling_s + own.round_s:.2f})"
            )
            for mbit, measured in found.items():
                forecast = forecast_link(run, mbit / 1e3, work=work)
                figure = "s that a sync costs" if delay else "s a sync"
                good &= _row(mbit, codec, delay, figure, measured.cost_s, forecast.exposed_s)
                if delay:
                    waits_s = forecast.exposed_s - work.busy_s
                    good &= _row(mbit, codec, delay, "s waited for the link", measured.waited_s, waits_s)
    print("\nall figures agree" if good else "\nFAILED: figures marked with * do not agree")
    return 0 if good else 1


def mean(one: Measured, other: Measured) -> Measured:
    return Measured(cost_s=(one.cost_s + other.cost_s) / 2, waited_s=(one.waited_s + other.waited_s) / 2)


def _row(mbit: float, codec: str, delay: int, figure: str, measured: float, simulated: float) -> bool:
    """Print one comparison; whether it agrees."""
    if simulated < NEAR_ZERO_S:
        agrees, ratio = measured < simulated + NEAR_ZERO_S, "     -"
    else:
        agrees, ratio = abs(measured / simulated - 1) <= TOLERANCE, f"{measured / simulated:6.2f}"
    head = f"{mbit:7g}  {codec:<5}  {delay:3d}  {figure:<28}"
    print(f"{head}  {measured:8.2f}  {simulated:9.2f}  {ratio}{'' if agrees else ' *'}", flush=True)
    return agrees


if __name__ == "__main__":
    raise SystemExit(main())
