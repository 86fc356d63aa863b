"""The words of a task, and its estimated difficulty.

A deletion is described by signature, docstring and call sites, never by its body. A mutation is described by its
symptom: which test fails and at which assertion. The place is for the agent to find.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from orchestrator.coding.factory.source_functions import FunctionIndex, SourceFunction
from orchestrator.coding.factory.suite import TestRecord

MAX_CALL_SITES = 4
MAX_SYMPTOMS = 3
_SIGNATURE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 600
_RULES = "Change the sources only. The tests stay as they are."


def deletion_prompt(
    index: FunctionIndex, functions: Sequence[SourceFunction], *, helpers: int, start: Mapping[str, str]
) -> str:
    """Ask for deleted functions. `start`: the files as the agent finds them, where call sites are looked for."""
    one = len(functions) == 1
    opening = (
        f"The body of `{functions[0].qualname}` in `{functions[0].path}` is missing: it raises "
        "NotImplementedError. Write it."
        if one
        else f"The bodies of {len(functions)} functions are missing: they raise NotImplementedError. Write them."
    )
    parts = [opening]
    if helpers:
        parts.append("Private helpers that only it used are gone as well. Write your own where you need some.")
    for function in functions:
        head = f"`{function.path}`, `{function.qualname}`:" if not one else "What is left of it:"
        parts.append(f"{head}\n\n```python\n{function.signature[:_SIGNATURE_CHARACTERS]}\n```")
    sites = call_sites(functions, {**index.texts, **start})
    if sites:
        parts.append("Where it is used:\n\n" + "\n".join(f"- `{place}`: `{line}`" for place, line in sites))
    return "\n\n".join([*parts, _RULES])


def call_sites(functions: Sequence[SourceFunction], texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return up to MAX_CALL_SITES lines of the sources that call one of the functions, as (place, line)."""
    names = sorted({function.name for function in functions if not function.name.startswith("__")})
    if not names:
        return []
    call = re.compile(rf"(?<!def )\b(?:{'|'.join(map(re.escape, names))})\(")
    sites = []
    for path, text in sorted(texts.items()):
        if not call.search(text):
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if call.search(line) and not line.lstrip().startswith(("#", ">>>", "...", "def ", "async def ", "class ")):
                sites.append((f"{path}:{number}", line.strip()[:200]))
                if len(sites) == MAX_CALL_SITES:
                    return sites
    return sites


def mutation_prompt(failures: Sequence[TestRecord], *, total: int) -> str:
    """Describe a bug by up to MAX_SYMPTOMS failing tests. `total`: how many tests fail."""
    tests = "A test fails" if total == 1 else f"{total} tests fail"
    parts = [f"{tests} that should pass. Find the bug in the sources and repair it."]
    parts += _symptoms(failures)
    return "\n\n".join([*parts, _RULES])


def commit_prompt(message: str, failures: Sequence[TestRecord], *, total: int) -> str:
    """Ask for what a commit did, in the commit's own words."""
    parts = [f"Make this change:\n\n{message.strip()[:_SIGNATURE_CHARACTERS]}"]
    parts.append(f"{total} test{'s' * (total != 1)} of the repository must pass then, and must not pass now.")
    return "\n\n".join([*parts, *_symptoms(failures), _RULES])


def _symptoms(failures: Sequence[TestRecord]) -> list[str]:
    parts = []
    for record in failures[:MAX_SYMPTOMS]:
        statement = f"{record.assertion}\n\n" if record.assertion else ""
        parts.append(f"`{record.node}`:\n\n```\n{statement}{steady(record.message)[:_MESSAGE_CHARACTERS]}\n```")
    return parts


def steady(text: str) -> str:
    """Take addresses out of a message: they differ from run to run."""
    return re.sub(r"0x[0-9a-fA-F]{4,}", "0x...", text)


def difficulty(*, body_lines: int, branches: int, callees: int, failing: int, files: int) -> float:
    """Estimate how hard a deletion is, in [0, 1): more code, branches, callees, failing tests and files are harder.

    The weights are a guess, not fitted to any solver. A run measures pass rates and does not need them.
    """
    load = 0.04 * body_lines + 0.08 * branches + 0.03 * callees + 0.1 * math.log1p(failing) + 0.3 * (files - 1)
    return round(1 - math.exp(-load), 3)


def search_difficulty(*, reached: int, body_lines: int, failing: int) -> float:
    """Estimate how hard a bug is to find, in [0, 1): many functions under few failing tests are hard."""
    load = 0.25 * math.log1p(reached) + 0.1 * math.log1p(body_lines) + 0.3 / max(failing, 1)
    return round(1 - math.exp(-load), 3)
