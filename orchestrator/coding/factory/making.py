"""Harder tasks during a run: when most tasks of a source are mastered, the factory makes more of what it left over.

    TaskMaker.run   curriculum.mastered() --enough--> `python -m orchestrator.coding.factory.making`, niced
                    RUN/tasks/SOURCE/made/           its output folder, as of `composer tasks make`
                    the harder half of it   -------> RUN/tasks/SOURCE/tasks.jsonl, at the end
                    curriculum.grow                  a worker reads the file again when it lacks a task

The stock is what `composer tasks make` did not look at, because of its --limit: the candidates of the trees beside the
source's tasks.jsonl. Each round takes the tree with the fewest tasks. Tasks keep their index: the file only grows, and
a resumed run loads it with the others. Any failure is an event, and the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from composer_prime.config.orchestrator import MakingConfig, SourceConfig
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, SandboxError
from composer_prime.monitor.events import event
from composer_prime.run.process import child_options, end_with_parent, last_words
from composer_prime.run.run_dir import write_atomic
from orchestrator.coding.task import TASKS_FILE, TREES_FOLDER, CodeTask, read_tasks
from orchestrator.environments.answers import split_of
from orchestrator.tasks.curriculum import Frontier
from orchestrator.tasks.sources import Sources, grown_tasks

logger = logging.getLogger(__name__)

_LOOK_S = 20.0
"""Seconds between two looks at what is mastered."""


@dataclass(slots=True, kw_only=True)
class TaskMaker:
    """Makes the further tasks of one source, one round at a time."""

    source: SourceConfig
    settings: MakingConfig
    curriculum: Frontier
    folder: Path
    """RUN/tasks/SOURCE."""
    look_s: float = _LOOK_S
    _exhausted: set[str] = field(default_factory=set, init=False)
    """Trees whose candidates are all made."""

    @property
    def stock(self) -> Path:
        return Path(self.source.taskset["folder"]).expanduser().resolve()

    async def run(self) -> None:
        """Make tasks until the stock is used up. A failed round ends it, with an event."""
        try:
            while True:
                await asyncio.sleep(self.look_s)
                if self.curriculum.mastered() >= self.settings.mastered and not await self.round():
                    logger.info("source %s: no candidates are left to make tasks of", self.source.name)
                    return
        except (ConfigError, SandboxError, OSError, msgspec.MsgspecError) as error:
            about = event("process", cause=str(error), command=f"cat {self.folder / 'making.log'}")
            logger.warning("source %s: no more tasks are made: %s", self.source.name, error, extra=about)

    async def round(self) -> bool:
        """Make tasks of one tree, and take in the harder ones. Return False where no tree has candidates left."""
        known = await asyncio.to_thread(lambda: [task for task in read_tasks(self.stock) if self._is_chosen(task)])
        repositories = {task.tree: task.repository for task in known if task.tree}
        counts = Counter({tree: 0 for tree in repositories})
        made = await asyncio.to_thread(self._made)
        counts.update(task.tree for task in [*known, *made] if task.tree in repositories)
        waiting = [tree for tree in sorted(counts) if tree not in self._exhausted]
        if not waiting:
            return False
        tree = min(waiting, key=counts.__getitem__)
        is_done = await self._run_factory(tree)
        before = sum(task.tree == tree for task in made)
        made = await asyncio.to_thread(self._made)
        if is_done and sum(task.tree == tree for task in made) < before + self.settings.tasks:
            self._exhausted.add(tree)
        known_ids, least = {task.id for task in known}, self.curriculum.wanted_difficulty()
        harder = await asyncio.to_thread(self._take_in, made, repositories, known_ids, least)
        if harder:
            self.curriculum.grow([task.difficulty for task in harder])
            text = f"source {self.source.name}: {pluralize(len(harder), 'harder task')} made of {tree}"
            logger.info(text, extra=event("groups"))
        return True

    def _made(self) -> list[CodeTask]:
        return list(read_tasks(self.folder / "made")) if _has_tasks(self.folder / "made") else []

    def _is_chosen(self, task: CodeTask) -> bool:
        """Tell whether the source trains on such tasks."""
        taskset = self.source.taskset
        if taskset.get("repositories"):
            is_in = task.repository in taskset["repositories"]
        else:
            is_in = taskset.get("split", "train") in (
                "all",
                split_of(task.repository, taskset.get("eval_share", 0.2)),
            )
        is_kind = not taskset.get("kinds") or task.kind in taskset["kinds"]
        return is_in and is_kind and (task.difficulty or 0.0) <= taskset.get("max_difficulty", 1.0)

    async def _run_factory(self, tree: str) -> bool:
        """Run this module as a program. Return whether it ended in time.

        At the deadline it is killed; its folder keeps what is done. Raises SandboxError for one that failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        work = {"stock": str(self.stock), "folder": str(self.folder / "made"), "tree": tree}
        is_ours = self.source.runtime.type in ("bubblewrap", "subprocess")
        work |= {"runtime": self.source.runtime.type if is_ours else "auto"}
        work |= {"tasks": self.settings.tasks, "jobs": self.settings.jobs}
        log = self.folder / "making.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, json.dumps(work), stdout=output, stderr=output, **child_options()
            )
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await process.wait()
        except TimeoutError:
            logger.warning("source %s: tasks of %s were not made within %g s (orchestrator.source.making.timeout_s)",
                           self.source.name, tree, self.settings.timeout_s, extra=event("process"))  # fmt: skip
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        status = process.returncode
        if status is not None and status > 0:
            raise SandboxError(f"the factory ended with status {status}:\n{last_words(log, count=5)}")
        return status == 0

    def _take_in(
        self, made: Sequence[CodeTask], repositories: dict[str, str], known: set[str], wanted: float
    ) -> list[CodeTask]:
        """Append the harder ones of the made tasks to the file that the workers read, and return them.

        Harder are those of difficulty `wanted`, and at least half of them.
        """
        taken = list(read_tasks(self.folder)) if _has_tasks(self.folder) else []
        known = known | {task.id for task in taken}
        made = [
            msgspec.structs.replace(task, repository=repositories[task.tree])
            for task in made
            if task.tree in repositories and task.id not in known
        ]
        made = [task for task in made if self._is_chosen(task)]
        if not made:
            return []
        least = min(wanted, median(task.difficulty or 0.0 for task in made))
        harder = [task for task in made if (task.difficulty or 0.0) >= least]
        trees = self.folder / TREES_FOLDER
        if not trees.is_symlink():
            trees.symlink_to(Path("made") / TREES_FOLDER)
        lines = [msgspec.json.encode(task) + b"\n" for task in [*taken, *harder]]
        write_atomic(self.folder / TASKS_FILE, b"".join(lines))
        return harder


