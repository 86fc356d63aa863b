"""What could become a task: deletions of functions, features, classes and modules, and mutations.

A candidate is a recipe, not text: the changed files are made when it is its turn. Candidates are numbered in an order
that depends on the seed only, so that every run makes the same tasks.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from orchestrator.coding.factory.baseline import Baseline, FactorySettings
from orchestrator.coding.factory.mutations import Mutation, byte_lines, function_nodes, mutated, mutations
from orchestrator.coding.factory.source_functions import FunctionIndex, SourceFunction, without_bodies

MAX_BODY_LINES = 400
_NEVER = {"__init_subclass__", "__class_getitem__", "__del__", "__set_name__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCandidate:
    """A change that may make a task."""

    id: str
    kind: str
    """delete | mutate | history"""
    shape: str
    """function | feature | class | module for deletions; the operator of a mutation; "commit"."""
    functions: tuple[str, ...]
    """Places of the functions that lose their body, or are mutated."""
    helpers: tuple[str, ...] = ()
    """Places of the functions that are taken away altogether."""
    mutation: Mutation | None = None
    before: dict[str, str] = field(default_factory=dict)
    """Files of a commit's parent, by path."""
    added: tuple[str, ...] = ()
    """Files that a commit added."""
    message: str = ""
    """A commit's message."""
    tests: tuple[str, ...] = ()
    """Test files to run, where the trace does not tell."""


@dataclass(slots=True, kw_only=True)
class CandidateList:
    candidates: list[TaskCandidate]
    left_out: Counter[str]
    """Why functions give no candidate -> how many."""


def find_candidates(name: str, index: FunctionIndex, baseline: Baseline, settings: FactorySettings) -> CandidateList:
    """Return all candidates of a tree in the seed's order."""
    usable, left_out = usable_functions(index, baseline, settings.min_lines)
    candidates: dict[tuple, TaskCandidate] = {}
    if "delete" in settings.kinds:
        for candidate in _deletions(name, index, baseline, usable):
            candidates.setdefault((candidate.functions, candidate.helpers), candidate)
    if "mutate" in settings.kinds:
        for function in usable:
            for candidate in _mutations(name, index, baseline, function, settings):
                candidates[(candidate.id,)] = candidate
    unique = {candidate.id: candidate for candidate in candidates.values()}
    ordered = sorted(unique.values(), key=lambda candidate: shuffled(settings.seed, candidate.id))
    return CandidateList(candidates=ordered, left_out=left_out)


def shuffled(seed: int, word: str) -> str:
    """Return a sort key that puts words into an order that only the seed decides."""
    return hashlib.sha256(f"{seed} {word}".encode()).hexdigest()


def usable_functions(
    index: FunctionIndex, baseline: Baseline, min_lines: int
) -> tuple[list[SourceFunction], Counter[str]]:
    """Return the functions that tests reach and that do not run at import, and why others are left out."""
    usable, left_out = [], Counter()
    for place, function in index.functions.items():
        if place in baseline.imported:
            left_out["runs when the package is imported"] += 1
        elif not baseline.reach.get(place):
            left_out["no test reaches it"] += 1
        elif function.name in _NEVER:
            left_out["a hook of the class machinery"] += 1
        elif function.body_lines < min_lines:
            left_out[f"a body of fewer than {min_lines} lines"] += 1
        else:
            usable.append(function)
    return usable, left_out


def changed_files(candidate: TaskCandidate, index: FunctionIndex) -> dict[str, str] | None:
    """Return path -> text of the files that differ at the start. None where the change gives no valid code."""
    if candidate.kind == "history":
        return candidate.before
    if candidate.mutation is not None:
        function = index.functions[candidate.functions[0]]
        lines, nodes = _parsed(index.texts[function.path])
        text = mutated(lines, nodes[function.def_line], candidate.mutation)
        return None if text is None else {function.path: text}
    files = without_bodies(index, candidate.functions, candidate.helpers)
    try:
        for text in files.values():
            ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return files


@lru_cache(maxsize=64)
def _parsed(text: str):
    return byte_lines(text), function_nodes(text)


def _deletions(
    name: str, index: FunctionIndex, baseline: Baseline, usable: list[SourceFunction]
) -> Iterator[TaskCandidate]:
    named: dict[str, list[SourceFunction]] = defaultdict(list)
    for function in index.functions.values():
        named[function.name].append(function)
    symbols = Counter(function.symbol for function in usable)
    for function in usable:
        symbol = function.symbol if symbols[function.symbol] == 1 else f"{function.symbol}@{function.first_line}"
        yield _deletion(name, "function", symbol, [function])
        helpers = _private_helpers(function, index, named, baseline)
        if helpers:
            yield _deletion(name, "feature", f"{symbol}+{len(helpers)}", [function], helpers)
    by_class: dict[str, list[SourceFunction]] = defaultdict(list)
    by_module: dict[str, list[SourceFunction]] = defaultdict(list)
    for function in usable:
        by_module[function.path].append(function)
        if function.owner:
            by_class[function.symbol.rpartition(".")[0]].append(function)
    for shape, groups in (("class", by_class), ("module", by_module)):
        for owner, functions in groups.items():
            if len(functions) > 1 and sum(function.body_lines for function in functions) <= MAX_BODY_LINES:
                yield _deletion(name, shape, owner, functions)


def _deletion(
    name: str, shape: str, symbol: str, functions: list[SourceFunction], helpers: Iterable[SourceFunction] = ()
) -> TaskCandidate:
    return TaskCandidate(
        id=f"{name}/delete/{symbol}",
        kind="delete",
        shape=shape,
        functions=tuple(sorted(function.place for function in functions)),
        helpers=tuple(sorted(function.place for function in helpers)),
    )


def _private_helpers(
    function: SourceFunction, index: FunctionIndex, named: dict[str, list[SourceFunction]], baseline: Baseline
) -> list[SourceFunction]:
    """Return the functions that only this one uses, directly or through one another."""
    gone = {function.place}
    helpers: dict[str, SourceFunction] = {}
    pending = [function]
    while pending:
        for callee in sorted(pending.pop().callees):
            for helper in named[callee] if len(named[callee]) == 1 else ():
                users = index.uses[callee] - {helper.place}
                if users <= gone and helper.place not in gone | baseline.imported and not callee.startswith("__"):
                    gone.add(helper.place)
                    helpers[helper.place] = helper
                    pending.append(helper)
    return list(helpers.values())


def _mutations(
    name: str, index: FunctionIndex, baseline: Baseline, function: SourceFunction, settings: FactorySettings
) -> Iterator[TaskCandidate]:
    """Yield mutations on lines that tests execute, of different operators where there are any."""
    lines, nodes = _parsed(index.texts[function.path])
    everything = [
        change
        for change in mutations(nodes[function.def_line], lines, function.body_start)
        if change.operator in ("default", "case") or f"{function.path}:{change.line}" in baseline.lines
    ]
    symbol = f"{name}/mutate/{function.symbol}"
    numbered = {f"{symbol}/{change.operator}-{_mark(change)}": change for change in everything}
    taken: Counter[str] = Counter()
    for _ in range(min(settings.mutations_per_function, len(numbered))):
        best = min(numbered, key=lambda key: (taken[numbered[key].operator], shuffled(settings.seed, key)))
        change = numbered.pop(best)
        taken[change.operator] += 1
        yield TaskCandidate(id=best, kind="mutate", shape=change.operator, functions=(function.place,), mutation=change)


def _mark(change: Mutation) -> str:
    return hashlib.sha256(f"{change.start} {change.end} {change.replacement}".encode()).hexdigest()[:8]
