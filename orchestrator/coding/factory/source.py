"""The clean tree of a folder, or of a git repository's commit: its files, sources, functions and tests.

Of each function there are the edits that make tasks of it: a body removed, or one mistake as a person makes it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.conversion import NO_TESTS
from orchestrator.coding.git_command import commit_files
from orchestrator.coding.monitor.before import agents_files, is_test_file, unwanted_files
from orchestrator.coding.sandbox.box import read_tree
from orchestrator.coding.task import matches

_NO_SOURCES = {
    "test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "tools", "scripts", "script",
    "bin", "ci", "requirements", "changelog", "news", "man", "licenses", "extras", "contrib", "tasks", "perf", "setup",
    "conftest", "noxfile", "fabfile", "versioneer", "runtests", "run_tests", "manage", "release", "src", "lib",
    "python",
}  # fmt: skip
"""Folders and modules at the root that are no part of a package."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_SWAPS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_SIGNS = tuple("+-*/%&|^~")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """A package's clean tree on disk."""

    folder: Path
    """Its name is the tree's: "toolz-1.2.0"."""
    repository: str
    """What held-out splits are made by: the same for all commits of a repository."""
    origin: str
    python_path: tuple[str, ...]
    """Folders, relative to the tree, that hold the importable packages."""
    texts: Mapping[str, str]
    sources: tuple[str, ...]
    functions: Mapping[str, SourceFunction]
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name


def source_files(source: Path, commit: str = "", overlay: Collection[str] = ()) -> dict[str, bytes]:
    files = commit_files(source, commit) if commit else _folder_files(source)
    files |= {path: (source / path).read_bytes() for path in overlay if (source / path).is_file()}
    return {path: content for path, content in agents_files(files).items() if not path.endswith((".so", ".pth"))}


def _folder_files(source: Path) -> dict[str, bytes]:
    found = (path for path in sorted(source.rglob("*")) if path.is_file() and not path.is_symlink())
    paths = {path.relative_to(source).as_posix(): path for path in found}
    unwanted = set(unwanted_files(paths))
    return {name: path.read_bytes() for name, path in paths.items() if name not in unwanted}


@functools.lru_cache(maxsize=4)
def plain_texts(folder: Path) -> Mapping[str, str]:
    return {path: plain(content.decode(errors="replace")) for path, content in read_tree(folder).items()}


def plain(text: str) -> str:
    return "".join(f"\n{line.strip()}" for line in text.splitlines() if line.strip()) + "\n"


def describe_tree(folder: Path, repository: str, origin: str) -> SourceTree:
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
    tests = tuple(path for path in texts if is_test(path))
    for root in ("src", "lib", "python", "."):
        sources = tuple(path for path in texts if _belongs(path, root) and not is_test(path))
        if sources:
            break
    else:
        raise ConfigError(f"{origin}: no Python package in it (neither in src, lib, python nor at the root)")
    if not tests:
        raise ConfigError(f"{origin}: no tests in it (test_*.py, *_test.py or a folder tests); tasks need tests")
    _make_installed(folder, root)
    return SourceTree(
        folder=folder,
        repository=repository,
        origin=origin,
        python_path=(".",) if root == "." else (root, "."),
        texts=texts,
        sources=sources,
        functions={each.place: each for path in sources for each in find_functions(path, texts[path])},
        tests=tests,
    )


def editable_patterns(tree: SourceTree, changed: Iterable[str] = ()) -> list[str]:
    """Return patterns of the packages' folders with what is new there, less tests and the data that is there already,
    which tests may read; and those of `changed` that these lack. Modules at the root are given one by one.
    """
    root = "" if tree.python_path[0] == "." else f"{tree.python_path[0]}/"
    parts = [path.removeprefix(root).partition("/") for path in tree.sources]
    packages = {root + (f"{name}/**" if slash else "*.py" if root else name) for name, slash, _ in parts}
    files = [path.relative_to(tree.folder).as_posix() for path in tree.folder.rglob("*") if path.is_file()]
    data = [f"!{path}" for path in sorted(files) if not path.endswith(".py") and matches(path, [*packages])]
    patterns = [*sorted(packages), *NO_TESTS, *data]
    return [*patterns, *sorted(path for path in changed if not matches(path, patterns))]


