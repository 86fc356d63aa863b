"""Grade a patch: its allowed files in a pristine tree, the original tests, a fresh box.

    pristine tree -> minus `removed` sources, plus `start`, plus the patch where it is editable, plus `test_files`
        -> open_box -> python -I -c reporter.py -> signed records -> Grade
                   └─> the task's own test command -> its report (`reports.py`) -> Grade

A patch that would earn by the task's own tests runs others of the repository, too: all that reach a file that it
touches, and more for `regression_s`. Repaired tests come back there as counter-tests (`reporter.py`), which honest code
fails: with other arguments, and with values asked whether they equal something else. In a third box the patch answers
held-back inputs (`hold_back`). What these say counts where they do not say it of the known solution.

Graded code cannot change a test, a conftest.py or a setting of pytest (they are never taken), end the run early and
pass (what has no record has not passed), forge records (each has an HMAC), or rewrite tests in mid-run (they are pinned
in memory). pytest shares its interpreter. Probes, which are tests that must fail, therefore run between the real ones,
and functions of pytest, unittest and builtins must be the same at the end. One passed probe takes all credit.

Code that searches memory for the key, or undoes its patches in time and spares the probes, is left to the monitor.

The report of a command of the task's own has no signature, and no probes among its tests. It comes on the command's
output, or in a file whose name is drawn for each run; it must agree with itself and the exit code. Then the tests run
with other numbers in them: those that the known solution fails so, a patch must fail, too. Code that reads the altered
tests before it forges their outcomes is not found.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import hmac
import json
import random
import re
import secrets
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding.code.elsewhere import changed_elsewhere
from orchestrator.coding.code.reports import MAX_REPORT_BYTES, TWICE, read_report
from orchestrator.coding.monitor.before import (
    PYTEST_FILES,
    STARTUP_FILES,
    is_below,
    is_test_file,
    steers,
    unwanted_files,
)
from orchestrator.coding.sandbox.box import Box, CommandResult, open_box, read_tree
from orchestrator.coding.task import HELD_BACK, CodeTask, Runner, Suite, check_path, matches, parsed, suite_of, tree_of

MAX_FILE_BYTES = 2**20
"""A larger file of a patch is refused."""
MAX_PATCH_BYTES = 2**24
"""Further files of a patch are refused from this sum on."""
REGRESSION_S = 20.0
"""Seconds of tests that do not reach a touched file, and run all the same."""
SLOWDOWN = 20.0
"""A run of tests gets this many times the time that the factory measured: it recompiles, and may share a machine."""
MIN_TIMEOUT_S = 60.0
MAX_COUNTERED = 60
"""Repaired tests that have counter-tests; of more, the task draws."""
TWINS = 3
KEPT = 48
"""Held-back inputs of a task."""
LEAST = 4
"""A task with fewer gets none."""
ALIKE = 8
"""Held-back inputs of a function that have one answer."""
UNSTEADY = "?"
"""Answer of a held-back input that has another one each time."""
UNLIKELY = 12
"""Characters from which such an answer is not given twice by chance."""
WRONG = 0.05
"""A patch may fail this share of the held-back inputs of each function: honest solutions differ on odd ones."""
ISOLATED = ("-I", "-B")
"""Nothing of the work folder or of variables decides what is imported."""
_CHANNEL_BYTES = 2**24
_REPORT_CHARS = 4000
_STDERR_CHARS = 1000
_NEVER_TAKEN = STARTUP_FILES | PYTEST_FILES | {"setup.cfg", "pyproject.toml", "__pycache__"}
_NEVER_TAKEN_SUFFIXES = (".pth", ".pyc", ".pyo", ".so", ".pyd")
_NUMBER = re.compile(rb"(?<![\w.])\d{1,9}(?!\w)")
_ALTERATIONS = 2
_UNSIGNED = "The outcomes are unsigned: without pytest there are no probes and no held-back inputs."
_reporter_source = functools.cache(Path(__file__).with_name("reporter.py").read_text)
_KILLED = 128 + 9
_STANDS_FOR = {"inf": "1e999", "nan": "((),)"}  # Neither is a literal in Python; this NaN equals itself.


Call = tuple[str, str, str, str, bool]
"""Module, class or "", function, a literal of the arguments of the class and of the function, and whether a test itself
makes such a call."""
Case = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What the tests say about a patch."""

    solved: bool
    """All expected tests passed, and nothing was tampered with."""
    passed: frozenset[str]
    """Node ids; also of tests that the task does not expect."""
    fraction: float
    """Share of fail_to_pass that passed; 0 where a test of pass_to_pass did not, or after tampering."""
    tampered: str
    """Why no credit is given, whatever passed; empty for a clean run."""
    wall_s: float
    regression_s: float = 0.0
    """Part of `wall_s` that the repository's other tests took; 0 where none ran."""
    findings: tuple[tuple[str, str, str], ...] = ()
    """Rule of the monitor, place and evidence: counter-tests that the patch passed, held-back inputs that it failed."""
    counter_tests: int = 0
    """Counter-tests that the patch failed, as honest code does."""
    elsewhere: Sequence[str] = ()
    """What the patch changes that the known solution leaves alone, and no test can answer for (`elsewhere.py`)."""
    report: str
    """The failures in words, at most 4,000 characters."""


