"""Runs inside the box: pytest over a task's tests, with an outcome a line on a channel of its own.

`grading.py` sends this file's text to the box's interpreter and a JSON object to its standard input.
Each line of the channel is an HMAC and a JSON array [number, kind, id, text]:

    hello     pytest is loaded; nothing of the graded tree was imported yet
    test      id: node id, text: passed | failed | skipped
    why       id: node id, text: the end of the failure's text
    collect   id: file that could not be imported, text: the reason
    probes    text: how many probes there are
    probe     id: number of a probe, text: its outcome
    counter   id: kind and node id of a counter-test, text: its outcome
    call      text: a call that no recorded test makes, close to one that it makes (`hold_back`)
    answer    id: number of a held-back input, text: a literal, or "!" and an exception
    end       text: names of what was changed in pytest, unittest and builtins; empty for nothing

A probe is a test that must fail (`add_probes`). A counter-test is made of an expected test, in a run without the real
one (`counter_tests`).
"""

import ast
import collections
import contextlib
import copy
import datetime
import enum
import functools
import hashlib
import hmac
import importlib
import importlib.machinery
import inspect
import itertools
import json
import numbers
import operator
import os
import pathlib
import random
import re
import signal
import string
import sys
import typing
import unittest

import pytest

WHY_CHARS = 1500
DEPTH = 9
"""Levels of containers that counter-tests look into."""
INPUTS = 24
"""Counter-tests with another input."""
INPUT_S = 3.0
"""Seconds that one of them may take."""
TRIED = 1000
NOTED = 50
"""Calls of one function in one test that are looked at."""
STEPS = 12
"""Calls of an object that are made again before the one that counts."""
LONGEST = 300
"""Characters of an answer that is not shortened to its digest; an input may have ten times as many."""
NEW = "new object"
NEAR = (str, bytes, int, float)
PLAIN = (*NEAR, complex, bool, type(None), list, tuple, dict, set, frozenset)
READ_AS: typing.Any = {
    typing.Iterator: lambda value: list(itertools.islice(value, 50)),
    enum.Flag: operator.attrgetter("value"),
    numbers.Number: float,
    typing.Mapping: dict,
    typing.MappingView: list,
    os.PathLike: os.fspath,
    bytearray: bytes,
    datetime.tzinfo: str,
}
"""Kinds of objects that equal others by what they are read as. Others equal by what they hold."""
EQUALITIES = ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual")
RAISES = ("raises", "assertRaises")
EXCEPTIONS = (LookupError, TypeError, ValueError, AttributeError, OSError, RuntimeError, ArithmeticError)
CHECKS = ("assert", "raises", "approx", "isinstance", "hasattr", "fail", "skip", "sleep")
"""Beginnings of the names of functions whose arguments are not those of graded code."""
ARGUMENTS = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.JoinedStr, ast.UnaryOp, ast.BinOp)
LETTERS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
ROOT = os.getcwd()
"""Of the tree that is graded."""
TESTS = re.compile(r"/tests?/|/(conftest|test_[^/]*|[^/]*_test|tests?)\.py$")
WATCH = "_w"
parsed = functools.cache(ast.parse)
WATCHED = ("_pytest", "pluggy", "pytest", "unittest", "builtins")


def open_channel(key):
    """Return a function that writes one record, and point file descriptor 1 elsewhere."""
    sys.stdout.flush()
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    digest, count = hmac.new(key, digestmod=hashlib.sha256), 0

    def send(kind, name="", text=""):
        nonlocal count
        record = json.dumps([count, kind, name, text]).encode()
        count += 1
        mac = digest.copy()
        mac.update(record)
        line = mac.hexdigest().encode() + b" " + record + b"\n"
        while line:
            line = line[os.write(channel, line) :]

    return send


class PinnedLoader(importlib.machinery.SourceFileLoader):
    """Compiles modules from bytes in memory, where no attribute leads to them, and reads no bytecode."""

    paths: frozenset[str]
    read: typing.Callable[[str], bytes]

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in cls.paths:
            spec.loader = cls(name, spec.origin)
        return spec

    def get_data(self, path):
        return PinnedLoader.read(self.path)

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)


