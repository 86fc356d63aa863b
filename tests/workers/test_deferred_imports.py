"""verifiers loads without sympy until mathematics is scored."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util
import sys
import orchestrator.workers.verifiers_adapter
from verifiers.v1.utils.score import verify_boxed_math_answer as verify
assert importlib.util.find_spec("math_verify") is not None
assert "sympy" not in sys.modules
print(verify("so \\\\boxed{\\\\frac{2}{4}}", "0.5"), verify("\\\\boxed{3}", "4"), verify("\\\\boxed{(}", "4"))
import math_verify
print("sympy" in sys.modules, math_verify.LatexExtractionConfig.__name__, math_verify.__file__ is not None)
"""


# An adapter loads neither math_verify nor sympy; an answer is verified by the real ones.
@pytest.mark.process
def test_mathematics_is_loaded_when_an_answer_is_verified():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.splitlines() == ["1.0 0.0 0.0", "True LatexExtractionConfig True"], done.stderr[-2000:]
