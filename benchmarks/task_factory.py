"""Measure how fast tasks are made, and what shared interpreters save over one interpreter a test run.

    python benchmarks/task_factory.py toolz==1.2.0 cachetools --limit 40 --jobs 2

First the tasks of each source are made, with all refusals, into a folder that is removed afterwards. Then the test runs
of a sample of them are played twice: all in one box with one interpreter that forks, as the factory does, and each in a
box and an interpreter of its own. The times mean something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.factory.check import draw_tasks
from orchestrator.coding.factory.factory import FactorySettings, TaskFactory, factory_runtime
from orchestrator.coding.factory.journal import MakingJournal
from orchestrator.coding.factory.suite import SuiteRun, run_suite
from orchestrator.coding.task import CodeTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+")
    parser.add_argument("--limit", type=int, default=40, help="tasks of each source")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=12, help="tasks whose test runs are played both ways")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/composer-prime/sources")
    options = parser.parse_args()
    runtime = factory_runtime("auto")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tasks"
        print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        factory = TaskFactory(
            MakingJournal(out), FactorySettings(limit=options.limit), runtime, options.jobs, options.cache
        )
        report = asyncio.run(factory.make(options.source))
        print(f"load average after: {os.getloadavg()[0]:.1f}")
        print(
            f"{report['made_in_this_run']} proven of {report['candidates']} candidates in {report['wall_s']} s: "
            f"{report['tasks_per_minute']} a minute with {options.jobs} jobs; refused: {report['sources_refused']}"
        )
        asyncio.run(compare(draw_tasks(out, options.sample, 0), out, runtime))


async def compare(tasks: Sequence[CodeTask], out: Path, runtime: RuntimeConfig) -> None:
    """Print the seconds of a test run, both ways."""
    trees: dict[str, list[CodeTask]] = {}
    for task in tasks:
        trees.setdefault(task.tree, []).append(task)
    seconds = {"forks of one interpreter": 0.0, "an interpreter and a box each": 0.0}
    for tree, of_tree in trees.items():
        runs = [SuiteRun(key=task.id, tests=task.tests, files=dict(task.start), timeout_s=120) for task in of_tree]
        python_path = of_tree[0].python_path
        for way, groups in zip(seconds, ([runs], [[run] for run in runs]), strict=True):
            for group in groups:
                started = time.monotonic()
                await run_suite(
                    runtime, out / "trees" / tree, group, python_path=python_path, test_timeout_s=5, hash_seed=0
                )
                seconds[way] += time.monotonic() - started
    for way, spent in seconds.items():
        print(f"  {way:30} {spent / len(tasks):6.3f} s a test run, mean of {len(tasks)}")


if __name__ == "__main__":
    main()