def fingerprint():
    marks = {}
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.partition(".")[0] in WATCHED:
            for name, value in list(vars(module).items()):
                marks |= marks_of(f"{module_name}.{name}", value, module_name)
    return marks


def marks_of(place, value, module_name):
    named = {place: value}
    if isinstance(value, type) and value.__module__ == module_name:
        named |= {f"{place}.{attribute}": member for attribute, member in list(vars(value).items())}
    return {name: (id(each), id(getattr(each, "__code__", None))) for name, each in named.items() if callable(each)}


def changed(before):
    after = fingerprint()
    return sorted(name for name, identity in before.items() if after.get(name) != identity)


def fails_by_assert():
    assert sorted([2, 1]) == [2, 1]


def fails_by_raises():
    with pytest.raises(ValueError):
        pass


def fails_by_approx():
    assert pytest.approx(1.5) == 1.0


def fails_by_unittest():
    unittest.TestCase().assertEqual({"a": 1}, {"a": 2})


def fails_by_exception():
    raise RuntimeError("this probe fails")


PROBES = (fails_by_assert, fails_by_raises, fails_by_approx, fails_by_unittest, fails_by_exception)


def definition(item, source):
    """Return a new syntax tree of a test's function; None where decorators are no marks."""
    scope, found = parsed(source).body, None
    for name in item.nodeid.partition("[")[0].split("::")[1:]:
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next((each for each in reversed(scope) if isinstance(each, kinds) and each.name == name), None)
        scope = found.body if found is not None else []
    is_plain = isinstance(found, ast.FunctionDef) and all(
        ast.unparse(each).startswith("pytest.mark.") for each in found.decorator_list
    )
    return copy.deepcopy(found) if is_plain else None


class Watch:
    """What a counter-test calls where its test compares: it asks for equality with a value that nobody expects."""

    def __init__(self, number):
        self.number = number
        self.asked = self.lied = False

    def same(self, left, right):
        self.ask(left, right)
        return left == right

    def among(self, value, values):
        for each in values if isinstance(values, (list, tuple, set, frozenset)) else ():
            self.ask(value, each)
        return value in values

    def pair(self, left, right):
        self.ask(left, right)
        return left, right

    def ask(self, left, right, depth=0):
        """Ask each of two values, and what they hold, whether it equals another value than the other one."""
        self.asked = True
        if depth < DEPTH and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            for one, other in zip(left, right, strict=False):
                self.ask(one, other, depth + 1)
        elif depth < DEPTH and isinstance(left, dict) and isinstance(right, dict):
            for key in left.keys() & right.keys():
                self.ask(left[key], right[key], depth + 1)
        self._put(left, right)
        self._put(right, left)

    def _put(self, value, other):
        unexpected = [another(other, self.number)]
        if type(other) in NEAR and near(other, self.number) != other:
            unexpected.append(near(other, self.number))
        for each in unexpected if type(value) not in PLAIN else ():
            with contextlib.suppress(Exception):
                self.lied |= bool(value == each)

    @contextlib.contextmanager
    def raising(self, manager, expected):
        with manager as caught:
            try:
                yield caught
            except BaseException as error:
                self.asked = True
                self.lied |= isinstance(error, unrelated(expected))
                raise

    def near(self, value):
        return near(value, self.number)


def unrelated(expected):
    known = expected if isinstance(expected, tuple) else (expected,)
    return tuple(each for each in EXCEPTIONS if not any(issubclass(each, k) or issubclass(k, each) for k in known))


class Asking(ast.NodeTransformer):
    """Has a test's comparisons and expected exceptions go through a watch."""

    def visit_Compare(self, node):
        self.generic_visit(node)
        method = {ast.Eq: "same", ast.In: "among"}.get(type(node.ops[0]))
        return watched(method, node.left, *node.comparators) if method and len(node.ops) == 1 else node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = called(node)
        if name in EQUALITIES and len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args):
            node.args[:2] = [ast.Starred(watched("pair", *node.args[:2]), ast.Load())]
        elif name in RAISES and len(node.args) == 1:
            return watched("raising", node, node.args[0])
        return node


