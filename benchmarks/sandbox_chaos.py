"""Kill workers and sandboxes under many rollouts: python benchmarks/sandbox_chaos.py [--rollouts 256] [--seed 0]

    scripted policy --right answers only--> a coding task, its own sandbox a rollout --tests in a fresh one--> reward 1
    seeded kill -9 of worker processes and of sandboxes' first processes, until --box-kills and --worker-kills are used

A rollout that a kill took is a failure and is played again under a new id, as in a run. It ends with status 1 when a
rollout was scored other than 1, a task has not exactly one score, something is left, or a kill was not used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
from aiohttp import web
from tokenizers import Tokenizer

import composer_prime
from composer_prime.run.retry import backoff_s
from orchestrator.coding.task import CodeTask, write_tasks
from orchestrator.workers.pool import RunRollout, SourceSpec, WorkerPool
from tests.scripted_node import call
from tests.workers.peer import Peer, generated

POLICY = Path(composer_prime.__file__).parent / "assets/tiny/policy"
STUB, BODY = "    raise NotImplementedError\n", "    return a + b\n"
HEAD = "def add(a, b):\n"
TESTS = (
    "from demo import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\ndef test_callable():\n    assert add\n"
)
MAX_TRIES = 60
END_S = 60.0


TEXTS = (
    call("bash", command="ls"),
    call("str_replace", path="demo.py", old_str=STUB.rstrip(), new_str=BODY.rstrip()),
    call("bash", command="python -c 'import demo; print(demo.add(1, 2))'"),
    "Done.",
)


def write_task(folder: Path) -> None:
    tree = folder / "trees/demo-1.0"
    (tree / "tests").mkdir(parents=True)
    (tree / "demo.py").write_text(HEAD + BODY)
    (tree / "tests/test_demo.py").write_text(TESTS)
    task = CodeTask(
        id="demo",
        kind="delete",
        repository="demo-1.0",
        tree="demo-1.0",
        prompt="Implement demo.add: the sum of both.",
        start={"demo.py": HEAD + STUB},
        solution={"demo.py": HEAD + BODY},
        editable=["*.py"],
        tests=["tests/test_demo.py"],
        fail_to_pass=["tests/test_demo.py::test_add"],
        pass_to_pass=["tests/test_demo.py::test_callable"],
        timeout_s=200.0,
    )
    write_tasks(folder, [task])


class ScriptedPolicy(Peer):
    """Answers the n-th request of a session with the n-th text, after a seeded while."""

    def __init__(self, seed: int, killing_ended: asyncio.Event) -> None:
        super().__init__()
        tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
        self._ids = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids for text in TEXTS]
        self._turns: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._killing_ended = killing_ended

    async def generate(self, request: web.Request) -> web.Response:
        session = request.headers["X-Session-ID"]
        ids = self._ids[min(self._turns[session], len(TEXTS) - 1)]
        self._turns[session] += 1
        await asyncio.sleep(self._random.uniform(0.2, 2.0))
        if session.startswith("g0") and ids == self._ids[-1]:
            await self._killing_ended.wait()
        return generated("", ids)


class Chaos:
    """Kills at seeded times, and remembers every process that the pool ever had."""

    def __init__(self, pool: WorkerPool, seed: int, box_kills: int, worker_kills: int) -> None:
        self.seen: set[psutil.Process] = set()
        self.most_boxes = 0
        self.killed: Counter[str] = Counter()
        self.ended = asyncio.Event()
        """Set when every kill is used, and when the killing failed."""
        self._pool = pool
        self._random = random.Random(seed)
        self._kinds = ["sandbox"] * box_kills + ["worker"] * worker_kills
        self._random.shuffle(self._kinds)

    @property
    def not_used(self) -> dict[str, int]:
        return dict(Counter(self._kinds))

    async def run(self, every_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(self._random.expovariate(1 / every_s))
                workers, boxes = await asyncio.to_thread(self._look)
                victims = boxes if self._kinds and self._kinds[-1] == "sandbox" else workers
                if self._kinds and victims and boxes:
                    victim = self._random.choice(victims)
                    try:
                        victim.kill()
                    except psutil.NoSuchProcess:
                        continue
                    self.killed[self._kinds.pop()] += 1
                if not self._kinds:
                    self.ended.set()
        finally:
            self.ended.set()

    def _look(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Return the workers, and the first process of each sandbox."""
        workers, boxes = [], []
        for child in psutil.Process().children(recursive=True):
            try:
                self.seen.add(child)
                parent = child.parent()
                if child.pid in [player.pid for player in self._pool.players]:
                    workers.append(child)
                elif parent is not None and parent.name() == "bwrap" and child.name() != "bwrap":
                    boxes.append(child)
            except psutil.NoSuchProcess:
                continue
        self.most_boxes = max(self.most_boxes, len(boxes))
        return sorted(workers, key=lambda found: found.pid), sorted(boxes, key=lambda found: found.pid)


