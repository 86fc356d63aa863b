"""Small synthetic traces, and reading with the accounts checked."""

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

SESSIONS = json.loads(Path(__file__).with_name("sessions.json").read_text())
MESSAGES, TOOLS = SESSIONS["messages"], SESSIONS["tools"]
OPENHANDS, ROLLOUT = SESSIONS["openhands"], SESSIONS["rollout"]