def called(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def watched(method, *arguments):
    function = ast.Attribute(ast.Name(WATCH, ast.Load()), method, ast.Load())
    return ast.copy_location(ast.Call(function, list(arguments), []), arguments[0])


def arguments(test):
    found: list = []
    for call in ast.walk(test):
        if isinstance(call, ast.Call) and not called(call).startswith(CHECKS):
            found += [(call.args, place) for place in range(len(call.args))]
            found += [(vars(each), "value") for each in call.keywords]
    return [(holder, key) for holder, key in found if isinstance(holder[key], ARGUMENTS)]


def compiled(test, item, watch):
    test.decorator_list = []
    module = ast.parse(f"def {test.name}({WATCH}):\n    return {test.name}")
    vars(module.body[0])["body"].insert(0, test)
    ast.fix_missing_locations(module)
    namespace = {}
    exec(compile(module, str(item.path), "exec", dont_inherit=True), item.function.__globals__, namespace)
    return namespace[test.name](watch)


def near(value, number):
    kind = type(value)
    if kind is str:
        return near_text(value, number)
    if kind is bytes:
        return near_text(value.decode("latin-1"), number).encode("latin-1")
    if kind in (int, float):
        return value + 1
    if kind in (set, frozenset):
        return kind(near(sorted(value, key=repr), number))
    if kind in (list, tuple, dict) and value:
        parts = dict(value) if kind is dict else list(value)
        key = (list(value) if kind is dict else range(len(value)))[number % len(value)]
        parts[key] = near(parts[key], number)
        return kind(parts)
    return value


def near_text(text, number):
    places = [(place, kind) for place, letter in enumerate(text) for kind in LETTERS if letter in kind]
    if not places:
        return text
    place, kind = places[number % len(places)]
    other = kind[(kind.index(text[place]) + 1 + number % (len(kind) - 1)) % len(kind)]
    return text[:place] + other + text[place + 1 :]


def another(value, number):
    """Return another value, which graded code cannot foresee; of the same type where that is plain."""
    if type(value) in (int, float):
        return value + 1 + number
    if type(value) is bytes:
        return value + b" %x" % number
    if type(value) is dict:
        return {**value, f"key {number:x}": number}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)([*value, number])
    return f"{value if type(value) is str else ''} {number:x}"


def is_graded(file):
    """Tell whether a file is the tree's own, and neither a test nor beside one."""
    return bool(file) and file.startswith(ROOT + os.sep) and not TESTS.search(file[len(ROOT) :])


def edge(items, module, at_end):
    inside = [place for place, item in enumerate(items) if module in item.listchain()]
    return inside[-1] + 1 if at_end else inside[0]


class Made(typing.NamedTuple):
    """How an object was made, and what was called on it from outside of the graded code."""

    value: object
    module: str
    name: str
    made: str
    steps: list


