"""Read SWE-agent's .traj: one JSON document whose `history` holds all messages that the model saw.

Entries of demonstrations and of other agents are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, feed, take_message
from composer_prime.traces.ingest.trace_file import FileStart, TraceFile, at, objects, parse_json, string
from composer_prime.traces.records import TraceState

NAME, VERSION = "swe_agent", 1
"""Written for SWE-agent 0.6 to 1.x."""


def matches(sample: FileStart) -> bool:
    history = at(sample.document, "history")
    entries = objects(history[:8]) if isinstance(history, list) else []
    return any("role" in entry and ("agent" in entry or "message_type" in entry) for entry in entries)


def read(file: TraceFile) -> Iterator[TraceState]:
    if not matches(FileStart(path=file.path, document=file.whole)):
        file.unknown()
        return
    document = file.whole
    history = document["history"]
    agents = Counter(string(entry.get("agent")) for entry in objects(history) if entry.get("role") != "tool")
    acting = agents.most_common(1)[0][0] if agents else None
    trace_id = string(document.get("instance_id")) or file.path.stem
    yield from feed(file, TraceBuilder(file, trace_id, _model(document)), history, partial(_take, acting))


def _take(acting: str | None, builder: TraceBuilder, entry: Any) -> str | None:
    """Take a message of the agent that acts. Return why it is skipped, if it is."""
    if not isinstance(entry, dict):
        return "not an object"
    if entry.get("is_demo"):
        return "demonstration"
    if entry.get("agent", acting) != acting:
        return "another agent's message"
    thoughts = [string(block.get("thinking")) or "" for block in objects(entry.get("thinking_blocks"))]
    return take_message(builder, {**entry, "reasoning_content": "\n\n".join(thoughts)} if thoughts else entry)


def _model(document: dict[str, Any]) -> str | None:
    """Return the model's name from the configuration that newer versions add."""
    config = document.get("replay_config")
    value = parse_json(config.encode("utf-8", "replace")) if isinstance(config, str) else config
    return string(at(value, "agent", "model", "name"))
