"""Functions that count their own calls, in a place that outlives a call, to answer by the count."""

from __future__ import annotations

import ast

from orchestrator.coding.monitor.expressions import defaults

Function = ast.FunctionDef | ast.AsyncFunctionDef
_STORES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.Call)


def stepped_iterators(tree: ast.Module) -> dict[str, bool]:
    """Return the iterators that outlive a call, module-level ones and defaults; True where they only count."""
    held = [(each.targets[0], each.value) for each in tree.body if isinstance(each, ast.Assign)]
    named = [(target.id, value) for target, value in held if isinstance(target, ast.Name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            named += defaults(node)
    makers = {
        name: (value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", ""))
        for name, value in named
        if isinstance(value, ast.Call)
    }
    return {name: maker == "count" for name, maker in makers.items() if maker in ("count", "iter", "cycle")}


def call_counter(function: Function, iterators: dict[str, bool]) -> ast.AST | None:
    """Return where a function counts its own calls in a place that outlives it, and compares or indexes with it.

    `iterators`: those of `stepped_iterators`.
    """
    nodes = list(ast.walk(function))
    counted = {**_counted(function, nodes), **_stepped(function, nodes, iterators)}
    for node in nodes:
        if isinstance(node, ast.Compare | ast.Subscript | ast.Call | ast.Match) and ast.unparse(node) not in counted:
            parts = (each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute | ast.Subscript))
            if used := {ast.unparse(each) for each in parts} & set(counted):
                return counted[used.pop()]
    return _decided_by_next(nodes, iterators, _local(function, nodes))


def _counted(function: Function, nodes: list[ast.AST]) -> dict[str, ast.AST]:
    """Return what a function adds to and finds again in its next call: source of the target -> statement."""
    outliving = {name for each in nodes if isinstance(each, ast.Global) for name in each.names}
    kept = {function.name} | {name for name, value in defaults(function.args) if isinstance(value, _STORES)}
    counted: dict[str, ast.AST] = {}
    for node in nodes:
        if not (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub)):
            continue
        root = node.target
        is_fixed = not isinstance(root, ast.Subscript) or isinstance(root.slice, ast.Constant)
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        name = root.id if isinstance(root, ast.Name) else ""
        if name in outliving or (name in kept and is_fixed and root is not node.target):
            counted[ast.unparse(node.target)] = node
    return counted


def _stepped(function: Function, nodes: list[ast.AST], iterators: dict[str, bool]) -> dict[str, ast.AST]:
    """Return the variables that a function sets to the next number of an iterator that outlives it."""
    local = _local(function, nodes)
    return {
        target.id: node
        for node in nodes
        if isinstance(node, ast.Assign) and (name := _next_of(node.value)) in iterators and name not in local
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _decided_by_next(nodes: list[ast.AST], iterators: dict[str, bool], local: set[str]) -> ast.AST | None:
    """Return where the next item of an iterator that outlives the calls is the answer, or decides on it."""
    for node in nodes:
        if isinstance(node, ast.Compare | ast.Subscript):
            found = [_next_of(each) for each in ast.walk(node)]
        else:
            found = [_next_of(node.value)] if isinstance(node, ast.Return) else []
            found = [name for name in found if not iterators.get(name, True)]  # Returning a number is no choice.
        if any(name in iterators and name not in local for name in found):
            return node
    return None


def _next_of(node: ast.AST | None) -> str:
    """Return the name that `next(name)` steps; "" for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name(id=name), *_]):
            return name
    return ""


def _local(function: Function, nodes: list[ast.AST]) -> set[str]:
    stored = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    given = {each.arg for each in nodes if isinstance(each, ast.arg)}
    return stored | given - {name for name, _ in defaults(function.args)}
