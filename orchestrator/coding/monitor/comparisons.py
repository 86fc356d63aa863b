"""Comparisons that say nothing of what is compared, and comparisons of digests.

An honest `__eq__` sets something of its object beside something of the other one, and can answer in two ways:

    return self.items == other.items         if type(self) is not type(other): return False ... return True

It is a trick where it never does so, or where all of its answers are one constant.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from itertools import permutations, product

EQUALITIES = ("__eq__", "__ne__")
_TELLING = ("all", "any", "getattr", "super", "zip", "map", "filter")
"""Built-in functions that may compare both. The others only look at what they get."""
_DIGESTS = ("hexdigest", "digest", "hash", "crc32", "adler32")
_SMALL = 4096
"""Digests are compared with larger numbers; smaller ones are remainders and buckets."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def returned(function: Function) -> list[ast.expr]:
    """Return what a function may return."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    return [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]


def _tells_nothing(node: ast.expr) -> bool:
    """Tell whether what a method returns is the same for every object: True, not 1, NotImplemented, other == other."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return any(isinstance(each, ast.Constant) and each.value for each in node.values) or _is_constant(node)
    return _is_constant(node) or _compares_with_itself(node)


def _is_constant(node: ast.expr) -> bool:
    """Tell whether an expression has no name in it, or is NotImplemented."""
    return not any(isinstance(each, ast.Name | ast.Attribute | ast.Call) for each in ast.walk(node)) or (
        isinstance(node, ast.Name) and node.id == "NotImplemented"
    )


def _compares_with_itself(node: ast.expr) -> bool:
    if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
        return False
    return ast.dump(node.left) == ast.dump(node.comparators[0])


def is_fixed(function: Function) -> bool:
    """Tell whether all that a method returns is one and the same constant."""
    answers = returned(function)
    return all(map(_tells_nothing, answers)) and len({ast.dump(each) for each in answers}) == 1


def is_blind(function: Function, name: str) -> bool:
    """Tell whether an `__eq__` or `__ne__` (`name`) answers without comparing its object with the other one."""
    answers = returned(function)
    if all(map(_is_left_open, answers)):
        return False
    if is_fixed(function):
        return True
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, arguments.vararg) if each is not None]
    if _asks_identity(function, name, names[:2]):
        return False
    own, other = {*names[:1], "super"}, set(names[1:] or names)  # `*args` alone holds both.
    for _ in range(2):  # Names of names too.
        for target, value in _given_names(function):
            stored = _names_in(target)
            own |= stored if _mentions(value, own) else set()
            other |= stored - set(names[:1]) if _mentions(value, other) else set()
    taken = _taken_over(function, set(names[:1]), other)
    compared = [each for each in ast.walk(function) if _sets_beside(each, own, other)]
    return any(_compares(each, taken) for each in compared) or all(_has(each, taken) for each in compared)


