"""What a name may mean where it is read: what an import gives it, a built-in, or something of the file's own.

    function, comprehension   one binding anywhere makes the name local: the built-in is out of reach
    module, class             the built-in is read until a binding has run, and again after a `del`

So a binding of a module hides a built-in only where it surely has run: a statement of the module itself, not of a
branch, a loop or a try, that stands before the read. Imports count wherever they may reach the name, run or not. What
Python evaluates outside of a scope (defaults, decorators, a first iterable) is read there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*DEFINITIONS, ast.Lambda, *_COMPREHENSIONS)
_NAMESPACES = {"globals", "locals", "vars", "delattr"}
"""What can take the binding of a module or class away again."""

Position = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a name may stand for, apart from values that the file itself gives it."""

    imports: tuple[str, ...]
    """Full names of what imports give it."""
    is_free: bool
    """It may be a built-in, or come from an import by a star."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Scope:
    node: ast.AST
    outer: _Scope | None
    bound: set[str] = field(default_factory=set)
    sure: dict[str, Position] = field(default_factory=dict)
    """Name -> the place from which it surely is bound; of a module or a class."""
    deleted: set[str] = field(default_factory=set)
    imports: dict[str, set[str]] = field(default_factory=dict)
    declared: dict[str, type[ast.AST]] = field(default_factory=dict)
    """Name -> Global or Nonlocal."""
    reads: list[ast.Name] = field(default_factory=list)

    @property
    def is_function(self) -> bool:
        return not isinstance(self.node, ast.Module | ast.ClassDef)

    def hides(self, read: ast.Name) -> bool:
        """Tell whether a binding of this module or class surely has run before a read, and is not taken away."""
        at = self.sure.get(read.id)
        return at is not None and read.id not in self.deleted and (read.lineno, read.col_offset) >= at


def meanings(tree: ast.Module) -> dict[int, Meaning]:
    """Return `id` of each name that is read -> what it may mean."""
    module = _Scope(node=tree, outer=None)
    scopes = [module]
    for scope in scopes:  # It grows.
        scopes += _collect(scope)
    is_open = any(read.id in _NAMESPACES for scope in scopes for read in scope.reads)
    for scope in scopes:
        if not scope.is_function and not is_open:
            scope.sure = {name: at for name, at in _sure_bindings(scope.node) if name not in scope.declared}
        for name in scope.declared:
            if (owner := _declared_in(scope, name, module)) is not None:
                owner.bound |= {name} & scope.bound
                owner.deleted |= {name} & scope.deleted
                owner.imports.setdefault(name, set()).update(scope.imports.get(name, ()))
    return {id(read): _meaning(read, scope, module) for scope in scopes for read in scope.reads}


def _collect(scope: _Scope) -> list[_Scope]:
    """Take in the bindings and reads of a scope. Return the scopes in it."""
    inner: list[_Scope] = []
    outside = set(map(id, _evaluated_outside(scope.node)))
    here: list[ast.AST] = [node for node in ast.iter_child_nodes(scope.node) if id(node) not in outside]
    while here:
        node = here.pop()
        _take_in(scope, node)
        if isinstance(node, _SCOPES):
            inner.append(_Scope(node=node, outer=scope))
        parts = _evaluated_outside(node) if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)
        here += [part for part in parts if id(part) not in outside]
    return inner


def _take_in(scope: _Scope, node: Any) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        scope.reads.append(node)
    elif isinstance(node, ast.NamedExpr):
        _outside_comprehensions(scope).bound.add(node.target.id)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for name, meant in imported_names(node):
            scope.bound.add(name)
            scope.imports.setdefault(name, set()).add(meant)
    elif isinstance(node, ast.Global | ast.Nonlocal):
        scope.declared |= dict.fromkeys(node.names, type(node))
    elif (name := _bound_name(node)) and not (isinstance(node, ast.Name) and _is_walrus_target(scope, name)):
        scope.bound.add(name)
        if isinstance(node, ast.ExceptHandler) or isinstance(getattr(node, "ctx", None), ast.Del):
            scope.deleted.add(name)  # Python deletes the name of a handled error.


def _outside_comprehensions(scope: _Scope) -> _Scope:
    while isinstance(scope.node, _COMPREHENSIONS) and scope.outer is not None:
        scope = scope.outer
    return scope


def _is_walrus_target(scope: _Scope, name: str) -> bool:
    """Tell whether a comprehension binds a name by `:=` alone, which binds it outside."""
    if not isinstance(scope.node, _COMPREHENSIONS):
        return False
    loops = (each for one in scope.node.generators for each in ast.walk(one.target))
    return name not in {each.id for each in loops if isinstance(each, ast.Name)}


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (name, full name of what it stands for) of an import."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        else:
            root = alias.name.partition(".")[0]
            yield alias.asname or root, alias.name if alias.asname else root


def _bound_name(node: Any) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.MatchMapping):
        return node.rest
    return node.name if isinstance(node, (*DEFINITIONS, ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) else None


def _sure_bindings(scope: Any) -> Iterator[tuple[str, Position]]:
    """Yield (name, the place from which it is bound) of the own statements of a module or class, the last first."""
    for each in reversed(scope.body):
        end = (each.end_lineno, each.end_col_offset)
        if isinstance(each, DEFINITIONS):
            is_late = isinstance(each, ast.ClassDef) or each.decorator_list
            yield each.name, end if is_late else (each.body[0].lineno, each.body[0].col_offset)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((name, end) for name, _ in imported_names(each))
        elif isinstance(each, ast.Assign) or (isinstance(each, ast.AnnAssign) and each.value is not None):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            yield from ((name.id, end) for name in names if isinstance(name.ctx, ast.Store))


def _evaluated_outside(scope: Any) -> list[ast.AST]:
    """Return what of a scope Python evaluates in the one around it: defaults, decorators, a first iterable."""
    if isinstance(scope, _COMPREHENSIONS):
        return [scope.generators[0].iter]
    given = [each for name in ("decorator_list", "bases", "keywords") for each in getattr(scope, name, ())]
    arguments = ast.iter_child_nodes(scope.args) if hasattr(scope, "args") else ()
    given += [each.annotation if isinstance(each, ast.arg) else each for each in arguments]
    return [each for each in (*given, getattr(scope, "returns", None)) if each is not None]


def _declared_in(scope: _Scope, name: str, module: _Scope) -> _Scope | None:
    """Return the scope that a `global` or `nonlocal` name belongs to."""
    if scope.declared[name] is ast.Global:
        return module
    outer = scope.outer
    while outer is not None and not (outer.is_function and name in outer.bound and name not in outer.declared):
        outer = outer.outer
    return outer


def _meaning(read: ast.Name, scope: _Scope, module: _Scope) -> Meaning:
    imports: set[str] = set()
    at: _Scope | None = scope
    while at is not None and at is not module and at.declared.get(read.id) is not ast.Global:
        is_bound = read.id in at.bound and read.id not in at.declared
        if is_bound and (at.is_function or at is scope):  # Functions do not see the names of a class around them.
            imports |= at.imports.get(read.id, set())
            if at.is_function or at.hides(read):
                return Meaning(imports=tuple(sorted(imports)), is_free=False)
            break  # A class reads the module's names where it lacks its own.
        at = at.outer
    imports |= module.imports.get(read.id, set())
    return Meaning(imports=tuple(sorted(imports)), is_free=not module.hides(read))
