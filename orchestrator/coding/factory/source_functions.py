"""The functions of a tree, and how a body is removed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.coding.factory.mutations import FunctionNode


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFunction:
    """One function or method of a source file. Lines are counted from 1."""

    path: str
    qualname: str
    """Name inside the file: "Cache.get"."""
    first_line: int
    """Line of the first decorator, as in a code object."""
    def_line: int
    body_start: int
    """First line after signature and docstring, comments included."""
    end_line: int
    """Last line, with comments that trail the body."""
    signature: str
    """Decorators, signature and docstring, unindented."""
    body_lines: int
    """Lines of statements."""

    @property
    def place(self) -> str:
        """The key that traces use: path and first line."""
        return f"{self.path}:{self.first_line}"

    @property
    def symbol(self) -> str:
        """Dotted name with the module: "toolz.itertoolz.groupby"."""
        module = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.qualname}"


@dataclass(slots=True, kw_only=True)
class FunctionIndex:
    """All functions of a tree's sources."""

    functions: dict[str, SourceFunction]
    """By `place`."""
    texts: dict[str, str]
    """By path."""


def index_functions(sources: Mapping[str, str]) -> FunctionIndex:
    """Index the sources, path -> text."""
    functions = [function for path, text in sources.items() for function in _functions(path, text)]
    return FunctionIndex(functions={function.place: function for function in functions}, texts=dict(sources))


def _functions(path: str, text: str) -> list[SourceFunction]:
    """Return the functions of modules and classes, not those inside of functions. A file of other Python has none."""
    try:
        pending: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")
    found = []
    while pending:
        parent, prefix = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                pending.append((node, f"{prefix}{node.name}."))
            elif isinstance(node, ast.If | ast.Try):
                pending.append((node, prefix))
            elif isinstance(node, FunctionNode):
                found.append(_describe(path, lines, node, prefix))
    return sorted(filter(None, found), key=lambda function: function.first_line)


def _describe(path: str, lines: list[str], node: FunctionNode, prefix: str) -> SourceFunction | None:
    """Describe a function; None for one without a body to speak of, or written on one line."""
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not statements or node.body[0].lineno == node.lineno or node.end_lineno is None:
        return None
    start = _first_line(statements[0])
    if statements is not node.body and node.body[0].end_lineno == start:
        return None
    while not lines[start - 2].strip() or lines[start - 2].lstrip().startswith("#"):
        start -= 1
    children = [child for part in statements for child in ast.walk(part)]
    first = _first_line(node)
    return SourceFunction(
        path=path,
        qualname=prefix + node.name,
        first_line=first,
        def_line=node.lineno,
        body_start=start,
        end_line=_end_of_comments(lines, node),
        signature="\n".join(line[node.col_offset :].rstrip() for line in lines[first - 1 : start - 1]).rstrip(),
        body_lines=len({getattr(child, "lineno", None) for child in children} - {None}),
    )


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _end_of_comments(lines: list[str], node: FunctionNode) -> int:
    """Return the last line of a function with the comments below its last statement that are still inside."""
    end = node.end_lineno or node.lineno
    for number in range(end + 1, len(lines) + 1):
        line = lines[number - 1].strip()
        if line and not (line.startswith("#") and _indent(lines[number - 1]) > node.col_offset):
            break
        if line:
            end = number
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def without_bodies(index: FunctionIndex, places: Iterable[str]) -> dict[str, str]:
    """Return the changed files: the functions at these places raise NotImplementedError."""
    by_path: dict[str, list[SourceFunction]] = defaultdict(list)
    for place in places:
        by_path[index.functions[place].path].append(index.functions[place])
    changed = {}
    for path, functions in by_path.items():
        lines = index.texts[path].split("\n")
        for function in sorted(functions, key=lambda function: function.body_start, reverse=True):
            indent = _indent(lines[function.def_line - 1]) + 4
            lines[function.body_start - 1 : function.end_line] = [" " * indent + "raise NotImplementedError"]
        changed[path] = "\n".join(lines)
    return changed
