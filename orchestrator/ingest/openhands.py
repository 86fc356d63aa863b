"""OpenHands: events of its first version (`action` / `observation`) and of its second (`kind`), and the benchmark's
output.jsonl, whose lines hold a `history` of such events.

    *.jsonl of events, trajectory.json (a list), a conversation folder (base_state.json, events/*.json)   one trace
    output.jsonl                                                                                   a trace a line

A record is an event; of output.jsonl, also a line that holds no history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.traces import TraceState
from orchestrator.ingest import openhands_v0, openhands_v1
from orchestrator.ingest.builder import TraceBuilder
from orchestrator.ingest.reading import Bad, document
from orchestrator.ingest.sample import Sample

if TYPE_CHECKING:
    from orchestrator.ingest.formats import TraceFile

NAME, VERSION = "openhands", 1
"""Written for events of OpenHands 0.2x to 0.5x and of its software-agent-sdk 1.x."""
_CONVERSATION = {"agent", "workspace", "execution_status"}
_PEEKED = 100


def matches(sample: Sample) -> bool:
    if sample.path.is_dir():
        return _is_folder(sample.path)
    value = sample.document
    if value is not None:
        events = value if isinstance(value, list) else value.get("history") if isinstance(value, dict) else None
        return _are_events(events) or (isinstance(value, dict) and value.keys() >= _CONVERSATION)
    lines = sample.objects("history")
    return _are_events(sample.records) or any(_are_events(_flat(line["history"])) for line in lines)


def read(file: TraceFile) -> Iterator[TraceState]:
    value = file.whole
    if file.path.is_dir():
        yield from _folder(file)
    elif isinstance(value, dict) and not isinstance(value.get("history"), list):
        file.tally.skip("conversation state without its events")
    elif isinstance(value, dict):
        yield from _line(file, value)
    elif isinstance(value, list):
        yield from _events(file, file.builder(file.path.stem), value)
    elif value is not None:
        file.unknown()
    else:
        yield from _records(file)


def _records(file: TraceFile) -> Iterator[TraceState]:
    """A file of lines: of output.jsonl, or the events of one trace."""
    kind, records = _peek(file.records())
    if kind != "output":
        yield from _events(file, file.builder(file.path.stem), records)
        return
    for record in records:
        yield from file.trace(partial(_line, record=record))
        del record


def _line(file: TraceFile, record: Any) -> Iterator[TraceState]:
    history = _flat(record.get("history")) if isinstance(record, dict) else None
    if not isinstance(record, dict) or not history:
        file.tally.skip("no history" if isinstance(record, dict) else "not an object")
        return
    builder = file.builder(record.get("instance_id"), _model(record))
    instruction = record.get("instruction")
    if isinstance(instruction, str) and not any(_says_user(event) for event in history):
        builder.context("user", instruction)
    yield from _events(file, builder, history)


def _folder(file: TraceFile) -> Iterator[TraceState]:
    state = document(file.path / "base_state.json", file.options.limits)
    known = state if isinstance(state, dict) else {}
    builder = file.builder(known.get("id") or file.path.name, _model(known))

    def events() -> Iterator[Any]:
        for path in sorted((file.path / "events").glob("*.json")):
            value = document(path, file.options.limits)
            if isinstance(value, Bad):
                file.tally.skip(value.reason)
            else:
                yield value
            if file.progress is not None:
                file.progress(path.stat().st_size)

    yield from _events(file, builder, events())


def _events(file: TraceFile, builder: TraceBuilder, events: Any) -> Iterator[TraceState]:
    kind, rest = _peek(iter(events))
    take: Callable[[TraceBuilder, dict[str, Any]], openhands_v1.Taken] = (
        openhands_v1.take if kind == "v1" else openhands_v0.Reader().take
    )
    for event in rest:
        if not isinstance(event, dict):
            file.tally.skip("not an object")
            continue
        state, skipped = take(builder, event)
        if skipped is None:
            file.tally.take()
        else:
            file.tally.skip(skipped)
        if state is not None:
            yield state
        del event
    state = builder.close()
    if state is not None:
        yield state


def _peek(records: Iterator[Any]) -> tuple[str | None, Iterator[Any]]:
    """(what the first record that tells is: output, v1 or v0; all records, which are let go of as they are drawn)."""
    ahead: deque[Any] = deque()
    kind = None
    for record in islice(records, _PEEKED):
        ahead.append(record)
        kind = _kind(record)
        if kind:
            break
    return kind, _rejoined(ahead, records)


def _rejoined(ahead: deque[Any], rest: Iterator[Any]) -> Iterator[Any]:
    while ahead:
        yield ahead.popleft()
    yield from rest


def _kind(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    if "history" in record:
        return "output"
    return "v1" if "kind" in record else "v0" if "action" in record or "observation" in record else None


def _flat(history: Any) -> list[Any] | None:
    """Older outputs hold pairs of an action and its observation."""
    if not isinstance(history, list):
        return None
    return [event for entry in history for event in (entry if isinstance(entry, list) else [entry])]


def _are_events(events: Any) -> bool:
    found = [event for event in (events or [])[:16] if isinstance(event, dict)] if isinstance(events, list) else []
    return any(_is_v1(event) or _is_v0(event) for event in found)


def _is_v1(event: dict[str, Any]) -> bool:
    return isinstance(event.get("kind"), str) and "source" in event and "id" in event


def _is_v0(event: dict[str, Any]) -> bool:
    named = isinstance(event.get("action"), str) and isinstance(event.get("args"), dict)
    return named or (isinstance(event.get("observation"), str) and "content" in event)


def _says_user(event: Any) -> bool:
    return isinstance(event, dict) and event.get("source") == "user"


def _is_folder(path: Path) -> bool:
    return (path / "base_state.json").is_file() and (path / "events").is_dir()


def _model(record: dict[str, Any]) -> str | None:
    for keys in (("metadata", "llm_config", "model"), ("agent", "llm", "model"), ("llm_config", "model")):
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value
    return None
