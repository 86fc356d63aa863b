"""How fast `composer view` answers over many runs: python -m benchmarks.view

Makes runs in the real form (5 kB a rollout, half of them in one long run), and times the server's answers over HTTP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks._shared import running
from tests.view.run_made import ROLLOUT, make_run, rollout, write_lines

GROUP = 8
SEED = 7
WORDS = ("the agent", "reads a file", "and then", "runs its tests", "before", "it answers", "with what it found")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="8 runs with 8,000 rollouts")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.rollouts = 8, 8000
    with tempfile.TemporaryDirectory(prefix="composer-view-") as folder:
        outputs = Path(folder) / "outputs"
        size = make_runs(outputs, options.runs, options.rollouts)
        print(
            f"{options.runs} runs, {options.rollouts:,} rollouts, {size / 1e6:,.0f} MB; {os.cpu_count()} CPU cores, "
            f"load average {os.getloadavg()[0]:.0f}"
        )
        ours = measure_view(outputs)
    for name, value in ours.items():
        print(f"{name:<58} {value}")
    return 0


def make_runs(outputs: Path, runs: int, rollouts: int) -> int:
    """Write the runs and return the bytes of their rollouts."""
    draw = random.Random(SEED)
    turns = [made_turns(draw) for _ in range(64)]
    size = 0
    for number, count in enumerate([rollouts // 2, *([rollouts // 2 // (runs - 1)] * (runs - 1))]):
        per_step = 64 if number else 500
        steps = max(count // per_step, 1)
        run_dir = make_run(outputs / f"run-{number:03d}", steps=steps, seed=number)
        for step in range(1, steps + 1):
            rows = per_step if step < steps else count - (step - 1) * per_step
            write_lines(run_dir.rollouts(step), [rollout_line(draw, step, place, turns) for place in range(rows)])
            size += run_dir.rollouts(step).stat().st_size
    return size


def made_turns(draw: random.Random) -> list[dict[str, Any]]:
    """Turns of 25 phrases each."""
    roles = ["system", "user", *["assistant", "tool"] * 4, "assistant"]
    return [
        ROLLOUT["line"]["turns"][-1] | {"role": role, "text": " ".join(draw.choices(WORDS, k=25)), "parent": parent}
        for parent, role in zip([None, *range(len(roles))], roles, strict=False)
    ]


def rollout_line(draw: random.Random, step: int, place: int, turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    group, reward = step * 1000 + place // GROUP, float(draw.random() < 0.4)
    own = {"task_id": f"toolsmith/train/{draw.randrange(10**12)}", "turns": draw.choice(turns)}
    return rollout(step, group, place % GROUP, reward, **own)


ANSWERS = {
    "first page, all runs": "/api/runs",
    "newest rollouts of the long run": "/api/rollouts?run=run-000",
    "a filter over the long run (reward, text)": "/api/rollouts?run=run-000&min=1&q=train/9&sort=tokens",
    "one rollout of an early step, with its siblings": "/api/rollout?run=run-000&kind=step&step=3&id=g003003-2",
    "another run's rollouts": "/api/rollouts?run=run-007&max=0",
}


def measure_view(outputs: Path) -> dict[str, str]:
    """Return times of the first answers of each kind, then of the same filter again, and the server's memory."""
    figures = {}
    began = time.monotonic()
    with started(outputs) as (process, port):
        figures["server listens after"] = f"{time.monotonic() - began:.2f} s"
        for name, path in ANSWERS.items():
            figures[name] = described(port, path)
        name = "a filter over the long run (reward, text)"
        figures[f"{name}, again"] = described(port, ANSWERS[name])
        figures["memory of the server"] = f"{psutil.Process(process.pid).memory_info().rss / 1e6:,.0f} MB"
    return figures


def described(port: int, path: str) -> str:
    """Return how long an answer took, and how many rollouts matched."""
    began = time.monotonic()
    body = get(port, path)
    took, answer = time.monotonic() - began, json.loads(body)
    more = f"  {answer['total']:,} match" if "total" in answer else ""
    return f"{took:.3f} s{more}"


@contextmanager
def started(outputs: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `composer view`."""
    words = [sys.executable, "-m", "composer_prime.cli.main", "view", str(outputs), "--port", "0"]
    with running(words, stdout=subprocess.PIPE, text=True) as process:
        address = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        yield process, int(address.split(":")[2].partition("/")[0])


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {body[:200]!r}")
    return body


if __name__ == "__main__":
    raise SystemExit(main())
