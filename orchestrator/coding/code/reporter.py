"""Runs inside the box: pytest over a task's tests, with an outcome a line on a channel of its own.

`grading.py` sends this file's text to the box's interpreter and a JSON object to its standard input.
Each line of the channel is an HMAC and a JSON array [number, kind, id, text]:

    hello     pytest is loaded; nothing of the graded tree was imported yet
    test      id: node id, text: passed | failed | skipped
    why       id: node id, text: the end of the failure's text
    collect   id: file that could not be imported, text: the reason
    probes    text: how many probes there are
    probe     id: number of a probe, text: its outcome
    end       text: names of what was changed in pytest, unittest and builtins; empty for nothing

A probe is a test that must fail (`add_probes`). Some are expected tests that expect another constant (`altered`), to
which only an object that equals everything is equal.
"""

import ast
import hashlib
import hmac
import importlib.machinery
import json
import os
import random
import shutil
import sys
import unittest

import pytest

WHY_CHARS = 1500
ALTERED = 3
"""Expected tests that also run with another constant."""
PLAIN = (str, bytes, int, float, list, tuple, dict)
EQUALITIES = ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual")
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
    """Compiles modules from bytes in memory, and reads no bytecode."""

    sources: dict[str, bytes]
    """By absolute path."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in cls.sources:
            spec.loader = cls(name, spec.origin)
        return spec

    def get_data(self, path):
        return self.sources[self.path]

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)


def fingerprint():
    """Return {name: identity} of the functions and methods that decide what an outcome is."""
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


def altered(item, source, number):
    """Return a test's function that expects another constant, where it compares with one.

    Only comparisons count that run whenever the test passes. `number` chooses one, and the new constant.
    """
    test = definition(item, source)
    if test is None or any(isinstance(each, (ast.Return, ast.Yield)) for each in ast.walk(test)):
        return None
    row = item.callspec.params if hasattr(item, "callspec") else {}
    places = [place for statement in test.body for place in compared(statement)]
    places = [place for place in places if plain_value(place[2], row) is not None]
    if not places:
        return None
    parent, field, node = places[number % len(places)]
    new = ast.copy_location(ast.parse(repr(another(plain_value(node, row), number)), mode="eval").body, node)
    old = getattr(parent, field)
    setattr(parent, field, [new if each is node else each for each in old] if isinstance(old, list) else new)
    test.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(body=[test], type_ignores=[]))
    namespace = {}
    exec(compile(module, str(item.path), "exec"), item.function.__globals__, namespace)
    return namespace[test.name]


def definition(item, source):
    """Return the syntax tree of a test's function; None where decorators are no marks."""
    scope, found = ast.parse(source).body, None
    for name in item.nodeid.partition("[")[0].split("::")[1:]:
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next((each for each in reversed(scope) if isinstance(each, kinds) and each.name == name), None)
        scope = found.body if found is not None else []
    is_plain = isinstance(found, ast.FunctionDef) and all(
        ast.unparse(each).startswith("pytest.mark.") for each in found.decorator_list
    )
    return found if is_plain else None


def compared(statement):
    """Yield (parent, its field, expression) of what a statement asserts to be equal."""
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        if [type(each) for each in statement.test.ops] == [ast.Eq]:
            yield statement.test, "left", statement.test.left
            yield statement.test, "comparators", statement.test.comparators[0]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in EQUALITIES:
            yield from ((statement.value, "args", each) for each in statement.value.args[:2])


