"""What a name may mean where it is read: what an import gives it, a built-in, or something of the file's own.

`Names` tells the full name of an expression, such as sys._getframe.

    function, comprehension   one binding anywhere makes the name local: the built-in is out of reach
    module, class             the built-in is read until a binding has run, and again after a `del`

So a binding of a module hides a built-in only where it surely has run: a statement of the module itself, not of a
branch, a loop or a try, that stands before the read. Imports count wherever they may reach the name, run or not. What
Python evaluates outside of a scope (defaults, decorators, a first iterable) is read there.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.coding.monitor.expressions import aliases, fold

WATCHED = ("sys", "os", "inspect", "importlib", "builtins", "gc")
"""Modules of which much counts. Where their names come by a star, or they go as values, nothing can be followed."""
_TOOLS = {"getattr", "setattr", "delattr", "type", "vars", "globals", "locals", "__import__"}
"""Built-in functions that are followed under other names."""
_MODULE_NAMES = ("__builtins__", "__file__", "__spec__", "__loader__", "__cached__")
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


_NOTHING = Meaning(imports=(), is_free=False)


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


class Names:
    """Full names of the expressions of a file. `is_ruled`: whether a rule knows a full name."""

    def __init__(self, tree: ast.Module, is_ruled: Callable[[str], object]) -> None:
        self._is_ruled = is_ruled
        self._meanings = meanings(tree)
        imports = (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom))
        self._stars = [meant[:-2] for each in imports for name, meant in imported_names(each) if name == "*"]
        self._renamed: dict[str, set[str]] = {}
        """Name -> modules and built-ins that the file gives this name."""
        self.followed: set[int] = set()
        """`id`s of modules as values whose new name is known."""
        bound: Counter[str] = Counter()
        for node in ast.walk(tree):
            is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            if not is_read and (name := _bound_name(node)) is not None:
                bound[name] += 1
        self._known: dict[int, list[str]] = {}
        named: dict[str, list[ast.expr]] = {}
        for name, value in aliases(tree):
            named.setdefault(name, []).append(value)
        for _ in range(3):  # Names of names too.
            self._follow(named, bound)
            self._known.clear()

    def _follow(self, named: dict[str, list[ast.expr]], bound: Counter[str]) -> None:
        """Let a name stand for the built-ins that it is given; for a module where it is bound to nothing else."""
        for name, values in named.items():
            meant = {dotted for value in values for dotted in self.meant(value) or [""]}
            if meant <= set(WATCHED) and len(meant) == 1 and len(values) == bound[name]:
                self.followed |= {id(value) for value in values}
                self._renamed.setdefault(name, set()).update(meant)
            self._renamed.setdefault(name, set()).update(meant & _TOOLS)

    def dotted(self, node: ast.AST) -> str | None:
        """Return the full name of an expression: an imported thing, a built-in one, or a part of it.

        Where it may have several, one that a rule knows.
        """
        meant = self.meant(node)
        return next(filter(self._is_ruled, meant), meant[0] if meant else None)

    def meant(self, node: ast.AST) -> list[str]:
        """Return the full names that an expression may have."""
        if id(node) not in self._known:
            self._known[id(node)] = self._read(node)
        return self._known[id(node)]

    def _read(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Name):
            return self._names(node)
        if isinstance(node, ast.Attribute):
            return [f"{owner}.{node.attr}" for owner in self.meant(node.value)]
        if isinstance(node, ast.Subscript) and (name := fold(node.slice)):
            return [f"{owner}.{name}" for owner in self._namespace(node.value)]
        if not isinstance(node, ast.Call):
            return []
        if isinstance(node.func, ast.Attribute) and node.args and (name := fold(node.args[0])) is not None:
            is_attribute = node.func.attr in ("__getattribute__", "__getattr__")
            if is_attribute or node.func.attr in ("get", "pop", "setdefault", "__getitem__"):
                owners = self.meant(node.func.value) if is_attribute else self._namespace(node.func.value)
                if owners:
                    return [f"{owner}.{name}" for owner in owners]
        functions = self.meant(node.func)
        if "getattr" in functions and len(node.args) >= 2 and (name := fold(node.args[1])) is not None:
            return [f"{owner}.{name}" for owner in self.meant(node.args[0])]
        if {"__import__", "importlib.import_module"} & set(functions) and node.args and (name := fold(node.args[0])):
            return [name]
        return []

    def _names(self, node: ast.Name) -> list[str]:
        """Return what a name may stand for, built-ins first."""
        meaning = self._meanings.get(id(node), _NOTHING)
        names = [*meaning.imports, *sorted(self._renamed.get(node.id, ()))]
        if not meaning.is_free:
            return names
        names += filter(self._is_ruled, (f"{module}.{node.id}" for module in self._stars))
        return [node.id, *names] if hasattr(builtins, node.id) or node.id in _MODULE_NAMES else names

    def _namespace(self, node: ast.AST) -> list[str]:
        """Return the module or class whose names `vars(it)` or `it.__dict__` holds."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return self.meant(node.value)
        if isinstance(node, ast.Call) and node.args and "vars" in self.meant(node.func):
            return self.meant(node.args[0])
        return []
