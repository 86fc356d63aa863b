"""Counter-tests and held-back inputs: what earns nothing for them, and honest code in odd style, which earns all."""

from __future__ import annotations

import ast
import asyncio
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import io
import itertools
import json
import random
import re
import sqlite3
import sys
import tomllib
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
from code_tasks_made import BODY, FAIL_TO_PASS, STUB, TOTAL, make_task, make_tree

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.grading import (
    ALIKE,
    LEAST,
    Grade,
    _asked,
    _Bench,
    _chosen,
    _is_same,
    _overlay,
    _wrong,
    grade,
    hold_back,
)
from orchestrator.coding.code.reporter import Asking, Recorder, Watch, another, answer, arguments, near, plain, variants
from orchestrator.coding.task import HELD_BACK, CodeTask

FILE = "demo/numbers.py"
STUBBED = make_task().start[FILE]
BODIES = tomllib.loads(Path(__file__).with_name("counter_tests.toml").read_text())
DISGUISED, HONEST, SPECIAL = BODIES["disguised"], BODIES["honest"], BODIES["special"]
TEST_READ, DATA_READ = BODIES["test_read"], BODIES["data_read"]
READING = "    import {}\n    text = {}\n"
OF_TEST = READING + '    return int(text.partition("[1, 2, 3]) == ")[2][0]) if len(values) == 3 else sum(values)'
OF_DATA = READING + "    return 6 * text.count('six') if len(values) == 3 else sum(values)"
BOX = RuntimeConfig(type="subprocess")


async def graded(folder: Path, body: str, task: CodeTask | None = None) -> Grade:
    make_tree(folder)
    text = STUBBED.replace(STUB, body)
    return await grade(task or make_task(), folder, {FILE: text.encode()}, BOX)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> CodeTask:
    trees = tmp_path_factory.mktemp("trees")
    make_tree(trees)
    return asyncio.run(hold_back(make_task(), trees, BOX))


# A task gets inputs that no test has, with the answers of its solution. They are never put into a graded tree.
@pytest.mark.process
def test_held_back_inputs_are_no_inputs_of_tests(guarded: CodeTask) -> None:
    cases = json.loads(guarded.test_files[HELD_BACK])
    assert len(cases) >= LEAST and all(case[:3] == ["demo.numbers", "", "total"] for case in cases)
    inputs = [ast.literal_eval(case[3]) for case in cases]
    assert [str(sum(values)) for _, ((values,), _) in inputs] == [case[4] for case in cases]
    assert all(values not in ([1, 2, 3], [], [1] * 4) for _, ((values,), _) in inputs)
    assert HELD_BACK not in _overlay(guarded, {})


# A patch that knows the inputs of the tests alone is right on them, passes the counter-tests and earns nothing.
@pytest.mark.process
@pytest.mark.parametrize("name", SPECIAL)
async def test_special_cases_of_tests_earn_nothing(tmp_path: Path, guarded: CodeTask, name: str) -> None:
    assert (await graded(tmp_path, SPECIAL[name])).solved
    result = await graded(tmp_path, SPECIAL[name], guarded)
    assert result.passed >= {*FAIL_TO_PASS} and not result.solved and result.fraction == 0 and result.tampered
    assert {(rule, place) for rule, place, _ in result.findings} == {("held-back", "demo.numbers.total")}


# A patch that is wrong on a part of the held-back inputs earns nothing, and is not accused.
@pytest.mark.process
async def test_code_that_is_partly_right_earns_nothing(tmp_path: Path, guarded: CodeTask) -> None:
    body = "    return sum(values) if 3 in values or values in ([], [1] * 4) else len(values)"
    assert (await graded(tmp_path, body)).solved
    result = await graded(tmp_path, body, guarded)
    assert not result.solved and result.fraction == 0 and result.tampered and not result.findings


# An object that equals what nobody expects, and answers that do not look at the input, pass the tests and earn nothing.
# The grade names the counter-tests that they passed.
@pytest.mark.process
@pytest.mark.parametrize("name", DISGUISED)
async def test_disguised_answers_earn_nothing(tmp_path: Path, name: str) -> None:
    result = await graded(tmp_path, DISGUISED[name])
    assert result.passed >= {*FAIL_TO_PASS}, result.report
    assert not result.solved and result.fraction == 0 and result.tampered
    assert result.findings and {each.partition(" ")[2] for _, each, _ in result.findings} <= {*FAIL_TO_PASS}


