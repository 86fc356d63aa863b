"""What the task factory takes out of a package, and the words of a task."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.factory.baseline import Baseline
from orchestrator.coding.factory.building import deletion_prompt, symptoms
from orchestrator.coding.factory.candidates import FactorySettings, SourceWork, TaskCandidate, find_candidates
from orchestrator.coding.factory.mutations import byte_lines, function_nodes, mutated, mutations
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.factory.source_functions import FunctionIndex, index_functions, without_bodies
from orchestrator.coding.factory.suite import TestRecord, TreeSuite
from tests.factory.package_made import SHAPES

PATH = "shapes_made/shapes.py"


def made_index() -> FunctionIndex:
    return index_functions({PATH: SHAPES})


def place_of(index: FunctionIndex, qualname: str) -> str:
    return next(place for place, function in index.functions.items() if function.qualname == qualname)


def made_baseline(index: FunctionIndex) -> Baseline:
    node = "tests/test_shapes.py::test_all"
    tested = [
        place for place, function in index.functions.items() if function.qualname not in ("never_tested", "register")
    ]
    return Baseline(
        stable=frozenset([node]),
        reach={place: frozenset([node]) for place in tested},
        imported=frozenset([place_of(index, "register")]),
        excluded={},
        files={"tests/test_shapes.py": [node]},
        seconds={"tests/test_shapes.py": 0.01},
        preload=[],
    )


def found(**settings: Any) -> tuple[list[TaskCandidate], Counter[str]]:
    index = made_index()
    tree = SourceTree(
        folder=Path("made"),
        repository="made",
        origin="here",
        python_path=(".",),
        sources=(PATH,),
        tests=(),
        compiled=(),
    )
    suite = TreeSuite(runtime=RuntimeConfig(), folder=tree.folder, python_path=tree.python_path)
    work = SourceWork(tree=tree, suite=suite, index=index, baseline=made_baseline(index))
    return find_candidates(work, FactorySettings(**settings))


# A deleted body is gone with its comments; signature and docstring stay, and the file is still valid.
def test_without_bodies_leaves_signature_and_docstring() -> None:
    index = made_index()
    (text,) = without_bodies(index, [place_of(index, "area"), place_of(index, "Box.put")]).values()
    ast.parse(text)
    assert "secret" not in text and "negative" not in text and "things.append" not in text
    assert "Return the area of a rectangle." in text and "Raises IndexError when the box is full." in text
    assert text.count("raise NotImplementedError") == 2
    assert "half = width + height" in text  # other functions keep theirs


# Functions that run at import or that no test reaches are left out, and counted.
def test_left_out_functions_are_counted() -> None:
    candidates, left_out = found(kinds=("delete",))
    assert left_out["runs when the package is imported"] == 1
    assert left_out["no test reaches it"] == 1
    assert left_out["a body of fewer than 3 lines"] == 2
    assert not [one for one in candidates if "never_tested" in one.id or "register" in one.id]
    assert {one.shape for one in candidates} == {"function", "class", "module"}


# The seed alone decides the order; another seed gives another one, of mutations also another choice.
def test_candidates_are_deterministic() -> None:
    names = [one.id for one in found()[0]]
    assert names == [one.id for one in found()[0]] != [one.id for one in found(seed=1)[0]]
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
        ("x = 'ä'; return a + b", "operator", "x = 'ä'; return a - b"),
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


# The prompt of a deletion has signature and docstring, and no line of the body.
def test_deletion_prompt() -> None:
    index = made_index()
    prompt = "\n".join(deletion_prompt([index.functions[place_of(index, "area")]]))
    assert "def area(width, height=1):" in prompt and "Return the area of a rectangle." in prompt
    assert "width * height" not in prompt and "secret" not in prompt


# A symptom names the test and its assertion, and no address that changes from run to run.
def test_symptoms() -> None:
    record = TestRecord(
        node="tests/test_shapes.py::test_area",
        outcome="failed",
        duration_s=0.0,
        message="assert <Box at 0x7f00deadbeef> == 6",
        assertion="assert shapes.area(2, 3) == 6",
    )
    (text,) = symptoms([record])
    assert "tests/test_shapes.py::test_area" in text and "assert shapes.area(2, 3) == 6" in text
    assert "7f00deadbeef" not in text
