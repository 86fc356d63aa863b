"""Run tests of a tree in a box, and learn from three runs of the untouched one which tests can be relied on.

Many runs of one job share a box and one interpreter (`suite_program.py`). The first of the three traces calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.monitor.before import agents_files, own_modules
from orchestrator.coding.sandbox.box import open_box, read_tree
from orchestrator.coding.task import Suite

RUNS = 3
SLOW_FILE_S = 8.0
"""A test file that takes longer is in no task."""
_PROGRAM = Path(__file__).with_name("suite_program.py")
_ANSWER_BYTES = 256 << 20
_ARGUMENTS = ["-q", "-o", "addopts=", "-o", "required_plugins=", "-p", "no:cacheprovider"]
_ARGUMENTS += ["--continue-on-collection-errors", "--rootdir=.", "--tb=native"]
_START_S = 60.0


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True):
    """Tests to run once over a tree with some files replaced."""

    key: str
    tests: list[str]
    """Test files or folders, as pytest gets them; [] for what pytest finds by itself."""
    files: dict[str, str | None] = {}
    """Path -> text written over the tree; None for a file that is not there."""
    timeout_s: float = 60.0
    trace: bool = False


class TestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one test ended."""

    __test__ = False

    node: str
    outcome: str
    duration_s: float
    message: str
    """Type and words of the exception, for a failed test."""
    assertion: str
    """The test's own statement that failed."""
    reached: list[str] = []


class SuiteResult(msgspec.Struct, kw_only=True):
    """How one run ended."""

    key: str
    tests: dict[str, TestRecord] = {}
    collect_errors: dict[str, str] = {}
    ended: str = ""
    """"" when pytest finished, else "timeout", "exit status N" """
    running: str | None = None
    imported: list[str] = []
    """Functions that ran while tests were collected."""

    def passed(self) -> set[str]:
        return {node for node, record in self.tests.items() if record.outcome == "passed"}


