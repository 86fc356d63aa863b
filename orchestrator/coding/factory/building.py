"""Turn a proof into a task, with the words that ask for it.

A deletion is described by signature and docstring, never by its body. A mutation is described by its symptom: which
test fails and at which assertion. The place is for the agent to find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from orchestrator.coding.factory.baseline import test_file
from orchestrator.coding.factory.candidates import FactorySettings, SourceWork, shuffled
from orchestrator.coding.factory.proof import Proof
from orchestrator.coding.factory.source import SourceTree, editable_patterns
from orchestrator.coding.factory.source_functions import SourceFunction
from orchestrator.coding.factory.suite import TestRecord
from orchestrator.coding.task import CodeTask, matches

MAX_EXPECTED = 200
"""Tests of each list of a task. Of more, the seed draws."""
MIN_TIMEOUT_S = 60.0
_TIMEOUT_PER_SECOND = 20.0
"""Grading recompiles everything and may share a machine, so it gets this many times the measured duration."""
MAX_SYMPTOMS = 3
_SIGNATURE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 600


def build_task(work: SourceWork, proof: Proof, settings: FactorySettings) -> CodeTask:
    """Return the task of a proven candidate."""
    tree, candidate = work.tree, proof.candidate
    functions = [work.index.functions[place] for place in candidate.functions]
    changed = (*proof.start, *candidate.added)
    hidden = sorted({test_file(node) for node in proof.fail_to_pass}) if settings.hide_tests else []
    return CodeTask(
        id=candidate.id,
        kind=candidate.kind,
        repository=tree.repository,
        tree=tree.name,
        prompt=_prompt(proof, functions),
        start=proof.start,
        removed=[*candidate.added, *hidden],
        solution={path: tree.text(path) for path in changed if (tree.folder / path).is_file()},
        editable=_editable(tree, changed),
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
    if candidate.commit is not None:
        opening = f"Make this change:\n\n{candidate.commit.message[:_SIGNATURE_CHARACTERS]}"
        tests = f"{total} test{'s' * (total != 1)} of the repository must pass then, and must not pass now."
        parts = [opening, tests, *symptoms(failures)]
    elif candidate.mutation is not None:
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