def _has_tasks(folder: Path) -> bool:
    path = folder / TASKS_FILE
    return path.is_file() and path.stat().st_size > 0


def task_makers(configs: Sequence[SourceConfig], sources: Sources, run_dir: Path, *, whole: bool) -> list[TaskMaker]:
    """Return the makers of the sources that have one. Raises ConfigError where a source cannot have one.

    `whole`: whether this run plays all tasks of a source.
    """
    makers = []
    for source in configs:
        if source.making is None:
            continue
        if not whole:
            raise ConfigError(
                f"orchestrator.source {source.name!r} has making, and diloco.task_shard gives this run a part of its "
                "tasks: leave one of the two out"
            )
        curriculum = sources.curricula[source.name].inner
        if not isinstance(curriculum, Frontier):
            raise ConfigError(
                f"orchestrator.source {source.name!r} has making, but orchestrator.curriculum is "
                f"{type(curriculum).__name__}, which knows no difficulty and cannot grow: set "
                "orchestrator.curriculum.import_path to orchestrator.tasks.curriculum:Frontier"
            )
        stock = Path(str(source.taskset.get("folder", ""))).expanduser() / "making.jsonl"
        if not stock.is_file():
            raise ConfigError(
                f"orchestrator.source {source.name!r} has making, but there is no {stock}: its taskset.folder must be "
                "one that `composer tasks make` wrote, or leave making out"
            )
        makers.append(
            TaskMaker(
                source=source,
                settings=source.making,
                curriculum=curriculum,
                folder=grown_tasks(run_dir, source.name),
            )
        )
    return makers


def main() -> int:
    """Make tasks of one tree: the first candidates that neither the stock nor an earlier round has looked at."""
    end_with_parent(signal.SIGKILL)
    os.nice(19)
    from orchestrator.coding.factory.factory import FactorySettings, TaskFactory, Watcher, factory_runtime
    from orchestrator.coding.factory.journal import MakingJournal, read_making

    work = json.loads(sys.argv[1])
    stock, tree = Path(work["stock"]), work["tree"]
    settings_by_tree, verdicts = read_making(stock)
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings_by_tree[tree].items()
    }
    journal = MakingJournal(Path(work["folder"]))
    journal.verdicts = {verdict.id: verdict for verdict in verdicts} | journal.verdicts
    proven = sum(verdict.source == tree and not verdict.reason for verdict in journal.verdicts.values())
    settings = FactorySettings(**chosen, limit=proven + work["tasks"])
    runtime = factory_runtime(work["runtime"], settings.packages)
    factory = TaskFactory(journal, settings, runtime, work["jobs"], stock, Watcher())
    try:
        asyncio.run(factory.make([str(stock / TREES_FOLDER / tree)]))
    finally:
        journal.close()
    for problem in factory.problems.values():
        print(problem, flush=True)
    return 1 if factory.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