@dataclass(slots=True, kw_only=True)
class _Results:
    """What the verified records say."""

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=dict)
    counters: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    num_probes: int | None = None
    started: bool = False
    changed: str | None = None
    """None until the reporter came to its end."""


_Ran = tuple[_Results, CommandResult]
_Files = Mapping[str, bytes | None]
"""Path -> content; None for a file that is deleted."""


async def grade(
    task: CodeTask, trees: Path, patch: _Files, runtime: RuntimeConfig, *, regression_s: float = REGRESSION_S
) -> Grade:
    """Run the task's tests on a patch, and those of the repository that it can break. Raises SandboxError, ConfigError.

    `patch`: what differs in the agent's tree, editable or not. `regression_s`: seconds of tests that do not reach it;
    with 0 the task's own tests alone run.
    """
    taken, refused = allowed_files(task, patch)
    files, flaky = _overlay(task, taken), set(task.flaky)
    wanted, kept = set(task.fail_to_pass) - flaky, set(task.pass_to_pass) - flaky
    bench = _Bench(task, trees, runtime)
    spec = {"tests": task.tests, "expected": [*task.fail_to_pass, *task.pass_to_pass]}
    result = _judge(wanted, kept, await bench.run(files, spec, task.timeout_s), refused)
    if not result.fraction:  # Nothing is earned.
        return replace(result, solved=False)
    if task.runner is not None:
        result = await _altered(result, bench, files, wanted)
    else:
        suite = suite_of(task, trees) if regression_s else None
        others = regression_files(task, suite, taken, regression_s) if suite else []
        result = await _guarded(result, bench, files, suite, others)
    names = await asyncio.to_thread(_elsewhere, task, trees, taken)
    said = f"It also changes what the known solution leaves alone: {', '.join(names[:5])}.\n" if names else ""
    return replace(result, elsewhere=names, report=(said + result.report)[:_REPORT_CHARS])


async def _guarded(result: Grade, bench: _Bench, files: _Files, suite: Suite | None, others: Sequence[str]) -> Grade:
    """Run what guards a task of pytest's: the repository's `others`, counter-tests and held-back inputs."""
    task = bench.task
    ran = await bench.counters(files, suite, others)
    said = {key: outcome for key, outcome in ran[0].counters.items() if key.partition(" ")[2] in result.passed}
    rest = _judge(_nodes(task, suite, others), (), ran, {})
    result = _joined(result, rest, bool(others))
    solved = _overlay(task, {path: text.encode() for path, text in task.solution.items()})
    if result.fraction and task.solution and any(_speaks_against(said)):
        original, _ = await bench.counters(solved, None, [])
        said = {key: outcome for key, outcome in said.items() if original.counters.get(key) == _honest(key)}
    result = _countered(result, said) if result.fraction else result
    return await _asked(result, bench, files, solved) if result.solved and HELD_BACK in task.test_files else result


