"""What could become a task: deletions of functions, classes and modules, mutations, and commits.

A candidate is a recipe, not text: the changed files are made when it is its turn. Candidates are numbered in an order
that depends on the seed only, so that every run makes the same tasks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.coding.factory.baseline import Baseline
from orchestrator.coding.factory.history import SourceCommit
from orchestrator.coding.factory.mutations import Mutation, byte_lines, function_nodes, mutated, mutations
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.factory.source_functions import FunctionIndex, SourceFunction, without_bodies
from orchestrator.coding.factory.suite import TreeSuite

MIN_LINES = 3
"""Lines of statements that a function must have."""
MAX_BODY_LINES = 400
MUTATIONS = 2
"""Mutations of each function."""
_NEVER = {"__init_subclass__", "__class_getitem__", "__del__", "__set_name__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorySettings:
    """What decides which tasks are made. The same settings and source give the same tasks."""

    kinds: tuple[str, ...] = ("delete", "mutate")
    history: int = 0
    """Newest commits of a git repository to look at."""
    seed: int = 0
    limit: int | None = None
    """Tasks of each source."""
    hide_tests: bool = False
    """The agent's tree lacks the test files of the task."""
    suite_timeout_s: float = 180.0
    packages: tuple[str, ...] = ()
    """Installed packages that tests need beside pytest."""


@dataclass(slots=True, kw_only=True)
class SourceWork:
    """One source in work."""

    tree: SourceTree
    suite: TreeSuite
    index: FunctionIndex
    baseline: Baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCandidate:
    """A change that may make a task."""

    id: str
    kind: str
    """delete | mutate | history"""
    shape: str
    """function | class | module for deletions; the operator of a mutation; "commit"."""
    functions: tuple[str, ...] = ()
    """Places of the functions that lose their body, or are mutated."""
    mutation: Mutation | None = None
    commit: SourceCommit | None = None
    tests: tuple[str, ...] = ()
    """Test files to run, where the trace does not tell."""

    @property
    def added(self) -> tuple[str, ...]:
        """Return the files that the agent does not begin with, because the commit adds them."""
        return self.commit.added if self.commit else ()


def find_candidates(work: SourceWork, settings: FactorySettings) -> tuple[list[TaskCandidate], Counter[str]]:
    """Return all candidates of a tree in the seed's order, and why functions give none."""
    usable, left_out = usable_functions(work.index, work.baseline)
    candidates: dict[tuple[str, ...] | str, TaskCandidate] = {}
    if "delete" in settings.kinds:
        for candidate in _deletions(work.tree.name, usable):
            candidates.setdefault(candidate.functions, candidate)
    if "mutate" in settings.kinds:
        for function in usable:
            for candidate in _mutations(work, function, settings.seed):
                candidates[candidate.id] = candidate
    unique = {candidate.id: candidate for candidate in candidates.values()}
    return sorted(unique.values(), key=lambda candidate: shuffled(settings.seed, candidate.id)), left_out


def shuffled(seed: int, word: str) -> str:
    """Return a sort key that puts words into an order that only the seed decides."""
    return hashlib.sha256(f"{seed} {word}".encode()).hexdigest()


def usable_functions(index: FunctionIndex, baseline: Baseline) -> tuple[list[SourceFunction], Counter[str]]:
    """Return the functions that tests reach and that do not run at import, and why others are left out."""
    usable, left_out = [], Counter()
    for place, function in index.functions.items():
        if place in baseline.imported:
            left_out["runs when the package is imported"] += 1
        elif not baseline.reach.get(place):
            left_out["no test reaches it"] += 1
        elif function.qualname.rpartition(".")[2] in _NEVER:
            left_out["a hook of the class machinery"] += 1
        elif function.body_lines < MIN_LINES:
            left_out[f"a body of fewer than {MIN_LINES} lines"] += 1
        else:
            usable.append(function)
    return usable, left_out


def changed_files(candidate: TaskCandidate, index: FunctionIndex) -> dict[str, str] | None:
    """Return path -> text of the files that differ at the start. None where the change gives no valid code."""
    if candidate.commit is not None:
        return candidate.commit.before
    if candidate.mutation is None:
        return without_bodies(index, candidate.functions)
    function = index.functions[candidate.functions[0]]
    lines, nodes = _parsed(index.texts[function.path])
    text = mutated(lines, nodes[function.def_line], candidate.mutation)
    return None if text is None else {function.path: text}


@lru_cache(maxsize=64)
def _parsed(text: str):
    return byte_lines(text), function_nodes(text)


def _deletions(name: str, usable: list[SourceFunction]) -> Iterator[TaskCandidate]:
    symbols = Counter(function.symbol for function in usable)
    groups: dict[tuple[str, str], list[SourceFunction]] = defaultdict(list)
    for function in usable:
        symbol = function.symbol if symbols[function.symbol] == 1 else f"{function.symbol}@{function.first_line}"
        yield _deletion(name, "function", symbol, [function])
        groups["module", function.path].append(function)
        if "." in function.qualname:
            groups["class", function.symbol.rpartition(".")[0]].append(function)
    for (shape, owner), functions in sorted(groups.items()):
        if len(functions) > 1 and sum(function.body_lines for function in functions) <= MAX_BODY_LINES:
            yield _deletion(name, shape, owner, functions)


def _deletion(name: str, shape: str, symbol: str, functions: list[SourceFunction]) -> TaskCandidate:
    places = tuple(sorted(function.place for function in functions))
    return TaskCandidate(id=f"{name}/delete/{symbol}", kind="delete", shape=shape, functions=places)


def _mutations(work: SourceWork, function: SourceFunction, seed: int) -> Iterator[TaskCandidate]:
    """Yield mutations of a function, of different operators where there are any."""
    lines, nodes = _parsed(work.index.texts[function.path])
    symbol = f"{work.tree.name}/mutate/{function.symbol}"
    changes = mutations(nodes[function.def_line], lines, function.body_start)
    numbered = {f"{symbol}/{change.operator}-{_mark(change)}": change for change in changes}
    taken: Counter[str] = Counter()
    for _ in range(min(MUTATIONS, len(numbered))):
        best = min(numbered, key=lambda key: (taken[numbered[key].operator], shuffled(seed, key)))
        change = numbered.pop(best)
        taken[change.operator] += 1
        yield TaskCandidate(id=best, kind="mutate", shape=change.operator, functions=(function.place,), mutation=change)


def _mark(change: Mutation) -> str:
    return hashlib.sha256(f"{change.start} {change.end} {change.replacement}".encode()).hexdigest()[:8]