def is_test(path: str) -> bool:
    return is_test_file(path) or path.endswith("conftest.py")


def _belongs(path: str, root: str) -> bool:
    if root != ".":
        return path.startswith(root + "/")
    first = path.partition("/")[0]
    return first.removesuffix(".py") not in _NO_SOURCES and not (first != path and first.startswith((".", "_")))


def _make_installed(folder: Path, root: str) -> None:
    """Write PKG-INFO where `importlib.metadata` finds it: many packages ask for their own version."""
    path = folder / "PKG-INFO"
    headers = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    name, version = headers.get("Name"), headers.get("Version")
    if not name or not version or any((folder / root).glob("*.egg-info/PKG-INFO")):
        return
    installed = folder / root / f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def tree_name(path: Path) -> str:
    return re.sub(r"[^\w.+-]", "-", path.resolve().name) or "source"


# Functions and their edits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    replacement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFunction:
    """One function or method of a source file. Lines are counted from 1."""

    path: str
    qualname: str
    """Name inside the file: "Cache.get"."""
    first_line: int
    """Line of the first decorator, as in a code object."""
    signature: str
    """Decorators, signature and docstring, unindented."""
    body_lines: int
    removal: Edit
    """Leaves the signature and the docstring, and takes the body with its comments."""
    mistakes: list[Edit]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.first_line}"

    @property
    def symbol(self) -> str:
        """Dotted name with the module: "toolz.itertoolz.groupby"."""
        module = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.qualname}"


def edited(text: str, edits: Iterable[Edit]) -> str:
    lines = text.encode().split(b"\n")
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, start), (last, end) = edit.start, edit.end
        lines[first - 1 : last] = [lines[first - 1][:start] + edit.replacement.encode() + lines[last - 1][end:]]
    return b"\n".join(lines).decode()


def find_functions(path: str, text: str) -> list[SourceFunction]:
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
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not statements or node.body[0].lineno == node.lineno or node.end_lineno is None:
        return None
    start = _first_line(statements[0])
    if statements is not node.body and node.body[0].end_lineno == start:
        return None
    while not lines[start - 2].strip() or lines[start - 2].lstrip().startswith("#"):
        start -= 1
    children = [child for part in statements for child in ast.walk(part)]
    first, end = _first_line(node), _end_of_comments(lines, node)
    return SourceFunction(
        path=path,
        qualname=prefix + node.name,
        first_line=first,
        signature="\n".join(line[node.col_offset :].rstrip() for line in lines[first - 1 : start - 1]).rstrip(),
        body_lines=len({getattr(child, "lineno", None) for child in children} - {None}),
        removal=Edit(
            kind="body",
            start=(start, 0),
            end=(end, len(lines[end - 1].encode())),
            replacement=" " * (_indent(lines[node.lineno - 1]) + 4) + "raise NotImplementedError",
        ),
        mistakes=_mistakes([node, *children], lines),
    )


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _end_of_comments(lines: list[str], node: FunctionNode) -> int:
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


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _replace(kind: str, node: ast.expr | ast.stmt, replacement: str) -> Edit:
    return Edit(kind=kind, start=(node.lineno, node.col_offset), end=_end(node), replacement=replacement)


