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
# and is not tried again.
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("correct", "pass"),
        ("correct", f"return self.other()\n{OTHER}"),
        ("correct", 'return "yes"'),
        ("longest", f"return 1.0\n{METRIC}"),
    ],
)
def test_a_reward_that_returns_no_number(tmp_path, monkeypatch, name, body) -> None:
    module = f"no_number_{name}_{len(body)}"
    text = block("python").replace("return float(trace.last_reply.split() == [self.data.larger])", body)
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    error = play(environment(TINY, {"id": module}, harness=TOOL_LOOP), Scripted(TINY, ["7"])).failure
    assert error is not None and not error.retryable
    kind = "metric" if name == "longest" else "reward"
    assert kind in error.message and name in error.message
