"""`diloco demo`: a rendezvous and two clusters on this machine train the tiny model, and end with one digest."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from composer_prime.errors import ConfigError, DeadlineError, RoleFailedError
from diloco.transport.keys import JointKey

CLUSTERS = ("a", "b")
_START_S = 120.0
"""Until the rendezvous listens; it imports torch first."""
_END_S = 30.0
"""What a process has between SIGTERM and SIGKILL."""
_CONFIG = """\
# Written by `diloco demo`; both clusters read it, and each has a peer_id, a seed and a part of the tasks of its own.
[run]
name = "demo"
output_dir = {folder}
max_steps = {steps}

[model]
path = "tiny"
max_context = 384

[inference]
engine = "local"
nodes = 1

[orchestrator]
groups_per_step = 4
group_size = 4
max_staleness = 1
filter_zero_advantage = false

[orchestrator.sampling]
max_tokens = 64

[[orchestrator.source]]
name = "toolsmith"
taskset = {{ id = "orchestrator.environments.toolsmith", split = "train", num_tasks = 4096 }}

[trainer]
micro_batch_tokens = 4096

[trainer.checkpoint]
every_steps = 0

[diloco]
rendezvous = {rendezvous}
run = "demo"
peer_id = "a"
key_file = {key}
sync_every = 2
fragments = 2

[monitor]
view = "plain"
"""


def demo_parser(add: Any) -> None:
    parser = add.add_parser(
        "demo", help="two clusters on this machine, for a look",
        description="Start a rendezvous and two clusters on this machine, show both, and compare their final models. "
        "It takes a few minutes on two CPU cores.",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="steps of each cluster, an even number (default 6)")
    parser.add_argument("--folder", type=Path, help="for key, configuration, logs and runs (default: a temporary one)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="most seconds for all of it (default 1800)")
    parser.set_defaults(run=run_demo)


def run_demo(words: argparse.Namespace) -> int:
    """Raises ConfigError, DeadlineError when it takes too long, RoleFailedError when a process fails or they differ."""
    if words.steps < 2 or words.steps % 2:
        raise ConfigError(
            f"--steps is {words.steps}; expected an even number of 2 or more: clusters sync every 2 steps"
        )
    folder = (words.folder or Path(tempfile.mkdtemp(prefix="diloco-demo-"))).resolve()
    key, file, deadline = folder / "joint.key", folder / "demo.toml", time.monotonic() + words.timeout_s
    JointKey.create(key)
    print(f"key, configuration, logs and runs: {folder}", flush=True)
    command = ["diloco.main", "rendezvous", "--run", "demo", "--key-file", str(key), "--bind", "tcp://127.0.0.1:0",
               "--start-peers", "2", "--min-peers", "2"]  # fmt: skip
    with _process(command, folder / "rendezvous.log") as rendezvous:
        address = _address(rendezvous, folder / "rendezvous.log")
        print(f"rendezvous | {address}", flush=True)
        values = {"folder": str(folder), "rendezvous": address, "key": str(key)}
        quoted = {name: json.dumps(value) for name, value in values.items()}  # a JSON string is a TOML string
        file.write_text(_CONFIG.format(steps=words.steps, **quoted))
        with contextlib.ExitStack() as stack:
            clusters = {
                name: stack.enter_context(_process(
                    ["trainer.main", "@", str(file), "--diloco.peer-id", name, "--run.seed", str(index),
                     "--diloco.task-shard", f"[{index}, {len(CLUSTERS)}]"], folder / f"{name}.log",
                ))
                for index, name in enumerate(CLUSTERS)
            }  # fmt: skip
            _watch(clusters, folder, deadline)
    return _compare(folder)


@contextlib.contextmanager
def _process(words: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m words` with its errors in `log`; it ends with the context."""
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(rendezvous: subprocess.Popen[str], log: Path) -> str:
    """Raises RoleFailedError when the rendezvous does not come up."""
    too_late = threading.Timer(_START_S, rendezvous.kill)
    too_late.start()
    line = _output(rendezvous).readline()
    too_late.cancel()
    if " at " not in line:
        raise RoleFailedError(f"the rendezvous did not start within {_START_S:g} s: {_tail(log)}")
    return line.rpartition(" at ")[2].strip()


def _watch(clusters: Mapping[str, subprocess.Popen[str]], folder: Path, deadline: float) -> None:
    """Print what the clusters print, until both have ended."""
    for name, process in clusters.items():
        threading.Thread(target=_show, args=(name, _output(process)), daemon=True).start()
    while running := [name for name, process in clusters.items() if process.poll() is None]:
        _check(clusters, folder)
        if time.monotonic() > deadline:
            raise DeadlineError(f"cluster(s) {', '.join(running)} still run: raise --timeout-s; logs are in {folder}")
        time.sleep(0.2)
    _check(clusters, folder)


def _check(clusters: Mapping[str, subprocess.Popen[str]], folder: Path) -> None:
    for name, process in clusters.items():
        if process.returncode:
            text = _tail(folder / f"{name}.log")
            raise RoleFailedError(f"cluster {name} ended with status {process.returncode}: {text}")


def _show(name: str, lines: IO[str]) -> None:
    for line in lines:
        print(f"{name:10} | {line.rstrip()}", flush=True)


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _tail(log: Path) -> str:
    return " ".join(log.read_text().splitlines()[-5:]) or f"{log} is empty"


def _compare(folder: Path) -> int:
    """Print what each cluster's global model ended with. Raises RoleFailedError when they differ."""
    digests = {}
    for name in CLUSTERS:
        lines = map(json.loads, (folder / "demo" / name / "metrics.jsonl").read_text().splitlines())
        last = next(line for line in lines if "diloco/final_hash" in line)
        digests[name] = last["diloco/final_hash"]
        print(f"{name:10} | ended at outer step {last['diloco/final_outer_step']}, digest {digests[name]}", flush=True)
    if len(set(digests.values())) > 1:
        raise RoleFailedError(f"the digests differ: {digests}; the logs are in {folder}")
    print(f"both clusters hold the same model: {folder / 'demo'}/<cluster>/final")
    return 0
