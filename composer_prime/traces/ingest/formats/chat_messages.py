"""Read messages-only traces: `{"messages": [...]}` a line (SWE-smith and many data sets), `{"conversations": [...]}`
with `from` and `value` (ShareGPT), or one list of messages; and mini-swe-agent's .traj.json, an object with `messages`.

A line whose messages make no conversation is skipped whole: a gap would show what the agent never saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, take_message, why_unreadable
from composer_prime.traces.ingest.trace_file import Bad, FileStart, TraceFile, at, objects, parse_json
from composer_prime.traces.records import TraceState

NAME, VERSION = "messages", 1
_KEYS = ("messages", "trajectory", "conversations")
_IDS = ("traj_id", "trajectory_id", "instance_id", "id", "task_id")
_MODELS = ("model", "model_name", "model_name_or_path")


def matches(sample: FileStart) -> bool:
    if sample.document is not None:
        return _conversation(sample.document) is not None
    return any(_conversation(record) is not None for record in sample.records)


def read(file: TraceFile) -> Iterator[TraceState]:
    if isinstance(file.whole, Bad):
        file.unknown()
        return
    if file.whole is not None:
        yield from _trace(file, file.whole, file.path.stem)
        return
    index = 0
    for record in file.records():
        yield from _trace(file, record, f"{file.path.stem}:{index}")
        index += 1  # noqa: SIM113 - enumerate holds the record until it has the next
        del record


def _trace(file: TraceFile, record: Any, unnamed: str) -> Iterator[TraceState]:
    messages = _conversation(record)
    if messages is None:
        file.tally.skip("no list of messages")
        return
    named = record if isinstance(record, dict) else {}
    trace_id = next((named[key] for key in _IDS if named.get(key)), unnamed)
    run_model = at(named, "info", "config", "model", "model_name")  # of mini-swe-agent
    builder = TraceBuilder(file, trace_id, next((named[key] for key in _MODELS if named.get(key)), run_model))
    builder.list_tools(named.get("tools"))
    reason = next(filter(None, map(why_unreadable, messages)), None)
    if reason is not None:
        file.tally.skip(reason)
        return
    file.tally.taken += 1
    for message in messages:
        take_message(builder, message)
        yield from file.drain()
    builder.close()
    yield from file.drain()


def _conversation(record: Any) -> list[Any] | None:
    """Return the messages of a record, also from JSON text. A state (records.py) is no trace."""
    messages = record
    if isinstance(record, dict):
        if "student_action" in record:
            return None
        messages = next((record[key] for key in _KEYS if key in record), None)
    if isinstance(messages, str) and messages.lstrip()[:1] == "[":
        value = parse_json(messages.encode())
        messages = None if isinstance(value, Bad) else value
    if not isinstance(messages, list) or not messages:
        return None
    begin = objects(messages[:8])
    return messages if any("role" in message or message.keys() >= {"from", "value"} for message in begin) else None
