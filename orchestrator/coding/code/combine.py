"""Harder tasks out of proven ones: several deletions of one tree, to be repaired together.

A stock of combinations costs a few numbers each. A task is made of one when it is first played, by merging the edits of
its parts. It needs no proof of its own: the pristine tree solves it as it solves every part, and the tests that fail
without one part's code fail without more of it. Parts whose edits meet in the same lines cannot be merged; the first of
them stays.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.coding.task import CodeTask

KINDS = ("delete", "mutate")
"""Kinds of tasks whose `start` only takes away from the tree or bends it, so that several go together."""
PART_COUNTS = (2, 2, 3, 3, 4)
"""How many parts a combination has; drawn."""
_TRIES = 20
_GAP_LINES = 1
"""Lines between two edits that can both be made."""


def draw_combinations(trees: Mapping[str, Sequence[int]], count: int, seed: int) -> list[tuple[int, ...]]:
    """Return up to `count` different combinations of tasks, each of one tree. `trees`: tree -> its tasks' numbers."""
    rng = random.Random(seed)
    names = sorted(name for name, tasks in trees.items() if len(tasks) > 1)
    weights = [len(trees[name]) for name in names]
    drawn: dict[tuple[int, ...], None] = {}
    for _ in range(count * _TRIES if names else 0):
        tasks = trees[rng.choices(names, weights)[0]]
        drawn.setdefault(tuple(sorted(rng.sample(tasks, min(rng.choice(PART_COUNTS), len(tasks))))))
        if len(drawn) == count:
            break
    return list(drawn)


def combined_id(ids: Sequence[str]) -> str:
    return " + ".join(ids)


def combined_prompt(prompts: Sequence[str]) -> str:
    parts = "\n\n".join(f"## Part {number}\n\n{prompt}" for number, prompt in enumerate(prompts, start=1))
    return f"There are {len(prompts)} things to repair. The tests decide about all of them together.\n\n{parts}"


def combined_difficulty(difficulties: Sequence[float | None]) -> float | None:
    """Return the estimate for parts that fail independently: 1 - product of (1 - d). None where one is unknown."""
    known = [difficulty for difficulty in difficulties if difficulty is not None]
    return 1 - math.prod(1 - difficulty for difficulty in known) if len(known) == len(difficulties) else None


def combine(parts: Sequence[CodeTask], pristine: Mapping[str, str]) -> CodeTask:
    """Return the task of several parts. `pristine`: text of the tree's files that the parts change."""
    merged, *others = parts
    taken = [merged]
    for part in others:
        start = _merge(merged.start, part.start, pristine)
        if start is None:
            continue
        taken.append(part)
        fail_to_pass = [*dict.fromkeys([*merged.fail_to_pass, *part.fail_to_pass])]
        merged = msgspec.structs.replace(
            merged,
            start=start,
            removed=_union(merged.removed, part.removed),
            solution={path: pristine[path] for path in start if path in pristine},
            editable=_union(merged.editable, part.editable),
            tests=_union(merged.tests, part.tests),
            test_files={**merged.test_files, **part.test_files},
            fail_to_pass=fail_to_pass,
            pass_to_pass=[test for test in merged.pass_to_pass if test in set(part.pass_to_pass)],
            flaky=_union(merged.flaky, part.flaky),
            symbols=_union(merged.symbols, part.symbols),
            timeout_s=max(merged.timeout_s, part.timeout_s),
        )
    return msgspec.structs.replace(
        merged,
        id=combined_id([part.id for part in parts]),
        kind="combined",
        prompt=combined_prompt([part.prompt for part in taken]) if len(taken) > 1 else merged.prompt,
        difficulty=combined_difficulty([part.difficulty for part in taken]),
    )


def _union(first: Sequence[str], second: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _merge(first: Mapping[str, str], second: Mapping[str, str], pristine: Mapping[str, str]) -> dict[str, str] | None:
    """Return both parts' files; None where the two change the same lines of a file, or one that the tree lacks."""
    merged = {**first, **second}
    for path in first.keys() & second.keys():
        text = _merge_text(pristine[path], first[path], second[path]) if path in pristine else None
        if text is None:
            return None
        merged[path] = text
    return merged


def _merge_text(base: str, first: str, second: str) -> str | None:
    lines = base.splitlines(keepends=True)
    edits = sorted([*_edits(lines, first), *_edits(lines, second)], key=lambda edit: edit[:2])
    for (_, end, _), (begin, _, _) in itertools.pairwise(edits):
        if begin < end + _GAP_LINES:
            return None
    for begin, end, replacement in reversed(edits):
        lines[begin:end] = replacement
    return "".join(lines)


def _edits(base: list[str], text: str) -> list[tuple[int, int, list[str]]]:
    """Return (begin, end, new lines) of each change, in lines of `base`."""
    changed = text.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, base, changed, autojunk=False)
    return [(a, b, changed[c:d]) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal"]
