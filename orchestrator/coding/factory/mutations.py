"""One small change to a function, as a person makes it by mistake.

Each operator looks at a node of the syntax tree and gives a replacement for a piece of the source. The rest of the file
keeps its form.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_WORDS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&",
    ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|",
    ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One replacement. Lines and columns are those of the syntax tree: lines from 1, columns in UTF-8 bytes from 0."""

    operator: str
    """operator | off-by-one | branch | case | statement | arguments | default"""
    line: int
    start: tuple[int, int]
    end: tuple[int, int]
    replacement: str


def mutations(node: FunctionNode, lines: list[bytes], body_start: int) -> list[Mutation]:
    """Return all mutations of a function, in the order of its lines. `lines`: the file's, with their ends."""
    changes = [*_defaults(node)]
    for statement in node.body:
        if statement.lineno >= body_start:
            for child in ast.walk(statement):
                changes += _of_node(child, lines)
    return sorted(changes, key=lambda change: (change.start, change.end, change.operator, change.replacement))


def mutated(lines: list[bytes], node: FunctionNode, mutation: Mutation) -> str | None:
    """Return the changed file, None if the changed function is not valid code."""
    (first, start), (last, end) = mutation.start, mutation.end
    changed = list(lines)
    changed[first - 1 : last] = [lines[first - 1][:start] + mutation.replacement.encode() + lines[last - 1][end:]]
    fewer = last - first
    function = b"".join(changed[node.lineno - 1 : _end(node)[0] - fewer]).decode()
    try:
        ast.parse(textwrap.dedent(function))
    except (SyntaxError, ValueError):
        return None
    return b"".join(changed).decode()


def function_nodes(text: str) -> dict[int, FunctionNode]:
    """Return a file's functions by the line of their `def`."""
    return {node.lineno: node for node in ast.walk(ast.parse(text)) if isinstance(node, FunctionNode)}


def byte_lines(text: str) -> list[bytes]:
    """Split a file as the syntax tree counts lines: at line feeds only."""
    *lines, last = text.encode().split(b"\n")
    return [*(line + b"\n" for line in lines), last]


def _segment(lines: list[bytes], node: ast.expr) -> str | None:
    """Return the source of an expression on one line, None for one on several."""
    line, end = _end(node)
    return lines[line - 1][node.col_offset : end].decode() if line == node.lineno else None


def _of_node(node: ast.AST, lines: list[bytes]) -> Iterator[Mutation]:
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in _SWAPPED
        and not _is_text(node.left)
        and not _is_text(node.right)
    ):
        yield from _between(node.left, node.right, _WORDS[type(node.op)], _SWAPPED[type(node.op)], lines)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = type(node.ops[0])
        yield from _between(node.left, node.comparators[0], _WORDS[operator], _SWAPPED[operator], lines)
    elif isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from _between(node.values[0], node.values[1], *words, lines)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield _replace("off-by-one", node, str(value) if value >= 0 else f"({value})")
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _replace("branch", node, str(not node.value))
    elif isinstance(node, ast.IfExp):
        yield from _branch(node, lines)
    elif isinstance(node, ast.Call):
        yield from _arguments(node, lines)
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node, lines)


def _of_statement(node: ast.stmt, lines: list[bytes]) -> Iterator[Mutation]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not _is_docstring(node):
        yield _replace("statement", node, "pass")
    if isinstance(node, ast.If | ast.While):
        yield from _branch(node, lines)
    if isinstance(node, ast.If | ast.Try | ast.Match):
        yield from _cases(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _replace(operator: str, node: ast.expr | ast.stmt, replacement: str) -> Mutation:
    start = (node.lineno, node.col_offset)
    return Mutation(operator=operator, line=node.lineno, start=start, end=_end(node), replacement=replacement)


def _between(left: ast.expr, right: ast.expr, old: str, new: str, lines: list[bytes]) -> Iterator[Mutation]:
    """Replace the operator between two operands on one line. Parentheses around the operands stay."""
    line, column = _end(left)
    if right.lineno != line:
        return
    place = lines[line - 1][column : right.col_offset].find(old.encode())
    if place >= 0:
        start = column + place
        end = (line, start + len(old.encode()))
        yield Mutation(operator="operator", line=line, start=(line, start), end=end, replacement=new)


def _branch(node: ast.If | ast.While | ast.IfExp, lines: list[bytes]) -> Iterator[Mutation]:
    """Turn a condition around. A `while` loop is left at once: turned around, it might never end."""
    condition = _segment(lines, node.test)
    if condition is None:
        return
    if isinstance(node, ast.While):
        yield _replace("branch", node.test, "False")
    elif isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
        yield _replace("branch", node.test, _segment(lines, node.test.operand) or "True")
    else:
        yield _replace("branch", node.test, f"not ({condition})")


def _arguments(node: ast.Call, lines: list[bytes]) -> Iterator[Mutation]:
    """Swap two neighboring positional arguments on one line."""
    for first, second in pairwise(node.args):
        one, two = _segment(lines, first), _segment(lines, second)
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if starred or one is None or two is None or one == two or first.lineno != second.lineno:
            continue
        between = lines[first.lineno - 1][_end(first)[1] : second.col_offset].decode()
        start = (first.lineno, first.col_offset)
        swapped = f"{two}{between}{one}"
        yield Mutation(operator="arguments", line=first.lineno, start=start, end=_end(second), replacement=swapped)


def _cases(node: ast.If | ast.Try | ast.Match) -> Iterator[Mutation]:
    """Drop one case: an `elif`, an `else`, an `except` beside others, a `case` beside others."""
    if isinstance(node, ast.If):
        if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
            yield _drop(_end(node.body[-1]), node.orelse[-1])
        elif node.orelse:
            rest = node.orelse[0]
            assert isinstance(rest, ast.If)
            if not rest.orelse:
                yield _drop(_end(node.body[-1]), rest)
        return
    parts = node.handlers if isinstance(node, ast.Try) else node.cases
    for before, part in pairwise(parts):
        yield _drop(_end(before.body[-1]), part.body[-1])


def _drop(start: tuple[int, int], last: ast.stmt) -> Mutation:
    return Mutation(operator="case", line=last.lineno, start=start, end=_end(last), replacement="")


def _defaults(node: FunctionNode) -> Iterator[Mutation]:
    """Give a parameter another default."""
    for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
        if not isinstance(default, ast.Constant):
            continue
        value = default.value
        if isinstance(value, bool):
            yield _replace("default", default, str(not value))
        elif isinstance(value, int | float) and not isinstance(value, complex):
            yield _replace("default", default, str(value + 1))
        elif isinstance(value, str):
            yield _replace("default", default, repr(value + " " if value else " "))
        elif value is None:
            yield _replace("default", default, "0")
