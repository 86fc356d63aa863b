"""Prove candidates: their tests fail before and pass after, three times over, under three hash seeds. Make them tasks.

    pass 0, 1, 2:   start of candidate 1, start of candidate 2, ...,  the tree itself once per set of test files
                    └────────────── one box and one interpreter a batch ──────────────┘

Grading runs whole test files, so proofs do as well. What a refused candidate lacks is its `reason`.

A deletion is described by signature and docstring, never by its body. A mutation is described by its symptom: which
test fails and at which assertion. The place is for the agent to find.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.factory.candidates import FactorySettings, TaskCandidate, changed_files, shuffled
from orchestrator.coding.factory.functions import SourceFunction
from orchestrator.coding.factory.source import SourceTree, editable_patterns
from orchestrator.coding.factory.suite import Baseline, SuiteResult, SuiteRun, TestRecord, play, test_file
from orchestrator.coding.task import CodeTask, matches

GRADINGS = 3
MAX_REACHING = 60
"""Test files are added until they hold this many tests that reach the change."""
MAX_SECONDS = 8.0
"""Test files of one task take at most this long; the first one is always taken."""
MAX_EXPECTED = 200
"""Tests of each list of a task. Of more, the seed draws."""
MIN_TIMEOUT_S = 60.0
_TIMEOUT_PER_SECOND = 20.0
"""Grading recompiles everything and may share a machine, so it gets this many times the measured duration."""
MAX_SYMPTOMS = 3
_SIGNATURE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the gradings of one candidate showed. `reason` is empty for a proven one."""

    candidate: TaskCandidate
    reason: str = ""
    detail: str = ""
    """More about the reason: a test, a file."""
    start: dict[str, str | None] = field(default_factory=dict)
    """Path -> text of the files that differ at the start; None for one that is not there."""
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
    if candidate.commit:
        return sorted(baseline.files)
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


async def prove(batch: Sequence[TaskCandidate], baseline: Baseline, runtime: RuntimeConfig) -> list[Proof]:
    """Return a proof of each candidate, in the batch's order."""
    proofs = {candidate.id: _prepare(candidate, baseline) for candidate in batch}
    seen: dict[str, list[tuple[SuiteResult, SuiteResult]]] = {name: [] for name in proofs}
    for hash_seed in range(GRADINGS):
        cases = {name: proof for name, proof in proofs.items() if not proof.reason}
        if not cases:
            break
        runs = _runs(cases, baseline)
        results = await play(baseline.tree, runtime, runs, hash_seed=hash_seed, explain=hash_seed == 0)
        for name, proof in cases.items():
            seen[name].append((results[name], results["\n".join(proof.tests)]))
            proofs[name] = _judge(proof, baseline, seen[name])
    return list(proofs.values())


def _prepare(candidate: TaskCandidate, baseline: Baseline) -> Proof:
    """Make the changed files, and refuse what needs no run."""
    start = changed_files(candidate, baseline)
    if all(baseline.tree.texts.get(path) == text for path, text in start.items()):
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
        runs[name] = SuiteRun(key=name, tests=proof.tests, files=proof.start, timeout_s=limit_s)
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


def build_task(tree: SourceTree, proof: Proof, settings: FactorySettings) -> CodeTask:
    """Return the task of a proven candidate."""
    candidate = proof.candidate
    functions = [tree.functions[place] for place in candidate.functions]
    start = {path: text for path, text in proof.start.items() if text is not None}
    hidden = sorted({test_file(node) for node in proof.fail_to_pass}) if settings.hide_tests else []
    return CodeTask(
        id=candidate.id,
        kind=candidate.kind,
        repository=tree.repository,
        tree=tree.name,
        prompt=_prompt(proof, functions),
        start=start,
        removed=[*(path for path in proof.start if path not in start), *hidden],
        solution={path: tree.texts[path] for path in proof.start if path in tree.texts},
        editable=_editable(tree, proof.start),
        tests=proof.tests,
        fail_to_pass=_draw(proof.fail_to_pass, settings.seed),
        pass_to_pass=_draw(proof.pass_to_pass, settings.seed),
        flaky=proof.flaky,
        python_path=list(tree.python_path),
        timeout_s=max(MIN_TIMEOUT_S, round(_TIMEOUT_PER_SECOND * proof.seconds)),
        symbols=[function.symbol for function in functions],
        source=tree.origin,
    )


def _editable(tree: SourceTree, changed: Iterable[str]) -> list[str]:
    """Return the patterns of the sources, which do not tell where the change is, and what they do not match."""
    patterns = editable_patterns(tree)
    return sorted([*patterns, *(path for path in changed if not matches(path, patterns))])


def _draw(nodes: list[str], seed: int) -> list[str]:
    """Return the nodes in their order, at most MAX_EXPECTED of them."""
    drawn = set(sorted(nodes, key=lambda node: shuffled(seed, node))[:MAX_EXPECTED])
    return [node for node in nodes if node in drawn]


def _prompt(proof: Proof, functions: Sequence[SourceFunction]) -> str:
    candidate, total = proof.candidate, len(proof.fail_to_pass)
    failures = sorted(proof.failures, key=lambda record: (not record.assertion, record.node))
    if candidate.commit:
        opening = f"Make this change:\n\n{candidate.message[:_SIGNATURE_CHARACTERS]}"
        tests = f"{total} test{'s' * (total != 1)} of the repository must pass then, and must not pass now."
        parts = [opening, tests, *symptoms(failures)]
    elif candidate.kind == "mutate":
        tests = "A test fails" if total == 1 else f"{total} tests fail"
        parts = [f"{tests} that should pass. Find the bug in the sources and repair it.", *symptoms(failures)]
    else:
        parts = deletion_prompt(functions)
    return "\n\n".join([*parts, "Change the sources only. The tests stay as they are."])


def deletion_prompt(functions: Sequence[SourceFunction]) -> list[str]:
    """Return paragraphs that ask for deleted functions."""
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
