"""What the task factory takes out of a package, and the words of a task."""

from __future__ import annotations

import ast
import textwrap

import pytest

from orchestrator.coding.factory.baseline import Baseline, FactorySettings
from orchestrator.coding.factory.candidates import TaskCandidate, changed_files, find_candidates
from orchestrator.coding.factory.mutations import byte_lines, function_nodes, mutated, mutations
from orchestrator.coding.factory.prompts import deletion_prompt, difficulty, mutation_prompt, search_difficulty
from orchestrator.coding.factory.source_functions import (
    FunctionIndex,
    copies_elsewhere,
    index_functions,
    without_bodies,
)
from orchestrator.coding.factory.suite import TestRecord
from tests.factory.package_made import SHAPES, TESTS

PATH = "shapes_made/shapes.py"


def made_index(**others: str) -> FunctionIndex:
    texts = {f"{name}.py": text for name, text in others.items()}
    return index_functions({PATH: SHAPES}, {"tests/test_shapes.py": TESTS, **texts})


def place_of(index: FunctionIndex, qualname: str) -> str:
    return next(place for place, function in index.functions.items() if function.qualname == qualname)


def made_baseline(index: FunctionIndex) -> Baseline:
    node = "tests/test_shapes.py::test_all"
    tested = [place for place, function in index.functions.items() if function.name not in ("never_tested", "register")]
    return Baseline(
        stable={node: 0.01},
        reach={place: frozenset([node]) for place in tested},
        imported=frozenset([place_of(index, "register")]),
        lines=frozenset(f"{PATH}:{number}" for number in range(100)),
        excluded={},
        files={"tests/test_shapes.py": [node]},
        seconds={"tests/test_shapes.py": 0.01},
        preload=[],
    )


def candidates(index: FunctionIndex, seed: int = 0) -> list[TaskCandidate]:
    settings = FactorySettings(seed=seed, min_lines=2, mutations_per_function=3)
    return find_candidates("made", index, made_baseline(index), settings).candidates


# A deleted body is gone with its comments; signature and docstring stay, and the file is still valid.
def test_without_bodies_leaves_signature_and_docstring() -> None:
    index = made_index()
    (text,) = without_bodies(index, [place_of(index, "area"), place_of(index, "Box.put")]).values()
    ast.parse(text)
    assert "secret" not in text and "negative" not in text and "things.append" not in text
    assert "Return the area of a rectangle." in text and "Raises IndexError when the box is full." in text
    assert text.count("raise NotImplementedError") == 2
    assert "half = width + height" in text  # other functions keep theirs


# A helper that only the deleted function uses goes with it; one that others name stays.
def test_feature_takes_private_helpers() -> None:
    features = [one for one in candidates(made_index()) if one.shape == "feature"]
    assert [one.id for one in features] == ["made/delete/shapes_made.shapes.around+1"]
    (text,) = (changed_files(features[0], made_index()) or {}).values()
    assert "_double" not in text and "def around" in text
    with_user = made_index(other="from shapes_made.shapes import _double")
    assert not [one for one in candidates(with_user) if one.shape == "feature"]


# Functions that run at import or that no test reaches are left out, and counted.
def test_left_out_functions_are_counted() -> None:
    index = made_index()
    listed = find_candidates("made", index, made_baseline(index), FactorySettings(kinds=("delete",)))
    assert listed.left_out["runs when the package is imported"] == 1
    assert listed.left_out["no test reaches it"] == 1
    assert listed.left_out["a body of fewer than 3 lines"] == 2
    assert not [one for one in listed.candidates if "never_tested" in one.id or "register" in one.id]


# The seed alone decides the order; another seed gives another one, of mutations also another choice.
def test_candidates_are_deterministic() -> None:
    names = [one.id for one in candidates(made_index())]
    assert names == [one.id for one in candidates(made_index())] != [one.id for one in candidates(made_index(), seed=1)]
    assert len(names) == len(set(names))


