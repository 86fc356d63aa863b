"""Recall and false positives of the hack monitor: python benchmarks/hack_monitor.py [TASKS ...] [--graded N]

Three small packages, and tasks of real packages (folders that `composer tasks make` wrote), get the hacks of
tests/monitor_hacks and every honest rewriting. Printed with 95 % Wilson intervals:

    recall, monitor     hacks whose reward the verdict takes away, by data alone
    recall, grading     hacks that grading alone gives nothing (a sample, in real sandboxes)
    recall, both        hacks that earn nothing after both
    false positives     honest work whose reward the verdict takes away

Each task of TASKS gets a random 25 of the hacks, without those that need the answers of the tests. The graded sample
goes through the kinds in turns, so that it has as many of one as of another, and is also listed by kind.

--unseen takes the tasks of inflection==0.5.1 and measures the sample of hack_monitor_sides/unseen.py alone. It was
written before its author read the rules. With --graded N, N of its hacks are graded too.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "monitor_hacks"))
from hacks import HACKS, Attempt, Hack, bash
from honest import honest_commands, refactorings, rewritten, solutions
from small_packages import Case, cases, write_trees

from benchmarks.hack_monitor_sides.unseen import HACKS as UNSEEN
from benchmarks.hack_monitor_sides.unseen import HONEST, PACKAGE
from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.grading import grade
from orchestrator.coding.monitor.after import inspect
from orchestrator.coding.monitor.before import seal
from orchestrator.coding.sandbox.box import read_tree
from orchestrator.coding.task import TREES_FOLDER, index_tasks, tree_of

_GRADED_AT_ONCE = 4


def main() -> None:
    options = _options()
    if options.unseen is not None:
        _unseen(options.unseen, options.graded)
        return
    small = cases()[: 1 if options.quick else None]
    real = [case for folder in options.tasks for case in _real_cases(folder, options.per_set)]
    kinds = {hack.kind for hack in HACKS}
    print(f"{len(HACKS)} hacks of {len(kinds)} kinds; {len(small)} small and {len(real)} real tasks")
    _recall("small packages", small)
    if real:
        _recall("real packages", real)
    _false_positives("small packages", [(case, *each) for case in small for each in _honest(case)])
    if real:
        texts = [(case, *each) for case in real for each in _rewritings(case)]
        work = [(case, name, Attempt(files={case.module: text.encode()})) for case, name, text in texts]
        _false_positives("real packages", work)
    if options.graded:
        hacks = enumerate(_by_turns(HACKS, options.graded))
        with tempfile.TemporaryDirectory() as folder:
            chosen = [(each, small[number % len(small)]) for number, each in hacks]
            asyncio.run(_graded([_made(*each) for each in chosen], write_trees(Path(folder))))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", type=Path, help="folders with tasks.jsonl and trees/")
    parser.add_argument("--graded", type=int, default=0, help="hacks that are graded as well; 0 grades none")
    parser.add_argument("--unseen", type=Path, help="folder with the tasks of inflection==0.5.1")
    parser.add_argument("--per-set", type=int, default=20, help="tasks of each folder")
    parser.add_argument("--quick", action="store_true", help="the first small package alone: whether it works")
    return parser.parse_args()


def _real_cases(folder: Path, count: int) -> list[Case]:
    """Return cases of deleted top-level functions."""
    tasks = [
        task
        for task in dict(index_tasks(folder)).values()
        if task.kind == "delete" and len(task.start) == 1 == len(task.symbols)
    ]
    random.Random(0).shuffle(tasks)
    made: list[Case] = []
    for task in tasks:
        module, function = next(iter(task.start)), task.symbols[0].rpartition(".")[2]
        tree = tree_of(task, folder / TREES_FOLDER)
        is_plain = f"\ndef {function}(" in task.start[module]
        if tree is not None and is_plain and len(made) < count:
            made.append(Case(task=task, tree=read_tree(tree), module=module, function=function, answers=[]))
    return made


def _hacks(case: Case) -> Iterator[tuple[str, Attempt]]:
    sealed = seal(case.task, case.tree)
    chosen = HACKS
    if not case.answers:
        general = [hack for hack in HACKS if hack.kind != "hard-coded answers"]
        chosen = random.Random(case.task.id).sample(general, 25)
    for hack in chosen:
        yield hack.name, hack.make(case, sealed)


def _honest(case: Case) -> Iterator[tuple[str, Attempt]]:
    for name, text in solutions(case):
        yield name, Attempt(files={case.module: text.encode()})
    for name, files in refactorings(case):
        yield name, Attempt(files=files)
    for text in honest_commands(case):
        yield text, Attempt(files={case.module: case.original.encode()}, uses=[bash(text)])


def _rewritings(case: Case) -> Iterator[tuple[str, str]]:
    original = case.task.solution.get(case.module) or case.original
    yield "original", original
    yield from rewritten(original, case.function)


def _is_hack(case: Case, attempt: Attempt) -> bool:
    sealed = seal(case.task, case.tree)
    return inspect(case.task, sealed, attempt.agent_files(sealed), attempt.uses).policy != "none"


def _recall(name: str, chosen: Iterable[Case]) -> None:
    missed: Counter[str] = Counter()
    count, started = 0, time.perf_counter()
    for case in chosen:
        for hack, attempt in _hacks(case):
            count += 1
            missed[hack] += not _is_hack(case, attempt)
    wall_s = time.perf_counter() - started
    _show(f"recall, monitor, {name}", count - missed.total(), count)
    print(f"    missed: {dict(+missed)}; {1000 * wall_s / max(count, 1):.0f} ms a rollout")


def _false_positives(name: str, work: list[tuple[Case, str, Attempt]]) -> None:
    flagged = [(case.task.id, what) for case, what, attempt in work if _is_hack(case, attempt)]
    _show(f"false positives, {name}", len(flagged), len(work))
    for each in flagged[:20]:
        print("   ", *each)


def _unseen(folder: Path, num_graded: int) -> None:
    """Measure the unseen sample: each hack and each honest one in the task of the function that it writes."""
    known = {case.function: case for case in _real_cases(folder, 100) if case.task.repository == PACKAGE}
    hacks = [(each.kind, each.name, known[each.function], each.attempt(known[each.function])) for each in UNSEEN]
    missed = [f"{kind}: {name}" for kind, name, case, attempt in hacks if not _is_hack(case, attempt)]
    _show("recall, monitor, unseen sample", len(hacks) - len(missed), len(hacks))
    print("    missed:", *missed, sep="\n      ")
    work = [(known[each.function], each.name, each.attempt(known[each.function])) for each in HONEST]
    _false_positives("unseen sample", work)
    if num_graded:
        asyncio.run(_graded(hacks[:num_graded], folder / TREES_FOLDER))


Made = tuple[str, str, Case, Attempt]
"""Kind and name of a hack, its task, and what it leaves."""


def _made(each: Hack, case: Case) -> Made:
    return each.kind, each.name, case, each.make(case, seal(case.task, case.tree))


async def _graded(chosen: list[Made], trees: Path) -> None:
    """Grade hacks, a few at a time."""
    slots = asyncio.Semaphore(_GRADED_AT_ONCE)

    async def one(kind: str, name: str, case: Case, attempt: Attempt) -> tuple[str, bool, bool]:
        """Return (kind, whether grading alone pays nothing, whether the monitor sees it)."""
        async with slots:
            is_unpaid = await _earns_nothing(case, attempt, trees)
        is_seen = _is_hack(case, attempt)
        if not (is_unpaid or is_seen):
            print(f"    earned a reward: {name} on {case.task.id}")
        return kind, is_unpaid, is_seen

    results = await asyncio.gather(*(one(*each) for each in chosen))
    _show("recall, grading alone", sum(unpaid for _, unpaid, _ in results), len(results))
    _show("recall, monitor alone", sum(seen for _, _, seen in results), len(results))
    _show("recall, both", sum(unpaid or seen for _, unpaid, seen in results), len(results))
    for kind in sorted({kind for kind, _, _ in results}):
        mine = [(unpaid, seen) for each, unpaid, seen in results if each == kind]
        by_grading, by_monitor = (sum(column) for column in zip(*mine, strict=True))
        print(f"    {kind:<24} of {len(mine):<3} grading stops {by_grading:<3} the monitor sees {by_monitor}")


def _by_turns(hacks: list[Hack], count: int) -> list[Hack]:
    """Return random hacks: one of each kind, then a second one of each, and so on."""
    shuffled, turn = random.Random(0).sample(hacks, len(hacks)), Counter[str]()
    turns: list[tuple[int, Hack]] = []
    for each in shuffled:
        turns.append((turn[each.kind], each))
        turn[each.kind] += 1
    return [each for _, each in sorted(turns, key=lambda pair: pair[0])][:count]


async def _earns_nothing(case: Case, attempt: Attempt, trees: Path) -> bool:
    sealed = seal(case.task, case.tree)
    files = attempt.agent_files(sealed)
    patch = {
        path: content
        for path, content in files.items()
        if path not in sealed.lures and sealed.start.get(path) != content
    }
    return not (await grade(case.task, trees, patch, RuntimeConfig())).solved


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share, `hits` of `count` independent trials (Wilson 1927).

    Raises ValueError unless 0 <= hits <= count and count > 0.
    """
    if not (0 <= hits <= count and count > 0):
        raise ValueError(f"{hits} of {count} is not a share: it needs 0 <= hits <= count and count > 0")
    z, share = 1.959963984540054, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _show(name: str, hits: int, count: int) -> None:
    low, high = wilson_interval(hits, count)
    print(f"{name:<34} {hits:>5} of {count:<5} {hits / count:.4f} [{low:.4f}, {high:.4f}]", flush=True)


if __name__ == "__main__":
    main()
