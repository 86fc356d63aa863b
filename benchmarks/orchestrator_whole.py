"""Measure the whole orchestrator under load: its event loop and the CPU per rollout as rollouts multiply.

    environment workers (toolsmith) <--HTTP--> orchestrator (`orchestrator @ file`) <--CURVE ZMQ--> a fixed-delay node

    python benchmarks/orchestrator_whole.py --levels 64 256 1024     # rollouts at a time; about 5 minutes

Each level is a process of its own that dispatches, plays, makes samples, journals and forms batches as in a run. Every
reply calls a tool that does not exist, so a rollout is `--turns` turns long. No trainer attaches: the orchestrator
plays as many batches ahead as the staleness bound allows. Lag is measured in the orchestrator's process (windows of a
few seconds, without the first one). CPU is read from the operating system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks._shared import running
from composer_prime.model_source import resolve_model
from composer_prime.run.run_dir import RunDir

GROUP, AHEAD = 8, 3
START_S, ROLLOUT_SLACK = 120.0, 8.0
SIDES = Path(__file__).parent / "gateway_scale_sides"
CALL = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call><|im_end|>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The figures of one level; times in seconds."""

    concurrent: int
    rollouts: int
    wall_s: float
    orchestrator_cpu_ms: float
    """Per rollout."""
    worker_cpu_ms: float
    lag_p99_s: float
    """Median over the windows of their 99th percentiles."""
    memory_mib: float


def configuration(folder: Path, level: int, args: argparse.Namespace) -> str:
    return f"""
[run]
name = "level-{level}"
output_dir = "{folder}"
max_steps = 1000
[model]
path = "tiny"
max_context = 512
[inference]
nodes = 0
[orchestrator]
groups_per_step = {level // GROUP}
group_size = {GROUP}
max_concurrent = {level}
max_staleness = {AHEAD}
filter_zero_advantage = false
sampling = {{ max_tokens = 64 }}
[[orchestrator.source]]
name = "toolsmith"
taskset = {{ id = "orchestrator.environments.toolsmith", split = "train", num_tasks = 4096, seed = 0 }}
harness = {{ id = "orchestrator.environments.tool_loop", max_turns = {args.turns} }}
workers = {args.workers}
timeout_s = 600
"""


def measure(folder: Path, level: int, reply: list[int], args: argparse.Namespace) -> Level:
    file = folder / f"level-{level}.toml"
    file.write_text(configuration(folder, level, args))
    run_dir = RunDir(folder / f"level-{level}")
    script = [sys.executable, str(SIDES / "loop_lag.py")]
    log, variables = folder / f"{level}.log", os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as said, running([*script, "@", str(file)], stdout=said, stderr=said, env=variables) as process:
        orchestrator = psutil.Process(process.pid)
        endpoint = _endpoint(run_dir, process, log)
        node = [sys.executable, str(SIDES / "peers.py"), "node", f"--endpoint={endpoint}", f"--delay-s={args.delay_s}",
                "--reply", *map(str, reply)]  # fmt: skip
        variables["COMPOSER_NODE_TOKEN"] = (run_dir.keys / "node.token").read_text().strip()
        with running(node, env=variables):
            return _watch(run_dir, orchestrator, level, args)


def _endpoint(run_dir: RunDir, orchestrator: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and orchestrator.poll() is None:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads(run_dir.endpoints.read_text())["node"]
        time.sleep(0.1)
    raise SystemExit(f"the orchestrator did not start within {START_S:.0f} s:\n{log.read_text()[-2000:]}")


def _watch(run_dir: RunDir, orchestrator: psutil.Process, level: int, args: argparse.Namespace) -> Level:
    """From the first finished rollout until one batch less than the staleness bound allows is played."""
    wanted = (AHEAD - 1) * level
    deadline = time.monotonic() + START_S + AHEAD * args.turns * args.delay_s * ROLLOUT_SLACK
    begun = None
    while time.monotonic() < deadline:
        time.sleep(0.25)
        played = GROUP * (_lines(run_dir) or [{}])[-1].get("groups/total/ready", 0)
        if begun is None and played:
            begun = (time.monotonic(), played, _cpu(orchestrator), len(_lines(run_dir)))
        elif begun is not None and played >= wanted:
            return _level(level, begun, played, orchestrator, _lines(run_dir))
    raise SystemExit(f"level {level}: {wanted} rollouts were not played in time; see {run_dir.root}")


def _level(level: int, begun: tuple, played: int, orchestrator: psutil.Process, lines: list[dict]) -> Level:
    since, before, cpu, first = begun
    rollouts = played - before
    own, workers = (now - then for now, then in zip(_cpu(orchestrator), cpu, strict=True))
    windows = [line for line in lines[first:] if line.get("loop_lag/p99_s") is not None]
    return Level(
        concurrent=level,
        rollouts=rollouts,
        wall_s=time.monotonic() - since,
        orchestrator_cpu_ms=1000 * own / rollouts,
        worker_cpu_ms=1000 * workers / rollouts,
        lag_p99_s=statistics.median(line["loop_lag/p99_s"] for line in windows),
        memory_mib=orchestrator.memory_info().rss / (1 << 20),
    )


def _lines(run_dir: RunDir) -> list[dict]:
    text = run_dir.metrics.read_text() if run_dir.metrics.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in found if line["role"] == "orchestrator" and "groups/total/batches" in line]


def _cpu(orchestrator: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the orchestrator itself and of its workers."""
    times = [sum(process.cpu_times()[:2]) for process in [orchestrator, *orchestrator.children(recursive=True)]]
    return times[0], sum(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[64, 256, 1024], help="concurrent rollouts")
    parser.add_argument("--delay-s", type=float, default=10.0, help="the node answers after this long")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="environment worker processes")
    parser.add_argument("--quick", action="store_true", help="16 rollouts at a time: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.levels, args.delay_s = [16], 2.0
    from transformers import AutoTokenizer

    reply = AutoTokenizer.from_pretrained(resolve_model("tiny"))(CALL)["input_ids"]
    print(f"node delay {args.delay_s:g} s, {args.turns} turns, {len(reply)} tokens a turn")
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print("rollouts at a time  CPU a rollout: orchestrator  workers   lag p99   memory")
    levels = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.levels:
            levels.append(found := measure(Path(folder), number, reply, args))
            print(
                f"{found.concurrent:18d} {found.orchestrator_cpu_ms:25.2f} ms {found.worker_cpu_ms:6.1f} ms"
                f" {1000 * found.lag_p99_s:6.1f} ms {found.memory_mib:5.0f} MiB", flush=True,
            )  # fmt: skip
    flat = levels[-1].orchestrator_cpu_ms / levels[0].orchestrator_cpu_ms
    print(f"orchestrator CPU a rollout, last level over first: {flat:.2f} (1 is flat)")


if __name__ == "__main__":
    main()
