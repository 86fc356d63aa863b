"""Make tasks of sources: copy, measure the baseline, find candidates, prove them, write what is proven.

    source ── copy ──> tree ── three runs ──> baseline ── trace, syntax ──> candidates ── batches ──> proofs
    proofs ──> tasks.jsonl, report.json

    a batch, three times:   start of candidate 1, start of candidate 2, ...,  the tree once per set of test files
                            └──────────────── one box and one interpreter ────────────────┘

A proof is that tests fail before and pass after, under three hash seeds. Grading runs whole test files, so proofs do.
Proofs are taken in the candidates' order, so that the same settings give the same tasks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.console import ProgressLines, pluralize
from composer_prime.errors import ConfigError, SandboxError
from composer_prime.run.run_dir import write_atomic
from orchestrator.coding.code.grading import MIN_TIMEOUT_S, SLOWDOWN, grade, hold_back
from orchestrator.coding.factory.candidates import (
    FactorySettings,
    TaskCandidate,
    changed_files,
    commit_candidates,
    find_candidates,
    shuffled,
)
from orchestrator.coding.factory.source import (
    SourceFunction,
    SourceTree,
    describe_tree,
    editable_patterns,
    plain,
    plain_texts,
    source_files,
    tree_name,
)
from orchestrator.coding.factory.suite import (
    Baseline,
    SuiteResult,
    SuiteRun,
    TestRecord,
    last_line,
    measure_baseline,
    play,
    test_file,
)
from orchestrator.coding.formats.conversion import in_order
from orchestrator.coding.git_command import git
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.task import HELD_BACK, TASKS_FILE, TREES_FOLDER, CodeTask, write_suite, write_tree

REPORT_FILE = "report.json"
BATCH = 12
"""Candidates that share a box and an interpreter."""
_HISTORY_TEST_FILES = 4
GRADINGS = 3
_LINES_BESIDE = 2
"""A mistake's own line may stand anywhere; with these around it, it is a copy."""
MAX_SYMPTOMS = 3
_SIGNATURE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 600


