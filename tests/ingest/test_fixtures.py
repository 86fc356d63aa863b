"""Real sessions of other projects, from SWE_TRACES or ../shared/fixtures/traces; their states were counted by hand."""

import json
import os
from pathlib import Path

import pytest
from ingest_traces import taken

ROOT = Path(os.environ.get("SWE_TRACES") or Path(__file__).parents[3] / "shared" / "fixtures" / "traces")
# file: (format, records, taken, turns, states, states with an error, family)
COUNTS = {
    "claude_code/daaain.edge_cases.jsonl": ("claude_code/2", 19, 12, 4, 3, 1, "claude"),
    "claude_code/daaain.representative_messages.jsonl": ("claude_code/2", 12, 11, 5, 5, 0, "claude"),
    "claude_code/dkimuson.1af7fc5e-8455-4414-9ccd-011d40f70b2a.jsonl": ("claude_code/2", 29, 29, 7, 7, 1, "claude"),
    "claude_code/dkimuson.agent-test-hash-123.jsonl": ("claude_code/2", 2, 0, 0, 0, 0, "claude"),
    "openhands/sdk.fncall-llm-message.json": ("messages/1", 1, 1, 6, 6, 0, "unknown"),
    "openhands/sdk.goal_events.jsonl": ("openhands/1", 10, 4, 2, 1, 1, "minimax"),
    "openhands/sdk.v1_11_5.base_state.json": ("openhands/1", 1, 0, 0, 0, 0, "unknown"),
    "swe_agent/function_calling_simple.traj": ("swe_agent/1", 12, 12, 5, 5, 0, "unknown"),
    "swe_agent/humanevalfix-python-0.traj": ("swe_agent/1", 11, 11, 5, 5, 0, "unknown"),
    "swe_agent/mini.local.traj.json": ("messages/1", 1, 1, 2, 2, 0, "unknown"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_real_sessions_give_the_states_that_were_counted(name: str) -> None:
    path = ROOT / name
    if not path.is_file():
        pytest.skip(f"no real traces at {ROOT}: set SWE_TRACES to a folder that has {name}")
    states, tally = taken(path)
    errors = sum(state.error is not None for state in states)
    found = (tally.format, tally.seen, tally.taken, tally.turns, tally.states, errors)
    assert found == COUNTS[name][:6]
    assert {state.source_family for state in states} <= {COUNTS[name][6]}
    # What is offered does not tell what was chosen: it is the same in all states of a file, and holds every choice.
    assert len({json.dumps(state.tools) for state in states}) <= 1
    offered = {tool["function"]["name"] for state in states[:1] for tool in state.tools}
    called = {call["function"]["name"] for state in states for call in state.student_action.get("tool_calls") or []}
    assert called <= offered


# The counts above cover the folder: a trace that is added must be counted too.
def test_every_real_session_is_counted() -> None:
    if not ROOT.is_dir():
        pytest.skip(f"no real traces at {ROOT}")
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*") if path.is_file()}
    assert there == COUNTS.keys()
