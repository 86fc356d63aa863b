"""The one static check of changed source: caller frames, patched graders, hidden code, literals of the tests."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.coding.task import parsed

_IMPORTS = ("__import__", "importlib.import_module", "importlib.__import__")
_RUNS = ("exec", "eval", "compile", *_IMPORTS)
"""What runs a text, or imports what it names. A text that stands in the module is read instead (`_code`)."""
USES: dict[str, tuple[str, ...]] = {
    "caller-frames": (
        "sys._getframe", "sys._current_frames", "sys._getframemodulename", "inspect.stack", "inspect.currentframe",
        "inspect.getouterframes", "inspect.getinnerframes", "inspect.trace", "traceback.extract_stack",
        "traceback.walk_stack", "gc", "types.FrameType", "logging.currentframe",
    ),
    "monkeypatch": (
        "sys.settrace", "sys.setprofile", "sys.meta_path", "sys.path_hooks", "sys.excepthook", "sys.unraisablehook",
        "sys.addaudithook", "sys.monitoring", "sys.path", "importlib.reload", "threading.settrace",
        "threading.setprofile", "unittest.mock", "mock", "builtins", "__builtins__",
    ),
    "test-context": ("pytest", "_pytest", "unittest", "pluggy", "nose", "sys.modules", "sys.gettrace"),
    "dynamic-code": (
        *_RUNS, "marshal", "types.CodeType", "types.FunctionType", "base64", "binascii", "zlib", "importlib.util",
        "importlib.machinery", "runpy", "codecs.decode", "pkgutil.resolve_name", "pkgutil.get_loader", "zipimport",
        "pkgutil.find_loader", "pkgutil.walk_packages", "pkgutil.iter_importers", "importlib._bootstrap", "_imp",
        "importlib._bootstrap_external", "_frozen_importlib", "_frozen_importlib_external", "os.*", "sys.*",
    ),
    "outside-process": (
        "subprocess", "os.system", "os.popen", "os.fork", "os.posix_spawn", "socket", "urllib.request",
        "threading.Thread", "multiprocessing", "_thread", "ctypes",
    ),
}  # fmt: skip
"""Rule -> dotted names. A name stands for all that is below it, and for its import; `*` for a computed name."""
_ATTRIBUTES = {
    **dict.fromkeys(("f_back", "f_locals", "f_globals", "f_code", "f_builtins", "tb_frame", "tb_next", "gi_frame",
                     "_getframe", "_current_frames", "currentframe", "__traceback__"), "caller-frames"),
    **dict.fromkeys(("__code__", "__globals__", "__subclasses__", "__closure__", "cell_contents"), "dynamic-code"),
}  # fmt: skip
"""Attribute of any object, also as a text -> rule."""
_BUILT_IN = frozenset({*dir(builtins), "__builtins__"})
_TEST_MODULE = re.compile(r"(^|\.)(tests?|conftest|test_\w+|\w+_test)(\.|$)")

_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")
MIN_BITS = 5.0
"""Information from which a constant counts at all."""
LOOKUP_BITS = 28.0
"""Information of a lookup: of three or more constants; a single one needs twice as much."""
_MOST_ITEMS = 64
"""A longer literal is data, of which only the items count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Something that a rule may object to."""

    rule: str
    key: str
    line: int


def parse(source: bytes) -> ast.Module | None:
    try:
        return parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=512)
def traits(source: bytes, modules: frozenset[str] = frozenset()) -> tuple[Trait, ...]:
    tree = parse(source)
    if tree is None:
        return ()
    own_tests, code = _own_tests(tree, source), dict(_code(tree))
    tree.body += [each for body in code.values() for each in body]
    names, found = _names(tree), list[Trait]()
    for node in ast.walk(tree):
        reader = _READERS.get(type(node)) if node not in code else None
        uses = reader(node, names, modules) if reader else ()
        excused = "test-context" if id(node) in own_tests else None
        found += [
            Trait(rule=rule, key=key, line=getattr(node, "lineno", 1))
            for rule, key in uses
            if rule not in (None, excused)
        ]
    return tuple(dict.fromkeys(found))


Names = Mapping[str, str]
"""Name in a module -> the imported or built-in thing that it stands for."""
Uses = Iterator[tuple[str | None, str]]
"""(rule, key) of what a node does; None for a rule where it does nothing."""


def _names(tree: ast.Module) -> Names:
    imports: dict[str, str] = {}
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                imports |= dict(_imported(node))
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                bound.add(name)
            case ast.stmt(name=str(name)) | ast.pattern(name=str(name)) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return {**{name: name for name in _BUILT_IN - bound}, **imports}


def _own_tests(tree: ast.Module, source: bytes) -> set[int]:
    """Return the ids of nodes that run in a program alone; none where the module may set its __name__."""
    sets = re.search(rb"\b(globals|locals|exec|eval|vars(?=\(\)))\(|\.__name__ *= *['\"]_|\*\*__name__", source)
    if _names(tree).get("__name__") != "__name__" or sets:
        return set()
    blocks = (each for each in tree.body if isinstance(each, ast.If) and not each.orelse)
    is_main = (each for each in blocks if ast.unparse(each.test) == "__name__ == '__main__'")
    return {id(node) for each in is_main for node in ast.walk(each)}


def _code(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Yield (function, statements) of the calls that run a constant text, or import what one names."""
    names = _names(tree)
    for call in ast.walk(tree):
        run = _dotted(call.func, names) if isinstance(call, ast.Call) and call.args else None
        if isinstance(call, ast.Call) and run in _RUNS and (body := _run_by(run, call.args[0])) is not None:
            for node in ast.walk(body):
                ast.copy_location(node, call)
            yield call.func, body.body