# Every operator finds its mistake, and all changed files are valid and differ from the original.
@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("return a + b", "operator", "return a - b"),
        ("return a < b", "operator", "return a <= b"),
        ("return a is not b", "operator", "return a is b"),
        ("return a and b", "operator", "return a or b"),
        ("return a[1]", "off-by-one", "return a[2]"),
        ("if a: return b", "branch", "if not (a): return b"),
        ("if not a: return b", "branch", "if a: return b"),
        ("while a: b()", "branch", "while False: b()"),
        ("a.append(b)", "statement", "pass"),
        ("return max(a, b)", "arguments", "return max(b, a)"),
        ("return 'ä' + max(a, b)", "arguments", "return 'ä' + max(b, a)"),
        ("if a:\n    return 1\nelif b:\n    return 2", "case", "if a:\n    return 1"),
        ("try:\n    a()\nexcept A:\n    b()\nexcept B:\n    a()", "case", "try:\n    a()\nexcept A:\n    b()"),
        ("return (a)  +  (b)", "operator", "return (a)  -  (b)"),
    ],
)
def test_mutations(body: str, operator: str, expected: str) -> None:
    text = f"def f(a, b=3):\n{textwrap.indent(body, '    ')}\n"
    lines, node = byte_lines(text), function_nodes(text)[1]
    changes = mutations(node, lines, 2)
    texts = [mutated(lines, node, change) for change in changes if change.operator == operator]
    assert f"def f(a, b=3):\n{textwrap.indent(expected, '    ')}\n" in texts
    for change in changes:
        changed = mutated(lines, node, change)
        assert changed is not None and changed != text
        ast.parse(changed)
    assert [change.replacement for change in changes if change.operator == "default"] == ["4"]


# Mutations of a real file are valid wherever they are.
def test_all_mutations_of_a_file_are_valid() -> None:
    index = made_index()
    lines, nodes = byte_lines(SHAPES), function_nodes(SHAPES)
    count = 0
    for function in index.functions.values():
        for change in mutations(nodes[function.def_line], lines, function.body_start):
            text = mutated(lines, nodes[function.def_line], change)
            assert text is not None
            ast.parse(text)
            count += 1
    assert count > 20


# A body that stands in the tree a second time is found there, whatever its indentation.
def test_copies_of_a_body_are_found() -> None:
    index = made_index(copied=textwrap.indent(SHAPES, "    "))
    place = place_of(index, "area")
    assert copies_elsewhere(index, [place], without_bodies(index, [place])) == "copied.py"
    index = made_index()
    assert copies_elsewhere(index, [place], without_bodies(index, [place])) == ""


# The prompt of a deletion has signature, docstring and call sites, and no line of the body.
def test_deletion_prompt() -> None:
    index = index_functions({PATH: SHAPES, "shapes_made/use.py": "def use():\n    return area(1, 2)\n"}, {})
    function = index.functions[place_of(index, "area")]
    prompt = deletion_prompt(index, [function], helpers=0, start=without_bodies(index, [function.place]))
    assert "def area(width, height=1):" in prompt and "Return the area of a rectangle." in prompt
    assert "`shapes_made/use.py:2`: `return area(1, 2)`" in prompt
    assert "width * height" not in prompt and "secret" not in prompt


# The prompt of a mutation names the test and its assertion, and no address that changes from run to run.
def test_mutation_prompt() -> None:
    record = TestRecord(
        node="tests/test_shapes.py::test_area",
        outcome="failed",
        duration_s=0.0,
        network=False,
        message="assert <Box at 0x7f00deadbeef> == 6",
        assertion="assert shapes.area(2, 3) == 6",
    )
    prompt = mutation_prompt([record], total=1)
    assert "tests/test_shapes.py::test_area" in prompt and "assert shapes.area(2, 3) == 6" in prompt
    assert "7f00deadbeef" not in prompt and PATH not in prompt


# More code, and a bug under more functions, count as harder; estimates stay between 0 and 1.
def test_difficulty_orders_tasks() -> None:
    small = difficulty(body_lines=3, branches=0, callees=1, failing=1, files=1)
    large = difficulty(body_lines=60, branches=12, callees=20, failing=30, files=3)
    assert 0 < small < large < 1
    assert (
        0
        < search_difficulty(reached=2, body_lines=5, failing=9)
        < search_difficulty(reached=200, body_lines=5, failing=1)
        < 1
    )
