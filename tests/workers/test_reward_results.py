"""Rewards and metrics that are `async def` and return no number: what a user is told."""

from __future__ import annotations

import pytest
from test_adapter import TINY, TOOL_LOOP, Scripted, block, environment, play

pytestmark = pytest.mark.process  # verifiers' subprocess runtime

METRIC = """
    @vf.metric
    async def longest(self, trace: vf.Trace) -> float:
        pass
"""
OTHER = """
    async def other(self) -> float:
        return 1.0
"""


# Nothing, a coroutine that nobody awaited, a text, and a metric beside a right reward: the failure names the function
# with file and line, says what to do, and is not tried again.
@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("correct", "pass", "NoneType'): return a number on every way through it"),
        ("correct", f"return self.other()\n{OTHER}", "'coroutine'): await what it calls"),
        ("correct", 'return "yes"', "could not convert string to float: 'yes'): return a number"),
        ("longest", f"return 1.0\n{METRIC}", "NoneType'): return a number on every way through it"),
    ],
)
def test_a_reward_that_returns_no_number(tmp_path, monkeypatch, name, body, says) -> None:
    module = f"no_number_{name}_{len(body)}"
    text = block("python").replace("return float(trace.last_reply.split() == [self.data.larger])", body)
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    error = play(environment(TINY, {"id": module}, harness=TOOL_LOOP), Scripted(TINY, ["7"])).failure
    assert error is not None and not error.retryable
    kind = "metric" if name == "longest" else "reward"
    assert error.message.startswith(f"{kind} `{name}` returned no number (") and says in error.message
    decorator = next(number for number, line in enumerate(text.splitlines(), 1) if f"@vf.{kind}" in line)
    assert error.where.endswith(f"{module}.py:{decorator}, in {name}")
