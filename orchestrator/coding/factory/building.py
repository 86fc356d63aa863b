"""Turn a proof into a task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.coding.factory.baseline import Baseline, FactorySettings, SourceWork
from orchestrator.coding.factory.candidates import shuffled
from orchestrator.coding.factory.prompts import (
    commit_prompt,
    deletion_prompt,
    difficulty,
    mutation_prompt,
    search_difficulty,
)
from orchestrator.coding.factory.proof import Proof
from orchestrator.coding.factory.source import SourceTree, editable_patterns
from orchestrator.coding.factory.source_functions import FunctionIndex, SourceFunction
from orchestrator.coding.task import CodeTask, matches

MAX_EXPECTED = 200
"""Tests of each list of a task. Of more, the seed draws."""
MIN_TIMEOUT_S = 60.0
_TIMEOUT_PER_SECOND = 20.0
"""Grading recompiles everything and may share a machine, so it gets this many times the measured duration."""


def build_task(work: SourceWork, proof: Proof, settings: FactorySettings) -> CodeTask:
    """Return the task of a proven candidate."""
    tree, index, seed = work.tree, work.index, settings.seed
    candidate = proof.candidate
    functions = [index.functions[place] for place in (*candidate.functions, *candidate.helpers)]
    failing_files = {node.split("::", 1)[0] for node in proof.fail_to_pass}
    hidden = sorted(failing_files) if settings.hide_tests else []
    return CodeTask(
        id=candidate.id,
        kind=candidate.kind,
        repository=tree.repository,
        tree=tree.name,
        prompt=_prompt(index, proof, functions),
        start=proof.start,
        removed=[*candidate.added, *hidden],
        solution={
            path: _text(tree.folder / path)
            for path in (*proof.start, *candidate.added)
            if (tree.folder / path).is_file()
        },
        editable=_editable(tree, (*proof.start, *candidate.added)),
        tests=proof.tests,
        fail_to_pass=_draw(proof.fail_to_pass, seed),
        pass_to_pass=_draw(proof.pass_to_pass, seed),
        flaky=proof.flaky,
        python_path=list(tree.python_path),
        timeout_s=max(MIN_TIMEOUT_S, round(_TIMEOUT_PER_SECOND * proof.seconds)),
        difficulty=_difficulty(proof, functions, work.baseline),
        symbols=[function.symbol for function in functions],
        source=tree.origin,
        license=tree.license,
    )


def _editable(tree: SourceTree, changed: Iterable[str]) -> list[str]:
    """Return the patterns of the sources, which do not tell where the change is, and what they do not match."""
    patterns = editable_patterns(tree)
    return sorted([*patterns, *(path for path in changed if not matches(path, patterns))])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _draw(nodes: list[str], seed: int) -> list[str]:
    """Return the nodes in their order, at most MAX_EXPECTED of them."""
    if len(nodes) <= MAX_EXPECTED:
        return nodes
    drawn = set(sorted(nodes, key=lambda node: shuffled(seed, node))[:MAX_EXPECTED])
    return [node for node in nodes if node in drawn]


def _prompt(index: FunctionIndex, proof: Proof, functions: list[SourceFunction]) -> str:
    candidate, total = proof.candidate, len(proof.fail_to_pass)
    failures = sorted(proof.failures, key=lambda record: (not record.assertion, record.node))
    if candidate.kind == "mutate":
        return mutation_prompt(failures, total=total)
    if candidate.kind == "history":
        return commit_prompt(candidate.message, failures, total=total)
    asked = [function for function in functions if function.place in candidate.functions]
    return deletion_prompt(index, asked, helpers=len(candidate.helpers), start=proof.start)


def _difficulty(proof: Proof, functions: list[SourceFunction], baseline: Baseline) -> float:
    failing = len(proof.fail_to_pass)
    body_lines = sum(function.body_lines for function in functions)
    if proof.candidate.kind == "mutate":
        wanted = set(proof.fail_to_pass)
        reached = sum(not wanted.isdisjoint(nodes) for nodes in baseline.reach.values())
        return search_difficulty(reached=reached, body_lines=body_lines, failing=failing)
    return difficulty(
        body_lines=body_lines or 10 * len(proof.start),
        branches=sum(function.branches for function in functions),
        callees=len(frozenset[str]().union(*(function.callees for function in functions))),
        failing=failing,
        files=len({*proof.start, *proof.candidate.added}),
    )
