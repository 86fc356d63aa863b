"""Events of OpenHands before its sdk (version 0): `{id, source, action, args}` and `{id, observation, content, cause}`.

With function calling an action's `tool_call_metadata` holds the model's own answer, several calls of one answer in
several events. Without it the action is written down as a call of that name, and its `thought` as the text.
A condensation forgets events, by their ids or from one to another, and its summary replaces that of the one before.
"""

from __future__ import annotations

from typing import Any

from orchestrator.ingest.blocks import string, text_of
from orchestrator.ingest.builder import Call, TraceBuilder
from orchestrator.ingest.conversation import calls_of
from orchestrator.ingest.openhands_v1 import Taken

_ASIDE = {"recall", "change_agent_state", "null", "agent_state_changed", "pause", "condensation_request", "condense"}
_SUMMARY = "summary"
_NOT_ARGUMENTS = {"thought", "content_blocks", "confirmation_state", "is_confirmed", "hidden", "blocking"}


class Reader:
    """Remembers which call each action made, for the observations that name their cause, and which ids there were."""

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}
        self._ids: list[int] = []

    def take(self, builder: TraceBuilder, event: dict[str, Any]) -> Taken:
        """Take in one event."""
        if isinstance(event.get("id"), int):
            self._ids.append(event["id"])
        action, observation = event.get("action"), event.get("observation")
        if isinstance(action, str) and action:
            return self._action(builder, event, action)
        if isinstance(observation, str) and observation:
            return self._observation(builder, event, observation)
        return None, "event without action or observation"

    def _action(self, builder: TraceBuilder, event: dict[str, Any], action: str) -> Taken:
        given = event.get("args")
        arguments = given if isinstance(given, dict) else {}
        text = text_of(arguments.get("content") or event.get("message"))
        if action in _ASIDE:
            return None, f"event {action}"
        if action == "condensation":
            return self._condensed(builder, arguments)
        if action == "system":
            builder.tools.given(arguments.get("tools"))
            return builder.context("system", text, mark=_mark(event)), None
        if event.get("source") == "user":
            return builder.context("user", text, mark=_mark(event)), None
        if event.get("source") != "agent":
            return None, "action of the environment"
        return self._turn(builder, event, action, arguments, text)

    def _condensed(self, builder: TraceBuilder, arguments: dict[str, Any]) -> Taken:
        listed, summary = arguments.get("forgotten_event_ids"), text_of(arguments.get("summary"))
        first, last = arguments.get("forgotten_events_start_id"), arguments.get("forgotten_events_end_id")
        if isinstance(listed, list):
            forgotten = [str(each) for each in listed]
        elif isinstance(first, int) and isinstance(last, int):
            forgotten = [str(each) for each in self._ids if first <= each <= last]
        else:
            return None, "condensation that names no events"
        return builder.forget([*forgotten, _SUMMARY] if summary else forgotten, summary, _SUMMARY), None

    def _turn(
        self, builder: TraceBuilder, event: dict[str, Any], action: str, arguments: dict[str, Any], text: str
    ) -> Taken:
        metadata, answer, response = _answer(event)
        if answer is not None:
            calls = calls_of(answer)
            self._calls[str(event.get("id"))] = str(metadata.get("tool_call_id"))
            state = builder.assistant(
                text_of(answer.get("content")),
                calls,
                string(answer.get("reasoning_content")) or "",
                key=string(response.get("id")),
                mark=_mark(event),
                model=string(response.get("model")),
            )
            return state, None
        if action == "message":
            return builder.assistant(text, mark=_mark(event)), None
        call_id = f"event_{event.get('id')}"
        self._calls[str(event.get("id"))] = call_id
        kept = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
        call = Call(call_id=call_id, name=action, arguments=kept)
        return builder.assistant(text_of(arguments.get("thought")), [call], mark=_mark(event)), None

    def _observation(self, builder: TraceBuilder, event: dict[str, Any], observation: str) -> Taken:
        if observation in _ASIDE:
            return None, f"event {observation}"
        metadata = event.get("tool_call_metadata")
        listed = metadata.get("tool_call_id") if isinstance(metadata, dict) else None
        call_id = str(listed or self._calls.get(str(event.get("cause"))) or "")
        text = text_of(event.get("content"))
        error = (text or observation) if observation == "error" or _exit_code(event) else None
        if builder.tool_result(call_id, text, error=error, mark=_mark(event)):
            return None, None
        if error is not None and event.get("source") != "user":
            return builder.context("user", text, error=error, mark=_mark(event)), None
        return None, "observation without its action"


def _mark(event: dict[str, Any]) -> str | None:
    return str(event["id"]) if isinstance(event.get("id"), int | str) else None


def _answer(event: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """(metadata, the model's message, the response it came in); the message is None without function calling."""
    metadata = event.get("tool_call_metadata")
    response = metadata.get("model_response") if isinstance(metadata, dict) else None
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    if not isinstance(metadata, dict) or not isinstance(response, dict) or not isinstance(message, dict):
        return {}, None, {}
    return metadata, message, response


def _exit_code(event: dict[str, Any]) -> bool:
    """Whether a command ended with an exit status other than 0."""
    extras = event.get("extras")
    known = extras if isinstance(extras, dict) else {}
    metadata = known.get("metadata")
    code = known.get("exit_code", metadata.get("exit_code") if isinstance(metadata, dict) else None)
    return isinstance(code, int) and not isinstance(code, bool) and code != 0
