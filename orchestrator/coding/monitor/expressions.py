"""What an expression says without being run: texts in pieces, other names of modules, constants."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

_BLOB = re.compile(r"[A-Za-z0-9+/=_\-\\]{100,}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_HEXADECIMAL_BLOB = 400
"""Hexadecimal digits from which a text is a blob. Constants of ciphers and curves have fewer."""
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{1,6}\U000e007f")
"""A flag of a region: a black flag, then letters and an end without a shape."""
_INVISIBLE = 32
"""Characters without a shape from which a text is a hiding place."""


def fold(node: ast.AST | None) -> str | None:
    """Return the text that an expression of constants is: "ex" + "ec", "".join([...]), "cexe"[::-1], chr(101)."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = fold(node.left), fold(node.right)
        return None if left is None or right is None else left + right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and (text := fold(node.left)) is not None:
        parts = [fold(each) for each in (node.right.elts if isinstance(node.right, ast.Tuple) else [node.right])]
        return text % tuple(parts) if None not in parts and text.count("%") == text.count("%s") == len(parts) else None
    if isinstance(node, ast.JoinedStr):
        parts = [fold(each.value if isinstance(each, ast.FormattedValue) else each) for each in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and (text := fold(node.value)) is not None:
        return text[::-1] if node.slice.step is not None and ast.unparse(node.slice.step) == "-1" else text
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "chr" and node.args:
        code = node.args[0]
        return chr(code.value) if isinstance(code, ast.Constant) and isinstance(code.value, int) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join" and node.args:
        items = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else []
        glue, parts = fold(node.func.value), [fold(each) for each in items]
        return glue.join(map(str, parts)) if items and glue is not None and None not in parts else None
    return None


def is_composed(node: ast.expr) -> bool:
    """Tell whether a name is put together from pieces that are all written out."""
    return not isinstance(node, ast.Constant) and (fold(node) is not None or _has_decoding(node))


def _has_decoding(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"


def is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def is_self_or_constant(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id in ("self", "cls")) or isinstance(node, ast.Lambda | ast.Constant)


def aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) of what gives an expression a name: assignments, loops over literals, defaults.

    Names in a class are reached in other ways, so they are left out.
    """
    in_classes = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in ast.walk(tree):
        if id(node) in in_classes:
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _pairs(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
            for each in node.iter.elts:
                yield from _pairs(node.target, each)
        elif isinstance(node, ast.arguments):
            yield from defaults(node)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, each in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, each)


def defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield (argument, its default)."""
    plain = [*arguments.posonlyargs, *arguments.args]
    start = len(plain) - len(arguments.defaults)
    yield from ((each.arg, value) for each, value in zip(plain[start:], arguments.defaults, strict=True))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((each.arg, value) for each, value in named if value is not None)


def is_ordered(digits: str) -> bool:
    """Tell whether hexadecimal digits are an alphabet, a table or a pattern: numbers of one width in equal steps."""
    for width in (1, 2, 4, 8):
        numbers = [int(digits[at : at + width], 16) for at in range(0, len(digits), width)]
        steps = {(after - before) % 16**width for before, after in pairwise(numbers)}
        if len(steps) <= 1:
            return True
    return False


def has_blob(text: str) -> bool:
    """Tell whether a text holds packed data: a long run without gaps that is not an alphabet or a number."""
    return any(
        len(run) >= _HEXADECIMAL_BLOB and len(set(run)) > 11 and not is_ordered(run)
        if _HEXADECIMAL.fullmatch(run)
        else len(set(run)) > 16
        for run in _BLOB.findall(text)
    )


def has_hiding_place(text: str) -> bool:
    """Tell whether a text has many characters without a shape. Those of flags do not count."""
    return sum(unicodedata.category(each) == "Cf" for each in _FLAG.sub("", text)) >= _INVISIBLE


def messages(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the texts that errors are raised with, and those of assertions. They are shown, not compared."""
    waiting: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            waiting += [*node.exc.args, *(each.value for each in node.exc.keywords)]
        elif isinstance(node, ast.Assert):
            waiting.append(node.msg)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant):
            yield node
        elif isinstance(node, ast.JoinedStr):
            waiting += node.values
        elif isinstance(node, ast.BinOp):
            waiting += [node.left, node.right]
