"""What a module offers to others, read without running it: public names, signatures, defaults, constants.

A patch may break a caller that no test has. What the start and the known solution offer alike, a patch must offer too:

    def scale(value, by=2)    -> ("value", "by=2"): more parameters may follow, with defaults of their own
    LIMIT = 5                 -> 5
    Old = New                 -> the name is there
    import x                  -> nothing, but in a package's __init__.py

Where a name may come from elsewhere now (a base class, a decorator, `import *`), nothing is said about it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NO_SURFACE = re.compile(r"(^|/)(tests?/|test_[^/]*$|[^/]*_test\.py$|conftest\.py$|_(?!_init__\.py$))")
_ASIDE = re.compile(r"\b(TYPE_CHECKING|__name__)\b")
_PRIVATE = re.compile(r"(^|\.)_(?!_(init|call)__$)")
Form = tuple[Any, ...]
"""A kind, then what must stay of it."""
_NAMED = "a name"
"""A default that another name holds."""
_NAME, _IMPORT, _PLAIN_CLASS = ("name",), ("import",), ("class",)
Parameter = tuple[str, str, str | None]
"""Name, kind (place, key, * or **), default."""


def lost(start: Mapping[str, bytes], solution: Mapping[str, bytes], patched: Mapping[str, bytes]) -> Iterator[str]:
    """Yield `path: name` of what `start` and `solution` offer alike, and `patched` does not. All map paths to files."""
    for path in sorted(patched.keys() & start.keys() & solution.keys()):
        moved = path.removesuffix(".py") + "/__init__.py" in patched  # A module became a package.
        if _NO_SURFACE.search(path) or moved:
            continue
        known, right, now = (_surface(files[path]) for files in (start, solution, patched))
        for name, form in sorted(known.items()):
            is_offered = right.get(name) == form and (form != _IMPORT or path.endswith("__init__.py"))
            if is_offered and not _keeps(form, _offered(now, name)):
                yield f"{path}: {name}"


def _offered(names: Mapping[str, Form], name: str) -> Form | None:
    """Return the form of a name; _NAME where it may come from a base class, a decorator or `import *`."""
    holder = name.rpartition(".")[0]
    elsewhere = "*" in names or "__getattr__" in names or (holder and names.get(holder) not in (None, _PLAIN_CLASS))
    return names.get(name, _NAME if elsewhere else None)


def _keeps(form: Form, other: Form | None) -> bool:
    """Tell whether `other` serves whoever relies on `form`. A name of another kind may stand for the same thing."""
    if other is None or form[0] != other[0]:
        return other not in (None, ("constant", "None")) and "async" not in (form[0], other[0])
    return _takes(form[1], other[1]) if form[0] in ("function", "async") else form == other or form[0] != "constant"


def _takes(old: Sequence[Parameter], new: Sequence[Parameter]) -> bool:
    """Tell whether each call of the `old` parameters has the same meaning with the `new` ones."""
    places, now_places = ([name for name, kind, _ in of if kind == "place"] for of in (old, new))
    stars, now_stars = ({kind for _, kind, _ in of if kind[0] == "*"} for of in (old, new))
    defaults, now = ({name: default for name, _, default in of if name} for of in (old, new))
    shifted = "*" in stars and len(now_places) > len(places)
    return (
        now_places[: len(places)] == places
        and stars <= now_stars
        and not shifted
        and defaults.keys() <= now.keys()
        and all(default in (None, _NAMED, now[name]) or now[name] == _NAMED for name, default in defaults.items())
        and None not in [now[name] for name in now.keys() - defaults.keys()]
    )


def _surface(source: bytes) -> dict[str, Form]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(_names(ast.parse(source).body, ""))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {name: form for name, form in found.items() if name == "__getattr__" or not _PRIVATE.search(name)}


def _names(body: list[ast.stmt], inside: str) -> Iterator[tuple[str, Form]]:
    for node in _flat(body):
        for name, form in _defined(node):
            yield inside + name, form
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{inside}{node.name}.")


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, and those below conditions and tries, but nothing that only a checker or a script runs."""
    for node in body:
        yield node
        aside = isinstance(node, ast.If) and _ASIDE.search(ast.unparse(node.test))
        if isinstance(node, ast.If | ast.Try | ast.With) and not aside:
            yield from _flat([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])


def _defined(node: ast.stmt) -> Iterator[tuple[str, Form]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "function"
            # A decorator may change the signature, or give a property.
            yield node.name, _NAME if node.decorator_list else (kind, tuple(_parameters(node.args)))
        case ast.ClassDef():
            yield node.name, _NAME if node.bases or node.decorator_list or node.keywords else _PLAIN_CLASS
        case ast.Import() | ast.ImportFrom():
            yield from (((alias.asname or alias.name).partition(".")[0], _IMPORT) for alias in node.names)
        case ast.Assign(targets=targets, value=value):
            yield from _assigned(targets, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _assigned([target], value)


def _assigned(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[str, Form]]:
    form = ("constant", ast.unparse(value)) if isinstance(value, ast.Constant) else _NAME
    yield from ((each.id, form) for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _parameters(given: ast.arguments) -> Iterator[Parameter]:
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    for kind, parameters, values in (
        ("place", positional, [*defaults, *given.defaults]),
        ("key", given.kwonlyargs, given.kw_defaults),
    ):
        for parameter, value in zip(parameters, values, strict=True):
            plain = value is None or not any(isinstance(each, ast.Name | ast.Call) for each in ast.walk(value))
            yield parameter.arg, kind, value and (ast.unparse(value) if plain else _NAMED)
    yield from (("", kind, None) for kind, rest in (("*", given.vararg), ("**", given.kwarg)) if rest is not None)