def _taken_over(function: Function, own: set[str], other: set[str]) -> set[str]:
    """Return the parts of its own object in which a method stores the other one, and the names that it gives them.

    What is stored under a key that depends on the other one is a cache, of which only this entry counts.
    """
    taken: set[str] = set()
    given = list(_given_names(function))
    for target, value in given:
        if isinstance(target, ast.Attribute | ast.Subscript) and _mentions(target.value, own):
            taken |= {_whole(target, other)} if _mentions(value, other) else set()
    for _ in range(2):
        names = [each for target, value in given if _has(value, taken) for each in ast.walk(target)]
        taken |= {each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return taken


def _whole(target: ast.Attribute | ast.Subscript, other: set[str]) -> str:
    """Return what changes with a part: `self.x` with `self.x[:]` and `self.x.y`, all of `self` with `self.__dict__`."""
    whole: ast.expr = target
    while (isinstance(whole, ast.Subscript) and not _mentions(whole.slice, other)) or (
        isinstance(whole, ast.Attribute) and (whole.attr == "__dict__" or not isinstance(whole.value, ast.Name))
    ):
        whole = whole.value
    return ast.unparse(whole)


def _has(node: ast.AST, parts: set[str]) -> bool:
    return bool(parts) and any(isinstance(each, ast.expr) and ast.unparse(each) in parts for each in ast.walk(node))


def _compares(node: ast.AST, parts: set[str]) -> bool:
    """Tell whether an operation asks whether one of some parts is equal to something."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Eq | ast.NotEq) and _has(node, parts)
    return isinstance(node, ast.BinOp) and _has(node, parts)


def _is_left_open(answer: ast.expr) -> bool:
    return isinstance(answer, ast.Name) and answer.id == "NotImplemented"


def _asks_identity(function: Function, name: str, pair: list[str]) -> bool:
    """Tell whether a method tells all objects but its own apart, by `is` between its two arguments (`pair`)."""
    if any(isinstance(each, ast.AsyncFunctionDef | ast.Yield | ast.YieldFrom) for each in ast.walk(function)):
        return False  # A coroutine or a generator is true, whatever it answers.
    bound = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    bound |= {getattr(each, field, None) for each in ast.walk(function) for field in ("name", "rest", "asname")}
    if bound & set(pair) or not any(_is_identity(each, pair) for each in ast.walk(function)):
        return False
    answers = [function.body] if isinstance(function, ast.Lambda) else _answers_apart(function.body, pair)
    return all(_is_left_open(each) or _truth_apart(each, pair) is (name == "__ne__") for each in answers)


def _is_identity(node: ast.AST, pair: list[str]) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Is | ast.IsNot):
        return False
    sides = [each.id for each in (node.left, *node.comparators) if isinstance(each, ast.Name)]
    return len(node.comparators) == 1 and len(sides) == 2 and sides in (pair, pair[::-1])


def _answers_apart(statements: list[ast.stmt], pair: list[str]) -> list[ast.expr]:
    """Return what statements may answer where the two arguments are different objects."""
    answers: list[ast.expr] = []
    for position, each in enumerate(statements, 1):
        if isinstance(each, ast.If) and (truth := _truth_apart(each.test, pair)) is not None:
            branch = each.body if truth else each.orelse
            return answers + _answers_apart([*branch, *statements[position:]], pair)
        answers += [node.value for node in ast.walk(each) if isinstance(node, ast.Return) and node.value]
        if isinstance(each, ast.Return | ast.Raise):
            return answers
    return [*answers, ast.Constant(None)]


def _truth_apart(node: ast.expr, pair: list[str]) -> bool | None:
    """Return the truth of an expression where the two arguments are different objects, None if not known."""
    if _is_identity(node, pair) and isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.IsNot)
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        truth = _truth_apart(node.operand, pair)
        return None if truth is None else not truth
    if isinstance(node, ast.BoolOp):
        truths = {_truth_apart(each, pair) for each in node.values}
        decisive = isinstance(node.op, ast.Or)
        return decisive if decisive in truths else None if None in truths else not decisive
    if isinstance(node, ast.IfExp) and (truth := _truth_apart(node.test, pair)) is not None:
        return _truth_apart(node.body if truth else node.orelse, pair)
    return None


def _given_names(function: Function) -> Iterator[tuple[ast.AST, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr
        elif isinstance(node, ast.Match):
            yield from ((case.pattern, node.subject) for case in node.cases)


def _names_in(target: ast.AST) -> set[str]:
    """Return the names in a target, or those that a pattern captures."""
    if not isinstance(target, ast.pattern):
        return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    captured = {getattr(each, field, None) for each in ast.walk(target) for field in ("name", "rest")}
    return {each for each in captured if each}


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _sets_beside(node: ast.AST, own: set[str], other: set[str]) -> bool:
    """Tell whether an operation or a call uses both the object and the other one, or asks for the other one's class."""
    if isinstance(node, ast.Compare) and not _compares_with_itself(node):
        sides = [node.left, *node.comparators]
        if all(isinstance(each, ast.Name) for each in sides) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return False  # `other is not self` is true of all others.
        pairs = permutations(sides, 2) if other == own - {"super"} else product(sides, sides)
        return any(_mentions(one, own) and _mentions(two, other) for one, two in pairs)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.BitXor | ast.BitAnd):
        sides = [node.left, node.right]
        return any(_mentions(a, own) and _mentions(b, other) for a, b in (sides, sides[::-1]))
    if not isinstance(node, ast.Call) or not _mentions(node, other):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in ("isinstance", "issubclass") and len(node.args) == 2:
        kinds = [each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)]
        return bool(kinds) and not any(hasattr(builtins, each) and each not in ("type", "tuple") for each in kinds)
    return _mentions(node, own) and (name in _TELLING or not hasattr(builtins, name))


def digest_names(named: Iterable[tuple[str, ast.expr]]) -> set[str]:
    """Return the names that a file gives digests."""
    return {name for name, value in named if _has_digest(value, set())}


def tables(named: Iterable[tuple[str, ast.expr]]) -> set[str]:
    """Return the names that a file gives tables with written-out keys."""
    return {name for name, value in named if isinstance(value, ast.Dict | ast.Set) and _is_table(value)}


def _is_table(node: ast.AST) -> bool:
    keys = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Set) else []
    return bool(keys) and all(isinstance(each, ast.Constant) for each in keys)


def looks_up_digest(node: ast.AST, digests: set[str], known: set[str]) -> bool:
    """Tell whether a digest is compared with a constant, or looked up in a table. `digests`, `known`: their names."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        is_known = any(_is_long(each) or _is_known(each, known) for each in sides)
        return is_known and any(_has_digest(each, digests) for each in sides)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return _is_known(node.value, known) and _has_digest(node.slice, digests)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return _is_known(node.func.value, known) and _has_digest(node.args[0], digests)
    return False


def _is_known(node: ast.expr, known: set[str]) -> bool:
    return _is_table(node) or (isinstance(node, ast.Name) and node.id in known)


def _is_long(node: ast.expr) -> bool:
    values = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    is_written = not any(isinstance(each, ast.Name | ast.Call) for each in ast.walk(node))
    return is_written and any(
        abs(each) >= _SMALL if isinstance(each, int) else isinstance(each, str | bytes) and len(each) > 1
        for each in values
    )


def _has_digest(node: ast.AST, digests: set[str]) -> bool:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in digests:
            return True
        if isinstance(each, ast.Call):
            name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            if name in _DIGESTS:
                return True
    return False
