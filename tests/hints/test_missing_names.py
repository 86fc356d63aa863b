"""Names that are missing: errors of Python and of a linter, and the hints that quote them."""

import pytest

from orchestrator.hints.generate import Templates


# An undefined name, a missing module and a missing attribute are errors of their own kind, in either program's words.
@pytest.mark.parametrize(
    "text",
    [
        "E   NameError: name 'frequency' is not defined",
        "ModuleNotFoundError: No module named 'demo.words'",
        "ImportError: cannot import name 'total' from 'demo' (/work/demo/__init__.py)",
        "E   AttributeError: module 'demo' has no attribute 'total'",
        "demo/words.py:3:12: undefined name 'frequency'",
    ],
)
def test_a_missing_name_is_found(text: str) -> None:
    assert Templates.load().detected(text, {"exception"}) == "missing_name"


# A failed test stays a failed test: its own line comes first.
def test_a_failed_test_is_not_a_missing_name() -> None:
    text = "1 failed\nFAILED t.py::test_a - NameError: name 'x' is not defined\nE   NameError: name 'x' is not defined"
    assert Templates.load().detected(text, {"exception", "test_failure"}) == "test_failure"
