"""Three runs of the untouched tree: which tests can be relied on, and which functions each of them reaches.

The first run traces calls. All three have other hash seeds, so a test that depends on the order of a set is found. A
test counts when it passed three times. Test files with a test that is slow are never part of a task, because grading
runs whole files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_prime.errors import ConfigError
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.factory.source_functions import FunctionIndex
from orchestrator.coding.factory.suite import SuiteResult, SuiteRun

RUNS = 3
SLOW_FILE_S = 8.0
"""A test file that takes longer is in no task."""

PlaySuite = Callable[..., Awaitable[dict[str, SuiteResult]]]
"""`run_suite` with tree and runtime given: (runs, preload, hash_seed) -> results by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorySettings:
    """What decides which tasks are made. The same settings and source give the same tasks."""

    kinds: tuple[str, ...] = ("delete", "mutate")
    history: int = 0
    """Newest commits of a git repository to look at."""
    seed: int = 0
    limit: int | None = None
    """Tasks of each source."""
    min_lines: int = 3
    """Lines of statements that a function must have."""
    mutations_per_function: int = 2
    hide_tests: bool = False
    """The agent's tree lacks the test files of the task."""
    test_timeout_s: float = 5.0
    suite_timeout_s: float = 180.0
    packages: tuple[str, ...] = ()
    """Installed packages that tests need beside pytest."""

    def identity(self) -> dict[str, Any]:
        """Return what must not change when a run continues. The number of tasks may grow."""
        return {name: value for name, value in asdict(self).items() if name not in ("limit", "history")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the untouched tree's tests do."""

    stable: dict[str, float]
    """Node id -> seconds, of tests that passed in all runs."""
    reach: dict[str, frozenset[str]]
    """Function's place -> stable tests that reach it."""
    imported: frozenset[str]
    """Places of functions that run while the tests are imported."""
    lines: frozenset[str]
    """Executed lines, as "path:line"."""
    excluded: dict[str, int]
    """Why tests do not count -> how many."""
    files: dict[str, list[str]]
    """Test file -> its stable tests. Files that grading must not run are not here."""
    seconds: dict[str, float]
    """Test file -> seconds of all its tests."""
    preload: list[str]
    """Modules from outside the tree that the tests import."""
    collect_errors: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SourceWork:
    """One source in work."""

    tree: SourceTree
    index: FunctionIndex
    baseline: Baseline
    play: PlaySuite


async def measure_baseline(tree: SourceTree, play: PlaySuite, suite_timeout_s: float) -> Baseline:
    """Run the tests three times.

    Raises ConfigError for a tree whose tests hang, or of which none passes, with the reason.
    """
    files = [path for path in tree.tests if _has_tests(tree, path)]
    results: list[SuiteResult] = []
    for number in range(RUNS):
        run = SuiteRun(key="all", tests=files, timeout_s=suite_timeout_s, trace=not results)
        modules = results[0].modules if results else []
        result = (await play([run], preload=modules, hash_seed=number))["all"]
        if result.ended.startswith("timeout") or (result.ended and result.running):
            raise ConfigError(
                f"{tree.origin}: its tests do not come to an end ({last_line(result.ended)}); they stop in "
                f"{result.running or 'the import of its tests'}. Take such tests out, or raise --suite-timeout "
                f"({suite_timeout_s:g} s)"
            )
        if result.ended:
            raise ConfigError(f"{tree.origin}: pytest cannot run its tests: {last_line(result.ended)}")
        results.append(result)
    baseline = _combine(results)
    if len(baseline.stable) < 2:
        count = "only one" if baseline.stable else "none"
        raise ConfigError(
            f"{tree.origin}: {count} of its tests passes here, so no task can be made. {_why(tree, baseline, results)}"
        )
    return baseline


def _has_tests(tree: SourceTree, path: str) -> bool:
    text = tree.text(path)
    return not path.endswith(("conftest.py", "__init__.py")) and ("def test" in text or "TestCase" in text)


def test_file(node: str) -> str:
    """Return the file of a node id."""
    return node.split("::", 1)[0]


def _combine(results: list[SuiteResult]) -> Baseline:
    first = results[0]
    nodes = sorted(set().union(*(result.tests for result in results)))
    stable: dict[str, float] = {}
    excluded: Counter[str] = Counter()
    slow_files: set[str] = set()
    seconds: dict[str, float] = defaultdict(float)
    for node in nodes:
        records = [result.tests[node] for result in results if node in result.tests]
        outcomes = {record.outcome for record in records}
        durations = sorted(record.duration_s for record in records)
        seconds[test_file(node)] += durations[len(durations) // 2]
        if "slow" in outcomes:
            slow_files.add(test_file(node))
            excluded["slow"] += 1
        elif any(record.network for record in records):
            excluded["needs a network"] += 1
        elif len(records) < RUNS or len(outcomes) > 1:
            excluded["flaky"] += 1
        elif outcomes != {"passed"}:
            excluded[outcomes.pop()] += 1
        else:
            stable[node] = durations[0]
    errors = {file: message for result in results for file, message in result.collect_errors.items()}
    excluded["test files that cannot be imported"] += len(errors)
    slow_files |= {file for file, duration in seconds.items() if duration > SLOW_FILE_S}
    files: dict[str, list[str]] = defaultdict(list)
    for node in stable:
        if test_file(node) in slow_files:
            excluded["in a file that is slow or has a slow test"] += 1
        else:
            files[test_file(node)].append(node)
    reach: dict[str, set[str]] = defaultdict(set)
    for node, record in first.tests.items():
        if node in stable and test_file(node) in files:
            for place in record.reached:
                reach[place].add(node)
    return Baseline(
        stable=stable,
        reach={place: frozenset(tests) for place, tests in reach.items()},
        imported=frozenset(first.imported),
        lines=first.lines,
        excluded={reason: count for reason, count in sorted(excluded.items()) if count},
        files=dict(files),
        seconds=dict(seconds),
        preload=results[-1].modules or first.modules,
        collect_errors=errors,
    )


def last_line(text: str) -> str:
    """Return the last line with something on it."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or [text])[-1]


def _why(tree: SourceTree, baseline: Baseline, results: list[SuiteResult]) -> str:
    counts = ", ".join(f"{reason}: {count}" for reason, count in baseline.excluded.items())
    text = f"Tests left out: {counts or ('none' if baseline.stable else 'pytest finds none')}"
    examples = {
        node: ": ".join(filter(None, [last_line(record.message), record.assertion[:200]]))
        for node, record in results[0].tests.items()
    }
    if example := next((node for node in examples if node not in baseline.stable), None):
        text += f", such as {example}" + f" ({examples[example] or 'no message'})"
    text += ". A task needs a test that fails and one that passes." if baseline.stable else "."
    if tree.compiled:
        text += f" The package has C extensions ({tree.compiled[0]} ...), and the factory compiles nothing."
    if baseline.collect_errors:
        file, message = next(iter(baseline.collect_errors.items()))
        text += f" {file}: {last_line(message)}"
    return text
