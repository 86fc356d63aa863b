"""One small change to a function, as a person makes it by mistake.

Each kind of syntax node has a function that gives replacements for a piece of the source. The rest of the file keeps
its form.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
"""Operator -> its word, and the wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One replacement. Lines and columns are those of the syntax tree: lines from 1, columns in UTF-8 bytes from 0."""

    operator: str
    """operator | off-by-one | branch | statement"""
    start: tuple[int, int]
    end: tuple[int, int]
    replacement: str


def mutations(node: FunctionNode, lines: list[bytes], body_start: int) -> list[Mutation]:
    """Return all mutations of a function, in the order of its lines. `lines`: the file's, with their ends."""
    body = [statement for statement in node.body if statement.lineno >= body_start]
    children = [child for statement in body for child in ast.walk(statement)]
    changes = [
        change for child in children if type(child) in _MISTAKES for change in _MISTAKES[type(child)](child, lines)
    ]
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


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _replace(operator: str, node: ast.expr | ast.stmt, replacement: str) -> Mutation:
    return Mutation(operator=operator, start=(node.lineno, node.col_offset), end=_end(node), replacement=replacement)


def _binary(node: ast.BinOp, lines: list[bytes]) -> Iterator[Mutation]:
    """Swap an operator of numbers. Texts know `+` and `%` only."""
    if type(node.op) in _SWAPS and not _is_text(node.left) and not _is_text(node.right):
        yield from _between(node.left, node.right, node.op, lines)


def _comparison(node: ast.Compare, lines: list[bytes]) -> Iterator[Mutation]:
    if len(node.ops) == 1:
        yield from _between(node.left, node.comparators[0], node.ops[0], lines)


def _boolean(node: ast.BoolOp, lines: list[bytes]) -> Iterator[Mutation]:
    yield from _between(node.values[0], node.values[1], node.op, lines)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _between(left: ast.expr, right: ast.expr, operator: ast.AST, lines: list[bytes]) -> Iterator[Mutation]:
    """Replace the operator between two operands on one line. Parentheses around the operands stay."""
    old, new = _SWAPS[type(operator)]
    line, column = _end(left)
    if right.lineno != line:
        return
    place = lines[line - 1][column : right.col_offset].find(old.encode())
    if place >= 0:
        start = column + place
        yield Mutation(operator="operator", start=(line, start), end=(line, start + len(old)), replacement=new)


def _constant(node: ast.Constant, lines: list[bytes]) -> Iterator[Mutation]:
    if type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield _replace("off-by-one", node, str(value) if value >= 0 else f"({value})")
    elif type(node.value) is bool:
        yield _replace("branch", node, str(not node.value))


def _branch(node: ast.If | ast.While | ast.IfExp, lines: list[bytes]) -> Iterator[Mutation]:
    """Turn a condition on one line around. A `while` loop is left at once: turned around, it might never end."""
    line, end = _end(node.test)
    if line != node.test.lineno:
        return
    if isinstance(node, ast.While):
        yield _replace("branch", node.test, "False")
    elif isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
        operand = node.test.operand
        yield _replace("branch", node.test, lines[line - 1][operand.col_offset : _end(operand)[1]].decode())
    else:
        yield _replace("branch", node.test, f"not ({lines[line - 1][node.test.col_offset : end].decode()})")


def _statement(node: ast.stmt, lines: list[bytes]) -> Iterator[Mutation]:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield _replace("statement", node, "pass")


_MISTAKES: dict[type, Callable[..., Iterator[Mutation]]] = {
    ast.BinOp: _binary,
    ast.Compare: _comparison,
    ast.BoolOp: _boolean,
    ast.Constant: _constant,
    ast.If: _branch,
    ast.While: _branch,
    ast.IfExp: _branch,
    ast.Assign: _statement,
    ast.AugAssign: _statement,
    ast.Expr: _statement,
}
"""Kind of syntax node -> what gives its mutations."""
