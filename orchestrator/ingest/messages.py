"""Messages-only traces: `{"messages": [...]}` a line (SWE-smith and many data sets), or one list of messages.

Each line is a trace and one record. A line whose messages make no conversation is skipped whole: a context with a hole
would show a teacher something that the agent never saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer_prime.traces import TraceState
from orchestrator.ingest.conversation import Unreadable, check, feed
from orchestrator.ingest.reading import Bad, parse
from orchestrator.ingest.sample import Sample

if TYPE_CHECKING:
    from orchestrator.ingest.formats import TraceFile

NAME, VERSION = "messages", 1
_KEYS = ("messages", "trajectory", "conversations")
_IDS = ("traj_id", "trajectory_id", "instance_id", "id", "task_id")
_MODELS = ("model", "model_name", "model_name_or_path")


def matches(sample: Sample) -> bool:
    if sample.document is not None:
        return _conversation(sample.document) is not None
    return any(_conversation(record) is not None for record in sample.records)


def read(file: TraceFile) -> Iterator[TraceState]:
    if isinstance(file.sample.document, Bad):
        file.unknown()
        return
    for index, record in enumerate([file.document()] if file.sample.document is not None else file.records()):
        messages = _conversation(record)
        if messages is None:
            file.tally.skip("no list of messages")
            continue
        named = record if isinstance(record, dict) else {}
        trace_id = next((named[key] for key in _IDS if named.get(key)), None)
        fallback = file.path.stem if file.sample.document is not None else f"{file.path.stem}:{index}"
        builder = file.builder(trace_id or fallback, next((named[key] for key in _MODELS if named.get(key)), None))
        builder.tools.given(named.get("tools"))
        try:
            check(messages)
        except Unreadable as error:
            file.tally.skip(str(error))
            continue
        file.tally.take()
        yield from feed(builder, messages)


def _conversation(record: Any) -> list[Any] | None:
    """The list of messages in a record, also where it is written as JSON text; None when there is none.

    Nor in a state that was ingested already (composer_prime/traces.py): it is no trace.
    """
    found = record
    if isinstance(record, dict):
        if "student_action" in record:
            return None
        found = next((record[key] for key in _KEYS if key in record), None)
    if isinstance(found, str) and found.lstrip()[:1] == "[":
        value = parse(found.encode())
        found = None if isinstance(value, Bad) else value
    if not isinstance(found, list) or not found:
        return None
    spoken = [message for message in found[:8] if isinstance(message, dict) and "role" in message]
    return found if spoken else None