Refusal = tuple[str, str]
"""Why a candidate gives no task, and more about it: a test, a file, a message."""
Outcome = tuple[TaskCandidate, CodeTask | Refusal]


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
    local_edits: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    refused: list[dict[str, str]] = field(default_factory=list)
    lacking: Counter[str] = field(default_factory=Counter)
    """What the tests of tasks do not give -> tasks: disguised values or special cases of tests might pass them."""
    _lines: ProgressLines = field(default_factory=ProgressLines)

    async def make(self, sources: Sequence[str]) -> dict[str, Any]:
        started = time.monotonic()
        if self.folder.is_file() or (self.folder.is_dir() and any(self.folder.iterdir())):
            raise ConfigError(f"{self.folder} is not empty: give -o a new folder, or remove it")
        names = Counter(tree_name(Path(source)) for source in set(sources))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"several sources are called {', '.join(repeated)}: give each another -o")
        for path in self.settings.overlay:
            if not any(Path(source, path).is_file() for source in sources):
                raise ConfigError(f"--overlay {path}: no such file in {', '.join(sources)}; paths begin at the source")
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
        if not source.is_dir():
            raise ConfigError(f"{source}: no such folder; unpack an archive first")
        if (source / ".git").exists():
            if edits := git(source, "status", "--porcelain", "--ignore-submodules").splitlines():
                self.local_edits[str(source)] = [line.decode(errors="replace") for line in edits]
            return self._copy(source, git(source, "rev-parse", "HEAD").decode().strip())
        if self.settings.history:
            raise ConfigError(f"{source} is not a git repository: --history needs a folder with .git")
        return self._copy(source)

    def _copy(self, source: Path, commit: str = "") -> SourceTree:
        repository = tree_name(source)
        folder = self.folder / TREES_FOLDER / (f"{repository}-{commit[:12]}" if commit else repository)
        write_tree(folder, source_files(source, commit, self.settings.overlay))
        return describe_tree(folder, repository, str(source))

    async def _make_tree(self, tree: SourceTree) -> None:
        baseline = await measure_baseline(tree, self.runtime, self.settings.suite_timeout_s)
        write_suite(tree.folder, baseline.suite())
        candidates, left_out = find_candidates(baseline, self.settings)
        figures = self.figures[tree.name] = {
            "tests": len(baseline.stable),
            "tests_left_out": baseline.excluded,
            "functions": len(tree.functions),
            "functions_left_out": dict(left_out),
            "candidates": len(candidates),
            "packages_missing": baseline.missing,
            "import_errors": {file: last_line(message) for file, message in baseline.collect_errors.items()},
        }
        batches = [candidates[start : start + BATCH] for start in range(0, len(candidates), BATCH)]
        figures["tasks"] = await self._take(lambda batch: self._prove_batch(baseline, batch), batches)

    async def _take(self, prove_one: Callable[[Any], Awaitable[list[Outcome]]], items: Sequence[Any]) -> int:
        made = 0
        async with aclosing(in_order(prove_one, items, self.jobs)) as results:
            async for outcomes in results:
                for candidate, outcome in outcomes:
                    if made == self.settings.limit:
                        return made
                    is_proven = isinstance(outcome, CodeTask)
                    made += self._record(candidate, await self._confirmed(outcome) if is_proven else outcome)
        return made

    async def _prove_batch(self, baseline: Baseline, batch: Sequence[TaskCandidate]) -> list[Outcome]:
        """Prove a batch. One that ends its box is taken apart, so that only the candidate at fault is refused."""
        try:
            return await prove(batch, baseline, self.runtime, self.settings)
        except SandboxError as error:
            await self._try_box()
            if len(batch) == 1:
                return [(batch[0], ("the box ended", str(error)[:300]))]
        return [outcome for candidate in batch for outcome in await self._prove_batch(baseline, [candidate])]

    async def _confirmed(self, task: CodeTask) -> CodeTask | Refusal:
        solution = {path: text.encode() for path, text in task.solution.items()}
        try:
            result = await grade(task, self.folder / TREES_FOLDER, solution, self.runtime)
            if not result.solved:
                return "grading does not confirm it", result.report[:300]
            held = await hold_back(task, self.folder / TREES_FOLDER, self.runtime)
        except SandboxError as error:
            await self._try_box()
            return "the box ended", str(error)[:300]
        self.lacking["counter-tests"] += not result.counter_tests
        self.lacking["held-back inputs"] += HELD_BACK not in held.test_files
        return held

    def _record(self, candidate: TaskCandidate, outcome: CodeTask | Refusal) -> bool:
        is_task = isinstance(outcome, CodeTask)
        if is_task:
            with (self.folder / TASKS_FILE).open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
            self.shapes[f"{candidate.kind}: {candidate.shape}"] += 1
        else:
            self.refused.append({"id": candidate.id, "reason": outcome[0], "detail": outcome[1]})
        made = self.shapes.total()
        self._lines.tell(lambda: f"{pluralize(made, 'task')} of {made + len(self.refused)} candidates")
        return is_task

    async def _prove_commit(self, repository: Path, candidate: TaskCandidate) -> list[Outcome]:
        if candidate.refusal:
            return [(candidate, (candidate.refusal, candidate.message[:80]))]
        try:
            tree = await asyncio.to_thread(self._copy, repository, candidate.commit)
            baseline = await measure_baseline(tree, self.runtime, self.settings.suite_timeout_s)
            write_suite(tree.folder, baseline.suite())
            return await self._prove_batch(baseline, [candidate])
        except (ConfigError, SandboxError) as error:
            if isinstance(error, SandboxError):
                await self._try_box()
            return [(candidate, ("the commit's tree cannot be used", str(error)[:300]))]

    def _report(self, wall_s: float) -> dict[str, Any]:
        made = self.shapes.total()
        return {
            "tasks": made,
            "candidates": made + len(self.refused),
            "wall_s": round(wall_s, 1),
            "settings": dataclasses.asdict(self.settings),
            "tasks_without_counter_tests": self.lacking["counter-tests"],
            "tasks_without_held_back_inputs": self.lacking["held-back inputs"],
            "tasks_by_shape": dict(self.shapes.most_common()),
            "refused_by_reason": dict(Counter(refusal["reason"] for refusal in self.refused).most_common()),
            "sources_refused": self.problems,
            "local_edits_left_out": self.local_edits,
            "baselines": self.figures,
            "refused": self.refused,
        }


# Proofs: what tests of a candidate fail before and pass after.


