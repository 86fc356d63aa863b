"""Read rollouts of Codex CLI: `{"timestamp", "type", "payload"}` a line.

1. A `response_item` is an item of OpenAI's Responses API. The items of one answer are not marked: those between two
   outputs or messages of the user are one turn.
2. `session_meta` names the session and its prompt, `turn_context` the model. A forked session repeats the records of
   its parent: equal states in two files count once.
3. `compacted` starts a new context: its `replacement_history`, or, in older files, the user's messages and the summary.
   `thread_rolled_back` takes the last messages of the user back, with all that followed them.
4. An `event_msg` shows the user what an item holds already, and is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, arguments_of, failure, feed
from composer_prime.traces.ingest.trace_file import Call, FileStart, TraceFile, at, object_at, objects, string, text_of
from composer_prime.traces.records import TraceState

NAME, VERSION = "codex", 1
"""Written for rollouts of Codex CLI 0.2x to 0.14x."""
_LINES = {"session_meta", "response_item", "turn_context", "event_msg", "compacted", "world_state"}
_OWN_PROMPT = re.compile(r"\s*(?:<[a-z_ ]+>|# AGENTS\.md)")
"""Begins what Codex itself adds as the user."""
_FAILED = re.compile(
    r'"exit_code":\s*(?!0\b)-?\d|(?:Exit code|exited with code):? (?!0\b)-?\d'
    r"|\A(?:exec(?:ution)? (?:error|failed)|failed to |error[: ]|unsupported call|aborted by user|apply_patch "
    r"verification failed|tool call error|err: |Script (?:failed|terminated))",
)
_NOT_ARGUMENTS = {"type", "id", "call_id", "status", "name", "namespace", "result"}
_COPIED = "copied by a compaction"


def matches(sample: FileStart) -> bool:
    return any(string(line["type"]) in _LINES for line in sample.objects("type", "payload"))


def read(file: TraceFile) -> Iterator[TraceState]:
    if file.whole is not None:
        file.unknown()
        return
    records = file.records()
    first = next(records, None)
    if first is not None:
        # Without an id in the first record the trace has the file's name.
        builder = TraceBuilder(file, string(at(first, "payload", "id")))
        yield from feed(file, builder, chain([first], records), _Rollout().take)


class _Rollout:
    """What is known of the session so far."""

    def __init__(self) -> None:
        self._began = False
        self._model: str | None = None
        self._answers = 0
        """Key of all items of the model's answer."""
        self._calls = 0
        self._held: list[dict[str, Any]] = []
        """The user's messages that wait: an image may come between the outputs of one answer."""
        self._prompts = 0
        """Messages that the user typed. Their number marks records, for rollbacks."""
        self._standing: list[int] = []
        """Those that were not taken back."""

    def take(self, builder: TraceBuilder, record: Any) -> str | None:
        """Process one record. Return why it is skipped, if it is."""
        if not isinstance(record, dict):
            return "not an object"
        kind, payload = record.get("type"), object_at(record, "payload")
        if kind == "response_item":
            return self._item(builder, payload)
        if kind == "session_meta":
            return self._session(builder, payload)
        if kind == "turn_context":
            self._model = string(payload.get("model")) or self._model
            return None if payload.get("model") else "turn_context without a model"
        if kind == "compacted":
            return self._compacted(builder, payload)
        if kind == "event_msg":
            return self._event(builder, payload)
        return f"record {kind}" if isinstance(kind, str) and kind in _LINES else "unknown record type"

    def _session(self, builder: TraceBuilder, meta: dict[str, Any]) -> str | None:
        if self._began:
            return "session_meta of the session that this one continues"
        self._began = True
        prompt = meta.get("base_instructions")
        text = text_of(at(prompt, "text") if isinstance(prompt, dict) else prompt)
        if text.strip():
            builder.context("system", text)
        return None

    def _item(self, builder: TraceBuilder, item: dict[str, Any], aside: str | None = None) -> str | None:
        kind = string(item.get("type")) or ""
        if kind == "message" and item.get("role") == "user":
            self._held.append(item)
            return None
        if kind.endswith("_output"):
            return self._output(builder, item)
        self._release(builder)
        if kind == "message":
            return self._message(builder, item, aside)
        if kind == "agent_message":  # of another agent
            return self._context(builder, "user", text_of(item.get("content")))
        if kind == "reasoning":
            thoughts = [*objects(item.get("summary")), *objects(item.get("content"))]
            text = "\n\n".join(string(part.get("text")) or "" for part in thoughts)
            if not text.strip():
                return "encrypted thought"
            return self._assistant(builder, "", [], text, aside)
        if kind.endswith("_call"):
            return self._assistant(builder, "", [self._call(item, kind)], "", aside)
        return f"item {kind}" if re.fullmatch(r"[a-z_]{1,40}", kind) else "unknown item"

    def _release(self, builder: TraceBuilder) -> None:
        """Show the user's messages that wait."""
        held, self._held = self._held, []
        for item in held:
            text = text_of(item.get("content"))
            if not _OWN_PROMPT.match(text):
                self._prompts += 1
                self._standing.append(self._prompts)
            self._context(builder, "user", text)

    def _message(self, builder: TraceBuilder, item: dict[str, Any], aside: str | None) -> str | None:
        role, text = item.get("role"), text_of(item.get("content"))
        if role == "assistant":
            return self._assistant(builder, text, [], "", aside)
        if role in ("system", "developer"):
            return self._context(builder, "system", text)
        return "message of an unknown role"

    def _context(self, builder: TraceBuilder, role: str, text: str) -> None:
        self._answers += 1
        builder.context(role, text, mark=f"{role[0]}{self._prompts}")

    def _assistant(
        self, builder: TraceBuilder, text: str, calls: list[Call], thought: str, aside: str | None = None
    ) -> None:
        key, mark = f"answer {self._answers}", f"a{self._prompts}"
        builder.assistant(text, calls, thought, key=key, mark=mark, model=self._model, aside=aside)

    def _call(self, item: dict[str, Any], kind: str) -> Call:
        """Return a call of any kind, named by its kind where it has no name."""
        self._calls += 1
        name = string(item.get("name")) or kind.removesuffix("_call")
        space = string(item.get("namespace"))
        written = next((item[key] for key in ("arguments", "action") if item.get(key) is not None), None)
        if isinstance(item.get("input"), str):  # text of no fixed form, such as a patch
            arguments: Any = {"input": item["input"]}
        elif written is not None:
            arguments = arguments_of(written)
        else:
            arguments = {key: value for key, value in item.items() if key not in _NOT_ARGUMENTS}
        call_id = item.get("call_id") or item.get("id") or f"{kind}_{self._calls}"
        return Call(call_id=str(call_id), name=f"{space}.{name}" if space else name, arguments=arguments)

    def _output(self, builder: TraceBuilder, item: dict[str, Any]) -> str | None:
        output, call_id = item.get("output"), item.get("call_id")
        shown = output.get("content", output.get("content_items")) if isinstance(output, dict) else output
        if "tools" in item and output is None:  # of tool_search
            shown = json.dumps(item["tools"], ensure_ascii=False)
        text = text_of(shown)
        failed = bool(_FAILED.search(text[:20_000])) or at(output, "success") is False
        error = (text or "error") if failed else failure(text)
        self._answers += 1
        output_of = None if call_id is None else str(call_id)
        paired = builder.tool_result(output_of, text, error=error, mark=f"a{self._prompts}")
        return None if paired else "output without its call"

    def _compacted(self, builder: TraceBuilder, payload: dict[str, Any]) -> None:
        self._release(builder)
        numbers = range(self._prompts + 1)
        history, summary = payload.get("replacement_history"), text_of(payload.get("message"))
        if isinstance(history, list):
            builder.forget([f"{who}{number}" for number in numbers for who in "aus"], "")
            for item in objects(history):
                self._item(builder, item, _COPIED)
            self._release(builder)
            builder.close()
        else:
            builder.forget([f"a{number}" for number in numbers], "")
            self._context(builder, "user", summary)

    def _event(self, builder: TraceBuilder, event: dict[str, Any]) -> str | None:
        kind, turns = string(event.get("type")) or "", event.get("num_turns")
        if kind == "thread_rolled_back" and isinstance(turns, int) and turns > 0:
            self._release(builder)
            builder.forget([f"{who}{number}" for number in self._standing[-turns:] for who in "aus"], "")
            del self._standing[-turns:]
            self._answers += 1
            return None
        return f"event {kind}" if re.fullmatch(r"[a-z_]{1,40}", kind) else "unknown event"