def _operator(node: ast.BinOp | ast.Compare | ast.BoolOp, lines: list[str]) -> Iterator[Edit]:
    """Replace the one operator of two operands on one line. Parentheses around them stay."""
    if isinstance(node, ast.BinOp):
        operands, operators = [node.left, node.right], [node.op]
    elif isinstance(node, ast.Compare):
        operands, operators = [node.left, *node.comparators], node.ops
    else:
        operands, operators = node.values, [node.op]
    line, column = _end(operands[0])
    values = [getattr(each, "value", "") for each in operands if isinstance(each, ast.Constant | ast.JoinedStr)]
    has_text = isinstance(node, ast.BinOp) and any(isinstance(each, str | bytes) for each in values)  # It has no `-`.
    if has_text or len(operators) > 1 or type(operators[0]) not in _SWAPS or operands[1].lineno != line:
        return
    old, new = _SWAPS[type(operators[0])]
    place = lines[line - 1].encode()[column : operands[1].col_offset].find(old.encode())
    if place >= 0:
        start = column + place
        yield Edit(kind="operator", start=(line, start), end=(line, start + len(old)), replacement=new)


def _constant(node: ast.Constant, lines: list[str]) -> Iterator[Edit]:
    """Count one too far, or one too short. What no person writes is left out: `- 0`, `--1`, 256 for 0xff."""
    line = lines[node.lineno - 1].encode()
    if type(node.value) is bool:
        yield _replace("branch", node, str(not node.value))
    elif type(node.value) is int and line[node.col_offset : node.end_col_offset].decode() == str(node.value):
        has_sign = line[: node.col_offset].decode().rstrip().endswith(_SIGNS)
        for value in (node.value + 1, node.value - 1):
            if value > 0 or not has_sign:
                yield _replace("off-by-one", node, str(value))


def _branch(node: ast.If | ast.IfExp, lines: list[str]) -> Iterator[Edit]:
    """Turn a condition on one line around, in a person's words. Of several with `and` or `or`, the first one is."""
    test = node.test
    while isinstance(test, ast.BoolOp):
        test = test.values[0]
    kept = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    is_negated = kept is not test
    has_words = isinstance(kept, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    if (has_words or (is_negated and isinstance(kept, ast.Compare | ast.BoolOp))) and _end(test)[0] == test.lineno:
        text = lines[kept.lineno - 1].encode()[kept.col_offset : _end(kept)[1]].decode()
        yield _replace("branch", test, text if is_negated else f"not {text}")


def _dropped(nodes: Sequence[ast.AST], lines: list[str]) -> Iterator[Edit]:
    """Drop one of several statements of a block, where it has its lines for itself."""
    for each in (each for block in _blocks(nodes) if len(block) > 1 for each in block):
        if isinstance(each, ast.Assign | ast.AugAssign | ast.Expr) and _has_own_lines(each, lines):
            above, last = each.lineno - 1, _end(each)[0]
            start, end = ((number, len(lines[number - 1].encode())) for number in (above, last))
            yield Edit(kind="statement", start=start, end=end, replacement="")


def _blocks(nodes: Sequence[ast.AST]) -> Iterator[list[ast.stmt]]:
    for block in (getattr(node, name, None) for node in nodes for name in ("body", "orelse", "finalbody")):
        if isinstance(block, list):
            yield [each for each in block if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]


def _has_own_lines(node: ast.stmt, lines: list[str]) -> bool:
    last, end = _end(node)
    before, after = lines[node.lineno - 1].encode()[: node.col_offset], lines[last - 1].encode()[end:]
    return not before.strip() and after.strip()[:1] in (b"", b"#")


_MISTAKES: dict[type, Callable[..., Iterator[Edit]]] = {
    ast.BinOp: _operator,
    ast.Compare: _operator,
    ast.BoolOp: _operator,
    ast.Constant: _constant,
    ast.If: _branch,
    ast.IfExp: _branch,
}


def _mistakes(nodes: Sequence[ast.AST], lines: list[str]) -> list[Edit]:
    tests = [node.test for node in nodes if isinstance(node, ast.While)]
    changed = [node for node in nodes if not (isinstance(node, ast.Constant) and node in tests)]  # `while True` stays.
    found = [edit for node in changed if type(node) in _MISTAKES for edit in _MISTAKES[type(node)](node, lines)]
    return sorted(
        [*found, *_dropped(nodes, lines)], key=lambda edit: (edit.start, edit.end, edit.kind, edit.replacement)
    )