async def play(
    tree: SourceTree, runtime: RuntimeConfig, runs: Sequence[SuiteRun], *, hash_seed: int, explain: bool = False
) -> dict[str, SuiteResult]:
    job = {
        "runs": [msgspec.to_builtins(run) for run in runs],
        "python_path": tree.python_path,
        "arguments": [*_ARGUMENTS, "--assert=rewrite" if explain else "--assert=plain"],
    }
    async with await open_box(runtime, files=agents_files(read_tree(tree.folder))) as box:
        finished = await box.run(
            ["python", "-P", "-c", _PROGRAM.read_text(encoding="utf-8")],
            env={"PYTHONHASHSEED": str(hash_seed), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=json.dumps(job).encode(),
            timeout_s=_START_S + sum(run.timeout_s for run in runs),
            output_bytes=_ANSWER_BYTES,
        )
    try:
        results = msgspec.convert(json.loads(finished.stdout), list[SuiteResult])
    except ValueError as error:
        said = finished.stderr.decode(errors="replace").strip()[-800:] or "nothing was printed"
        ended = finished.ended_by or f"exit code {finished.exit_code}"
        raise SandboxError(f"the tests of {tree.name} gave no report ({ended}): {said}") from error
    return {result.key: result for result in results}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the tests of an untouched tree do."""

    tree: SourceTree
    stable: frozenset[str]
    reach: dict[str, frozenset[str]]
    imported: frozenset[str]
    excluded: dict[str, int]
    files: dict[str, list[str]]
    """Test file -> its stable tests. Files that grading must not run are not here."""
    seconds: dict[str, float]
    collect_errors: dict[str, str]
    missing: list[str]

    def suite(self) -> Suite:
        reach: dict[str, set[str]] = defaultdict(set)
        for place, nodes in self.reach.items():
            reach[place.rpartition(":")[0]].update(map(test_file, nodes))
        seconds = {file: round(self.seconds[file], 3) for file in self.files}
        return Suite(tests=self.files, seconds=seconds, reach={path: sorted(reach[path]) for path in sorted(reach)})


async def measure_baseline(tree: SourceTree, runtime: RuntimeConfig, suite_timeout_s: float) -> Baseline:
    modules = {path: tree.texts[path] for path in tree.tests if not path.endswith(("conftest.py", "__init__.py"))}
    files = [path for path, text in modules.items() if "def test" in text or "TestCase" in text]
    results: list[SuiteResult] = []
    for number in range(RUNS):
        run = SuiteRun(key="all", tests=files, timeout_s=suite_timeout_s, trace=not results)
        result = (await play(tree, runtime, [run], hash_seed=number))["all"]
        if result.ended.startswith("timeout") or (result.ended and result.running):
            raise ConfigError(
                f"{tree.origin}: its tests do not come to an end ({last_line(result.ended)}); they stop in "
                f"{result.running or 'the import of its tests'}. Take such tests out, or raise --suite-timeout "
                f"({suite_timeout_s:g} s)"
            )
        if result.ended:
            raise ConfigError(f"{tree.origin}: pytest cannot run its tests: {last_line(result.ended)}")
        results.append(result)
    baseline = _combine(tree, results)
    if len(baseline.stable) < 2:
        count = "only one" if baseline.stable else "none"
        raise ConfigError(
            f"{tree.origin}: {count} of its tests passes here, so no task can be made. {_why(baseline, results)}"
        )
    return baseline


def test_file(node: str) -> str:
    return node.split("::", 1)[0]


def _combine(tree: SourceTree, results: list[SuiteResult]) -> Baseline:
    first = results[0]
    seconds: dict[str, float] = defaultdict(float)
    for node, record in results[-1].tests.items():  # The first run is slow, because it is traced.
        seconds[test_file(node)] += record.duration_s
    verdicts = {node: _verdict(node, results) for node in sorted(set().union(*(result.tests for result in results)))}
    stable = frozenset(node for node, verdict in verdicts.items() if verdict == "passed")
    excluded = Counter(verdict for verdict in verdicts.values() if verdict != "passed")
    errors = {file: message for result in results for file, message in result.collect_errors.items()}
    excluded["test files that cannot be imported"] += len(errors)
    said = "\n".join([*errors.values(), *(record.message for record in first.tests.values())])
    missing = {*re.findall(r"No module named '(\w+)", said)} - own_modules(tree.texts)
    files: dict[str, list[str]] = defaultdict(list)
    reach: dict[str, set[str]] = defaultdict(set)
    for node in sorted(stable):
        if seconds[test_file(node)] > SLOW_FILE_S:
            excluded["in a slow file"] += 1
            continue
        files[test_file(node)].append(node)
        for place in first.tests[node].reached:
            reach[place].add(node)
    return Baseline(
        tree=tree,
        stable=stable,
        reach={place: frozenset(tests) for place, tests in reach.items()},
        imported=frozenset(first.imported),
        excluded={reason: count for reason, count in sorted(excluded.items()) if count},
        files=dict(files),
        seconds=dict(seconds),
        collect_errors=errors,
        missing=sorted(missing),
    )


def _verdict(node: str, results: list[SuiteResult]) -> str:
    outcomes = {result.tests[node].outcome if node in result.tests else "missing" for result in results}
    return outcomes.pop() if len(outcomes) == 1 else "flaky"


def last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or [text])[-1]


def _why(baseline: Baseline, results: list[SuiteResult]) -> str:
    counts = ", ".join(f"{reason}: {count}" for reason, count in baseline.excluded.items())
    text = f"Tests left out: {counts or 'none'}"
    left_out = [record for node, record in results[0].tests.items() if node not in baseline.stable]
    if left_out:
        text += f", such as {left_out[0].node} ({last_line(left_out[0].message)}: {left_out[0].assertion[:200]})"
    for file, message in list(baseline.collect_errors.items())[:1]:
        text += f". {file}: {last_line(message)}"
    return text
