"""Prove candidates: their tests fail before and pass after, three times over, under three hash seeds.

    pass 0, 1, 2:   start of candidate 1, start of candidate 2, ...,  the tree itself once per set of test files
                    └────────────── one box and one interpreter a batch ──────────────┘

Grading runs whole test files, so proofs do as well. What a refused candidate lacks is its `reason`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.coding.factory.baseline import Baseline, test_file
from orchestrator.coding.factory.candidates import SourceWork, TaskCandidate, changed_files
from orchestrator.coding.factory.source_functions import FunctionIndex
from orchestrator.coding.factory.suite import SuiteResult, SuiteRun, TestRecord

GRADINGS = 3
MAX_REACHING = 60
"""Test files are added until they hold this many tests that reach the change."""
MAX_SECONDS = 8.0
"""Test files of one task take at most this long; the first one is always taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the gradings of one candidate showed. `reason` is empty for a proven one."""

    candidate: TaskCandidate
    reason: str = ""
    detail: str = ""
    """More about the reason: a test, a file."""
    start: dict[str, str] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    fail_to_pass: list[str] = field(default_factory=list)
    pass_to_pass: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    failures: list[TestRecord] = field(default_factory=list)
    """Records of fail_to_pass, from the first grading."""
    seconds: float = 0.0
    """Of all tests, before the change."""


def choose_test_files(candidate: TaskCandidate, baseline: Baseline) -> list[str]:
    """Return the test files to run: those with most tests that reach the change, and one more that others pass in."""
    if candidate.tests:
        return [file for file in candidate.tests if file in baseline.files]
    nodes = frozenset[str]().union(*(baseline.reach.get(place, frozenset()) for place in candidate.functions))
    reaching = Counter(test_file(node) for node in sorted(nodes))
    files, seconds, count = [], 0.0, 0
    for file, tests in reaching.most_common():
        if files and (count >= MAX_REACHING or seconds + baseline.seconds[file] > MAX_SECONDS):
            break
        files.append(file)
        seconds += baseline.seconds[file]
        count += tests
    if sum(len(baseline.files[file]) for file in files) == count:  # all may fail: add one whose tests keep passing
        others = [file for file in sorted(baseline.files) if file not in reaching]
        files += sorted(others, key=lambda file: (baseline.seconds[file] > 1.0, file))[:1]
    return sorted(files)


async def prove(batch: Sequence[TaskCandidate], work: SourceWork) -> list[Proof]:
    """Return a proof of each candidate, in the batch's order."""
    baseline = work.baseline
    proofs = {candidate.id: _prepare(candidate, work.index, baseline) for candidate in batch}
    seen: dict[str, list[tuple[SuiteResult, SuiteResult]]] = {name: [] for name in proofs}
    for hash_seed in range(GRADINGS):
        cases = {name: proof for name, proof in proofs.items() if not proof.reason}
        if not cases:
            break
        results = await work.suite.play(
            _runs(cases, baseline), preload=baseline.preload, hash_seed=hash_seed, explain=hash_seed == 0
        )
        for name, proof in cases.items():
            seen[name].append((results[name], results["\n".join(proof.tests)]))
            proofs[name] = _judge(proof, baseline, seen[name])
    return list(proofs.values())


def _prepare(candidate: TaskCandidate, index: FunctionIndex, baseline: Baseline) -> Proof:
    """Make the changed files, and refuse what needs no run."""
    start = changed_files(candidate, index)
    if start is None:
        return Proof(candidate=candidate, reason="the changed file is not valid Python")
    if all(index.texts.get(path) == text for path, text in start.items()) and not candidate.added:
        return Proof(candidate=candidate, reason="the change changes nothing")
    tests = choose_test_files(candidate, baseline)
    if not tests:
        return Proof(candidate=candidate, reason="no quick test file reaches it")
    return Proof(candidate=candidate, start=start, tests=tests)


def _runs(cases: Mapping[str, Proof], baseline: Baseline) -> list[SuiteRun]:
    """Return a run of each candidate's start, and one of the tree itself for each set of test files."""
    runs: dict[str, SuiteRun] = {}
    for name, proof in cases.items():
        limit_s = 20.0 + 8 * sum(baseline.seconds[file] for file in proof.tests)
        files: dict[str, str | None] = {**proof.start, **dict.fromkeys(proof.candidate.added)}
        runs[name] = SuiteRun(key=name, tests=proof.tests, files=files, timeout_s=limit_s)
        together = "\n".join(proof.tests)
        runs.setdefault(together, SuiteRun(key=together, tests=proof.tests, timeout_s=limit_s))
    return list(runs.values())


def _judge(proof: Proof, baseline: Baseline, seen: Sequence[tuple[SuiteResult, SuiteResult]]) -> Proof:
    """Sort the stable tests of the proof's files by what all gradings so far say, or refuse the candidate."""
    failing, passing = _sort_tests(proof.tests, baseline, seen)
    reason, detail = _refusal(*seen[-1])
    if not reason and not failing:
        reason = "no test fails" if len(seen) == 1 else "no test fails each time"
    if not reason and not passing:
        reason = "no test keeps passing"
    if reason:
        return Proof(candidate=proof.candidate, reason=reason, detail=detail)
    records = seen[0][0].tests
    return replace(
        proof,
        fail_to_pass=failing,
        pass_to_pass=passing,
        flaky=sorted({node for result, _ in seen for node in result.tests} - {*failing, *passing}),
        failures=[records[node] for node in failing if node in records],
        seconds=max(sum(record.duration_s for record in run.tests.values()) for _, run in seen),
    )


def _sort_tests(
    files: Sequence[str], baseline: Baseline, seen: Sequence[tuple[SuiteResult, SuiteResult]]
) -> tuple[list[str], list[str]]:
    """Return the tests that failed before and passed after in all gradings, and those that passed in all runs."""
    before, after = ([run.passed() for run in runs] for runs in zip(*seen, strict=True))
    solid = frozenset.intersection(*map(frozenset, after))
    never, always = solid.difference(*before), solid.intersection(*before)
    expected = [node for file in files for node in baseline.files.get(file, ())]
    return [node for node in expected if node in never], [node for node in expected if node in always]


def _refusal(before: SuiteResult, after: SuiteResult) -> tuple[str, str]:
    """Return why one grading refuses a candidate, and where; empty where it does not."""
    if before.ended.startswith("timeout"):
        return "the changed code hangs", before.running or ""
    if before.ended or after.ended:
        return "the test run ended early", before.ended or after.ended
    new = [file for file in before.collect_errors if file not in after.collect_errors]
    if new:
        return "a test file can no longer be imported", new[0]
    return "", ""
