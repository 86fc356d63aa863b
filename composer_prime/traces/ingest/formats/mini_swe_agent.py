"""Read mini-swe-agent's .traj.json: a list of messages, or an object with `messages`, `info` and `trajectory_format`.

A turn's command is in a fenced block of its text. Its result is in the next user message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.messages import readable, step
from composer_prime.traces.ingest.reading import FileStart
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.state import TraceState

NAME, VERSION = "mini_swe_agent", 1
"""Written for the bare list and for trajectory_format mini-swe-agent-1 and mini-swe-agent-1.1."""
_FORMATS = {None, "mini-swe-agent-1", "mini-swe-agent-1.1"}
_COMMAND = re.compile(r"```(?:mswea_bash_command|bash)\n")


def matches(sample: FileStart) -> bool:
    document, messages = sample.document, _messages(sample.document)
    named = isinstance(document, dict) and str(document.get("trajectory_format", "")).startswith("mini-swe-agent")
    return messages is not None and (named or _commands(messages))


def read(file: TraceFile) -> Iterator[TraceState]:
    messages = _messages(file.whole)
    if messages is None:
        file.unknown()
        return
    document = file.document()
    version = None if isinstance(document, list) else document.get("trajectory_format")
    if version is not None and version not in _FORMATS:
        for _ in messages:
            file.tally.skip("trajectory_format newer than this reader")
        return
    stem = file.path.name.removesuffix(".json").removesuffix(".traj")
    instance = document.get("instance_id") if isinstance(document, dict) else None
    builder = file.builder(instance or stem, _model(document))
    for message in messages:
        if not readable(message):
            file.tally.skip("unreadable message")
            continue
        file.tally.take()
        state = step(builder, message)
        if state is not None:
            yield state
    state = builder.close()
    if state is not None:
        yield state


def _messages(document: Any) -> list[Any] | None:
    """Return the messages of a document of either form; None for another document."""
    messages = document.get("messages") if isinstance(document, dict) else document
    return messages if isinstance(messages, list) else None


def _commands(messages: list[Any]) -> bool:
    """Check whether an answer among the first messages holds a fenced command."""
    answers = [m for m in messages[:12] if isinstance(m, dict) and m.get("role") == "assistant"]
    return any(isinstance(m.get("content"), str) and _COMMAND.search(m["content"]) for m in answers)


def _model(document: Any) -> str | None:
    value = document
    for key in ("info", "config", "model", "model_name"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None
