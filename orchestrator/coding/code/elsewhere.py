"""What a patch changes beside what its task is about, read without running it.

A change that no test sees may break a caller that nobody thought of, and comparing forms cannot tell. What can be told:
the known solution leaves that definition alone. So a definition of the start is changed elsewhere when the solution
keeps it and the patch does not: a function, a name that a module or class assigns, another statement of theirs, a file
that is not Python. New names and files are free, unless others meet them: special methods, names of builtins,
statements that run at import, a package in a module's place. Free are docstrings, annotations of functions, layout,
prose, and imports that are dropped outside an `__init__.py`.
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping

from orchestrator.coding.task import parsed

Files = Mapping[str, bytes | None]
Definition = tuple[str, str]
"""Kind (function, name, import, statement or file), and what stands there, with the conditions above it."""
Definitions = Mapping[str, list[Definition]]
"""By qualified name; other statements by their text."""
_PROSE = re.compile(r"\.(md|rst|txt)$|(^|/)(LICENSE|NOTICE|AUTHORS)[^/]*$")
_MET = re.compile(rf"(^|\.)__\w+__$|^({'|'.join(dir(builtins))})$")


def changed_elsewhere(start: Files, solution: Files, patch: Files) -> Iterator[str]:
    """Yield `path: name` of what a patch changes and the known solution does not.

    `solution` and `patch` map the paths of changed files to their contents, None for a deleted file. `start` has at
    least the files that these change.
    """
    for path in sorted(patch):
        module = re.sub(r"/__init__\.py$", ".py", path)
        if path not in start and module in start and path not in solution:
            yield f"{module}: a package stands in its place"
        elif path in start and not _PROSE.search(path):
            versions = [_definitions(path, files.get(path, start[path])) for files in (start, solution, patch)]
            yield from (f"{path}: {name[:60]}" for name in _changed(path, *versions))


def _changed(path: str, old: Definitions, right: Definitions, new: Definitions) -> list[str]:
    """Return the names that the patch changes and the solution keeps."""
    if _statements(old) != _statements(right):  # They are the task.
        old, right, new = (_without_statements(each) for each in (old, right, new))
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) == right.get(name) != new.get(name)]
    return [name for name in names if not _is_free(path, name, old, new)]


def _statements(found: Definitions) -> set[str]:
    return {name for name, [(kind, _), *_] in found.items() if kind == "statement"}


def _without_statements(found: Definitions) -> Definitions:
    return {name: each for name, each in found.items() if each[0][0] != "statement"}


def _is_free(path: str, name: str, old: Definitions, new: Definitions) -> bool:
    kinds = {kind for each in (old, new) for kind, _ in each.get(name, ())}
    if name not in old:
        runs_at_import = "statement" in kinds and "__name__" not in new[name][0][1]
        return not runs_at_import and not _MET.search(name)
    if name not in new:
        return kinds == {"import"} and not path.endswith("__init__.py")
    return kinds == {"import"} and set(old[name]) <= set(new[name])


def _definitions(path: str, content: bytes | None) -> Definitions:
    if content is None:
        return {}
    found: dict[str, list[Definition]] = defaultdict(list)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = parsed(content).body if path.endswith(".py") else None
        for name, kind, text in () if body is None else _walk(body, "", ""):
            found[name].append((kind, text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        body = None
    return {"the file": [("file", content.decode(errors="replace"))]} if body is None else found


def _walk(body: list[ast.stmt], inside: str, above: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, kind and text of each definition. `inside`: the class, with its dot; `above`: the conditions."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield inside + node.name, "function", above + _dump(_Plain().visit(node))
            case ast.ClassDef(name=name):
                bases = [*node.bases, *node.keywords, *node.decorator_list]
                yield inside + name, "name", above + "class " + " ".join(map(ast.dump, bases))
                yield from _walk(node.body, f"{inside}{name}.", above)
            case ast.Import() | ast.ImportFrom():
                source = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    name = inside + (alias.asname or alias.name.partition(".")[0])
                    yield name, "import", f"{above}{source} {alias.name}"
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if names := _assigned(node):
                yield from ((inside + name, "name", above + _dump(value)) for name in names)
            case ast.If() | ast.Try() | ast.With():
                yield from _below(node, inside, above)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                yield inside + ast.unparse(node), "statement", above


def _below(node: ast.If | ast.Try | ast.With, inside: str, above: str) -> Iterator[tuple[str, str, str]]:
    """Yield what stands in the branches of a statement; each branch is a condition above it."""
    head = ast.unparse(node).partition("\n")[0]
    for branch in ("body", "orelse", "finalbody"):
        yield from _walk(getattr(node, branch, []), inside, f"{above}{head} {branch}: ")
    for handler in getattr(node, "handlers", []):
        yield from _walk(handler.body, inside, f"{above}except {_dump(handler.type)}: ")


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment binds; none where it changes an object that is there."""
    targets = [
        each for target in getattr(node, "targets", [getattr(node, "target", None)]) for each in ast.walk(target)
    ]
    is_plain = not any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
    return [each.id for each in targets if isinstance(each, ast.Name)] if is_plain else []


def _dump(node: ast.AST | None) -> str:
    return ast.dump(node) if node else ""


class _Plain(ast.NodeTransformer):
    """Leaves out of a function what no caller meets: annotations and docstrings."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
        return super().generic_visit(node)
