"""What a module offers to others, read without running it: public names, signatures, defaults, constants.

A patch may break a caller that no test has. What the start and the known solution offer alike, a patch must offer too:

    def scale(value, by=2)    -> ("value", "by=2"): more parameters may follow, with defaults of their own
    LIMIT = 5                 -> 5
    Old = New, import x       -> the name is there
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping

_PRIVATE = re.compile(r"(^|\.)_(?!_\w+__$)")
Form = tuple[str, ...]
"""A kind, then what must stay; ("name",) for a name whose form may change."""


def lost(start: Mapping[str, bytes], solution: Mapping[str, bytes], patched: Mapping[str, bytes]) -> Iterator[str]:
    """Yield `path: name` of what `start` and `solution` offer alike, and `patched` does not. All map paths to files."""
    for path in sorted(patched.keys() & start.keys() & solution.keys()):
        known, right, now = (_surface(files[path]) for files in (start, solution, patched))
        for name, form in sorted(known.items()):
            if right.get(name) == form and not _keeps(form, now.get(name)):
                yield f"{path}: {name}"


def _keeps(form: Form, other: Form | None) -> bool:
    """Tell whether `other` serves whoever relies on `form`. A name of another kind may stand for the same thing."""
    if other is None:
        return False
    if form[0] != other[0] or form[0] == "name":
        return True
    if form[0] == "constant":
        return form == other
    by_place, now_by_place = ([each for each in of if each[0] != "*"] for of in (form, other))
    added = [*now_by_place[len(by_place) :], *({*other} - {*form} - {*now_by_place})]
    keeps = now_by_place[: len(by_place)] == by_place and {*form} - {*by_place} <= {*other}
    return keeps and all("=" in parameter or parameter in ("*", "**") for parameter in added)


def _surface(source: bytes) -> dict[str, Form]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _names(ast.parse(source).body, "")
            return {name: form for name, form in found if not _PRIVATE.search(name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _names(body: list[ast.stmt], inside: str) -> Iterator[tuple[str, Form]]:
    for node in _flat(body):
        for name, form in _defined(node):
            yield inside + name, form
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{inside}{node.name}.")


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, and those below conditions and tries."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _flat([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])


def _defined(node: ast.stmt) -> Iterator[tuple[str, Form]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            # A decorator may change the signature, or give a property.
            yield node.name, ("name",) if node.decorator_list else ("function", *_parameters(node.args))
        case ast.ClassDef():
            yield node.name, ("name",)
        case ast.Import() | ast.ImportFrom():
            yield from (((alias.asname or alias.name).partition(".")[0], ("name",)) for alias in node.names)
        case ast.Assign(targets=targets, value=value) | ast.AnnAssign(target=targets, value=ast.expr() as value):
            form = ("constant", ast.unparse(value)) if isinstance(value, ast.Constant) else ("name",)
            named = [targets] if isinstance(targets, ast.AST) else targets
            yield from ((target.id, form) for target in named if isinstance(target, ast.Name))


def _parameters(given: ast.arguments) -> Iterator[str]:
    """Yield each parameter with its default; those by keyword alone after a star, in the order of their names."""
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    yield from map(_parameter, positional, [*defaults, *given.defaults])
    if given.vararg is not None:
        yield "*"
    yield from sorted("*" + text for text in map(_parameter, given.kwonlyargs, given.kw_defaults))
    if given.kwarg is not None:
        yield "**"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    return parameter.arg if default is None else f"{parameter.arg}={ast.unparse(default)}"