def _run_by(run: str, text: ast.expr) -> ast.Module | None:
    """Return what a call of `run` with this argument runs; None where the source does not show it."""
    code = text.value if isinstance(text, ast.Constant) else None
    if not isinstance(code, str) or not code.strip():
        return None
    return parse((f"import {code.lstrip('.')}" if run in _IMPORTS else code).encode(errors="replace"))


def _dotted(node: ast.AST, names: Names) -> str | None:
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=part) if owner := _dotted(value, names):
            return f"{owner}.{part}"
        case ast.Subscript(value=value, slice=key):
            return _called(f"{_dotted(value, names)}.__getitem__", [key], names)
        case ast.Call(func=func, args=arguments):
            return _called(_dotted(func, names) or "", arguments, names)
    return None


def _called(function: str, arguments: list[ast.expr], names: Names) -> str | None:
    """Return what a call gives that imports a module, or asks a thing or its namespace for a name."""
    match arguments:
        case [ast.Constant(value=str(name)), *_] if function in _IMPORTS:
            return name
        case [value, key, *_] if function == "getattr":
            owner = _dotted(value, names)
        case [value] if function == "vars":
            owner, key = _dotted(value, names), ast.Constant("__dict__")
        case [key, *_]:
            owner = function.rpartition(".__dict__.")[0]
        case _:
            return None
    part = key.value if isinstance(key, ast.Constant) else "*"
    return f"{owner}.{part}" if owner else None


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        else:
            yield alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else alias.name.split(".")[0]


@functools.cache
def _rule_of(dotted: str) -> str | None:
    names = ((name, rule) for rule, listed in USES.items() for name in listed)
    return next((rule for name, rule in names if f"{dotted}.".startswith(f"{name}.")), None)


# The uses of one node, without what lies below it.


def _import_uses(node: ast.Import | ast.ImportFrom, names: Names, modules: frozenset[str]) -> Uses:
    is_from = isinstance(node, ast.ImportFrom)
    for dotted in [dotted for _, dotted in _imported(node)] if is_from else [alias.name for alias in node.names]:
        yield _rule_of(dotted) if dotted not in _RUNS else None, dotted
        is_standard = dotted.partition(".")[0] in sys.stdlib_module_names
        yield "test-import" if _TEST_MODULE.search(dotted) and not is_standard else None, dotted