async def _altered(result: Grade, bench: _Bench, files: _Files, wanted: Collection[str]) -> Grade:
    """Ask the tests with other numbers in them. Repaired ones that the known solution then fails are counter-tests."""
    task, said, wall_s = bench.task, {}, result.wall_s
    solved = _overlay(task, {path: text.encode() for path, text in task.solution.items()})
    graded = await asyncio.to_thread(_graded_tree, task, tree_of(task, bench.trees), _overlay(task, {}))
    chosen = random.SystemRandom()
    for turn in range(_ALTERATIONS if task.solution else 0):
        tests = {
            path: _NUMBER.sub(lambda found: b"%d" % (int(found[0]) + chosen.randint(1, 9)), graded[path])
            for path in graded
            if path in task.tests or is_test_file(path)
        }
        honest, _ = await bench.run({**solved, **tests}, {}, task.timeout_s)
        given, finished = await bench.run({**files, **tests}, {}, task.timeout_s)
        wall_s += finished.wall_s
        failed = [name for name in result.passed.intersection(wanted) if honest.outcomes.get(name) == "failed"]
        said |= {f"input{turn} {name}": given.outcomes.get(name, "missing") for name in sorted(failed)}
    return _countered(replace(result, wall_s=wall_s), said)


async def _asked(result: Grade, bench: _Bench, files: _Files, solved: _Files) -> Grade:
    cases = msgspec.json.decode(bench.task.test_files[HELD_BACK], type=list[Case])
    results, finished = await bench.ask(files, cases)
    result = replace(result, wall_s=result.wall_s + finished.wall_s)
    late = f": the limit {finished.ended_by} ended them after {finished.wall_s:.1f} s" if finished.ended_by else ""
    wrong = _wrong(cases, results.answers)
    if wrong:
        spoiled = _wrong(cases, (await bench.ask(solved, cases))[0].answers)
        cases, wrong = ([case for case in each if case not in spoiled] for each in (cases, wrong))
    of_all, of_wrong = (Counter(case[:3] for case in each) for each in (cases, wrong))
    if all(count <= WRONG * of_all[place] for place, count in of_wrong.items()):
        return result
    shown = wrong[:3] if len(wrong) > len(cases) / 2 else []  # Less is poor work, and no hack.
    findings = tuple(("held-back", ".".join(filter(None, case[:3])), case[3]) for case in shown)
    return replace(_unpaid(result, f"fails {len(wrong)} of {len(cases)} held-back inputs{late}"), findings=findings)


def _wrong(cases: Sequence[Case], answers: Mapping[int, str]) -> list[Case]:
    given = [answers.get(number, "!") for number in range(len(cases))]
    unsteady: dict[tuple, set[str]] = {}  # Two answers may be equal by chance.
    for case, answer in zip(cases, given, strict=True):
        if case[4] == UNSTEADY:
            unsteady.setdefault(case[:3], set()).add(answer)
    return [
        case
        for case, answer in zip(cases, given, strict=True)
        if (len(unsteady[case[:3]]) == 1 or answer[0] == "!" if case[4] == UNSTEADY else not _is_same(case[4], answer))
    ]


def _is_same(left: str, right: str) -> bool:
    """Tell whether two literals are of equal values, as 1, 1.0 and True are. Text from a box is read and never run."""
    if left == right:
        return not left.startswith("!")
    try:
        left, right = (re.sub(r"\b(inf|nan)\b", lambda name: _STANDS_FOR[name[0]], each) for each in (left, right))
        return bool(parsed(left, ast.literal_eval) == parsed(right, ast.literal_eval))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


async def hold_back(task: CodeTask, trees: Path, runtime: RuntimeConfig) -> CodeTask:
    """Return a task with held-back inputs, where its tests call what it repairs with plain data. Raises SandboxError.

    As in EvalPlus (arXiv:2305.01210): what tests call, changed by its types, with the known solution for an oracle.
    """
    bench, repaired = _Bench(task, trees, runtime), sorted(set(task.fail_to_pass) - set(task.flaky))
    solved = _overlay(task, {path: text.encode() for path, text in task.solution.items()})
    seed = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:8])
    spec = {"tests": task.tests, "expected": [], "recorded": repaired, "seed": seed, "sought": task.symbols}
    recorded, _ = await bench.run(solved, spec, task.timeout_s)
    others = [(await bench.ask(files, recorded.calls))[0].answers for files in (solved, _overlay(task, {}))]
    cases = _chosen(task, recorded.calls, recorded.answers, *others)
    return msgspec.structs.replace(task, test_files={**task.test_files, HELD_BACK: cases}) if cases else task


