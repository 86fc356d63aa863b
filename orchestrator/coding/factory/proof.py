"""Prove candidates: their tests fail before and pass after, three times over, under three hash seeds.

    pass 0, 1, 2:   start of candidate 1, start of candidate 2, ...,  the tree itself once per set of test files
                    └────────────── one box and one interpreter a batch ──────────────┘

Grading runs whole test files, so proofs do as well. What a refused candidate lacks is its `reason`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.coding.factory.baseline import Baseline, SourceWork, test_file
from orchestrator.coding.factory.candidates import TaskCandidate, changed_files
from orchestrator.coding.factory.source_functions import FunctionIndex, copies_elsewhere
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
    reaching: dict[str, int] = {}
    places = (*candidate.functions, *candidate.helpers)
    nodes = frozenset[str]().union(*(baseline.reach.get(place, frozenset()) for place in places))
    for node in nodes:
        reaching[test_file(node)] = reaching.get(test_file(node), 0) + 1
    ordered = sorted(reaching, key=lambda file: (-reaching[file], file))
    files, seconds, count = [], 0.0, 0
    for file in ordered:
        if files and (count >= MAX_REACHING or seconds + baseline.seconds[file] > MAX_SECONDS):
            break
        files.append(file)
        seconds += baseline.seconds[file]
        count += reaching[file]
    if sum(len(baseline.files[file]) for file in files) == count:  # all may fail: add one whose tests keep passing
        others = [file for file in sorted(baseline.files) if file not in reaching]
        files += sorted(others, key=lambda file: (baseline.seconds[file] > 1.0, file))[:1]
    return sorted(files)


async def prove(batch: Sequence[TaskCandidate], work: SourceWork) -> list[Proof]:
    """Return a proof of each candidate, in the batch's order."""
    baseline = work.baseline
    proofs: dict[str, Proof] = {}
    open_cases: dict[str, Proof] = {}
    for candidate in batch:
        proof = _prepare(candidate, work.index, baseline)
        (proofs if proof.reason else open_cases)[candidate.id] = proof
    seen: dict[str, list[tuple[SuiteResult, SuiteResult]]] = {name: [] for name in open_cases}
    for hash_seed in range(GRADINGS):
        if not open_cases:
            break
        runs = _runs(open_cases, baseline)
        results = await work.play(runs, preload=baseline.preload, hash_seed=hash_seed, explain=hash_seed == 0)
        for name, proof in list(open_cases.items()):
            before, after = results[name], results["\n".join(proof.tests)]
            seen[name].append((before, after))
            reason, detail = _refusal(before, after)
            judged = _judge(proof, baseline, seen[name])
            if not reason and not judged.fail_to_pass:
                reason = "no test fails" if hash_seed == 0 else "no test fails each time"
            if not reason and not judged.pass_to_pass:
                reason = "no test keeps passing"
            if reason:
                proofs[name] = Proof(candidate=proof.candidate, reason=reason, detail=detail)
                del open_cases[name]
            else:
                open_cases[name] = judged
    proofs.update(open_cases)
    return [proofs[candidate.id] for candidate in batch]


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
    if candidate.kind == "delete":
        copy = copies_elsewhere(index, (*candidate.functions, *candidate.helpers), start)
        if copy:
            return Proof(candidate=candidate, reason="the deleted body stands elsewhere, too", detail=copy)
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


def _refusal(before: SuiteResult, after: SuiteResult) -> tuple[str, str]:
    slow = [node for node, record in before.tests.items() if record.outcome == "slow"]
    if before.ended.startswith("timeout") or slow:
        return "the changed code hangs", slow[0] if slow else before.running or ""
    if before.ended or after.ended:
        return "the test run ended early", before.ended or after.ended
    new = [file for file in before.collect_errors if file not in after.collect_errors]
    if new:
        return "a test file can no longer be imported", new[0]
    return "", ""


def _judge(proof: Proof, baseline: Baseline, seen: Sequence[tuple[SuiteResult, SuiteResult]]) -> Proof:
    """Sort the stable tests of the proof's files by what all gradings so far say."""
    expected = [node for file in proof.tests for node in baseline.files.get(file, ())]
    before, after = ([run.passed() for run in runs] for runs in zip(*seen, strict=True))
    solid = [node for node in expected if all(node in passed for passed in after)]
    failing = [node for node in solid if not any(node in passed for passed in before)]
    passing = [node for node in solid if all(node in passed for passed in before)]
    known = {*failing, *passing}
    records = seen[0][0].tests
    return Proof(
        candidate=proof.candidate,
        start=proof.start,
        tests=proof.tests,
        fail_to_pass=failing,
        pass_to_pass=passing,
        flaky=sorted({node for result, _ in seen for node in result.tests} - known),
        failures=[records[node] for node in failing if node in records],
        seconds=max(sum(record.duration_s for record in run.tests.values()) for _, run in seen),
    )
