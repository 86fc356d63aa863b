"""The cheap import of verifiers leaves nothing behind and takes nothing away."""

from __future__ import annotations

import subprocess
import sys

LIGHT = """
import sys
from orchestrator.verifiers_import import import_verifiers
import_verifiers()
assert not {"anthropic", "sympy", "math_verify"} & set(sys.modules)
from verifiers.v1.utils.score import verify_boxed_math_answer
assert verify_boxed_math_answer(r"so \\\\boxed{2/4}", "0.5") == 1.0
assert verify_boxed_math_answer(r"so \\\\boxed{3/4}", "0.5") == 0.0
import anthropic, sympy
from anthropic.types import Message
assert "content" in Message.model_fields
"""


def test_the_light_import_keeps_what_is_used() -> None:
    """Anthropic's SDK and sympy are not loaded; the scoring that needs sympy works, and the real packages import."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