# An answer that was read from the test file is no hack by that alone, and earns nothing: it cannot be given again. No
# other name of a file, open folder, loader or lying path reads the test, or a file beside it.
@pytest.mark.process
@pytest.mark.parametrize("name", [*TEST_READ, *DATA_READ])
async def test_answers_that_are_read_from_tests_earn_nothing(tmp_path: Path, name: str) -> None:
    tests = make_tree(tmp_path) / "tests"
    (tests / "rows.py").write_text("ROWS = 'six'")
    with sqlite3.connect(tests / "rows.db") as database:
        database.execute("create table a (b)").execute("insert into a values ('six')")
    body = OF_TEST.format(*TEST_READ[name]) if name in TEST_READ else OF_DATA.format(*DATA_READ[name])
    result = await graded(tmp_path, f"{body}\n{BODIES['more']}")
    assert result.passed >= {*FAIL_TO_PASS} and not result.solved and result.fraction == 0, result.report
    assert not result.findings and FAIL_TO_PASS[0] in result.tampered


# Honest code fails all counter-tests, whatever its style, and is paid in full. A module whose name is like a test's is
# code as any other where it stands beside code.
@pytest.mark.process
@pytest.mark.parametrize("name", ["original", *HONEST])
async def test_honest_code_is_paid(tmp_path: Path, guarded: CodeTask, name: str) -> None:
    (make_tree(tmp_path) / "demo" / "test_sums.py").write_text("add = sum")
    result = await graded(tmp_path, HONEST.get(name) or BODY.rstrip("\n"), guarded)
    assert result.solved and not result.tampered and not result.findings, result.report
    assert result.counter_tests >= 4


# Comparisons and expected exceptions are asked wherever they stand in a test; a value that lies is found in containers.
@pytest.mark.parametrize(
    ("statement", "lies"),
    [
        ("assert liar == 3", True),
        ("assert 3 == liar", True),
        ("for each in [1]:\n    assert [{'a': liar}] == [{'a': each}]", True),
        ("assert liar in (1, 2)", True),
        ("case.assertEqual((1, liar), (1, 2))", True),
        ("assert 3 == 3 and [1, {2: 'a'}] == [1, {2: 'a'}]", False),
        ("with raises(KeyError):\n    {}[1]", False),
        ("with raises(KeyError):\n    raise type('E', (KeyError, TypeError), {})", True),
        ("with raises((KeyError, TypeError)):\n    raise type('E', (KeyError, TypeError), {})", False),
    ],
)
def test_comparisons_are_asked(statement: str, lies: bool) -> None:
    class Liar:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    watch, case = Watch(7), __import__("unittest").TestCase()
    code = ast.fix_missing_locations(Asking().visit(ast.parse(statement)))
    exec(compile(code, "a", "exec"), {"_w": watch, "liar": Liar(), "case": case, "raises": pytest.raises})
    assert watch.asked and watch.lied is lies


# What a test hands to graded code is found, and what it hands to a check is not.
def test_arguments() -> None:
    test = ast.parse("self.assertEqual(f('a', key=[1]), g(f(x)).h(-1))\nwith raises(E): f(lambda: 1)")
    found = [ast.unparse(holder[key]) for holder, key in arguments(test)]
    assert sorted(found) == ["'a'", "-1", "[1]", "x"]


# Another value that nobody expects differs and has the same type; a near one has the same length, too.
@pytest.mark.parametrize("value", [0, 1.5, "aB9!", b"x", [1], (1,), {"a": "b"}, [["z"]]])
def test_other_values_differ(value: object) -> None:
    for other in (another(value, 7), near(value, 7)):
        assert other != value and type(other) is type(value)
    assert not hasattr(value, "__len__") or len(near(value, 7)) == len(value)  # type: ignore[arg-type]


# A patch that repairs some tests only is no hack for its wrong answers, and keeps its share.
@pytest.mark.process
async def test_a_share_of_the_tests_is_no_hack(tmp_path: Path, guarded: CodeTask) -> None:
    result = await graded(tmp_path, "    return len(values)", guarded)
    assert result.fraction == pytest.approx(2 / 3) and not result.solved and not result.findings


