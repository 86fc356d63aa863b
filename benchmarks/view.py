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
    share = [rollouts // 2, *([rollouts // 2 // (runs - 1)] * (runs - 1))]
    for number, count in enumerate(share):
        root = outputs / f"run-{number:03d}"
        (root / "rollouts").mkdir(parents=True)
        (root / "run_id").write_text(f"run-{number}\n")
        per_step = 64 if number else 500
        steps = max(count // per_step, 1)
        (root / "config.json").write_text(json.dumps(settings(root.name, number, steps)))
        with (root / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                file.write(json.dumps(metrics_line(draw, step)) + "\n")
        for step in range(1, steps + 1):
            rows = min(per_step, count - (step - 1) * per_step) if step < steps else count - (step - 1) * per_step
            lines = [rollout_line(draw, step, place, turns) for place in range(rows)]
            data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (root / "rollouts" / f"step_{step:06d}.jsonl").write_text(data)
            size += len(data)
    return size


def settings(name: str, seed: int, steps: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "seed": seed, "max_steps": steps},
        "model": {"path": "tiny"},
        "trainer": {"optim": {"lr": 1e-4 if seed % 3 else 3e-4}},
        "orchestrator": {"source": [{"name": "toolsmith"}], "group_size": GROUP},
    }


def metrics_line(draw: random.Random, step: int) -> dict[str, Any]:
    figures = {f"figure/number_{number}": draw.random() for number in range(60)}
    return {
        "step": step,
        "time": 1.8e9 + step,
        "role": "trainer",
        "loss/total": 0.1,
        "reward/mean": draw.random(),
        **figures,
    }


def made_turns(draw: random.Random) -> list[dict[str, Any]]:
    roles = ["system", "user", *["assistant", "tool"] * 4, "assistant"]
    fields = {
        "error": None,
        "call": None,
        "session": 0,
        "reasoning": None,
        "turn": None,
        "finish_reason": None,
        "hint": None,
    }
    return [
        {"role": role, "text": " ".join(draw.choices(WORDS, k=25)), **fields, "parent": place - 1 if place else None,
         "tool_calls": [], "surprisal": 0.1, "token_count": 60}
        for place, role in enumerate(roles)
    ]  # fmt: skip


def rollout_line(draw: random.Random, step: int, place: int, turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    group = step * 1000 + place // GROUP
    reward = float(draw.random() < 0.4)
    return {
        "step": step, "status": "trained", "source": "toolsmith",
        "task_id": f"toolsmith/train/{draw.randrange(10**12)}",
        "group": group, "rollout_id": f"g{group:06d}-{place % GROUP}", "seed": place, "reward": reward,
        "advantage": reward - 0.4, "parts": {"correct": reward}, "metrics": {},
        "policy_versions": [step - 1, step], "stop_reason": "agent_completed", "truncated": False, "error": None,
        "failed_attempts": [], "tools": [], "turns": draw.choice(turns),
        "cost": {"prompt_tokens": 400, "sampled_tokens": draw.randrange(200), "cpu_s": 0.1, "wall_s": 2.0},
    }  # fmt: skip


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