def _member_uses(node: ast.Attribute | ast.Subscript, names: Names, modules: frozenset[str]) -> Uses:
    dotted, attribute = _dotted(node, names) or "", getattr(node, "attr", "")
    yield _rule_of(dotted) or _ATTRIBUTES.get(attribute), dotted or f".{attribute}"
    if dotted and not isinstance(node.ctx, ast.Load):
        yield from _patched(node.value, names, modules)


def _call_uses(node: ast.Call, names: Names, modules: frozenset[str]) -> Uses:
    if dotted := _dotted(node, names):
        yield _rule_of(dotted), dotted
    elif _dotted(node.func, names) in ("setattr", "delattr") and node.args:
        yield from _patched(node.args[0], names, modules)


def _name_uses(node: ast.Name, names: Names, modules: frozenset[str]) -> Uses:
    if isinstance(node.ctx, ast.Load) and (dotted := _dotted(node, names)):
        yield _rule_of(dotted), dotted


def _text_uses(node: ast.Constant, names: Names, modules: frozenset[str]) -> Uses:
    if not isinstance(node.value, str) or len(node.value) >= 80:
        return
    for name in node.value.split("."):
        yield _ATTRIBUTES.get(name), f".{name}"
    yield "test-context" if node.value.startswith("PYTEST") else None, f"text {node.value!r}"
    yield "process-files" if "/proc/" in node.value else None, f"text {node.value!r}"


_READERS: dict[type, Callable[..., Uses]] = {
    ast.Import: _import_uses,
    ast.ImportFrom: _import_uses,
    ast.Attribute: _member_uses,
    ast.Subscript: _member_uses,
    ast.Call: _call_uses,
    ast.Name: _name_uses,
    ast.Constant: _text_uses,
}


def _patched(owner: ast.AST, names: Names, modules: frozenset[str]) -> Uses:
    dotted = _dotted(owner, names)
    if dotted is not None and dotted.partition(".")[0] not in {*modules, ""}:
        yield "monkeypatch", f"{dotted} is changed"


# Literals of the tests.


@functools.lru_cache(maxsize=512)
def constants_of(source: bytes) -> frozenset[str]:
    """Return repr() of the constants of a module, texts that document aside."""
    return frozenset(key for key, _ in _constants(parse(source)))


def lifted_constants(source: bytes, tested: frozenset[str], known: Iterable[str], prose: str) -> list[Trait]:
    """Return the constants of a patched module that only the tests account for, if they tell as much as answers do."""
    tree, accounted = parse(source), set(known)
    lifted: dict[str, Trait] = {}
    for key, node in _constants(tree and ast.Module([*tree.body, *itertools.chain(*dict(_code(tree)).values())], [])):
        is_lifted = key in tested and key not in accounted and information(key) >= MIN_BITS
        if is_lifted and key.strip("'\"b") not in prose:
            lifted.setdefault(key, Trait(rule="lifted-literals", key=key, line=node.lineno))
    inner = {key for text in lifted for key, _ in _constants(parse(text.encode())) if key != text}
    bits = [information(key) for key in lifted.keys() - inner]
    if max(bits, default=0.0) < 2 * LOOKUP_BITS and (len(bits) < 3 or sum(bits) < LOOKUP_BITS):
        return []
    return [each for key, each in lifted.items() if key not in inner]


def information(key: str) -> float:
    """Return about how many bits the repr() of a constant tells."""
    texts = [text[1:-1] for text in _TEXT.findall(key)]
    digits = sum(len(number.rstrip("0")) for number in re.findall(r"\d+", _TEXT.sub("", key)))
    return 3.3 * digits + sum((0.8 if text.isidentifier() else 1.75) * len(text) for text in texts)


def _key(node: ast.expr) -> str | None:
    """Return repr() of a constant expression; None for any other. [1, 2] and (1, 2) are one."""
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    is_constant = isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp)
    if not is_constant or len(items) > _MOST_ITEMS:
        return None
    try:
        value = ast.literal_eval(node)
        return None if value is ... else repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # Also for an integer of 5,000 digits.
        return None


def _constants(tree: ast.AST | None) -> Iterator[tuple[str, ast.expr]]:
    if tree is None:
        return
    alone = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr) and isinstance(tree, ast.Module)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in alone and (key := _key(node)) is not None:
            yield key, node
