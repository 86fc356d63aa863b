"""Read mini-swe-agent's .traj.json: a list of messages, or an object with `messages`, `info` and `trajectory_format`.

A turn's command is in a fenced block of its text. Its result is in the next user message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, feed, take_message
from composer_prime.traces.ingest.reading import FileStart, at, objects, string
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.states import TraceState

NAME, VERSION = "mini_swe_agent", 1
"""Written for the bare list and for trajectory_format mini-swe-agent-1 and mini-swe-agent-1.1."""
_FORMATS = (None, "mini-swe-agent-1", "mini-swe-agent-1.1")
_COMMAND = re.compile(r"```(?:mswea_bash_command|bash)\n")


def matches(sample: FileStart) -> bool:
    messages = _messages(sample.document)
    named = str(at(sample.document, "trajectory_format")).startswith("mini-swe-agent")
    return messages is not None and (named or _commands(messages))


def read(file: TraceFile) -> Iterator[TraceState]:
    messages = _messages(file.whole)
    if messages is None:
        file.unknown()
        return
    document = file.whole
    version = at(document, "trajectory_format")
    if version not in _FORMATS:
        for _ in messages:
            file.tally.skip("trajectory_format newer than this reader")
        return
    stem = file.path.name.removesuffix(".json").removesuffix(".traj")
    model = at(document, "info", "config", "model", "model_name")
    yield from feed(file, TraceBuilder(file, at(document, "instance_id") or stem, model), messages, take_message)


def _messages(document: Any) -> list[Any] | None:
    messages = document.get("messages") if isinstance(document, dict) else document
    return messages if isinstance(messages, list) else None


def _commands(messages: list[Any]) -> bool:
    answers = [message for message in objects(messages[:12]) if message.get("role") == "assistant"]
    return any(_COMMAND.search(string(answer.get("content")) or "") for answer in answers)
