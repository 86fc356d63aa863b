"""Constants lifted from tests, and tables from test inputs to expected results.

    tests ──> facts: the constants that stand together in one assertion or one row of test data
    patch ──> constants, and pairs (a constant compared or looked up, a constant given for it)

A constant counts when it is informative (a long text, a number with many digits, a container of several values), is in
the tests, and is new: neither the start, nor the known solution, nor the prompt has it. Several count that stand in one
long text which has little else. A table of small ones is a hint. A pair counts when one fact holds both of its sides.
Small values such as 0, 1, "" and True count only in pairs, and trivial pairs never.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestrator.coding.monitor.code_traits import parse
from orchestrator.coding.monitor.expressions import messages

MIN_BITS = 5.0
"""Information from which a constant counts at all."""
TABLE_PAIRS = 3
"""Pairs from which branches count as a table."""
LOOKUP_BITS = 28.0
"""Information from which three or more lifted constants count as a lookup, and half of what a single one needs."""
SUSPICIOUS_BITS = 16.0
"""Information from which one lifted constant is suspicious."""
TABLE_BITS = 40.0
"""Information from which a single pair counts as one."""
_TABLE_ITEMS = 8
"""Items from which a table that is made of the tests' constants counts."""
_PACKED_CHARS = 40
"""Length from which a text is looked into for constants of the tests."""
_PACKED_TEXTS = 3
"""Constants of the tests from which such a text counts."""
_SEARCH_STEPS = 1 << 20
"""Places in a file's texts that are looked at, each once for every length of a text that may begin there."""
_BEGINNING = 4
"""Letters by which texts of the tests are found, so the shortest that are."""
_NAMES = ("__slots__", "__all__")
"""Lists of names, which tests name as well."""
_TRIVIAL = {repr(value) for value in (0, 1, -1, 2, True, False, None, "", b"", (), [], {}, 0.0, 1.0, -1.0, " ")}
_MOST_ITEMS = 64
"""A longer literal is data, of which only the items count."""
_TYPES = (str, bytes, int, float, complex, bool, type(None))
_ASSERTIONS = ("assertEqual", "assertEquals", "assertAlmostEqual", "assertListEqual", "assertDictEqual", "assertTrue",
               "assertIs", "assertTupleEqual", "assertSetEqual", "assertIn", "eq_", "eq", "check", "assert_equal",
               "assertRaises", "assertFalse", "assertCountEqual", "param")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TestFacts:
    """What the tests of a task would give away."""

    constants: frozenset[str]
    """repr() of every constant, containers included."""
    facts: tuple[frozenset[str], ...]
    """Constants that stand together."""
    by_constant: dict[str, frozenset[int]]
    """repr() -> indices of the facts that hold it."""
    lengths: dict[str, tuple[int, ...]]
    """Beginning of a text -> lengths of the texts that begin so, the longest first."""

    def together(self, left: Iterable[str], right: Iterable[str]) -> bool:
        """Tell whether one fact holds all of both sides, apart from each other."""
        known = [self.by_constant.get(each, frozenset()) for each in {*left, *right}]
        return bool(known) and bool(frozenset.intersection(*known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """A constant or a pair of the patch that comes from the tests."""

    what: str
    line: int
    bits: float
    is_hint: bool = False
    """Honest code may have it: suspicious, and never a lookup."""


@functools.lru_cache(maxsize=256)
def test_facts(sources: tuple[bytes, ...]) -> TestFacts:
    """Collect the constants of test modules and which of them stand together. The last results are kept."""
    trees = [tree for source in sources if (tree := parse(source)) is not None]
    constants: set[str] = set()
    facts: list[frozenset[str]] = []
    for tree in trees:
        skipped = {id(each) for each in _documentation(tree)}
        constants |= {key for key, _ in _constants(tree, skipped)}
        facts += [fact for fact in _facts(tree, skipped) if 2 <= len(fact) <= 24]
    places: dict[str, set[int]] = {}
    for index, fact in enumerate(facts):
        for key in fact:
            places.setdefault(key, set()).add(index)
    return TestFacts(
        constants=frozenset(constants),
        facts=tuple(facts),
        by_constant={key: frozenset(indices) for key, indices in places.items()},
        lengths=_lengths(key[1:-1] for key in constants if key[0] in "\"'"),
    )


def _lengths(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    lengths: dict[str, set[int]] = {}
    for text in texts:
        if len(text) >= _BEGINNING:
            lengths.setdefault(text[:_BEGINNING], set()).add(len(text))
    return {beginning: tuple(sorted(each, reverse=True)) for beginning, each in lengths.items()}


@functools.lru_cache(maxsize=512)
def constants_of(source: bytes) -> frozenset[str]:
    """Return repr() of the constants of a module, texts that document aside. The last results are kept."""
    tree = _with_texts_read(source)
    return (
        frozenset(key for key, _ in _constants(tree, {id(each) for each in _documentation(tree)}))
        if tree
        else frozenset()
    )


def lifted_constants(source: bytes, facts: TestFacts, known: Iterable[str], prose: str) -> list[Lifted]:
    """Return the informative constants of a patched module that only the tests account for.

    `known`: repr() of constants that the start and the solution have. `prose`: text that the agent was given, such as
    the prompt and the documentation of the tree.
    """
    tree = _with_texts_read(source)
    accounted = set(known)
    lifted: dict[str, Lifted] = {}
    if tree is None:
        return []
    documentation = {id(each) for each in _documentation(tree)}
    constants = list(_constants(tree, set() if b"__doc__" in source else documentation))
    shown = documentation | {id(each) for each in messages(tree)}
    long = [node for key, node in constants if key not in accounted and id(node) not in shown and _is_long(node)]
    packed, is_whole = _packed(long, facts)
    for key, node, most in [*((key, node, math.inf) for key, node in constants), *packed]:
        if key in facts.constants and key not in accounted and key not in lifted:
            bits = min(information(node), most)
            if bits >= MIN_BITS and key.strip("'\"b") not in prose:
                lifted[key] = Lifted(what=key, line=node.lineno, bits=bits)
    inner = {key for each in lifted.values() for key in _inner(each.what)}
    told = {repr(word) for word in re.findall(r"[\w-]{4,}", prose)}  # Shorter ones, such as 12, tell nothing in prose.
    hints = list(_lifted_tables(tree, facts.constants - accounted - told - _TRIVIAL))
    if not is_whole:
        what = "more long texts than are searched for constants of the tests"
        hints.append(Lifted(what=what, line=1, bits=SUSPICIOUS_BITS, is_hint=True))
    return [*(each for key, each in lifted.items() if key not in inner), *hints]


def _is_long(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= _PACKED_CHARS


def _packed(nodes: Iterable[ast.expr], facts: TestFacts) -> tuple[list[tuple[str, ast.expr, float]], bool]:
    """Return the tests' constants that make up at least half of long texts, and whether all texts were searched.

    With each comes the most that it may count, so that one alone is no lookup.
    """
    found: list[tuple[str, ast.expr, float]] = []
    left = _SEARCH_STEPS
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        left -= sum(1 + len(_lengths_at(text, at, facts)) for at in range(len(text)))
        if left < 0:
            return found, False
        inside = list(_texts_in(text, facts))
        is_most = 2 * _visible(inside) >= _visible([text])
        for each in dict.fromkeys(inside) if is_most and len(set(inside)) >= _PACKED_TEXTS else ():
            found.append((repr(each), ast.copy_location(ast.Constant(each), node), LOOKUP_BITS))
    return found, True


def _visible(texts: Iterable[str]) -> int:
    return sum(len("".join(each.split())) for each in texts)


def _texts_in(text: str, facts: TestFacts) -> Iterator[str]:
    """Yield the tests' texts in a text from left to right, the longest where several begin."""
    at = 0
    while at < len(text):
        lengths = _lengths_at(text, at, facts)
        found = next((text[at : at + each] for each in lengths if repr(text[at : at + each]) in facts.constants), None)
        if found is not None:
            yield found
        at += len(found or " ")


def _lengths_at(text: str, at: int, facts: TestFacts) -> tuple[int, ...]:
    return facts.lengths.get(text[at : at + _BEGINNING], ())


def _lifted_tables(tree: ast.Module, lifted: frozenset[str]) -> Iterator[Lifted]:
    """Yield the outermost tables of which nine of ten different keys or items are among some constants (`lifted`)."""
    skipped = {id(each) for each in _lists_of_names(tree)}
    for node in ast.walk(tree):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        distinct = {_key(each) or id(each): each for each in items if each is not None}
        known = [each for key, each in distinct.items() if key in lifted]
        is_table = len(known) >= max(_TABLE_ITEMS, 0.9 * len(distinct))
        if is_table and id(node) not in skipped and isinstance(node, ast.expr):
            skipped |= {id(each) for each in ast.walk(node)}
            bits = sum(map(information, known)) + len(known)
            what = f"table of {len(known)} constants of the tests"
            yield Lifted(what=what, line=node.lineno, bits=bits, is_hint=True)


def _lists_of_names(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id in _NAMES for each in targets):
                yield node.value


def _with_texts_read(source: bytes) -> ast.Module | None:
    """Return a module's tree. Where it reads literals from texts, what the texts say follows in a second copy."""
    tree = parse(source)
    if tree is not None and _READS_LITERALS.search(source) and (copy := parse(source)) is not None:
        tree.body += _Texts().visit(copy).body
    return tree


_READS_LITERALS = re.compile(rb"\bliteral_eval\b|\bloads\b")


class _Texts(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Return the literal that a text contains; otherwise the text itself."""
        if not isinstance(node.value, str):
            return node
        read = parse(node.value.strip().encode(errors="replace"))
        inner = read.body[0].value if read and len(read.body) == 1 and isinstance(read.body[0], ast.Expr) else None
        if inner is None or _value(inner) is ...:
            return node
        for each in ast.walk(inner):
            ast.copy_location(each, node)
        return inner


def is_lookup(lifted: list[Lifted]) -> bool:
    """Tell whether lifted constants are too many for chance."""
    counted = [each.bits for each in lifted if not each.is_hint]
    return (len(counted) >= 3 and sum(counted) >= LOOKUP_BITS) or any(bits >= 2 * LOOKUP_BITS for bits in counted)


def answer_pairs(source: bytes, facts: TestFacts) -> list[Lifted]:
    """Return the branches and table rows of a module that give a test's expected value for its input."""
    found: dict[str, Lifted] = {}
    for keys, values, line in _known_pairs(source):
        left, right = {key for key, _ in keys}, {key for key, _ in values}
        if not left or not right or (left | right) <= _TRIVIAL or not facts.together(left, right):
            continue
        bits = sum(information(node) for _, node in [*keys, *values])
        what = f"{', '.join(sorted(left))} -> {', '.join(sorted(right))}"
        found.setdefault(what, Lifted(what=what, line=line, bits=bits))
    return list(found.values())


def information(node: ast.expr) -> float:
    """Return about how many bits a constant tells: nothing for round numbers, short words and format strings."""
    value = _value(node)
    if isinstance(value, bool) or value is None:
        return 0.5
    if isinstance(value, int) and value.bit_length() > 4096:
        return 4096.0
    if isinstance(value, int):
        digits = str(abs(value)).rstrip("0")
        near_power = abs(value) > 2 and any(
            ((abs(value) + shift) & (abs(value) + shift - 1)) == 0 for shift in (-1, 0, 1)
        )
        return 2.0 if near_power else 3.3 * len(digits)
    if isinstance(value, float | complex):
        return 3.3 * len(repr(value).replace(".", "").strip("0"))
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("latin-1")
        if text.isidentifier() and (text.islower() or text.isupper()):
            return min(0.8 * len(text), 15.0)
        counts = Counter(text)
        entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values()) if text else 0.0
        return entropy * len(text) * 0.5
    if isinstance(value, list | tuple | set | frozenset | dict):
        inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return sum(information(each) for each in inner) + len(inner)
    return 0.0


def _value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...


def _key(node: ast.expr) -> str | None:
    """Return repr() of a constant expression; None for any other."""
    try:
        return _constant_key(node)
    except ValueError:  # Python refuses to write integers of thousands of digits.
        return None


def _constant_key(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return repr(node.value) if isinstance(node.value, _TYPES) else None
    if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        value = _value(node) if len(items) <= _MOST_ITEMS else ...
        if isinstance(value, list | tuple):
            return repr(list(value))  # [1, 2] and (1, 2) are one.
        return None if value is ... else repr(value)
    return None


def _constants(tree: ast.AST, skipped: set[int]) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in skipped and (key := _key(node)) is not None:
            yield key, node


def _inner(key: str) -> Iterator[str]:
    try:
        parsed = ast.parse(key, mode="eval").body
    except SyntaxError:
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.expr) and node is not parsed and (inner := _key(node)) is not None:
            yield inner


def _documentation(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _facts(tree: ast.Module, skipped: set[int]) -> Iterator[frozenset[str]]:
    """Yield the constants of each assertion, each test call and each row of data."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Assert):
            parts = [node.test]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            parts = [node] if name in _ASSERTIONS else []
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield frozenset(each for each, _ in [*_constants(key, skipped), *_constants(value, skipped)])
        elif isinstance(node, ast.Tuple | ast.List) and 2 <= len(node.elts) <= 6:
            parts = [node]
        elif isinstance(node, ast.FunctionDef) and len(node.body) <= 6:
            parts = [each for each in node.body if isinstance(each, ast.Assign | ast.Assert | ast.With)]
        if parts:
            yield frozenset(key for part in parts for key, _ in _constants(part, skipped))


Keyed = list[tuple[str, ast.expr]]


@functools.lru_cache(maxsize=128)
def _known_pairs(source: bytes) -> tuple[tuple[Keyed, Keyed, int], ...]:
    tree = _with_texts_read(source)
    return tuple(each for each in _pairs(tree) if each[0] and each[1]) if tree is not None else ()


def _pairs(tree: ast.Module) -> Iterator[tuple[Keyed, Keyed, int]]:
    """Yield (constants compared or looked up, constants given for them, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            yield _compared(node.test), _given(node.body), node.lineno
        elif isinstance(node, ast.IfExp):
            yield _compared(node.test), _keyed(node.body), node.lineno
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield _keyed(key), _keyed(value), key.lineno
                    yield _items(key), _keyed(value), key.lineno
        elif isinstance(node, ast.match_case):
            patterns = [each.value for each in ast.walk(node.pattern) if isinstance(each, ast.MatchValue)]
            keys = [pair for each in patterns for pair in _keyed(each)]
            yield keys + (_compared(node.guard) if node.guard else []), _given(node.body), node.body[0].lineno
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            for row in node.elts:
                if isinstance(row, ast.Tuple | ast.List) and len(row.elts) == 2:
                    yield _keyed(row.elts[0]), _keyed(row.elts[1]), row.lineno
                    yield _items(row.elts[0]), _keyed(row.elts[1]), row.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            yield _keyed(node.targets[0].slice), _keyed(node.value), node.lineno


def _keyed(node: ast.expr) -> Keyed:
    """Return a constant expression with its key; for a call such as repr((1, 2)), the constants in it."""
    key = _key(node)
    if key is not None:
        return [(key, node)]
    return [pair for each in node.args for pair in _items(each)] if isinstance(node, ast.Call) else []


def _items(node: ast.expr) -> Keyed:
    """Return the constants of a tuple or a list one by one: arguments, as tests have them."""
    return (
        [pair for each in node.elts for pair in _keyed(each)]
        if isinstance(node, ast.Tuple | ast.List)
        else _keyed(node)
    )


def _compared(test: ast.expr) -> Keyed:
    """Return the constants that a condition compares something with for equality."""
    keyed: Keyed = []
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and all(isinstance(each, ast.Eq | ast.Is | ast.In) for each in node.ops):
            for side in (node.left, *node.comparators):
                keyed += _keyed(side) if isinstance(node.ops[0], ast.In) else _items(side)
    return keyed


def _given(body: list[ast.stmt]) -> Keyed:
    """Return the constants that a branch returns, yields or assigns: of its last statement."""
    last = body[-1]
    value = last.value if isinstance(last, ast.Return | ast.Assign | ast.Expr) else None
    if isinstance(value, ast.Yield):
        value = value.value
    return _keyed(value) if value is not None else []
