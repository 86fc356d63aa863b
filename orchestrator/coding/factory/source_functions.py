"""The functions of a tree, the references to them, and how a body is removed.

References are by bare name: `f` counts as used wherever the identifier `f` stands, as a name, an attribute, an import
or a word in a string such as in `__all__`. So a helper is only taken away when its name stands nowhere else at all.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.coding.factory.mutations import FunctionNode

_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.comprehension)


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
    branches: int
    callees: frozenset[str]
    """Bare names that the body uses."""

    @property
    def name(self) -> str:
        return self.qualname.rsplit(".", 1)[-1]

    @property
    def place(self) -> str:
        """The key that traces use: path and first line."""
        return f"{self.path}:{self.first_line}"

    @property
    def owner(self) -> str:
        """The class's qualified name, "" for a plain function."""
        return self.qualname.rpartition(".")[0]

    @property
    def symbol(self) -> str:
        """Dotted name with the module: "toolz.itertoolz.groupby"."""
        module = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.qualname}"


@dataclass(slots=True, kw_only=True)
class FunctionIndex:
    """All functions of a tree's sources, and where each identifier stands."""

    functions: dict[str, SourceFunction] = field(default_factory=dict)
    """By `place`."""
    texts: dict[str, str] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Identifier -> places of the functions that use it; "path:0" for module code, tests and other files."""
    plain: dict[str, str] = field(default_factory=dict)
    """Path -> stripped text, of the sources and all other text files."""


def index_functions(sources: Mapping[str, str], others: Mapping[str, str]) -> FunctionIndex:
    """Index the sources. `others`: the tree's further text files. References in its Python files count as well."""
    plain = {path: stripped(text) for path, text in {**others, **sources}.items()}
    index = FunctionIndex(texts=dict(sources), plain=plain)
    for path, text in sources.items():
        tree = _parse(text)
        if tree is None:
            continue
        for function, node in _functions(path, text, tree):
            index.functions[function.place] = function
            for name in function.callees:
                index.uses[name].add(function.place)
            _forget(node)
        for name in _identifiers(tree):
            index.uses[name].add(f"{path}:0")
    for path, text in others.items():
        if not path.endswith(".py"):
            continue
        for name in set(re.findall(r"[^\W\d]\w*", text)):
            index.uses[name].add(f"{path}:0")
    return index


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _functions(path: str, text: str, tree: ast.Module) -> list[tuple[SourceFunction, FunctionNode]]:
    lines = text.split("\n")
    found = []
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        parent, prefix = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                pending.append((node, f"{prefix}{node.name}."))
            elif isinstance(node, FunctionNode):
                function = _describe(path, lines, node, prefix)
                if function is not None:
                    found.append((function, node))
            elif isinstance(node, ast.If | ast.Try):
                pending.append((node, prefix))
    return sorted(found, key=lambda pair: pair[0].first_line)


def _describe(path: str, lines: list[str], node: FunctionNode, prefix: str) -> SourceFunction | None:
    """Describe a function; None for one without a body to speak of, or written on one line."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not statements or node.body[0].lineno == node.lineno or node.end_lineno is None:
        return None
    start = min([statements[0].lineno, *(item.lineno for item in getattr(statements[0], "decorator_list", []))])
    if statements is not node.body and node.body[0].end_lineno == start:
        return None
    while lines[start - 2].strip() == "" or lines[start - 2].lstrip().startswith("#"):
        start -= 1
    end = node.end_lineno
    for number in range(end + 1, len(lines) + 1):  # comments below the last statement, still inside
        line = lines[number - 1]
        if line.strip() and not (line.lstrip().startswith("#") and _indent(line) > node.col_offset):
            break
        if line.strip():
            end = number
    children = [child for part in statements for child in ast.walk(part)]
    return SourceFunction(
        path=path,
        qualname=prefix + node.name,
        first_line=first,
        def_line=node.lineno,
        body_start=start,
        end_line=end,
        signature="\n".join(line[node.col_offset :].rstrip() for line in lines[first - 1 : start - 1]).rstrip(),
        body_lines=len({getattr(child, "lineno", None) for child in children} - {None}),
        branches=sum(isinstance(child, _BRANCHES) for child in children),
        callees=frozenset(name for part in [*statements, *node.decorator_list] for name in _identifiers(part)),
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _identifiers(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


def _forget(node: FunctionNode) -> None:
    """Empty a function's body in the syntax tree: its names are counted as its own, not the module's."""
    node.body, node.decorator_list = [ast.Pass()], []


def without_bodies(index: FunctionIndex, stubbed: Iterable[str], removed: Iterable[str] = ()) -> dict[str, str]:
    """Return the changed files: functions of `stubbed` raise NotImplementedError, those of `removed` are gone."""
    edits: dict[str, list[tuple[int, int, list[str]]]] = defaultdict(list)
    for place in stubbed:
        function = index.functions[place]
        head = index.texts[function.path].split("\n")[function.def_line - 1]
        edits[function.path].append(
            (function.body_start, function.end_line, [" " * (_indent(head) + 4) + "raise NotImplementedError"])
        )
    for place in removed:
        function = index.functions[place]
        edits[function.path].append((function.first_line, function.end_line, []))
    changed = {}
    for path, parts in edits.items():
        lines = index.texts[path].split("\n")
        for start, end, replacement in sorted(parts, reverse=True):
            lines[start - 1 : end] = replacement
        changed[path] = "\n".join(lines)
    return changed


def body_text(index: FunctionIndex, function: SourceFunction) -> list[str]:
    """Return the lines of a body without indentation, blank lines and comments."""
    lines = index.texts[function.path].split("\n")[function.body_start - 1 : function.end_line]
    return stripped("\n".join(lines)).split("\n")[1:-1]


def copies_elsewhere(index: FunctionIndex, places: Iterable[str], start: Mapping[str, str]) -> str:
    """Return the first file that holds a whole deleted body a second time; "" if none does.

    Skip bodies of fewer than three lines, which occur in many places by chance. `start`: the files from
    which the bodies are already taken.
    """
    plain = {**index.plain, **{path: stripped(text) for path, text in start.items()}}
    for place in places:
        body = body_text(index, index.functions[place])
        if len(body) >= 3:
            wanted = "\n" + "\n".join(body) + "\n"
            for path, text in plain.items():
                if wanted in text:
                    return path
    return ""


def stripped(text: str) -> str:
    """Return the lines without indentation, blank ones and comments left out."""
    lines = (line.strip() for line in text.split("\n"))
    return "\n" + "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"
