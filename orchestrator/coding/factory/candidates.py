"""What could become a task: deletions of functions, classes and modules, mutations, and commits.

A candidate is a recipe, not text: the changed files are made when it is its turn. Their order depends on the seed only.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from orchestrator.coding.factory.source import Edit, SourceFunction, edited, is_test, tree_name
from orchestrator.coding.factory.suite import Baseline
from orchestrator.coding.git_command import git

MIN_LINES = 3
"""Lines of statements that a function must have."""
MAX_BODY_LINES = 400
MAX_FILES = 8
"""Source files that a commit may change."""
MUTATIONS = 2
_NEVER = {"__init_subclass__", "__class_getitem__", "__del__", "__set_name__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorySettings:
    """What decides which tasks are made. The same settings and source give the same tasks."""

    kinds: tuple[str, ...] = ("delete", "mutate")
    history: int = 0
    seed: int = 0
    limit: int | None = None
    hide_tests: bool = False
    """The agent's tree lacks the test files of the task."""
    suite_timeout_s: float = 180.0
    overlay: tuple[str, ...] = ()
    """Files of a git repository's folder that its commits lack."""
    first_tests: int = 60
    first_s: float = 8.0
    """Seconds that these files take at most; one is always among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCandidate:
    """A change that may make a task."""

    id: str
    kind: str
    shape: str
    """function | class | module for deletions; the operator of a mutation; "commit"."""
    edits: tuple[tuple[str, Edit], ...] = ()
    """Places of the functions that lose their body, or are mutated, each with its edit."""
    commit: str = ""
    message: str = ""
    before: dict[str, str | None] = field(default_factory=dict)
    """Source file -> the parent's text; None for one that the commit added."""
    tests: tuple[str, ...] = ()
    refusal: str = ""


def find_candidates(baseline: Baseline, settings: FactorySettings) -> tuple[list[TaskCandidate], Counter[str]]:
    """Return all candidates of a tree, and why functions give none. Kinds take turns; the seed orders each one."""
    usable, left_out = usable_functions(baseline)
    candidates: dict[tuple[tuple[str, Edit], ...], TaskCandidate] = {}
    name = baseline.tree.name
    found = [*_deletions(name, usable)] if "delete" in settings.kinds else []
    for function in usable if "mutate" in settings.kinds else ():
        found += _mutations(name, function, settings.seed)
    for candidate in found:
        candidates.setdefault(candidate.edits, candidate)
    unique = {candidate.id: candidate for candidate in candidates.values()}
    in_order = sorted(unique.values(), key=lambda candidate: shuffled(settings.seed, candidate.id))
    by_kind = ([each for each in in_order if each.kind == kind] for kind in sorted(set(settings.kinds)))
    return [each for row in zip_longest(*by_kind) for each in row if each is not None], left_out


def shuffled(seed: int, word: str) -> str:
    return hashlib.sha256(f"{seed} {word}".encode()).hexdigest()


def usable_functions(baseline: Baseline) -> tuple[list[SourceFunction], Counter[str]]:
    usable, left_out = [], Counter()
    for place, function in baseline.tree.functions.items():
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


def changed_files(candidate: TaskCandidate, baseline: Baseline) -> dict[str, str | None]:
    if candidate.commit:
        return candidate.before
    edits: dict[str, list[Edit]] = defaultdict(list)
    for place, edit in candidate.edits:
        edits[baseline.tree.functions[place].path].append(edit)
    return {path: edited(baseline.tree.texts[path], each) for path, each in edits.items()}


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
    functions = sorted(functions, key=lambda function: function.place)
    return TaskCandidate(
        id=f"{name}/delete/{symbol}",
        kind="delete",
        shape=shape,
        edits=tuple((function.place, function.removal) for function in functions),
    )


def _mutations(name: str, function: SourceFunction, seed: int) -> Iterator[TaskCandidate]:
    symbol = f"{name}/mutate/{function.symbol}"
    numbered = {f"{symbol}/{edit.kind}-{_mark(edit)}": edit for edit in function.mistakes}
    taken: Counter[str] = Counter()
    for _ in range(min(MUTATIONS, len(numbered))):
        best = min(numbered, key=lambda key: (taken[numbered[key].kind], shuffled(seed, key)))
        edit = numbered.pop(best)
        taken[edit.kind] += 1
        yield TaskCandidate(id=best, kind="mutate", shape=edit.kind, edits=((function.place, edit),))


def _mark(edit: Edit) -> str:
    return hashlib.sha256(f"{edit.start} {edit.end} {edit.replacement}".encode()).hexdigest()[:8]


def commit_candidates(repository: Path, newest: int) -> list[TaskCandidate]:
    listing = git(repository, "log", "--no-merges", f"--max-count={newest}", "--format=%H %P").decode()
    return [_read_commit(repository, *line.split()[:2]) for line in listing.splitlines()]


def _read_commit(repository: Path, commit: str, parent: str = "") -> TaskCandidate:
    compared = ["--name-status", "--no-renames", "-z", parent, commit]
    changes = git(repository, "diff", *compared).decode().split("\0") if parent else []
    states = dict(zip(changes[1::2], changes[0::2], strict=False))
    modules = {path: state for path, state in states.items() if path.endswith(".py")}
    sources = {path: state for path, state in modules.items() if not is_test(path) and path != "setup.py"}
    tests = tuple(path for path, state in modules.items() if is_test(path) and state != "D")
    before: dict[str, str | None] = {}
    refusal = _why_no_task(parent, sources, tests)
    try:
        for path, state in sources.items() if not refusal else ():
            before[path] = None if state == "A" else git(repository, "show", f"{parent}:{path}").decode("utf-8")
    except UnicodeDecodeError:
        refusal = "a source of the commit is not UTF-8"
    return TaskCandidate(
        id=f"{tree_name(repository)}/history/{commit[:12]}",
        kind="history",
        shape="commit",
        commit=commit,
        message=git(repository, "log", "-1", "--format=%B", commit).decode(errors="replace").strip(),
        before=before,
        tests=tests,
        refusal=refusal,
    )


def _why_no_task(parent: str, sources: Collection[str], tests: Collection[str]) -> str:
    if not parent:
        return "the first commit changes nothing"
    if not tests:
        return "the commit changes no test file"
    if not sources:
        return "the commit changes no Python source"
    return f"the commit changes more than {MAX_FILES} Python sources" if len(sources) > MAX_FILES else ""