def choose_test_files(candidate: TaskCandidate, baseline: Baseline, settings: FactorySettings) -> list[str]:
    if candidate.commit:
        own = baseline.files.keys() & {*candidate.tests}
        others = sorted(baseline.files.keys() - own, key=lambda path: shuffled(settings.seed, path))
        return sorted([*own, *others[:_HISTORY_TEST_FILES]])
    nodes = frozenset[str]().union(*(baseline.reach.get(place, frozenset()) for place, _ in candidate.edits))
    reaching = Counter(test_file(node) for node in sorted(nodes))
    files, seconds, count = [], 0.0, 0
    for file, tests in reaching.most_common():
        if files and (count >= settings.first_tests or seconds + baseline.seconds[file] > settings.first_s):
            break
        files.append(file)
        seconds += baseline.seconds[file]
        count += tests
    if sum(len(baseline.files[file]) for file in files) == count:  # all may fail: add one whose tests keep passing
        others = [file for file in sorted(baseline.files) if file not in reaching]
        files += sorted(others, key=lambda file: (baseline.seconds[file] > 1.0, file))[:1]
    return sorted(files)


async def prove(
    batch: Sequence[TaskCandidate], baseline: Baseline, runtime: RuntimeConfig, settings: FactorySettings
) -> list[Outcome]:
    found = {candidate.id: _prepare(candidate, baseline, settings) for candidate in batch}
    seen: dict[str, list[Grading]] = {name: [] for name in found}
    for hash_seed in range(GRADINGS):
        cases = {name: run for name, run in found.items() if isinstance(run, SuiteRun)}
        for name, results in (await _graded(cases, baseline.tree, runtime, hash_seed)).items():
            seen[name].append(results)
            found[name] = _refusal(cases[name].tests, baseline, seen[name]) or cases[name]
    outcomes: list[Outcome] = []
    for each in batch:
        run = found[each.id]
        is_proven = isinstance(run, SuiteRun)
        outcomes.append((each, build_task(each, run, seen[each.id], baseline, settings) if is_proven else run))
    return outcomes


Grading = tuple[SuiteResult, SuiteResult]


async def _graded(
    cases: Mapping[str, SuiteRun], tree: SourceTree, runtime: RuntimeConfig, hash_seed: int
) -> dict[str, Grading]:
    own_keys = {name: "\n".join(run.tests) for name, run in cases.items()}
    own = {own_keys[name]: msgspec.structs.replace(run, key=own_keys[name], files={}) for name, run in cases.items()}
    runs = [*cases.values(), *own.values()]
    results = await play(tree, runtime, runs, hash_seed=hash_seed, explain=hash_seed == 0) if runs else {}
    return {name: (results[name], results[own_keys[name]]) for name in cases}


def _prepare(candidate: TaskCandidate, baseline: Baseline, settings: FactorySettings) -> SuiteRun | Refusal:
    start = changed_files(candidate, baseline)
    if all(baseline.tree.texts.get(path) == text for path, text in start.items()):
        return "the change changes nothing", ""
    tests = choose_test_files(candidate, baseline, settings)
    if not tests:
        return "no quick test file reaches it", ""
    if copy := _copy_of_the_original(candidate, baseline.tree, start):
        return "the original stands elsewhere", copy
    limit_s = 20.0 + 8 * sum(baseline.seconds[file] for file in tests)
    return SuiteRun(key=candidate.id, tests=tests, files=start, timeout_s=limit_s)


def _copy_of_the_original(candidate: TaskCandidate, tree: SourceTree, start: Mapping[str, str | None]) -> str:
    originals = []
    for place, edit in candidate.edits:
        function = tree.functions[place]
        beside = 0 if edit == function.removal else _LINES_BESIDE
        first = max(edit.start[0] - beside, function.first_line)
        last = min(edit.end[0] + beside, function.removal.end[0])
        originals.append(plain("\n".join(tree.texts[function.path].split("\n")[first - 1 : last])))
    texts = {**plain_texts(tree.folder), **{path: plain(text or "") for path, text in start.items()}}
    found = (path for path, text in texts.items() if originals and all(original in text for original in originals))
    return next(found, "")