def plain_value(node, row):
    """Return the value of a constant, or of a name in a test's row; None for others."""
    try:
        value = row[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
        ast.literal_eval(repr(value))
    except (KeyError, ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return value if type(value) in PLAIN else None


def another(value, number):
    """Return another value of the same type, which graded code cannot foresee."""
    if isinstance(value, (int, float)):
        return value + 1 + number
    if isinstance(value, str):
        return f"{value} {number:x}"
    if isinstance(value, bytes):
        return value + b" %x" % number
    if isinstance(value, dict):
        return {**value, f"key {number:x}": number}
    return type(value)([*value, number])


def edge(items, module, at_end):
    inside = [place for place, item in enumerate(items) if module in item.listchain()]
    return inside[-1] + 1 if at_end else inside[0]


class Reporter:
    """The pytest plugin. It writes a record for each test as soon as the test has ended."""

    def __init__(self, spec, send, sources):
        self._spec = spec
        self._sources = sources
        self._send = send
        self._probes = {}
        self._outcome = ""
        self._text = ""

    def pytest_collectreport(self, report):
        if report.failed:
            self._send("collect", report.nodeid, str(report.longrepr)[-WHY_CHARS:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.add_probes(items, random.Random(self._spec["seed"]))
        self._send("probes", text=str(len(self._probes)))

    def add_probes(self, items, chosen):
        """Put in tests that must fail: twins with the ids of expected tests, others at the edges of test files.

        Honest code sees no difference. Altered tests run a test's body once more, so they come last.
        """
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
        self._add_altered(items, [test for test in expected if test.nodeid in self._spec["repaired"]], chosen)

    def _add_altered(self, items, repaired, chosen):
        most = len(items) + ALTERED
        for test in chosen.sample(repaired, len(repaired)):
            function = altered(test, self._sources.get(str(test.path), b""), chosen.getrandbits(32))
            if function is not None and len(items) < most:
                self._insert(items, len(items), test.parent, test.name, function, like=test)

    def _insert(self, items, place, parent, name, function, like=None):
        """Put in a probe, with the fixtures and the row of data of the test `like`."""
        more = {}
        if like is not None:
            instance = like._getinstance()
            function = function if instance is None else function.__get__(instance)
            more = {"fixtureinfo": like._fixtureinfo, "callspec": getattr(like, "callspec", None)}
            more["originalname"] = like.originalname
        try:
            probe = (pytest.Function if like is None else type(like)).from_parent(
                parent, name=name, callobj=function, **more
            )
        except AttributeError:
            return  # pytest looks a parametrized name up in the test's class, which has none of that name.
        self._probes[probe] = str(len(self._probes))
        items.insert(place, probe)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._outcome, self._text = "", ""
        result = yield
        probe = self._probes.get(item)
        if probe is not None:
            self._send("probe", probe, self._outcome)
        else:
            self._send("test", item.nodeid, self._outcome)
            if self._text:
                self._send("why", item.nodeid, self._text)
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._outcome, self._text = "failed", report.longreprtext[-WHY_CHARS:]
        elif report.skipped or hasattr(report, "wasxfail"):
            self._outcome = self._outcome or "skipped"
        elif report.when == "call":
            self._outcome = self._outcome or "passed"


def remove(paths):
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)


def pinned_sources(tests):
    """Return the bytes of the test files and of each conftest.py beside or above one."""
    paths = set()
    for test in tests:
        folder = os.path.dirname(os.path.abspath(test))
        paths.add(os.path.abspath(test))
        while folder.startswith(os.getcwd()):
            paths.add(os.path.join(folder, "conftest.py"))
            folder = os.path.dirname(folder)
    sources = {}
    for path in paths:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                sources[path] = file.read()
    return sources


def main():
    spec = json.loads(sys.stdin.buffer.read())
    send = open_channel(bytes.fromhex(spec.pop("key")))
    remove(spec["removed"])
    tests = [test for test in spec["tests"] if os.path.exists(test)]
    PinnedLoader.sources = sources = pinned_sources(tests)
    sys.meta_path.insert(0, PinnedLoader)
    sys.path[:0] = [os.path.abspath(folder) for folder in spec["python_path"]]
    options = ["-q", "--tb=short", "--assert=plain", "--continue-on-collection-errors", f"--rootdir={os.getcwd()}"]
    options += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins="]
    before = fingerprint()
    send("hello")
    if tests:
        pytest.main([*options, *tests], plugins=[Reporter(spec, send, sources)])
    send("end", text=", ".join(changed(before))[:WHY_CHARS])
    os._exit(0)


if __name__ == "__main__":
    main()
