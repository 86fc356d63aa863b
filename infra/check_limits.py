"""Check how much a reader has to hold at once: python infra/check_limits.py [--write]

complexity   cognitive complexity of a function, at most 15 (the package complexipy)
parameters   of a function beside `self`, at most 7
fields       of a class, annotated in it or set in its __init__, at most 12; settings are not counted
walk         files on a way through the code, as docs/architecture.md lists them; every file that it names exists

infra/over_limits.txt lists what is still over its limit, each with its figure. A figure may fall and must never grow;
what is within its limit leaves the list. --write writes the list anew.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from complexipy import code_complexity

PRODUCT = ("composer_prime", "orchestrator", "inference", "trainer", "diloco")
LIMITS = {"complexity": 15, "parameters": 7, "fields": 12}
WALKS = {
    "A task until its weights are on a node": 35,
    "A hint until the SDPO loss": 14,
    "A recorded session until the replay-DPO loss": 24,
    "A fragment until the outer step": 16,
    "One micro-batch inside the trainer": 7,
}
"""Section of docs/architecture.md -> the most files."""
Figures = dict[tuple[str, str], int]
"""(measure, name) -> figure."""


def main(root: Path, write: bool) -> int:
    problems = list(missing_files(root))
    over = {key: figure for key, figure in figures(root).items() if figure > limit_of(*key)}
    path = root / "infra" / "over_limits.txt"
    lines = [f"{measure} {figure} {name}" for (measure, name), figure in sorted(over.items())]
    if write:
        path.write_text("\n".join([*lines, ""]))
    listed = read_list(path)
    for (measure, name), figure in over.items():
        most = listed.get((measure, name), limit_of(measure, name))
        if figure > most:
            problems.append(f"{name}: {measure} is {figure}, at most {most} is allowed")
    problems += [f"{name}: {measure} is within its limit now: take it off {path.name}"
                 for measure, name in listed.keys() - over.keys()]  # fmt: skip
    print(f"{len(over)} figures are over their limits")
    print("\n".join(problems))
    return int(bool(problems))


def limit_of(measure: str, name: str) -> int:
    return WALKS[name] if measure == "walk" else LIMITS[measure]


def read_list(path: Path) -> Figures:
    entries = [line.split(" ", 2) for line in path.read_text().splitlines() if line]
    return {(measure, name): int(figure) for measure, figure, name in entries}


def figures(root: Path) -> Figures:
    """Return every measured figure; of functions and classes of one name in one file, the largest."""
    found = {("walk", title): len(files) for title, files in walks(root).items()}
    for path in sorted(path for package in PRODUCT for path in (root / package).rglob("*.py")):
        source, where = path.read_text(), path.relative_to(root)
        measured = [("complexity", each.name, each.complexity) for each in code_complexity(source).functions]
        for measure, name, figure in [*measured, *sizes(ast.parse(source))]:
            key = (measure, f"{where}:{name}")
            found[key] = max(figure, found.get(key, 0))
    return found


def sizes(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield (measure, name, figure) of the functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            yield "parameters", node.name, len(names) - (names[:1] in (["self"], ["cls"]))
        elif isinstance(node, ast.ClassDef) and not any("Config" in ast.unparse(base) for base in node.bases):
            yield "fields", node.name, max(len(annotated(node)), len(assigned(node)))


def annotated(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}


def assigned(node: ast.ClassDef) -> set[str]:
    """Return the attributes that __init__ sets."""
    makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    stored = [each for maker in makers for each in ast.walk(maker) if isinstance(each, ast.Attribute)]
    return {each.attr for each in stored if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}


def walks(root: Path) -> dict[str, list[Path]]:
    """Return the files of each way through the code, in their order, each once."""
    text = (root / "docs" / "architecture.md").read_text()
    sections = dict(re.findall(r"^### (.+)\n((?:(?!^#).*\n)*)", text, re.MULTILINE))
    steps = {title: re.findall(r"^- `([\w/]+)`: (.+)$", sections.get(title, ""), re.MULTILINE) for title in WALKS}
    return {
        title: list(dict.fromkeys(Path(folder, name) for folder, line in each for name in re.findall(r"\w+\.py", line)))
        for title, each in steps.items()
    }


def missing_files(root: Path) -> Iterator[str]:
    for title, files in walks(root).items():
        if not files:
            yield f"docs/architecture.md has no files under {title!r}"
        yield from (f"docs/architecture.md: {title!r} names {file}, which does not exist" for file in files
                    if not (root / file).is_file())  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], "--write" in sys.argv))