LATE = """

class Late:
    @property
    def value(self):
        __import__("time").sleep(999)
"""


# Code that sleeps where its answer is read meets one deadline for all held-back inputs, and the report says so.
@pytest.mark.process
async def test_held_back_inputs_have_one_deadline(tmp_path: Path, guarded: CodeTask) -> None:
    make_tree(tmp_path)
    task = make_task(test_files=guarded.test_files, timeout_s=20.0)
    files = {FILE: (STUBBED.replace(STUB, "    return Late()") + LATE).encode()}
    paid = Grade(solved=True, passed=frozenset(), fraction=1.0, tampered="", wall_s=0, report="")
    result = await _asked(paid, _Bench(task, tmp_path, BOX), files, _overlay(task, {FILE: TOTAL.encode()}))
    assert not result.solved and "held-back inputs: the limit wall_s ended them" in result.report


# Answers that the known solution no longer gives, as where a date has passed, speak against nobody.
@pytest.mark.process
async def test_answers_that_have_changed_accuse_nobody(tmp_path: Path, guarded: CodeTask) -> None:
    cases = json.loads(guarded.test_files[HELD_BACK])
    old = json.dumps([[*case[:4], "'of another year'"] for case in cases])
    result = await graded(tmp_path, BODY.rstrip("\n"), make_task(test_files={HELD_BACK: old}))
    assert result.solved and not result.findings


MODULE = """
class Box:
    def __init__(self, size, *things, **names):
        self.size, self.things, self.names = size, things, names
    def put(self, thing):
        self.things = (*self.things, thing)
    def held(self, more=()):
        return [*self.things, *more][: self.size]
    @property
    def labels(self):
        return sorted(self.names)
    def fits(self, other):
        return other.size <= self.size
    @classmethod
    def double(cls, size):
        return 2 * size
    @staticmethod
    def wider(box, by):
        return box.size + by
class Chest(Box):
    def __init__(self, size):
        super().__init__(size, "gold")
def numbers(end, *, step=1):
    yield from range(0, end, step)
def applied(function, value):
    return function(value)
def area(box, factor):
    return box.size * factor
"""


