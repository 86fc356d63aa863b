"""What an expression says without being run: texts in pieces, imported names, other names of modules, constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*DEFINITIONS, ast.Lambda, *_COMPREHENSIONS)


def fold(node: ast.AST | None) -> str | None:
    """Return the text that an expression of constants is: "ex" + "ec", "".join([...]), "cexe"[::-1], chr(101)."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = fold(node.left), fold(node.right)
        return None if left is None or right is None else left + right
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


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    alias.name if alias.asname else alias.name.partition(".")[0],
                )
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield alias.asname or alias.name, f"{module}.{alias.name}"


def is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_constant(node: ast.expr) -> bool:
    """Tell whether an expression has no name in it: True, 1, not False."""
    return not any(isinstance(each, ast.Name | ast.Attribute | ast.Call) for each in ast.walk(node)) or (
        isinstance(node, ast.Name) and node.id == "NotImplemented"
    )


def is_self_or_constant(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id in ("self", "cls")) or isinstance(node, ast.Lambda | ast.Constant)


def tells_nothing(node: ast.expr) -> bool:
    """Tell whether what a comparison returns does not depend on what is compared."""
    return _is_constant(node) or _compares_with_itself(node)


def _compares_with_itself(node: ast.expr) -> bool:
    if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
        return False
    return ast.dump(node.left) == ast.dump(node.comparators[0])


def shadowed(tree: ast.Module) -> set[int]:
    """Return the `id`s of the names that a binding of their scope, or of one around it, keeps from built-ins.

    A parameter `type` of one function leaves the built-in to all others. Names of a class are not seen in its methods.
    A module or class reads the built-in until the line after its own binding.
    """
    found: set[int] = set()
    top: set[str] | None = None
    waiting: list[tuple[ast.AST, set[str]]] = [(tree, set())]
    while waiting:
        scope, outer = waiting.pop()
        is_function = not isinstance(scope, ast.Module | ast.ClassDef)
        lines, loose, names, inner = dict[str, int](), set[str](), list[ast.Name](), list[ast.AST]()
        outside = set(map(id, _evaluated_outside(scope)))
        here: list[Any] = [node for node in ast.iter_child_nodes(scope) if id(node) not in outside]
        while here:
            node = here.pop()
            if isinstance(node, ast.Name):
                names.append(node)
            elif isinstance(node, ast.Global):
                loose.update(node.names)
            if (name := _bound_name(node, is_function)) is not None:
                lines[name] = min(node.lineno, lines.get(name, node.lineno))
            inner += [node] if isinstance(node, _SCOPES) else []
            parts = _evaluated_outside(node) if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)
            here += [part for part in parts if id(part) not in outside]
        top = set(lines) if top is None else top
        bound = (outer | set(lines)) - loose | loose & top
        for name in names:
            if name.id in bound and (is_function or name.id in outer or name.lineno > lines.get(name.id, 0)):
                found.add(id(name))
        waiting += [(node, outer if isinstance(scope, ast.ClassDef) else bound) for node in inner]
    return found


def _bound_name(node: Any, is_function: bool) -> str | None:
    """Return the name that `node` binds in its scope. Only a function is left without the name of a handled error."""
    if isinstance(node, ast.Name):
        return node.id if is_stored(node) else None
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.MatchMapping):
        return node.rest
    is_bound = isinstance(node, (*DEFINITIONS, ast.MatchAs, ast.MatchStar))
    return node.name if is_bound or (is_function and isinstance(node, ast.ExceptHandler)) else None


def _evaluated_outside(scope: Any) -> list[ast.AST]:
    """Return what of a scope Python evaluates in the one around it: defaults, decorators, a first iterable."""
    if isinstance(scope, _COMPREHENSIONS):
        return [scope.generators[0].iter]
    given = [each for name in ("decorator_list", "bases", "keywords") for each in getattr(scope, name, ())]
    arguments = ast.iter_child_nodes(scope.args) if hasattr(scope, "args") else ()
    given += [each.annotation if isinstance(each, ast.arg) else each for each in arguments]
    return [each for each in (*given, getattr(scope, "returns", None)) if each is not None]


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