def _refusal(files: Sequence[str], baseline: Baseline, seen: Sequence[Grading]) -> Refusal | None:
    before, after = seen[-1]
    failing, passing = _sort_tests(files, baseline, seen)
    new = [file for file in before.collect_errors if file not in after.collect_errors]
    if before.ended.startswith("timeout"):
        return "the changed code hangs", before.running or ""
    if before.ended or after.ended:
        return "the test run ended early", before.ended or after.ended
    if new:
        return "a test file can no longer be imported", new[0]
    if not failing:
        return "no test fails" if len(seen) == 1 else "no test fails each time", ""
    return None if passing else ("no test keeps passing", "")


def _sort_tests(files: Sequence[str], baseline: Baseline, seen: Sequence[Grading]) -> tuple[list[str], list[str]]:
    before, after = ([run.passed() for run in runs] for runs in zip(*seen, strict=True))
    solid = frozenset.intersection(*map(frozenset, after))
    never, always = solid.difference(*before), solid.intersection(*before)
    expected = [node for file in files for node in baseline.files.get(file, ())]
    return [node for node in expected if node in never], [node for node in expected if node in always]


def build_task(
    candidate: TaskCandidate, run: SuiteRun, seen: Sequence[Grading], baseline: Baseline, settings: FactorySettings
) -> CodeTask:
    tree = baseline.tree
    failing, passing = _sort_tests(run.tests, baseline, seen)
    records = seen[0][0].tests
    start = {path: text for path, text in run.files.items() if text is not None}
    hidden = sorted({test_file(node) for node in failing}) if settings.hide_tests else []
    seconds = max(sum(record.duration_s for record in after.tests.values()) for _, after in seen)
    return CodeTask(
        id=candidate.id,
        kind=candidate.kind,
        repository=tree.repository,
        tree=tree.name,
        prompt=_prompt(candidate, tree, [records[node] for node in failing if node in records], len(failing)),
        start=start,
        removed=[*(path for path in run.files if path not in start), *hidden],
        solution={path: tree.texts[path] for path in run.files if path in tree.texts},
        editable=editable_patterns(tree, run.files),
        tests=run.tests,
        fail_to_pass=failing,
        pass_to_pass=passing,
        flaky=sorted({node for before, _ in seen for node in before.tests} - {*failing, *passing}),
        python_path=list(tree.python_path),
        timeout_s=max(MIN_TIMEOUT_S, round(SLOWDOWN * seconds)),
        symbols=[tree.functions[place].symbol for place, _ in candidate.edits],
        source=tree.origin,
    )


def _prompt(candidate: TaskCandidate, tree: SourceTree, failures: Sequence[TestRecord], total: int) -> str:
    failures = sorted(failures, key=lambda record: (not record.assertion, record.node))
    if candidate.commit:
        opening = f"Make this change:\n\n{candidate.message[:_SIGNATURE_CHARACTERS]}"
        tests = f"{total} test{'s' * (total != 1)} of the repository must pass then, and must not pass now."
        parts = [opening, tests, *symptoms(failures)]
    elif candidate.kind == "mutate":
        tests = "A test fails" if total == 1 else f"{total} tests fail"
        parts = [f"{tests} that should pass. Find the bug in the sources and repair it.", *symptoms(failures)]
    else:
        parts = deletion_prompt([tree.functions[place] for place, _ in candidate.edits])
    return "\n\n".join([*parts, "Change the sources only. The tests stay as they are."])


def deletion_prompt(functions: Sequence[SourceFunction]) -> list[str]:
    if len(functions) == 1:
        where = f"`{functions[0].qualname}` in `{functions[0].path}`"
        parts = [f"The body of {where} is missing: it raises NotImplementedError. Write it."]
    else:
        parts = [f"The bodies of {len(functions)} functions are missing: they raise NotImplementedError. Write them."]
    for function in functions:
        head = "What is left of it:" if len(functions) == 1 else f"`{function.path}`, `{function.qualname}`:"
        parts.append(f"{head}\n\n```python\n{function.signature[:_SIGNATURE_CHARACTERS]}\n```")
    return parts


def symptoms(failures: Sequence[TestRecord]) -> list[str]:
    """Return a paragraph for each of the first failing tests, without addresses: they differ from run to run."""
    parts = []
    for record in failures[:MAX_SYMPTOMS]:
        statement = f"{record.assertion}\n\n" if record.assertion else ""
        message = re.sub(r"0x[0-9a-fA-F]{4,}", "0x...", record.message)[:_MESSAGE_CHARACTERS]
        parts.append(f"`{record.node}`:\n\n```\n{statement}{message}\n```")
    return parts
