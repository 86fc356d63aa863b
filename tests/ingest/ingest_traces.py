"""Small synthetic traces, and reading with the accounts checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_prime.traces.ingest.ingest import ingest
from composer_prime.traces.ingest.trace_file import Options, Tally
from composer_prime.traces.records import TraceState


def taken(path: Path, **options: Any) -> tuple[list[TraceState], Tally]:
    """All states of a file, and accounts that balance."""
    tally = Tally()
    states = list(ingest(path, tally, Options(**options)))
    assert tally.states == len(states)
    return states, tally


def lines(path: Path, *records: Any) -> Path:
    """A file of one JSON value a line; bytes stand as they are."""
    raw = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def prompt(uuid: str, parent: str | None, text: str, **more: Any) -> dict[str, Any]:
    """A user's line of Claude Code."""
    return {"type": "user", "message": {"role": "user", "content": text}, **_claude(uuid, parent), **more}


def answer(uuid: str, parent: str | None, *blocks: dict[str, Any], message_id: str = "", **more: Any) -> dict[str, Any]:
    """A line of the model's."""
    message = {"id": message_id or uuid, "role": "assistant", "model": "claude-sonnet-4", "content": list(blocks)}
    return {"type": "assistant", "message": message, **_claude(uuid, parent), **more}


def result(uuid: str, parent: str, call_id: str, text: str, error: bool = False) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": text, "is_error": error}
    return {"type": "user", "message": {"role": "user", "content": [block]}, **_claude(uuid, parent)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _claude(uuid: str, parent: str | None) -> dict[str, Any]:
    return {"uuid": uuid, "parentUuid": parent, "sessionId": "s1", "isSidechain": False, "version": "2.0.1"}


def roles(state: TraceState) -> list[str]:
    return [message["role"] for message in state.messages]


SESSION = [
    prompt("u1", None, "Fix the test."),
    answer("a1", "u1", {"type": "thinking", "thinking": "look first", "signature": "x"}, message_id="m1"),
    answer("a2", "a1", text("I will look."), message_id="m1"),
    answer("a3", "a2", use("t1", "Bash", command="ls"), message_id="m1"),
    answer("a4", "a3", use("t2", "Read", file_path="a.py"), message_id="m1"),
    result("r1", "a3", "t1", "a.py"),
    result("r2", "a4", "t2", "no such file", error=True),
    answer("a5", "r2", text("It is gone."), message_id="m2"),
]
"""One session of two turns: the first in four lines with two calls, the second of which fails."""

MESSAGES = [
    {"role": "system", "content": "You can call tools."},
    {"role": "user", "content": [{"type": "text", "text": "What is in a.py?"}]},
    {
        "role": "assistant",
        "content": "<think>open it</think>",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "cat", "arguments": '{"path": "a.py"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
    {"role": "assistant", "content": "It sets x."},
]
TOOLS = [{"type": "function", "function": {"name": "cat", "parameters": {"type": "object", "properties": {}}}}]

OPENHANDS = [
    {"kind": "SystemPromptEvent", "id": "e0", "source": "agent", "system_prompt": text("Be brief."), "tools": TOOLS},
    {"kind": "MessageEvent", "id": "e1", "source": "user", "llm_message": MESSAGES[1]},
    {
        "kind": "ActionEvent",
        "id": "e2",
        "source": "agent",
        "thought": [text("Two at once.")],
        "reasoning_content": "hm",
        "tool_name": "terminal",
        "tool_call_id": "c1",
        "tool_call": {"id": "c1", "name": "terminal", "arguments": '{"command": "ls"}'},
        "llm_response_id": "r1",
    },
    {
        "kind": "ActionEvent",
        "id": "e3",
        "source": "agent",
        "thought": [],
        "tool_name": "terminal",
        "tool_call_id": "c2",
        "tool_call": {"id": "c2", "name": "terminal", "arguments": '{"command": "pwd"}'},
        "llm_response_id": "r1",
    },
    {
        "kind": "ObservationEvent",
        "id": "e4",
        "source": "environment",
        "tool_call_id": "c1",
        "observation": {"content": [text("a.py")], "is_error": False, "exit_code": 0},
    },
    {"kind": "AgentErrorEvent", "id": "e5", "source": "agent", "tool_call_id": "c2", "error": "pwd: not allowed"},
    {"kind": "MessageEvent", "id": "e6", "source": "agent", "llm_message": {"role": "assistant", "content": "Done."}},
]


ROLLOUT = {
    "step": 3,
    "rollout_id": "g1-0",
    "task_id": "toolsmith/1",
    "tools": TOOLS,
    "turns": [
        {"role": "user", "text": "Add 1 and 2.", "parent": None, "tool_calls": []},
        {
            "role": "assistant",
            "text": "",
            "parent": 0,
            "tool_calls": [{"name": "sum", "arguments": '{"a": 1}'}],
            "surprisal": 0.75,
        },
        {"role": "tool", "text": "Tool not found: sum", "error": "Tool not found: sum", "parent": 1},
        {"role": "assistant", "text": "3", "parent": 2, "tool_calls": []},
    ],
}
