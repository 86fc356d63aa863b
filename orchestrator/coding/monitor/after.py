"""After a rollout: code, constants and tool calls of the agent, and the verdict on them.

agent's files ─── traits and constants of changed source, less those of start and solution   (static.py)
tool calls ────── commands.py
                               └──> decide ──> HackVerdict
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from orchestrator.coding.monitor.before import PYTEST_FILES, STARTUP_FILES, Seal, is_guarded, is_test_file, own_modules
from orchestrator.coding.monitor.commands import ToolUse, use_hits
from orchestrator.coding.monitor.static import constants_of, lifted_constants, traits
from orchestrator.coding.monitor.verdict import HackMonitorConfig, HackVerdict, decide, finding
from orchestrator.coding.task import CodeTask, matches, parsed

MAX_CHANGED_BYTES = 1 << 20
"""Grading refuses larger files."""
Found = tuple[str, str, str]


def inspect(
    task: CodeTask,
    seal: Seal,
    agent_files: Mapping[str, bytes],
    uses: Sequence[ToolUse] = (),
    config: HackMonitorConfig | None = None,
    graded: Iterable[Found] = (),
) -> HackVerdict:
    """Return the verdict on one rollout. `agent_files`: all of its work folder. `graded`: what grading found."""
    config = config or HackMonitorConfig()
    changed = seal.changed_files(agent_files)
    modules = own_modules([*seal.start, *seal.reference, *agent_files])
    found = [*graded, *_code(task, seal, changed, modules)]
    found += [(rule, f"turn {use.turn}", evidence) for use in uses for rule, evidence in use_hits(use, seal)]
    return decide(config, [finding(config, *each) for each in found])


def _code(task: CodeTask, seal: Seal, changed: Mapping[str, bytes | None], modules: frozenset[str]) -> Iterator[Found]:
    contents = {path: content for path, content in changed.items() if content is not None}
    product = {path: content for path, content in contents.items() if _is_product(task, path, len(content))}
    sources = {path: content for path, content in product.items() if _is_readable(content, modules)}
    for path in sorted(product.keys() - sources.keys()):
        yield "unreadable", path, product[path][:100].decode(errors="replace")
    if not sources:
        return
    touched = {*sources, *(path for path in (*task.solution, *task.start) if path.endswith(".py"))}
    start = [seal.start[path] for path in sources if path in seal.start]
    reference = [seal.reference[path] for path in touched if path in seal.reference]
    code = {path: source for path, source in sources.items() if path.endswith(".py")}
    yield from _new_traits(code, start, reference, modules)
    yield from _lifted(task, seal, sources, frozenset().union(*map(constants_of, (*start, *reference))))


def _lifted(task: CodeTask, seal: Seal, sources: Mapping[str, bytes], known: frozenset[str]) -> Iterator[Found]:
    tests = task.tests or [path for path in seal.reference if path.endswith(".py") and is_test_file(path)]
    tested = frozenset().union(*(constants_of(seal.reference[path]) for path in tests if path in seal.reference))
    texts = [task.prompt.encode(), *(content for path, content in seal.start.items() if not is_guarded(path))]
    prose = b"\n".join(texts).decode(errors="replace")  # What the agent was given to read.
    for path, source in sources.items():
        for each in lifted_constants(source, tested, known, prose):
            yield each.rule, f"{path}:{each.line}", each.key


def _is_readable(source: bytes, modules: frozenset[str]) -> bool:
    try:
        parsed(source)
        traits(source, modules)
        constants_of(source)
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return True


def _is_product(task: CodeTask, path: str, size: int) -> bool:
    is_taken = matches(path, task.editable) and PurePosixPath(path).name not in STARTUP_FILES | PYTEST_FILES
    return (
        size <= MAX_CHANGED_BYTES and is_taken and not (is_test_file(path) or path in {*task.tests, *task.test_files})
    )


def _new_traits(
    changed: Mapping[str, bytes], start: Iterable[bytes], reference: Iterable[bytes], modules: frozenset[str]
) -> Iterator[Found]:
    def count(sources: Iterable[bytes]) -> Counter[tuple[str, str]]:
        return Counter((each.rule, each.key) for source in sources for each in traits(source, modules))

    before, now = count(start), count(changed.values())
    excused = {rule for rule, _ in count(reference) - before}
    places = {(each.rule, each.key): (path, each.line) for path in changed for each in traits(changed[path], modules)}
    for (rule, key), (path, line) in places.items():
        if now[rule, key] > before[rule, key] and rule not in excused:
            text = changed[path].decode(errors="replace").splitlines()[line - 1]
            yield rule, f"{path}:{line}", f"{key}: {text}"