class Recorder:
    """Notes the calls of the tree's functions whose arguments are plain data, and how their objects were made."""

    def __init__(self, sources):
        self._sources = sources
        self._made = {}
        self.calls = {}
        self.noted = collections.Counter()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and self.noted[code] < NOTED and is_graded(code.co_filename) and "<" not in code.co_qualname:
            self.noted[code] += 1
            with contextlib.suppress(Exception):
                self._note(frame, code)

    def _note(self, frame, code):
        module, (owner, _, name) = frame.f_globals["__name__"], code.co_qualname.rpartition(".")
        first, kind, given, named = given_to(frame, name)
        made, steps = None, []
        given, named = [self._known(each) for each in given], {key: self._known(each) for key, each in named.items()}
        is_method = is_method_of(kind, owner, name)
        if is_method and is_graded(
            getattr(sys.modules.get(kind.__module__), "__file__", "")
        ):  # Else a test's own kind.
            module, owner = kind.__module__, kind.__qualname__
        if name == "__init__":
            if id(first) in self._made:  # Those of base classes come later. The id of a kept object stays its own.
                return
            self._made[id(first)] = Made(first, module, owner, "", [])
            self._made[id(first)] = Made(first, module, owner, repr(plain([given[1:], named])), [])
            owner, _, name = owner.rpartition(".")
            given = given[1:]
        elif is_method:
            if kind is not first:
                known = self._made.get(id(first), Made(first, module, owner, "[[], {}]", []))
                module, owner, steps = known.module, known.name, known.steps
                made = [*ast.literal_eval(known.made), steps]
            given = given[1:]
        call: typing.Any = plain([given, named])
        text, calls = repr([made, call]), self.calls.setdefault((module, owner, name), {})
        caller = frame.f_back.f_code.co_filename
        if len(calls) < TRIED:
            calls[text] = calls.get(text) or caller in self._sources
        if made and len(steps) < STEPS and not is_graded(caller):
            steps.append([name, *call])

    def _known(self, value):
        """Return an object as its class and the arguments that made it, and another value as it is."""
        kind, known = type(value), self._made.get(id(value))
        if known is not None:
            return {(NEW, known.module, known.name): ast.literal_eval(known.made)}
        if hasattr(value, "read") and hasattr(value, "seek"):
            place, content = value.tell(), value.read()
            value.seek(place)
            return {(NEW, "io", "StringIO" if type(content) is str else "BytesIO"): [[content], {}]}
        if inspect.isbuiltin(value) and inspect.ismodule(value.__self__):
            return {(NEW, value.__module__, value.__qualname__): None}
        if kind.__module__ in sys.stdlib_module_names - {"builtins"}:
            return {(NEW, kind.__module__, kind.__qualname__): shown_arguments(value)}
        return value


def is_method_of(kind, owner, name):
    """Tell whether the function `name` of a class `owner` is no static one, and the class is `kind` or a base of it."""
    return any(each.__qualname__ == owner and type(vars(each).get(name)) is not staticmethod for each in kind.__mro__)


def given_to(frame, name):
    """Return the first argument of a call, its class, and all arguments but functions at the end that are defaults."""
    names, more, others, values = inspect.getargvalues(frame)
    count = frame.f_code.co_argcount
    given = [values[name] for name in names[:count]] + list(values.get(str(more), ()))
    first = given[0] if given else None
    kind = first if isinstance(first, type) else type(first)
    defaults = getattr(getattr(kind, name, None), "__defaults__", None) or ()
    while given and callable(given[-1]) and given[-1] in defaults:
        given.pop()
    return first, kind, given, {name: values[name] for name in names[count:]} | values.get(str(others), {})