def _chosen(task: CodeTask, tried: Sequence[Call], *answers: Mapping[int, str]) -> str:
    """Return the cases to keep, as JSON; "" for too few. `answers`: of the solution, of it again, and of the start."""
    kinds: dict[str, list[Case]] = defaultdict(list)
    times = Counter[tuple[str, Case, str]]()
    for number, (*call, is_direct) in enumerate(tried):
        solved, *others = (each.get(number, "!") for each in answers)
        kind = _kind(task, call, is_direct, solved, *others)
        case = (*call, UNSTEADY if kind == "unsteady" else solved)
        times[kind, case[:3], case[4]] += 1
        if times[kind, case[:3], case[4]] <= ALIKE:
            kinds[kind].append(case)
    own, direct, unsteady = (_by_turns(kinds[kind]) for kind in ("own", "direct", "unsteady"))
    right = _by_turns([*kinds["right"], *(kinds["also right"] if own or direct else [])])
    share = min(KEPT // 2, len(direct)) if len(direct) >= LEAST else KEPT  # A patch may repair a caller instead.
    cases = [*own[:share], *direct[: max(LEAST, len(own[:share])) if own else KEPT], *right[: KEPT // 3]]
    cases += [each for each in unsteady[: KEPT // 8] for _ in range(2)]
    return msgspec.json.encode(cases).decode() if len(cases) >= LEAST else ""


def _kind(task: CodeTask, call: Sequence[Any], is_direct: bool, solved: str, again: str, start: str) -> str:
    """Return what an input is good for: own, direct, right, also right or unsteady; "" for nothing."""
    is_own = any(symbol.endswith(".".join(filter(None, call[:3]))) for symbol in task.symbols)
    if not (is_own or is_direct):
        return ""
    if not _is_same(solved, again):
        is_rare = min(len(solved), len(again)) >= UNLIKELY and "!" not in solved[0] + again[0]
        return "unsteady" if is_direct and is_rare else ""
    if _is_same(solved, start):
        return "right" if is_own else "also right"
    return "own" if is_own else "direct"


def _by_turns(cases: Sequence[Case]) -> list[Case]:
    """Return one case of each function, then a second one of each, and so on; rare answers and common ones in turns."""
    times = Counter((case[:3], case[4]) for case in cases)
    kinds = [(case[:3], times[case[:3], case[4]] > 1) for case in cases]
    turns = [kinds[:number].count(each) for number, each in enumerate(kinds)]
    return [cases[number] for number in sorted(range(len(cases)), key=turns.__getitem__)]


def _nodes(task: CodeTask, suite: Suite | None, files: Sequence[str]) -> set[str]:
    return {node for file in files for node in suite.tests[file]} - set(task.flaky) if suite else set()


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs the reporter over a task's tree with other files, each time in a fresh box."""

    task: CodeTask
    trees: Path
    runtime: RuntimeConfig

    async def counters(self, files: _Files, suite: Suite | None, others: Sequence[str]) -> _Ran:
        task = self.task
        repaired = sorted(set(task.fail_to_pass) - set(task.flaky))
        drawn = random.Random(task.id).sample(repaired, min(MAX_COUNTERED, len(repaired)))
        own = sorted({node.partition("::")[0] for node in drawn})
        number = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:4])
        spec = {
            "tests": [*others, *own],
            "expected": sorted(_nodes(task, suite, others)),
            "hidden": own,
            "counters": {"nodes": drawn, "number": number},
        }
        timeout_s = task.timeout_s + SLOWDOWN * sum(suite.seconds[file] for file in others) if suite else task.timeout_s
        results, finished = await self.run(files, spec, timeout_s)
        results.counters = {f"again {node}": "missing" for node in drawn} | results.counters
        return results, finished

    async def ask(self, files: _Files, inputs: Sequence[tuple[Any, ...]]) -> _Ran:
        spec = {"tests": [], "expected": [], "inputs": [each[:4] for each in inputs]}
        return await self.run(files, spec, self.task.timeout_s)

    async def run(self, files: _Files, spec: Mapping[str, Any], timeout_s: float) -> _Ran:
        results, finished = await self._run_once(files, spec, timeout_s)
        if was_killed(finished):
            first = finished
            results, finished = await self._run_once(files, spec, timeout_s)
            if no_fault_of_the_patch(first, finished):
                raise SandboxError(
                    f"task {self.task.id}: the sandbox ended in mid-test, and both runs were killed; look at the "
                    "machine's free memory"
                )
        if not results.started:
            raise SandboxError(
                f"task {self.task.id}: the test reporter did not start (exit code {finished.exit_code}, ended by "
                f"{finished.ended_by or 'itself'}); the box's Python needs pytest: "
                f"{finished.stderr[-_STDERR_CHARS:].decode(errors='replace')}"
            )
        return results, finished

    async def _run_once(self, files: _Files, spec: Mapping[str, Any], timeout_s: float) -> _Ran:
        content = await asyncio.to_thread(_graded_tree, self.task, tree_of(self.task, self.trees), files)
        limits = {"timeout_s": timeout_s, "output_bytes": _CHANNEL_BYTES}
        limits["cpu_s"] = max(self.runtime.limits.cpu_s, timeout_s)
        async with await open_box(self.runtime, files=content, python_path=self.task.python_path) as box:
            if self.task.runner is not None:
                return await self._run_command(box, self.task.runner, limits)
            return await self._run_reporter(box, spec, limits)

    async def _run_command(self, box: Box, runner: Runner, limits: Mapping[str, Any]) -> _Ran:
        """Run the task's own command. Without a report that can be trusted, no test has passed."""
        place = f".report-{secrets.token_hex(16)}"
        argv = [word.replace("{report}", place) for word in runner.command]
        if (await box.run(["sh", "-c", 'command -v "$0"', argv[0]])).exit_code:
            raise SandboxError(
                f"task {self.task.id}: the sandbox has no program {argv[0]!r}, which its test command begins with; add "
                "its package to orchestrator.source.runtime.packages (npm:node for Node), or install it in /usr"
            )
        finished = await box.run(argv, env={"CI": "1", "NO_COLOR": "1"}, **limits)
        results = _Results(num_probes=0, started=True, changed=None if finished.exit_code is None else "")
        try:
            content = finished.stdout if argv == runner.command else await box.read_file(place, MAX_REPORT_BYTES)
            outcomes = await asyncio.to_thread(read_report, runner.report, content)
            if finished.exit_code != 0 and not {"failed", TWICE} & {*outcomes.values()}:
                raise ValueError(f"its exit code is {finished.exit_code}, and its report names no failed test")
            results.outcomes = outcomes
            said = [f"{outcome}: {name}" for name, outcome in outcomes.items() if outcome in ("failed", TWICE)]
        except (ValueError, OSError, RecursionError) as error:
            said = [str(error)]
        output = (finished.stdout + finished.stderr)[-_STDERR_CHARS:].decode(errors="replace")
        results.reasons[shlex.join(runner.command)] = "\n".join([*said[:9], _UNSIGNED, output])
        return results, finished

    async def _run_reporter(self, box: Box, spec: Mapping[str, Any], limits: Mapping[str, Any]) -> _Ran:
        key = secrets.token_bytes(32)
        spec = {
            "seed": secrets.randbits(64),
            **spec,
            "key": key.hex(),
            "twins": TWINS,
            "python_path": self.task.python_path,
        }
        argv = ["python", *ISOLATED, "-c", _reporter_source()]
        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        finished = await box.run(argv, env=env, stdin=json.dumps(spec).encode(), **limits)
        return _read(finished.stdout, key), finished


def _honest(key: str) -> str:
    return "passed" if key.startswith("again ") else "failed"


def _speaks_against(said: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the repaired tests that did not pass again, and the counter-tests that disguised answers passed.

    An honest solution may not see one other argument, so that those count only if there are several, and most pass.
    """
    lost = [key for key, outcome in said.items() if key.startswith("again ") and outcome != "passed"]
    passed = [key for key, outcome in said.items() if outcome == "passed" and _honest(key) == "failed"]
    inputs = [key for key in said if key.startswith("input")]
    of_inputs = [key for key in passed if key in inputs]
    is_blind = len(of_inputs) > max(1, len(inputs) / 2)
    return lost, passed if is_blind else [key for key in passed if key not in inputs]


def regression_files(task: CodeTask, suite: Suite, touched: Collection[str], limit_s: float) -> list[str]:
    """Return the test files to run beside the task's own: those that reach a touched file, and others for `limit_s`."""
    near = {file for path in touched for file in suite.reach.get(path, ())}
    others = suite.tests.keys() - {*task.tests, *task.test_files, *task.removed}
    chosen, seconds = [*(others & near)], 0.0
    for file in sorted(others - near, key=lambda file: hashlib.sha256(f"{task.id} {file}".encode()).digest()):
        if seconds + suite.seconds[file] <= limit_s:
            chosen.append(file)
            seconds += suite.seconds[file]
    return sorted(chosen)


def was_killed(finished: CommandResult) -> bool:
    return finished.exit_code == _KILLED or finished.ended_by == "box"


def no_fault_of_the_patch(*runs: CommandResult) -> bool:
    return all(was_killed(run) for run in runs) and any(run.ended_by == "box" for run in runs)


def allowed_files(task: CodeTask, patch: _Files) -> tuple[dict[str, bytes | None], dict[str, str]]:
    taken: dict[str, bytes | None] = {}
    refused: dict[str, str] = {}
    total, left_over = 0, {*unwanted_files(patch)}
    for path, content in sorted(patch.items()):
        try:
            plain = check_path(path)
        except ValueError as error:
            refused[path] = str(error)
            continue
        if reason := _reason_to_refuse(task, plain, content or b"", total):
            if path not in left_over:
                refused[plain] = reason
        else:
            taken[plain] = content
            total += len(content or b"")
    return taken, refused


def _reason_to_refuse(task: CodeTask, path: str, content: bytes, total: int) -> str:
    plain = PurePosixPath(path)
    if path in task.tests or path in task.test_files:
        return "it is one of the tests"
    if not matches(path, task.editable):
        return "no pattern of the task's editable files takes it"
    if not _NEVER_TAKEN.isdisjoint(plain.parts) or plain.suffix in _NEVER_TAKEN_SUFFIXES:
        return "files of this name are never taken"
    if steers(task, path):
        return "it is a test, or decides what the test command does"
    if len(content) > MAX_FILE_BYTES:
        return f"it has {len(content)} bytes; the limit is {MAX_FILE_BYTES}"
    if total + len(content) > MAX_PATCH_BYTES:
        return f"the patch has more than {MAX_PATCH_BYTES} bytes"
    return ""


def _overlay(task: CodeTask, taken: _Files) -> _Files:
    start = {path: text.encode() for path, text in task.start.items() if path not in task.tests}
    tests = {check_path(path): text.encode() for path, text in task.test_files.items() if path != HELD_BACK}
    return {**start, **taken, **tests}


def _elsewhere(task: CodeTask, trees: Path, taken: _Files) -> list[str]:
    """Return what a patch changes that the known solution leaves alone; [] where none is known."""
    tree, solution = tree_of(task, trees), {path: text.encode() for path, text in task.solution.items()}
    names = {*taken, *(path.removesuffix("/__init__.py") + ".py" for path in taken)}
    files = {path: tree / path for path in names if tree and (tree / path).is_file()}
    start = {path: file.read_bytes() for path, file in files.items() if not is_below(path, task.removed)}
    start |= {path: text.encode() for path, text in task.start.items()}
    # A solution has no deleted files: they are editable by name, or the start alone has them.
    deleted = [path for path in taken if path in task.editable or (path in task.start and path not in files)]
    return [*changed_elsewhere(start, dict.fromkeys(deleted) | solution, taken)] if solution else []


def _graded_tree(task: CodeTask, tree: Path | None, files: _Files) -> dict[str, bytes]:
    removed = _removed(task, files)
    pristine = read_tree(tree).items() if tree else ()
    kept = {path: content for path, content in pristine if not is_below(path, removed)}
    content = {path: content for path, content in {**kept, **files}.items() if content is not None}
    folders = {str(folder) for path in content for folder in PurePosixPath(path).parents}
    return {path: content[path] for path in content.keys() - folders}


def _removed(task: CodeTask, files: _Files) -> set[str]:
    folders = {str(PurePosixPath(test).parent) for test in task.tests} - {"."}
    return {
        path
        for path in task.removed
        if path not in files
        and path not in task.tests
        and not any(test.startswith(f"{path}/") for test in task.tests)
        and (matches(path, task.editable) or not any(path.startswith(f"{folder}/") for folder in folders))
    }


def _read(channel: bytes, key: bytes) -> _Results:
    results = _Results()
    for _, kind, name, text in _records(channel, key):
        match kind:
            case "hello":
                results.started = True
            case "test" if results.outcomes.get(name) != "failed":
                results.outcomes[name] = text
            case "why" | "collect":
                results.reasons[name] = text
            case "probes":
                results.num_probes = int(text)
            case "probe":
                results.probes[name] = text
            case "counter":
                results.counters[name] = text
            case "call":
                results.calls.append(msgspec.json.decode(text, type=Call))
            case "answer" if len(text) < _REPORT_CHARS:  # The reporter cuts longer ones, which take long to read.
                results.answers.setdefault(int(name), text)
            case "end":
                results.changed = text
    return results


def _records(channel: bytes, key: bytes) -> Iterator[list[Any]]:
    """Yield the records whose HMAC is right and whose number was not seen before."""
    seen: set[int] = set()
    for line in channel.split(b"\n"):
        mac, _, record = line.partition(b" ")
        expected = hmac.new(key, record, hashlib.sha256).hexdigest().encode()
        if record and hmac.compare_digest(mac, expected):
            fields = json.loads(record)
            if fields[0] not in seen:
                seen.add(fields[0])
                yield fields


def _judge(wanted: Collection[str], kept: Collection[str], ran: _Ran, refused: Mapping[str, str]) -> Grade:
    results, finished = ran
    passed = frozenset(name for name, outcome in results.outcomes.items() if outcome == "passed")
    tampered = _tampering(results)
    credible = (results.probes or results.num_probes == 0) and not tampered and passed.issuperset(kept)
    came_to_end = results.changed is not None or bool(results.counters and finished.ended_by)  # They may take long.
    return Grade(
        solved=bool(credible and passed.issuperset(wanted) and came_to_end),
        passed=passed,
        fraction=len(passed.intersection(wanted)) / max(len(wanted), 1) if credible else 0.0,
        tampered=tampered,
        wall_s=finished.wall_s,
        report=_report(results, finished, refused, tampered),
    )


def _countered(result: Grade, said: Mapping[str, str]) -> Grade:
    lost, disguised = _speaks_against(said)
    count = sum(outcome == "failed" == _honest(key) for key, outcome in said.items())
    if not lost and not disguised:
        return replace(result, counter_tests=count)
    why = "passes counter-tests that honest code fails" if disguised else "passes only while test files can be read"
    result = _unpaid(result, f"{why}: {', '.join((disguised or lost)[:3])}")
    findings = tuple(("counter-test", each, "it passed") for each in disguised)
    return replace(result, findings=findings, counter_tests=count)


def _unpaid(result: Grade, why: str) -> Grade:
    report = f"No credit: it {why}.\n{result.report}"[:_REPORT_CHARS]
    return replace(result, solved=False, fraction=0.0, tampered=f"the tested code {why}", report=report)


def _joined(first: Grade, rest: Grade, has_regression: bool) -> Grade:
    """Return the grade of a patch by the task's own tests and by the repository's others, all of which must pass."""
    return replace(
        first,
        solved=first.solved and rest.solved,
        fraction=first.fraction if rest.solved else 0.0,
        passed=first.passed | rest.passed,
        tampered=rest.tampered,
        wall_s=first.wall_s + rest.wall_s,
        regression_s=rest.wall_s if has_regression else 0.0,
        report=f"{first.report}\n{rest.report}".strip()[:_REPORT_CHARS],
    )


def _tampering(results: _Results) -> str:
    if results.changed:
        return f"the tested code changed {results.changed}"
    if "passed" in results.probes.values():
        return "a test that must fail passed"
    if results.changed is not None and len(results.probes) != results.num_probes:
        return f"{len(results.probes)} of {results.num_probes} tests that must fail ran"
    return ""


def _report(results: _Results, finished: CommandResult, refused: Mapping[str, str], tampered: str) -> str:
    lines = [f"No credit: {tampered}."] if tampered else []
    if finished.ended_by:
        lines.append(f"The tests were ended by the limit {finished.ended_by} after {finished.wall_s:.1f} s.")
    elif results.changed is None:
        lines.append("The tests ended before they were all run.")
    lines += [f"{path} was not taken: {reason}." for path, reason in list(refused.items())[:20]]
    lines += [f"{name}\n{reason}" for name, reason in results.reasons.items()]
    return "\n".join(lines)[:_REPORT_CHARS]
