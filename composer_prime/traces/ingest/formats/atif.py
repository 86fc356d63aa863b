"""Read ATIF, the trajectory format of Harbor: one JSON document, or one a line.

1. A step of the agent is a turn, with the results of its calls beside them (`observation`). Results without a
   `source_call_id` are given to the calls in order; a single one for several calls stands with the last call.
2. Harbor writes an answer of Claude Code as several steps: its text, then each call with "Executed Bash id" as the
   message. A text and the call that directly follow are one turn.
3. Copied steps and steps that no model made are context only. Embedded trajectories of subagents are not read.
4. The format has no mark for errors. What its writers use is recognized: `extra`, an exit code, a closing line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, arguments_of, failure, feed
from composer_prime.traces.ingest.trace_file import Call, FileStart, TraceFile, at, object_at, objects, string, text_of
from composer_prime.traces.records import TraceState

NAME, VERSION = "atif", 1
"""Written for ATIF 1.0 to 1.7."""
_COPIED = "copied from the trajectory that it continues"
_NO_MODEL = "a step that no model made"
_WITH_LAST = "[its result is shown with the last call]"
_EXECUTED = re.compile(r"\s*Executed \S+(?: \S+)?\s*")
_FAILED = re.compile(r"^\[error\] |^\[exit_?[cC]ode\] (?!0\b)-?\d", re.MULTILINE)
_BAD_STATUS = {"error", "failed", "failure"}


def matches(sample: FileStart) -> bool:
    records = sample.records if sample.document is None else _trajectories(sample.document)
    return any(map(_is_trajectory, records[:64]))


def read(file: TraceFile) -> Iterator[TraceState]:
    if file.whole is not None and not any(map(_is_trajectory, _trajectories(file.whole))):
        file.unknown()
        return
    for record in file.records() if file.whole is None else _trajectories(file.whole):
        yield from _trajectory(file, record)
        del record


def _trajectories(document: Any) -> list[Any]:
    return document if isinstance(document, list) else [document]


def _is_trajectory(value: Any) -> bool:
    steps = value.get("steps") if isinstance(value, dict) else None
    named = str(at(value, "schema_version")).startswith("ATIF")
    return isinstance(steps, list) and (named or any("step_id" in step and "source" in step for step in objects(steps)))


def _trajectory(file: TraceFile, record: Any) -> Iterator[TraceState]:
    if not _is_trajectory(record):
        file.tally.skip("no ATIF trajectory")
        return
    agent = object_at(record, "agent")
    trace_id = record.get("session_id") or record.get("trajectory_id")
    builder = TraceBuilder(file, trace_id, agent.get("model_name"))
    builder.list_tools(agent.get("tool_definitions"))
    yield from feed(file, builder, record["steps"], _Steps().take)


class _Steps:
    """The steps of one trajectory."""

    def __init__(self) -> None:
        self._turns = 0
        self._said = False
        """Whether the step before was a text alone, which the next one's call may complete."""

    def take(self, builder: TraceBuilder, step: Any) -> str | None:
        """Process one step. Return why it is skipped, if it is."""
        if not isinstance(step, dict):
            return "not an object"
        source, text = step.get("source"), text_of(step.get("message"))
        if source == "agent":
            self._agent(builder, step, text)
        elif source in ("user", "system"):
            self._said = False
            builder.context(source, text)
            self._observed(builder, step, [])
        else:
            return "step of an unknown source"
        return None

    def _agent(self, builder: TraceBuilder, step: dict[str, Any], text: str) -> None:
        calls = [
            Call(
                call_id=str(call.get("tool_call_id") or f"call_{self._turns}_{index}"),
                name=string(call.get("function_name")) or "unnamed",
                arguments=arguments_of(call.get("arguments")),
            )
            for index, call in enumerate(objects(step.get("tool_calls")))
        ]
        if calls and _EXECUTED.fullmatch(text):
            text = ""
        if not (self._said and calls and not text.strip()):
            self._turns += 1
        copied = step.get("is_copied_context") is True
        unmade = step.get("llm_call_count") == 0 and step["llm_call_count"] is not False
        builder.assistant(
            text,
            calls,
            string(step.get("reasoning_content")) or "",
            key=f"turn {self._turns}",
            model=string(step.get("model_name")),
            aside=_COPIED if copied else _NO_MODEL if unmade else None,
        )
        observed = self._observed(builder, step, calls)
        self._said = not calls and not observed

    def _observed(self, builder: TraceBuilder, step: dict[str, Any], calls: list[Call]) -> bool:
        """Give a step's results to its calls, and show the others as context. Return whether there were any."""
        results = objects(at(step, "observation", "results"))
        some_named = any(result.get("source_call_id") is not None for result in results)
        others: list[tuple[str, str | None]] = []
        if calls and not some_named and len(results) == 1:
            for call in calls[:-1]:
                builder.tool_result(call.call_id, _WITH_LAST)
        for result in results:
            text = text_of(result.get("content")) or _of_subagent(result)
            error = _error(text, result, step)
            named = result.get("source_call_id")
            belongs = named is not None or not some_named
            if not belongs or not builder.tool_result(None if named is None else str(named), text, error=error):
                others.append((text, error))
        _show(builder, others)  # context ends the turn, so it comes after all results
        return bool(results)


def _show(builder: TraceBuilder, others: list[tuple[str, str | None]]) -> None:
    failed = next((error for _, error in others if error is not None), None)
    for text, _ in others:
        if text.strip():
            builder.context("user", text, error=failed)


def _of_subagent(result: dict[str, Any]) -> str:
    references = objects(result.get("subagent_trajectory_ref"))
    names = [str(ref.get("trajectory_id") or ref.get("session_id") or "") for ref in references]
    return f"[done by a subagent: {', '.join(names)}]" if names else ""


def _is_failure(code: object) -> bool:
    return isinstance(code, int) and not isinstance(code, bool) and code != 0


def _error(text: str, result: dict[str, Any], step: dict[str, Any]) -> str | None:
    """Return the text where the call failed, by the marks of Harbor's agents."""
    for extra in (object_at(result, "extra"), object_at(step, "extra")):
        codes = [extra.get(name) for name in ("exit_code", "return_code", "returncode")]
        flags = (extra.get("is_error"), extra.get("tool_result_is_error"), extra.get("success") is False)
        if True in flags or str(extra.get("status")).lower() in _BAD_STATUS:
            return text or "error"
        if any(map(_is_failure, codes)):
            return text or "error"
    return (text or "error") if result.get("error") or _FAILED.search(text) else failure(text)
