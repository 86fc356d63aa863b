"""Read ADP (Agent Data Protocol, version 1): trajectories of actions and observations, one a line or in a list.

    {"id", "content": [{"class_": "text_observation" | "api_action" | "code_action" | "message_action" ...}], "details"}

An action of code is read as a call of the tool that ADP's own converters use for it. A call's result is the observation
that names it, or else the one that directly follows. Newer data sets are in ATIF (atif.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.messages import TraceBuilder, arguments_of, failure, feed, listed, read_each
from composer_prime.traces.ingest.reading import FileStart, object_at, objects, string, text_of
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.ingest.turns import Call
from composer_prime.traces.state import TraceState

NAME, VERSION = "adp", 1
_SHELLS, _PYTHONS = {"bash", "sh", "shell"}, {"python", "python3", "py", "ipython"}
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def matches(sample: FileStart) -> bool:
    return any(_is_trajectory(candidate) for candidate in listed(sample)[:64])


def read(file: TraceFile) -> Iterator[TraceState]:
    yield from read_each(file, matches, _trajectory)


def _is_trajectory(value: Any) -> bool:
    content = value.get("content") if isinstance(value, dict) else None
    return isinstance(content, list) and any("class_" in item for item in objects(content[:8]))


def _trajectory(file: TraceFile, record: Any) -> Iterator[TraceState]:
    if not _is_trajectory(record):
        file.tally.skip("no ADP trajectory")
        return
    details = object_at(record, "details")
    model = next((details[name] for name in ("model", "model_name") if string(details.get(name))), None)
    builder = TraceBuilder(file, record.get("id"), model)
    yield from feed(file, builder, record["content"], _Items().take)


class _Items:
    """The items of one trajectory."""

    def __init__(self) -> None:
        self._turns = 0
        self._calls = 0
        self._waiting = False
        """Whether the item before was a call."""

    def take(self, builder: TraceBuilder, item: Any) -> str | None:
        """Process one item. Return why it is skipped; None when it is not."""
        if not isinstance(item, dict):
            return "not an object"
        kind = _CAMEL.sub("_", string(item.get("class_")) or "").lower()
        if kind.endswith("_observation"):
            return self._observation(builder, item, kind)
        if kind == "message_action":
            self._turns += 1
            self._waiting = False
            return self._act(builder, item, text_of(item.get("content")), [])
        if kind in ("api_action", "code_action"):
            self._waiting = True
            return self._act(builder, item, "", [self._call(item, kind)])
        return "unknown class_"

    def _act(self, builder: TraceBuilder, item: dict[str, Any], text: str, calls: list[Call]) -> None:
        """Add to the turn. What no observation parts is one answer."""
        described, thought = string(item.get("description")) or "", string(item.get("reasoning_content")) or ""
        said = [part for part in (described, text) if part.strip()]
        builder.assistant("\n\n".join(dict.fromkeys(said)), calls, thought, key=f"turn {self._turns}")

    def _call(self, item: dict[str, Any], kind: str) -> Call:
        self._calls += 1
        call_id = str(item.get("tool_call_id") or f"call_{self._calls}")
        if kind == "api_action":
            name = string(item.get("function")) or "unnamed"
            return Call(call_id=call_id, name=name, arguments=arguments_of(item.get("kwargs") or {}))
        language, code = str(item.get("language") or "").lower(), text_of(item.get("content"))
        if language in _SHELLS:
            return Call(call_id=call_id, name="execute_bash", arguments={"command": code})
        if language in _PYTHONS:
            return Call(call_id=call_id, name="execute_ipython_cell", arguments={"code": code})
        return Call(call_id=call_id, name="execute_code", arguments={"language": language, "code": code})

    def _observation(self, builder: TraceBuilder, item: dict[str, Any], kind: str) -> None:
        text = _shown(item, kind)
        error, named = failure(text), item.get("tool_call_id")
        direct, self._waiting = self._waiting, False
        self._turns += 1
        belongs = named is not None or direct or item.get("source") == "environment"
        if not belongs or not builder.tool_result(None if named is None else str(named), text, error=error):
            builder.context("user", text, error=error if item.get("source") == "environment" else None)


def _shown(item: dict[str, Any], kind: str) -> str:
    """Return an observation as text. A web page is shown by its accessibility tree, or else its HTML."""
    if kind == "web_observation":
        page = string(item.get("axtree")) or string(item.get("html")) or ""
        parts = [string(item.get("url")) or "", page, "[image]" if item.get("image_observation") else ""]
        return "\n".join(part for part in parts if part)
    if kind == "image_observation":
        notes = [text_of(note.get("text")) for note in objects(item.get("annotations"))]
        return "\n".join(["[image]", *filter(None, notes)])
    return text_of(item.get("content"))
