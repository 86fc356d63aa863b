"""Read SWE-agent's .traj: one JSON document with `history` (all messages) and `trajectory` (steps).

The history is preferred because it is what the model saw. Entries of demonstrations and of other agents are skipped. A
file that holds only steps gives states without the prompt before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.messages import TraceBuilder, failure, objects, readable, step, string, text_of
from composer_prime.traces.ingest.reading import Bad, FileStart, parse_json
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.ingest.turns import Call
from composer_prime.traces.state import TraceState

NAME, VERSION = "swe_agent", 1
"""Written for SWE-agent 0.6 to 1.x."""
_STEP = {"action", "observation"}


def matches(sample: FileStart) -> bool:
    return _has_messages(sample.document)


def read(file: TraceFile) -> Iterator[TraceState]:
    if not _has_messages(file.whole):
        file.unknown()
        return
    document = file.document()
    builder = file.builder(_trace_id(document, file.path.stem), _model(document))
    history = document.get("history")
    if _is_history(history):
        yield from _history(file, builder, history)
    else:
        yield from _steps(file, builder, document["trajectory"])
    state = builder.close()
    if state is not None:
        yield state


def _history(file: TraceFile, builder: TraceBuilder, history: list[Any]) -> Iterator[TraceState]:
    agents = Counter(string(entry.get("agent")) for entry in objects(history) if entry.get("role") != "tool")
    acting = agents.most_common(1)[0][0] if agents else None
    for entry in history:
        if not isinstance(entry, dict):
            file.tally.skip("not an object")
        elif entry.get("is_demo"):
            file.tally.skip("demonstration")
        elif entry.get("agent", acting) != acting:
            file.tally.skip("another agent's message")
        elif not readable(entry):
            file.tally.skip("unreadable message")
        else:
            file.tally.take()
            state = step(builder, _message(entry))
            if state is not None:
                yield state


def _steps(file: TraceFile, builder: TraceBuilder, trajectory: list[Any]) -> Iterator[TraceState]:
    for index, entry in enumerate(trajectory):
        if not isinstance(entry, dict) or not entry.keys() >= _STEP:
            file.tally.skip("not a step")
            continue
        file.tally.take()
        action, call_id = string(entry["action"]) or "", f"step_{index}"
        calls = [Call(call_id=call_id, name="bash", arguments={"command": action.strip()})] if action.strip() else []
        state = builder.assistant(text_of(entry.get("thought")), calls)
        if state is not None:
            yield state
        state = _observed(builder, call_id, text_of(entry["observation"]))
        if state is not None:
            yield state


def _observed(builder: TraceBuilder, call_id: str, text: str) -> TraceState | None:
    """Store the result of the step's action. Without an action (a format error) the text is context."""
    error = failure(text)
    if builder.tool_result(call_id, text, error=error) or not text.strip():
        return None
    return builder.context("user", text, error=error)


def _message(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with its thinking. `content` holds the thought, in the older form with the command."""
    thoughts = [string(block.get("thinking")) or "" for block in objects(entry.get("thinking_blocks"))]
    return {**entry, "reasoning_content": "\n\n".join(thoughts)} if thoughts else entry


def _has_messages(document: object) -> bool:
    """Check whether a document has a history or steps."""
    return isinstance(document, dict) and (
        _is_history(document.get("history")) or _is_steps(document.get("trajectory"))
    )


def _is_history(history: object) -> bool:
    entries = [entry for entry in history[:8] if isinstance(entry, dict)] if isinstance(history, list) else []
    return any("role" in entry and ("agent" in entry or "message_type" in entry) for entry in entries)


def _is_steps(trajectory: object) -> bool:
    return isinstance(trajectory, list) and any(
        isinstance(entry, dict) and entry.keys() >= _STEP for entry in trajectory[:8]
    )


def _trace_id(document: dict[str, Any], stem: str) -> str:
    instance = document.get("instance_id")
    return instance if isinstance(instance, str) else stem


def _model(document: dict[str, Any]) -> str | None:
    """Return the model's name from the configuration that newer versions write beside the trajectory."""
    config = document.get("replay_config")
    value = parse_json(config.encode("utf-8", "replace")) if isinstance(config, str) else config
    for key in ("agent", "model", "name"):
        value = value.get(key) if isinstance(value, dict) and not isinstance(value, Bad) else None
    return value if isinstance(value, str) else None