async def play(pool: WorkerPool, url: str, number: int, scores: dict[int, list[float | None]], tries: Counter) -> None:
    """Play one rollout until it has a score, each try under an id of its own."""
    for attempt in range(MAX_TRIES):
        request = RunRollout(
            rollout_id=f"g{number}" + (f"r{attempt}" if attempt else ""),
            task_index=0,
            model="policy",
            gateway_url=url,
            timeout_s=500.0,
            seed=number,
        )
        reply = await pool.run(request)
        tries[reply.failure.kind if reply.failure else "scored"] += 1
        if reply.failure is None:
            scores.setdefault(number, []).append(reply.reward)
            return
        if not reply.failure.retryable:
            raise SystemExit(f"rollout {reply.rollout_id} failed for good: {reply.failure.text()}")
        await asyncio.sleep(backoff_s(min(attempt, 2), first_s=0.5, longest_s=30.0))


async def survive(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return what went wrong; prints the figures."""
    write_task(folder / "tasks")
    taskset = {"id": "orchestrator.coding.code", "folder": str(folder / "tasks"), "split": "all"}
    spec = SourceSpec(
        name="chaos",
        tasksets={"train": taskset | {"runtime": {"type": "bubblewrap"}}},
        harness={"id": "orchestrator.environments.tool_loop", "max_turns": 8},
        model_path=str(POLICY),
    )
    pool = WorkerPool(spec, workers=options.workers, start_timeout_s=500, hang_timeout_s=200, max_restarts=10_000)
    scores: dict[int, list[float | None]] = {}
    tries: Counter[str] = Counter()
    chaos = Chaos(pool, options.seed, options.box_kills, options.worker_kills)
    async with ScriptedPolicy(options.seed, chaos.ended) as policy, AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.start()
        began = time.perf_counter()
        killing = asyncio.create_task(chaos.run(options.kill_every_s))
        await asyncio.gather(*(play(pool, policy.url, number, scores, tries) for number in range(options.rollouts)))
        failure = killing.exception() if killing.done() else None
        killing.cancel()
        chaos._look()
        took_s = time.perf_counter() - began
    _, alive = await asyncio.to_thread(psutil.wait_procs, chaos.seen, END_S)
    left = sorted(path.name for path in folder.iterdir() if path.name != "tasks")
    print(
        f"{options.rollouts} rollouts at once, {options.workers} workers, seed {options.seed}: {took_s:.0f} s, "
        f"most sandboxes at a time {chaos.most_boxes}\n"
        f"killed: {dict(chaos.killed)}; workers started again: {pool.restarts}\n"
        f"tries: {dict(tries)}\n"
        f"scores: {dict(Counter(score for found in scores.values() for score in found))}; "
        f"tasks with exactly one: {sum(len(found) == 1 for found in scores.values())} of {options.rollouts}\n"
        f"processes seen {len(chaos.seen)}, left {len(alive)}; folders left {left}"
    )
    wrong = {number: found for number, found in scores.items() if found != [1.0]}
    return [
        *([f"the killing failed: {failure!r}"] if failure is not None else []),
        *([f"kills not used: {chaos.not_used}"] if chaos.not_used else []),
        *([f"scores other than one 1.0: {wrong}"] if wrong else []),
        *([f"{options.rollouts - len(scores)} rollouts have no score"] if len(scores) != options.rollouts else []),
        *([f"processes left: {alive}"] if alive else []),
        *([f"folders left: {left}"] if left else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256, help="all in flight at once")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--box-kills", type=int, default=64)
    parser.add_argument("--worker-kills", type=int, default=4)
    parser.add_argument("--kill-every-s", type=float, default=1.0, help="mean of the random pauses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 rollouts, 4 sandboxes and 1 worker killed")
    options = parser.parse_args()
    if options.quick:
        options.rollouts, options.workers, options.kill_every_s = 8, 1, 0.5
        options.box_kills, options.worker_kills = 4, 1
    with tempfile.TemporaryDirectory(prefix="sandbox-chaos-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        problems = asyncio.run(survive(options, Path(folder)))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