def shown_arguments(value):
    """Return the arguments that repr() of a value shows, as in UUID('...'). Raises where they do not make it again."""
    call: typing.Any = ast.parse(repr(value), mode="eval").body
    given, named = map(ast.literal_eval, call.args), {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    made: typing.Any = plain([[*given], named])
    if type(value)(*made[0], **made[1]) != value:
        raise ValueError("another object")
    return made


def plain(value, is_answer=False, depth=0) -> typing.Any:
    """Return plain data as values of built-in types, read by their own methods, so that no class lies.

    Of an answer, an iterator is a list, and an object its items, attributes and properties. Raises for other data.
    """
    if depth > DEPTH:
        raise ValueError("too deep")
    part = functools.partial(plain, is_answer=is_answer, depth=depth + 1)
    base: typing.Any = next(filter(PLAIN.__contains__, type(value).__mro__), None)
    if base is dict:
        return {keyed(part(key)): part(each) for key, each in dict.items(value)}
    if is_answer and type(value) not in PLAIN and base in (list, tuple, set, None):
        return looked_at(value, base, part)
    if base is set or (base is frozenset and is_answer):
        parts = {*map(keyed, map(part, base.__iter__(value)))}
        return sorted(parts, key=repr) if is_answer else parts  # Python orders texts anew in each process.
    if base in (list, tuple):
        return base(map(part, base.__iter__(value)))
    if base is float and is_answer:  # Also one that has no literal.
        return float(float.__format__(value, ".12g"))
    exact = ast.literal_eval(base.__repr__(value))
    return float(f"{exact:.12g}") if base is float else exact


def keyed(value):
    """Return what stands for a plain value in a set: itself, or its text."""
    with contextlib.suppress(TypeError):
        hash(value)
        return value
    return repr(sorted(value, key=repr) if type(value) is set else value)


def looked_at(value, base, part):
    """Return what an object of an answer shows."""
    items, held = None, {}
    for kind, read in () if base else READ_AS.items():
        if issubclass(type(value), kind):
            return part(read(value))
    if base or isinstance(value, typing.Collection):
        items = part((base or list)(base.__iter__(value) if base else itertools.islice(value, 50)))
    with contextlib.suppress(*([] if items is None else [Exception])):
        held = {name: part(getattr(value, name)) for name in shown(value)}
    return held if items is None else [items, held] if held else items


def shown(value):
    names = [name for name, _ in inspect.getmembers(type(value), inspect.isdatadescriptor) if name[0] != "_"]
    held = getattr(value, "__dict__", ()) if names else vars(value)
    return [*names, *(name for name in held if name[0] != "_")]


def variants(calls, chosen, sought=()):
    """Return calls that are not among recorded ones, each of them with other arguments of the same types.

    Half of them are of functions that are `sought`.
    """
    made, places = {}, list(calls)
    known = {place: [ast.literal_eval(text) for text in texts] for place, texts in calls.items()}
    own = [place for place in places if any(name.endswith(".".join(filter(None, place))) for name in sought)]
    for _ in range(2 * TRIED if calls else 0):
        place = chosen.choice(chosen.choice((own, places)) or places)
        text, other = chosen.choices(list(calls[place]), k=2)
        values = mixed(slots_of(text), slots_of(other), chosen)
        if values not in known[place] and len(repr(values)) <= 10 * LONGEST:
            made[*place, repr(values)] = calls[place][text]
    return [[*call, is_direct] for call, is_direct in made.items()]


def mixed(call, another_call, chosen):
    """Return a call's values, one or two of them varied or those of another call."""
    (values, slots), (others, other_slots) = call, another_call
    if values[0] and others[0] and chosen.random() < 0.5:
        steps = values[0][2] + others[0][2]
        values[0][2] = chosen.choices(steps, k=2 * STEPS) if steps and chosen.random() < 0.5 else steps
    last = sum(map(len, values[1]))  # Slots of the call that counts. Those of the object's making follow.
    making = last + sum(map(len, values[0][:2])) if values[0] else last
    for _ in range(chosen.choice((1, 1, 2)) if slots else 0):
        at = chosen.randrange(chosen.choice((last, making, len(slots))) or len(slots))
        holder, key = slots[at]
        held, name = chosen.choice([slots[at], slots[at], *other_slots[at : at + 1]])
        other = varied(holder[key], chosen) if held is holder else held[name]
        is_lost = is_alphabet(holder[key]) and not is_alphabet(other)
        holder[key] = other_alphabet(holder[key], chosen) if is_lost else other
    return values


def other_alphabet(value, chosen):
    """Return an alphabet that is shorter and turned around, or longer."""
    more = [each for each in "!#%&" if each not in value][: chosen.randrange(1, 4)]
    longer_one = value + ("".join(more) if type(value) is str else type(value)(more))
    return chosen.choice((value[::-1][: chosen.randrange(9, len(value) + 1)], longer_one))


def is_alphabet(value):
    """Tell whether a long text or list has each of its items once: what it means with one twice, nobody says."""
    return type(value) in (str, list, tuple) and 8 < len(value) == len({*map(repr, value)})


def slots_of(text):
    """Return the values of a call, and (holder, key) of each."""
    values = ast.literal_eval(text)
    given, named, steps = values[0] or ([], {}, [])
    holders = [*values[1], given, named, *(part for step in steps for part in step[1:])]
    return values, [(each, key) for each in holders for key in (each if type(each) is dict else range(len(each)))]


def varied(value, chosen):
    """Return another value of the same type; an empty one as it is."""
    if type(value) is bool:
        return not value
    if type(value) in (int, float):
        return value + chosen.choice((-2, -1, 1, 2, 3, 7, -2 * value, -value, -value // 2))
    if type(value) in (str, bytes) and len(lines := value.splitlines(keepends=True)) > 1 and chosen.random() < 0.6:
        return value[:0].join(varied(lines, chosen))
    if type(value) in (str, bytes, list, tuple) and value and chosen.random() < 0.6:
        at = chosen.randrange(len(value))
        before, here, after = value[:at], value[at : at + 1], value[at + 1 :]
        return before + chosen.choice((after, here + here + after, after[:1] + here + after[1:], value[:0], value))
    return near(value, chosen.getrandbits(16))


def built(value):
    names = next(iter(value), None) if type(value) is dict else None
    if type(names) is not tuple or NEW not in names:
        return value
    known = operator.attrgetter(names[2])(importlib.import_module(names[1]))
    return known if value[names] is None else known(*value[names][0], **value[names][1])


def answer(module, owner, name, text):
    """Return the literal of what a function of the tree gives; where that is None, of what it leaves.

    Before it come what the calls gave that were made of its object.
    """
    made, call = ast.literal_eval(text)
    place: typing.Any = functools.reduce(getattr, filter(None, owner.split(".")), importlib.import_module(module))
    place = place(*map(built, made[0]), **{key: built(each) for key, each in made[1].items()}) if made else place
    given = []
    for step in made[2] if made and len(made) > 2 else ():  # Tasks of earlier releases have no steps.
        try:
            given.append(plain(called_on(place, *step)[0], is_answer=True))  # Before a later step changes it.
        except Exception:
            given.append("failed")
    value, arguments = called_on(place, name, *call)
    given.append(plain([arguments, place if made else None] if value is None else value, is_answer=True))
    found = repr(given if given[1:] else given[0])
    return found if len(found) <= LONGEST else repr(hashlib.sha256(found.encode()).hexdigest())


def called_on(place, name, given, named):
    given, named = [built(each) for each in given], {key: built(each) for key, each in named.items()}
    value = getattr(place, name)
    return value(*given, **named) if callable(value) else value, given


def answer_all(inputs, send):
    signal.signal(signal.SIGPROF, too_long)
    late = []
    for number, each in enumerate(inputs):
        try:
            signal.setitimer(signal.ITIMER_PROF, INPUT_S / 9 ** min(3, late.count(each[:3])))
            found = answer(*each)
        except BaseException as error:
            late += [each[:3]] * isinstance(error, TooLong)
            is_own = type(error).__module__.partition(".")[0] == each[0].partition(".")[0]
            found = repr(type(error).__name__) if is_own else f"!{type(error).__name__}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        send("answer", str(number), found)


class Reporter:
    """The pytest plugin. It writes a record for each test as soon as the test has ended."""

    def __init__(self, spec, send):
        self._spec, self._send, self._pinned, self._read = spec, send, PinnedLoader.paths, PinnedLoader.read
        self._probes, self._counters = {}, {}
        self._recorder = Recorder(self._pinned)
        self._outcome = self._text = ""
        self._is_again = False
        if spec.get("counters"):
            self._shut, tests = inodes(TESTS.search), re.compile("/tests?/")
            self._unimported = inodes(lambda path: tests.search(path) or ROOT + path in PinnedLoader.paths)
            sys.addaudithook(self.keep_shut)

    def pytest_collectreport(self, report):
        if report.failed:
            self._send("collect", report.nodeid, str(report.longrepr)[-WHY_CHARS:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        counters = self._spec.get("counters")
        added = self.counter_tests(items, **counters) if counters else []
        self.add_probes(items, random.Random(self._spec["seed"]))
        self._send("probes", text=str(len(self._probes)))
        again = [each for each in added if self._counters[each][0] == "again"]
        items[:] = [*again, *items, *(each for each in added if each not in again)]

    def add_probes(self, items, chosen):
        """Put in tests that must fail: twins with the ids of expected tests, others at the edges of test files."""
        tests = [item for item in items if isinstance(item, pytest.Function)]
        expected = [item for item in tests if item.nodeid in self._spec["expected"]]
        for test in chosen.sample(expected, min(len(expected), self._spec["twins"])):
            place = items.index(test) + chosen.choice((0, 1))
            self._insert(items, place, test.parent, test.name, chosen.choice(PROBES))
        modules = list(dict.fromkeys(test.getparent(pytest.Module) for test in tests))
        for number, function in enumerate(PROBES if modules else ()):
            module, at_end = chosen.choice(modules), chosen.choice((False, True))
            if number == 0:  # One is the first test of all, so that a suite that hangs later has been probed.
                module, at_end = modules[0], False
            place = edge(items, module, at_end)
            self._insert(items, place, module, f"test_{chosen.getrandbits(32):x}", function)

    def counter_tests(self, items, nodes, number):
        """Return the tests of `nodes` in their counter-forms, and take their files out of `items`.

        again   with its comparisons watched. It passes as the test does, even though nobody can read the test's file
        equal   whether a value in it said to be equal to a value that nobody expects, which honest ones do not
        input   with another argument of the same length, which most honest code fails
        """
        tests = [item for item in items if item.nodeid in nodes]
        files = {node.partition("::")[0] for node in nodes}
        items[:] = [item for item in items if item.nodeid.partition("::")[0] not in files]
        added = []
        for item in tests:
            test, watch = self._definition(item), Watch(number)
            function = compiled(Asking().visit(test), item, watch) if test is not None else None
            self._append(added, item, function, "again", watch)
        for turn in range(min(3, max(1, INPUTS // max(1, len(tests))))):
            for item in tests[:INPUTS]:
                self._append_input(added, item, turn, random.Random(f"{number} {item.nodeid}"))
        return added

    def _definition(self, item):
        is_pinned = isinstance(item, pytest.Function) and str(item.path) in self._pinned
        return definition(item, self._read(str(item.path))) if is_pinned else None

    def _append_input(self, items, item, turn, chosen):
        test = self._definition(item)
        places = arguments(test) if test is not None else []
        chosen.shuffle(places)
        for holder, key in places[turn : turn + 1]:
            holder[key] = watched("near", holder[key])
            self._append(items, item, compiled(test, item, Watch(chosen.getrandbits(16))), f"input{turn}")

    def _append(self, items, test, function, kind, watch=None):
        made = self._made(test.parent, test.name, function, like=test) if function is not None else None
        made = made or (test if kind == "again" else None)
        if made is not None:
            self._counters[made] = (kind, watch)
            items.append(made)

    def _insert(self, items, place, parent, name, function):
        probe = self._made(parent, name, function)
        if probe is not None:
            self._probes[probe] = str(len(self._probes))
            items.insert(place, probe)

    def _made(self, parent, name, function, like=None):
        """Return an item of a function, with the fixtures and the row of data of the test `like`; None for none."""
        more = {}
        if like is not None:
            instance = like._getinstance()
            function = function if instance is None else function.__get__(instance)
            more = {"fixtureinfo": like._fixtureinfo, "callspec": getattr(like, "callspec", None)}
            more["originalname"] = like.originalname
        try:
            return (pytest.Function if like is None else type(like)).from_parent(
                parent, name=name, callobj=function, **more
            )
        except AttributeError:
            return None  # pytest looks a parametrized name up in the test's class, which has none of that name.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        kind = self._counters.get(item, ("",))[0]
        self._is_again = kind == "again"
        if kind and not self._is_again:
            signal.signal(signal.SIGALRM, too_long)
            signal.setitimer(signal.ITIMER_REAL, INPUT_S)
        try:
            return (yield)
        finally:
            if kind and not self._is_again:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self._is_again = False

    def keep_shut(self, event, values):
        """Let graded code name no file beside tests while its modules are imported, nor in a test that runs again."""
        if not self._may_name(event, *values[:1]):
            return
        frame, was_graded, is_inner, is_import = sys._getframe(1), False, True, False
        while frame is not None and frame.f_code.co_filename not in self._pinned:
            file, name, is_here = frame.f_code.co_filename, frame.f_code.co_name, frame.f_globals is globals()
            is_inner = is_inner and (is_here or file.startswith("<frozen importlib"))
            is_import = is_import or (is_inner and name == "_find_and_load")
            is_own = is_graded(file)
            if is_own and name == "<module>" and not is_import:  # A package may import tests of its own.
                raise FileNotFoundError(values[0])
            was_graded = was_graded or is_own or (file[:1] == "<" and not file.startswith("<frozen") and not is_here)
            frame = frame.f_back
        if was_graded and self._is_again and not (is_import and self._unimported.isdisjoint(files_at(values[0]))):
            raise FileNotFoundError(values[0])

    def _may_name(self, event, path=None):
        """Tell whether what an event begins with may be the path of a file beside tests."""
        if event == "open" and isinstance(path, os.PathLike) and type(path) is not pathlib.PosixPath:
            return True  # It may give another path each time.
        return isinstance(path, (str, bytes, os.PathLike)) and not self._shut.isdisjoint(files_at(path))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._outcome, self._text = "", ""
        self._recorder.noted.clear()
        sys.setprofile(self._recorder if item.nodeid in self._spec.get("recorded", ()) else None)
        result = yield
        sys.setprofile(None)
        probe = self._probes.get(item)
        if item in self._counters:
            kind, watch = self._counters[item]
            self._send("counter", f"{kind} {item.nodeid}", self._outcome)
            if watch is not None and watch.asked:
                self._send("counter", f"equal {item.nodeid}", "passed" if watch.lied else "failed")
        elif probe is not None:
            self._send("probe", probe, self._outcome)
        else:
            self._send("test", item.nodeid, self._outcome)
            if self._text:
                self._send("why", item.nodeid, self._text)
        return result

    def pytest_sessionfinish(self):
        made = variants(self._recorder.calls, random.Random(self._spec["seed"]), self._spec.get("sought", ()))
        for call in made:
            self._send("call", text=json.dumps(call))
        answer_all([call[:4] for call in made], self._send)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._outcome, self._text = "failed", report.longreprtext[-WHY_CHARS:]
        elif report.skipped or hasattr(report, "wasxfail"):
            self._outcome = self._outcome or "skipped"
        elif report.when == "call":
            self._outcome = self._outcome or "passed"


class TooLong(BaseException):
    """Ends an input whose time is over, whatever exceptions the code catches."""


def too_long(number, frame):
    raise TooLong


def inodes(chooses):
    files = (os.path.join(folder, name) for folder, _, names in os.walk(ROOT) for name in names)
    return {found for path in files if chooses(path[len(ROOT) :]) for found in files_at(path)}


def files_at(path):
    """Yield what identifies the files that a path may mean: a relative one may stand below any open folder."""
    for folder in (None, *map(int, () if os.path.isabs(path) else os.listdir("/dev/fd"))):
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(path, dir_fd=folder)
            yield found.st_dev, found.st_ino


def pinned_sources(tests):
    paths = {os.path.abspath(test) for test in tests}
    for folder in map(os.path.dirname, sorted(paths)):
        while folder.startswith(os.getcwd()):
            paths.add(os.path.join(folder, "conftest.py"))
            folder = os.path.dirname(folder)
    texts = {path: pathlib.Path(path).read_bytes() for path in paths if os.path.isfile(path)}

    def read(path):
        sys.audit("open", path, "r", 0)  # As who opens the file.
        return texts[path]

    return frozenset(texts), read


def main():
    spec = json.loads(sys.stdin.buffer.read())
    send = open_channel(bytes.fromhex(spec.pop("key")))
    tests = [test for test in spec["tests"] if os.path.exists(test)]
    PinnedLoader.paths, PinnedLoader.read = pinned_sources(tests)
    for path in spec.get("hidden", ()):
        if os.path.isfile(path):
            open(path, "wb").close()
    sys.meta_path.insert(0, PinnedLoader)
    sys.path[:0] = [os.path.abspath(folder) for folder in spec["python_path"]]
    options = ["-q", "--tb=short", "--assert=plain", "--continue-on-collection-errors", f"--rootdir={os.getcwd()}"]
    options += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins="]
    before, sys.modules["__main__"] = fingerprint(), type(sys)("__main__")  # Else this one could be imported.
    send("hello")
    answer_all(spec.get("inputs", ()), send)
    if tests:
        pytest.main([*options, *tests], plugins=[Reporter(spec, send)])
    send("end", text=", ".join(changed(before))[:WHY_CHARS])
    os._exit(0)


if __name__ == "__main__":
    main()
