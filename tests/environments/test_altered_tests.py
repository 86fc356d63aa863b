"""Expected tests with another constant: which comparisons are changed, and which never are."""

import ast

import pytest

from orchestrator.coding.code.reporter import another, compared, plain_value


# Both sides of an assertion of equality are looked at, and a test's row of data is read; other statements are not.
@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("assert f(1) == 3", [3]),
        ("assert [1, 2] == f(x)", [[1, 2]]),
        ("assert row == f(x)", ["value"]),
        ("self.assertEqual(f(x), 'a')", ["a"]),
        ("assert f(x) != 3", []),
        ("assert f(x) in (3, 4)", []),
        ("assert f(x) == approx(3)", []),
        ("with raises(E):\n    assert f(x) == 3", []),
        ("if x:\n    assert f(x) == 3", []),
        ("f(x) == 3", []),
    ],
)
def test_comparisons_with_plain_constants(statement, found):
    sides = compared(ast.parse(statement).body[0])
    values = [plain_value(node, {"row": "value"}) for _, _, node in sides]
    assert [value for value in values if value is not None] == found


# The other constant has the same type, and differs.
@pytest.mark.parametrize("value", [0, 1.5, "", b"x", [], (1,), {"a": 1}])
def test_another_constant_differs(value):
    assert another(value, 7) != value and type(another(value, 7)) is type(value)