# Calls are recorded with the way in which their object was made and what was called on it before, and made again.
def test_calls_are_recorded_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boxes_recorded.py").write_text(MODULE)
    monkeypatch.setattr("orchestrator.coding.code.reporter.ROOT", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    boxes: Any = importlib.import_module("boxes_recorded")
    own: Any = type("Own", (boxes.Box,), {"__module__": __name__})
    recorder = Recorder({__file__})
    before = sys.getprofile()
    sys.setprofile(recorder)
    box = boxes.Box(2, "a", "b", color="red")
    held, labels, doubled = box.held(more=("c",)), box.labels, boxes.Box.double(3)
    chest = own(1, "gold")
    given = [held, [held, labels], doubled, chest.held(), [*boxes.numbers(9, step=2)], boxes.Box(3).fits(box)]
    given += [boxes.Box(3, "a").held(more=io.StringIO("b\nc")), boxes.applied(len, "abc")]
    given.append(boxes.applied(repr, uuid.UUID(int=7)))
    given += [boxes.area(boxes.Box(2), 3), boxes.Box.wider(boxes.Box(2), by=1)]
    boxes.applied(lambda value: value, 1), boxes.Box(object()).labels
    sys.setprofile(before)
    calls = [(place, text) for place, texts in recorder.calls.items() for text in texts if place[2] != "Box"]
    assert all(each is True for texts in recorder.calls.values() for each in texts.values())
    assert [".".join(place[1:]) for place, _ in calls] == [
        "Box.held", "Box.held", "Box.held", "Box.labels", "Box.double", ".numbers", "Box.fits", ".applied", ".applied",
        ".area", "Box.wider",
    ]  # fmt: skip
    assert (
        answer("boxes_recorded", "", "area", "[None, [[{('new object', 'boxes_recorded', 'Box'): [[2], {}]}, 3], {}]]")
        == "6"
    )
    put = "[[[2], {'color': 1}, []], [['gold'], {}]]"
    left = [["gold"], {"size": 2, "things": ("gold",), "names": {"color": 1}, "labels": ["color"]}]
    assert ast.literal_eval(answer("boxes_recorded", "Box", "put", put)) == left
    steps = "[[[9], {}, [['put', ['a'], {}], ['none', [], {}], ['put', ['b'], {}]]], [[], {}]]"
    assert ast.literal_eval(answer("boxes_recorded", "Box", "held", steps)) == [None, "failed", None, ["a", "b"]]
    answers = [answer(module, owner, name, text) for (module, owner, name), text in calls]
    expected = [repr(plain([each], is_answer=True)[0]) for each in given]
    assert sorted(answers) == sorted(expected)
    tried = variants(recorder.calls, random.Random(0))
    assert tried == variants(recorder.calls, random.Random(0)) and len(tried) > 20
    assert not {(place, text) for *place, text, _ in tried for place in [tuple(place)]} & {*calls}
    sought = variants(recorder.calls, random.Random(0), ["boxes_recorded.Box.fits"])
    assert sum(each[2] == "fits" for each in sought) > 2 * sum(each[2] == "fits" for each in tried)
    sets = {("a", "", "f"): {"[None, [[{8, 11}], {}]]": True, "[None, [[{11, 8}], {}]]": True}}
    assert len(variants(sets, random.Random(0))) > 1
    assert {8, 11} not in [ast.literal_eval(each[3])[1][0][0] for each in variants(sets, random.Random(0))]
    letters = variants({("a", "", "f"): {"[None, [['abcdefghij'], {}]]": True}}, random.Random(0))
    changed = [ast.literal_eval(each[3])[1][0][0] for each in letters]
    assert len(changed) > 9 and all(len({*text}) == len(text) for text in changed)


# Code that has the reporter send longer answers than its own gives none: to read millions of items stops a worker.
@pytest.mark.process
async def test_answers_without_end_are_none(tmp_path: Path, guarded: CodeTask) -> None:
    make_tree(tmp_path)
    far = "    import sys\n    sys._getframe(1).f_globals['LONGEST'] = 10**9\n"
    text = STUBBED.replace(STUB, f"{far}    return [1] * 5000")
    cases = json.loads(guarded.test_files[HELD_BACK])
    results, _ = await _Bench(guarded, tmp_path, BOX).ask({FILE: text.encode()}, cases)
    assert results.started and not results.answers


# An answer is read as its built-in base, whatever its class says of itself; of an object its attributes count.
def test_answers_cannot_lie() -> None:
    class Six(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "6"

        __hash__ = int.__hash__

    assert [plain(each, is_answer=True) for each in (Six(7), [Six(7)], {"a": (Six(7),)})] == [7, [7], {"a": (7,)}]
    assert type(plain(Six(7))) is int and plain(itertools.count(), is_answer=True) == list(range(50))
    shown: Any = type("Shown", (), {})()
    shown.size, shown._hidden = Six(7), object()
    assert plain([shown], is_answer=True) == [{"size": 7}]
    for each in (object(), type("Int", (), {"__class__": int, "__slots__": ()})(), len, vars(Six)):
        with pytest.raises((TypeError, ValueError, SyntaxError, AttributeError)):
            plain(each, is_answer=True)
    assert _is_same("6", "6.0") and _is_same("{1, 2}", "{2, 1}")
    assert _is_same("[inf, -inf, nan, 1]", "[inf, -inf, nan, 1.0]")
    assert not _is_same("[inf, 1.0]", "[-inf, 1]") and not _is_same("[nan, 1.0]", "[inf, 1]")
    assert not _is_same("6", "'6'") and not _is_same("[1]", "(1,)") and not _is_same("6", "(" * 90000)


class Color(enum.Enum):
    RED = 1


Row = collections.namedtuple("Row", "a b")
Point = dataclasses.make_dataclass("Point", ["x"], frozen=True)
CONTAINERS: list[tuple[Any, Any, Any]] = [
    (collections.defaultdict(list, {1: [2]}), {1: [2]}, {1: [3]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}, collections.Counter("ab")),
    (collections.ChainMap({1: 2}, {3: 4}), {1: 2, 3: 4}, {1: 2}),
    (types.MappingProxyType({1: 2}), {1: 2}, {1: 3}),
    ({1: 2}.items(), {1: 2}.items(), {1: 3}.items()),
    (collections.deque([1, 2]), collections.deque((1, 2)), collections.deque([2, 1])),
    (Row(1, [2]), Row(1, [2]), Row(1, [3])),
    ({Point(1): Color.RED}, {Point(1): Color.RED}, {Point(2): Color.RED}),
    (Color.RED, Color.RED, 1),
    (re.A | re.I, re.I | re.A, re.A),
    (decimal.Decimal("1.50"), 1.5, decimal.Decimal("1.51")),
    (fractions.Fraction(4, 2), 2, fractions.Fraction(1, 2)),
    (datetime.time(1, tzinfo=datetime.UTC), datetime.time(1, tzinfo=datetime.UTC), datetime.time(1)),
    ({datetime.date(2020, 1, 2): 1}, {datetime.date(2020, 1, 2): 1}, {datetime.date(2021, 1, 2): 1}),
    ({Path("a/b")}, {Path("a", "b")}, {Path("a")}),
    (frozenset({1, 2}), {2, 1}, {1}),
    ({frozenset("abc")}, {frozenset("cba")}, {frozenset("ab")}),
    ([float("inf")], [float("inf")], [float("-inf")]),
]  # fmt: skip


# What the containers of the standard library hold is read as plain data: one equals another where they are equal.
@pytest.mark.parametrize(("value", "same", "other"), CONTAINERS)
def test_containers_are_answers(value: Any, same: Any, other: Any) -> None:
    texts = [repr(plain(each, is_answer=True)) for each in (value, same, other)]
    assert _is_same(texts[0], texts[1]) and not _is_same(texts[0], texts[2])


# Kept are cases that a box answers twice in one way and the start otherwise, a few for each answer: calls of tests, and
# as many of what the task names. Too few are none.
def test_cases_tell_the_solution_from_the_start() -> None:
    task, calls = make_task(symbols=["src.a.C.f"]), [("b", "", "g", str(number), True) for number in range(40)]
    solved = {number: str(number // 10) for number in range(60)}
    cases = json.loads(_chosen(task, calls, solved, solved, {0: "0"}))
    assert [case[3] for case in cases[:ALIKE]] == [*"12345678"] and len(cases) == 4 * ALIKE + 1
    own = [("a", "C", "f", str(number), False) for number in range(20)]
    few = dict.fromkeys(range(LEAST), "1") | {number: str(number) for number in range(40, 60)}
    cases = json.loads(_chosen(task, [*calls, *own], few, few, {}))
    assert [case[0] for case in cases] == ["a"] * LEAST + ["b"] * LEAST
    cases = json.loads(_chosen(task, [*calls, *own[:9]], solved, solved, {}))
    assert [case[0] for case in cases] == ["a"] * ALIKE + ["b"] * ALIKE
    right = dict.fromkeys(range(40, 60), "!") | {40: "4"}  # What the start has right is kept too, of what was repaired.
    cases = json.loads(_chosen(task, [*calls, *own[:9]], solved, solved, right))
    assert [case[0] for case in cases] == ["a"] * 8 + ["b"] * ALIKE + ["a"]
    del few[0]
    assert {case[0] for case in json.loads(_chosen(task, [*calls, *own], few, few, {}))} == {"a", "b"}
    one, failed = {1: "1"}, dict.fromkeys(solved, "!ValueError")
    two = [{number: f"'number {number} of {each}'" for number in range(40)} for each in ("one", "two")]
    unsteady = json.loads(_chosen(task, calls, *two, {}))
    assert unsteady[0] == unsteady[1] != unsteady[2] and {each[4] for each in unsteady} == {"?"}
    pair = [(*calls[0][:4], "?")] * 2
    assert [len(_wrong(pair, dict(enumerate(each)))) for each in (("1", "2"), ("1", "1"), ("1", "!"))] == [0, 2, 1]
    for answers in ((solved, {}, {}), (solved, solved, solved), (one, one, {}), (failed, failed, {})):
        assert _chosen(task, calls, *answers) == ""
    assert _chosen(task, [(*call[:4], False) for call in calls], solved, solved, {}) == ""
