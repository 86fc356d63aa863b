"""Make tasks of sources: copy, measure the baseline, find candidates, prove them, write what is proven.

    source ── copy ──> tree ── three runs ──> baseline ── trace, syntax ──> candidates ── batches ──> proofs
    proofs ──> tasks.jsonl, report.json

Sources follow one another; the batches of one share `jobs` boxes. Proofs are taken in the candidates' order, so that
the same settings give the same tasks. A source that cannot be used is recorded, and the others continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.console import ProgressLines, pluralize
from composer_prime.errors import ConfigError, SandboxError
from composer_prime.run.run_dir import write_atomic
from orchestrator.coding.factory.candidates import (
    FactorySettings,
    TaskCandidate,
    commit_candidates,
    find_candidates,
    shuffled,
)
from orchestrator.coding.factory.proof import Proof, build_task, prove
from orchestrator.coding.factory.source import SourceTree, describe_tree, source_files, tree_name
from orchestrator.coding.factory.suite import Baseline, last_line, measure_baseline
from orchestrator.coding.formats.conversion import in_order
from orchestrator.coding.git_command import git
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.task import TASKS_FILE, TREES_FOLDER, write_tree

REPORT_FILE = "report.json"
BATCH = 12
"""Candidates that share a box and an interpreter."""
_HISTORY_TEST_FILES = 4
"""Test files that a commit did not change and that run beside those it changed."""


TreeAndProofs = tuple[SourceTree | None, list[Proof]]
"""Proofs, and their tree; None where none has a task."""


def factory_runtime(kind: str, packages: tuple[str, ...] = ()) -> RuntimeConfig:
    """Return the runtime of proofs. A command runs many tests one after the other, so its time is large."""
    limits = SandboxLimits(wall_s=7200, cpu_s=7200, memory_gb=2)
    return RuntimeConfig(type=kind, limits=limits, packages=list(packages))


@dataclass(slots=True)
class TaskFactory:
    """Makes the tasks of one output folder."""

    folder: Path
    settings: FactorySettings
    runtime: RuntimeConfig
    jobs: int
    problems: dict[str, str] = field(default_factory=dict)
    """Source -> why it gives no task at all."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Source -> what its baseline showed."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Kind and shape -> tasks."""
    refused: list[dict[str, str]] = field(default_factory=list)
    """Candidates that became no task, with the reason."""
    _lines: ProgressLines = field(default_factory=ProgressLines)

    async def make(self, sources: Sequence[str]) -> dict[str, Any]:
        """Make the tasks of all sources. Return the report, which is also written, also when the work is canceled.

        Raises ConfigError for an output folder that has files, SandboxError where no sandbox can be opened.
        """
        started = time.monotonic()
        if self.folder.is_file() or (self.folder.is_dir() and any(self.folder.iterdir())):
            raise ConfigError(f"{self.folder} is not empty: give -o a new folder, or remove it")
        names = Counter(tree_name(Path(source)) for source in set(sources))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"several sources are called {', '.join(repeated)}: give each another -o")
        await self._try_box()  # without sandboxes every candidate would be refused for it
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for source in dict.fromkeys(sources):
                await self._make_source(source)
        finally:
            report = self._report(time.monotonic() - started)
            text = msgspec.json.format(msgspec.json.encode(report), indent=2)
            write_atomic(self.folder / REPORT_FILE, text + b"\n")
        return report

    async def _try_box(self) -> None:
        """Open a box and close it. Raises SandboxError, where no candidate is at fault."""
        async with await open_box(self.runtime):
            pass

    async def _make_source(self, source: str) -> None:
        self._lines.tell(lambda: f"{source}: three runs of its tests")
        try:
            tree = await asyncio.to_thread(self._open, Path(source))
            await self._make_tree(tree)
            if self.settings.history:
                commits = await asyncio.to_thread(commit_candidates, Path(source), self.settings.history)
                await self._take(lambda commit: self._prove_commit(Path(source), commit), commits)
        except (ConfigError, SandboxError, OSError) as error:
            self.problems[source] = str(error)

    def _open(self, source: Path) -> SourceTree:
        """Put the tree of a source below trees/: its newest commit, or its files where it has none."""
        if not source.is_dir():
            raise ConfigError(f"{source}: no such folder; unpack an archive first")
        if (source / ".git").exists():
            return self._copy(source, git(source, "rev-parse", "HEAD").decode().strip())
        if self.settings.history:
            raise ConfigError(f"{source} is not a git repository: --history needs a folder with .git")
        return self._copy(source)

    def _copy(self, source: Path, commit: str = "") -> SourceTree:
        repository = tree_name(source)
        folder = self.folder / TREES_FOLDER / (f"{repository}-{commit[:12]}" if commit else repository)
        write_tree(folder, source_files(source, commit))
        return describe_tree(folder, repository, str(source))

    async def _make_tree(self, tree: SourceTree) -> None:
        baseline = await measure_baseline(tree, self.runtime, self.settings.suite_timeout_s)
        candidates, left_out = find_candidates(baseline, self.settings)
        figures = self.figures[tree.name] = {
            "tests": len(baseline.stable),
            "tests_left_out": baseline.excluded,
            "functions": len(tree.functions),
            "functions_left_out": dict(left_out),
            "candidates": len(candidates),
            "import_errors": {file: last_line(message) for file, message in baseline.collect_errors.items()},
        }
        batches = [candidates[start : start + BATCH] for start in range(0, len(candidates), BATCH)]
        figures["tasks"] = await self._take(lambda batch: self._prove_batch(baseline, batch), batches)

    async def _take(self, prove_one: Callable[[Any], Awaitable[TreeAndProofs]], items: Sequence[Any]) -> int:
        """Record the proofs of all items in their order, until there are `limit` tasks. Return how many there are."""
        made = 0
        async with aclosing(in_order(prove_one, items, self.jobs)) as results:
            async for tree, proofs in results:
                for proof in proofs:
                    if made == self.settings.limit:
                        return made
                    made += self._record(tree, proof)
        return made

    async def _prove_batch(self, baseline: Baseline, batch: Sequence[TaskCandidate]) -> TreeAndProofs:
        """Prove a batch. One that ends its box is taken apart, so that only the candidate at fault is refused.

        A candidate is refused after two tries, and only while boxes can be opened. Raises SandboxError otherwise.
        """
        try:
            return baseline.tree, await prove(batch, baseline, self.runtime)
        except SandboxError:
            await self._try_box()
        proofs = []
        for candidate in batch:
            try:
                proofs += await prove([candidate], baseline, self.runtime)
            except SandboxError as error:
                await self._try_box()
                proofs.append(Proof(candidate=candidate, reason="the box ended", detail=str(error)[:300]))
        return baseline.tree, proofs

    def _record(self, tree: SourceTree | None, proof: Proof) -> bool:
        """Write the task of a proof, or note its refusal. Return whether it gave a task."""
        candidate = proof.candidate
        if proof.reason or tree is None:
            self.refused.append({"id": candidate.id, "reason": proof.reason, "detail": proof.detail})
        else:
            task = build_task(tree, proof, self.settings)
            with (self.folder / TASKS_FILE).open("ab") as file:
                file.write(msgspec.json.encode(task) + b"\n")
            self.shapes[f"{candidate.kind}: {candidate.shape}"] += 1
        made = self.shapes.total()
        self._lines.tell(lambda: f"{pluralize(made, 'task')} of {made + len(self.refused)} candidates")
        return not proof.reason

    async def _prove_commit(self, repository: Path, candidate: TaskCandidate) -> TreeAndProofs:
        """Prove one commit. It has a tree of its own, and a baseline over its tests and a few others."""
        try:
            tree = await asyncio.to_thread(self._copy, repository, candidate.commit)
            others = [path for path in tree.tests if path not in candidate.tests]
            others = sorted(others, key=lambda path: shuffled(self.settings.seed, path))[:_HISTORY_TEST_FILES]
            tree = dataclasses.replace(tree, tests=(*candidate.tests, *others))
            baseline = await measure_baseline(tree, self.runtime, self.settings.suite_timeout_s)
            return await self._prove_batch(baseline, [candidate])
        except (ConfigError, SandboxError) as error:
            if isinstance(error, SandboxError):
                await self._try_box()
            reason = "the commit's tree cannot be used"
            return None, [Proof(candidate=candidate, reason=reason, detail=str(error)[:300])]

    def _report(self, wall_s: float) -> dict[str, Any]:
        made = self.shapes.total()
        return {
            "tasks": made,
            "candidates": made + len(self.refused),
            "wall_s": round(wall_s, 1),
            "settings": dataclasses.asdict(self.settings),
            "tasks_by_shape": dict(self.shapes.most_common()),
            "refused_by_reason": dict(Counter(refusal["reason"] for refusal in self.refused).most_common()),
            "sources_refused": self.problems,
            "baselines": self.figures,
            "refused": self.refused,
        }
