"""Make tasks of sources: unpack, measure the baseline, find candidates, prove them, write what is proven.

    source ── unpack ──> tree ── three runs ──> baseline ── trace, syntax ──> candidates ── batches ──> proofs
    proofs ── tasks ──> tasks.jsonl;  proofs ── verdicts ──> making.jsonl, report.json

Sources and batches share `jobs` boxes. A source that cannot be used is recorded, and the others continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.console import ProgressLines, pluralize
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.factory.baseline import FactorySettings, PlaySuite, SourceWork, last_line, measure_baseline
from orchestrator.coding.factory.building import build_task
from orchestrator.coding.factory.candidates import TaskCandidate, find_candidates, shuffled
from orchestrator.coding.factory.history import SourceCommit, source_commits
from orchestrator.coding.factory.making_journal import CandidateVerdict, MakingJournal
from orchestrator.coding.factory.proof import Proof, prove
from orchestrator.coding.factory.source import (
    ARCHIVES,
    SourceTree,
    commit_files,
    describe_tree,
    fetch_archive,
    folder_files,
    git,
    other_texts,
    tree_digest,
    tree_name,
    unpack,
    write_tree,
)
from orchestrator.coding.factory.source_functions import index_functions
from orchestrator.coding.factory.suite import SuiteResult, SuiteRun, run_suite
from orchestrator.coding.sandbox.opening import open_box
from orchestrator.coding.task import CodeTask

CACHE = Path.home() / ".cache/composer-prime/sources"
"""Downloaded archives."""
BATCH = 12
"""Candidates that share a box and an interpreter."""
_HISTORY_TEST_FILES = 4
"""Test files that a commit did not change and that run beside those it changed."""


class _SuiteLimits(SandboxLimits):
    """The limits of a whole suite, whose output is long."""

    output_kb = 1 << 18
    output_mb = 512


def factory_runtime(kind: str, packages: tuple[str, ...] = ()) -> RuntimeConfig:
    """Return the runtime of proofs. A command runs many tests one after the other, so its time and output are large."""
    limits = _SuiteLimits(wall_s=7200, cpu_s=7200, memory_gb=2)
    return RuntimeConfig.model_validate({"type": kind, "limits": limits, "packages": list(packages)})


@dataclass(slots=True)
class TaskFactory:
    """Makes the tasks of one output folder."""

    journal: MakingJournal
    settings: FactorySettings
    runtime: RuntimeConfig
    jobs: int
    problems: dict[str, str] = field(default_factory=dict)
    """Source -> why it gives no task at all."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Source -> what its baseline showed."""
    _boxes: asyncio.Semaphore = field(init=False)
    _lines: ProgressLines = field(default_factory=ProgressLines)

    def __post_init__(self) -> None:
        self._boxes = asyncio.Semaphore(self.jobs)

    async def make(self, sources: Sequence[str]) -> dict[str, Any]:
        """Make the tasks of all sources. Return the report, which is also written, also when the work is canceled."""
        started, before = time.monotonic(), len(self.journal.verdicts)
        await self._try_box()  # without sandboxes every candidate would be refused for it
        places = asyncio.Semaphore(max(self.jobs, 1))
        try:
            async with asyncio.TaskGroup() as group:
                for source in dict.fromkeys(sources):
                    group.create_task(self._make_source(source, places))
        finally:
            total = self.journal.finish(self.settings.limit)
            report = self._report(total, time.monotonic() - started, before)
            self.journal.write_report(report)
        return report

    async def _try_box(self) -> None:
        """Open a box and close it. Raises SandboxError, where no candidate is at fault."""
        async with await open_box(self.runtime):
            pass

    async def _make_source(self, source: str, places: asyncio.Semaphore) -> None:
        async with places:
            self._lines.tell(lambda: f"{source}: unpacking, then three runs of its tests")
            try:
                tree = await asyncio.to_thread(self._open, source)
                self.journal.begin(tree.name, self.settings.identity())
                await self._make_tree(tree)
                if self.settings.history:
                    await self._make_history(Path(source))
            except (ConfigError, SandboxError, OSError) as error:
                self.problems[source] = str(error)

    def _open(self, source: str) -> SourceTree:
        """Get a source and put its tree below trees/."""
        path = Path(source)
        if path.is_dir():
            name = tree_name(path.resolve())
            if (path / ".git").exists():
                commit = git(path, "rev-parse", "HEAD").decode().strip()
                tree = self._place(
                    f"{name}-{commit[:12]}", source, lambda folder: write_tree(folder, commit_files(path, commit))
                )
                return dataclasses.replace(tree, repository=name)
            return self._place(name, source, lambda folder: write_tree(folder, folder_files(path)))
        if self.settings.history:
            raise ConfigError(f"{source} is not a git repository: --history needs a folder with .git")
        if not source.endswith(ARCHIVES):
            if "/" in source or path.suffix in (".whl", ".egg"):
                raise ConfigError(f"{source}: no such folder, and no archive of sources ({', '.join(ARCHIVES)})")
            path = fetch_archive(source, CACHE)
        elif not path.is_file():
            raise ConfigError(f"{source}: no such file")
        return self._place(tree_name(path), path.name, lambda folder: unpack(path, folder))

    def _place(self, name: str, origin: str, write) -> SourceTree:
        """Write a tree beside its place and rename it, so that a tree below trees/ is always whole.

        Raises ConfigError where an earlier run put another tree there.
        """
        folder = self.journal.trees / name
        with tempfile.TemporaryDirectory(dir=self.journal.folder) as beside:
            made = Path(beside) / name
            made.mkdir()
            write(made)
            describe_tree(made, name, origin)
            if not folder.is_dir():
                made.rename(folder)
            elif tree_digest(made) != tree_digest(folder):
                raise ConfigError(
                    f"{origin} differs from {folder}, which earlier tasks were made from; give another -o, or "
                    "remove that folder to make them again"
                )
        return describe_tree(folder, name, origin)

    async def _make_tree(self, tree: SourceTree) -> None:
        work = await self._begin(tree)
        listed = find_candidates(tree.name, work.index, work.baseline, self.settings)
        self.figures[tree.name] = {
            "tests": len(work.baseline.stable),
            "tests_left_out": work.baseline.excluded,
            "functions": len(work.index.functions),
            "functions_left_out": dict(listed.left_out),
            "candidates": len(listed.candidates),
            "import_errors": {file: last_line(message) for file, message in work.baseline.collect_errors.items()},
            "compiled_parts": list(tree.compiled[:3]),
        }
        await self._prove_all(work, listed.candidates)

    async def _begin(self, tree: SourceTree, tests: Sequence[str] | None = None) -> SourceWork:
        play = self._player(tree)
        limited = tree if tests is None else dataclasses.replace(tree, tests=tuple(tests))
        baseline = await measure_baseline(limited, play, self.settings.suite_timeout_s)
        sources = {path: tree.text(path) for path in tree.sources}
        index = await asyncio.to_thread(index_functions, sources, other_texts(tree))
        return SourceWork(tree=tree, index=index, baseline=baseline, play=play)

    def _player(self, tree: SourceTree) -> PlaySuite:
        async def play(
            runs: Sequence[SuiteRun], *, preload: Sequence[str], hash_seed: int, explain: bool = False
        ) -> dict[str, SuiteResult]:
            async with self._boxes:
                return await run_suite(
                    self.runtime,
                    tree.folder,
                    runs,
                    python_path=tree.python_path,
                    preload=preload,
                    test_timeout_s=self.settings.test_timeout_s,
                    hash_seed=hash_seed,
                    explain=explain,
                )

        return play

    async def _prove_all(self, work: SourceWork, candidates: Sequence[TaskCandidate]) -> None:
        """Prove the candidates that no earlier run did, in order, until the limit is reached."""
        orders = {candidate.id: order for order, candidate in enumerate(candidates)}
        waiting = [candidate for candidate in candidates if candidate.id not in self.journal.verdicts]
        batches = iter([waiting[start : start + BATCH] for start in range(0, len(waiting), BATCH)])

        async def worker() -> None:
            for batch in batches:
                if self._enough(orders):
                    return
                for proof in await self._prove_batch(work, batch):
                    self._record(work, proof, work.tree.name, orders[proof.candidate.id])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.jobs):
                    group.create_task(worker())
        except ExceptionGroup as group:  # The first one ended the others.
            raise group.exceptions[0] from group

    async def _prove_batch(
        self, work: SourceWork, batch: Sequence[TaskCandidate], *, is_again: bool = False
    ) -> list[Proof]:
        """Prove a batch. One that ends its box is taken apart, so that only the candidate at fault is refused.

        A candidate is refused after two tries, and only while boxes can be opened. Raises SandboxError otherwise.
        """
        try:
            return await prove(batch, work)
        except SandboxError as error:
            if is_again:
                await self._try_box()
                return [Proof(candidate=batch[0], reason="the box ended", detail=str(error)[:300])]
        return [proof for one in batch for proof in await self._prove_batch(work, [one], is_again=len(batch) == 1)]

    def _enough(self, orders: dict[str, int]) -> bool:
        """Tell whether the candidates before the first one that is not done give `limit` tasks."""
        if self.settings.limit is None:
            return False
        proven = 0
        for name in orders:
            verdict = self.journal.verdicts.get(name)
            if verdict is None or proven >= self.settings.limit:
                break
            proven += not verdict.reason
        return proven >= self.settings.limit

    def _record(self, work: SourceWork, proof: Proof, source: str, order: int) -> None:
        self._note(proof, source, order, None if proof.reason else build_task(work, proof, self.settings))

    def _note(self, proof: Proof, source: str, order: int, task: CodeTask | None) -> None:
        verdict = CandidateVerdict(
            source=source,
            order=order,
            id=proof.candidate.id,
            kind=proof.candidate.kind,
            shape=proof.candidate.shape,
            reason=proof.reason,
            detail=proof.detail,
        )
        self.journal.add(verdict, task)
        self._lines.tell(self._words)

    def _words(self) -> str:
        made = sum(not verdict.reason for verdict in self.journal.verdicts.values())
        return f"{pluralize(made, 'task')} of {len(self.journal.verdicts)} candidates"

    async def _make_history(self, repository: Path) -> None:
        """Make tasks of commits. They count as a source of their own, also for the limit."""
        commits = await asyncio.to_thread(source_commits, repository, self.settings.history)
        name = tree_name(repository.resolve())
        source = f"{name} history"
        orders = {_commit_id(name, commit): order for order, commit in enumerate(commits)}
        waiting = [commit for commit in commits if _commit_id(name, commit) not in self.journal.verdicts]
        for commit in waiting:
            if self._enough(orders):
                return
            candidate = TaskCandidate(
                id=_commit_id(name, commit),
                kind="history",
                shape="commit",
                functions=(),
                before=commit.before,
                added=commit.added,
                message=commit.message,
            )
            order = orders[candidate.id]
            try:
                work, proof = await self._prove_commit(repository, f"{name}-{commit.commit[:12]}", commit, candidate)
                self._record(work, proof, source, order)
            except (ConfigError, SandboxError) as error:
                if isinstance(error, SandboxError):
                    await self._try_box()
                refused = Proof(candidate=candidate, reason="the commit's tree cannot be used", detail=str(error)[:300])
                self._note(refused, source, order, None)

    async def _prove_commit(
        self, repository: Path, name: str, commit: SourceCommit, candidate: TaskCandidate
    ) -> tuple[SourceWork, Proof]:
        """Prove one commit. It has a tree of its own, and a baseline over its tests and a few others."""
        files = await asyncio.to_thread(lambda: list(commit_files(repository, commit.commit)))
        tree = self._place(name, str(repository), lambda folder: write_tree(folder, files))
        tree = dataclasses.replace(tree, repository=tree_name(repository.resolve()))
        others = [path for path in tree.tests if path not in commit.tests]
        others = sorted(others, key=lambda path: shuffled(self.settings.seed, path))[:_HISTORY_TEST_FILES]
        work = await self._begin(tree, [*commit.tests, *others])
        candidate = dataclasses.replace(candidate, tests=tuple(sorted(work.baseline.files)))
        (proof,) = await self._prove_batch(work, [candidate])
        return work, proof

    def _report(self, total: int, wall_s: float, before: int) -> dict[str, Any]:
        verdicts = list(self.journal.verdicts.values())
        proven = [verdict for verdict in verdicts if not verdict.reason]
        made = sum(not verdict.reason for verdict in verdicts[before:])
        return {
            "tasks": total,
            "candidates": len(verdicts),
            "made_in_this_run": made,
            "wall_s": round(wall_s, 1),
            "tasks_per_minute": round(60 * made / max(wall_s, 1e-9), 1),
            "jobs": self.jobs,
            "settings": dataclasses.asdict(self.settings),
            "tasks_by_source": dict(sorted(Counter(verdict.source for verdict in proven).items())),
            "tasks_by_shape": dict(Counter(f"{verdict.kind}: {verdict.shape}" for verdict in proven).most_common()),
            "refused_by_reason": dict(Counter(verdict.reason for verdict in verdicts if verdict.reason).most_common()),
            "sources_refused": self.problems,
            "baselines": self.figures,
            "refused": [
                {"id": verdict.id, "reason": verdict.reason, "detail": verdict.detail}
                for verdict in verdicts
                if verdict.reason
            ],
        }


def _commit_id(name: str, commit: SourceCommit) -> str:
    return f"{name}/history/{commit.commit[:12]}"
