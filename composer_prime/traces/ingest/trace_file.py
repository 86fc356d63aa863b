"""A file of agent sessions as a format's reader sees it: its records, their account, and the states made of its turns.

    records, results, errors ─> Turn ─> StateMaker.finish(turn, what came before) ─> TraceFile.drain(), context

A reader only decides what each record means. Messages are masked once, on entry. Records are taken or skipped, turns
give states or are passed over, each by reason.

A teacher can only choose among the tools that it is offered, and the offer must not reveal what the student chose. So
every state of a file that lists no tools offers all that the whole file calls, gathered in a first pass.

Files come from strangers: JSON values are read in bounded memory, and `at`, `objects`, `text_of` ... take any value.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.llm.reply import split_thinking
from composer_prime.model_families import family_of
from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.records import Message, TraceState

CHUNK_BYTES = 1 << 20
MAX_DEPTH = 100
"""Nesting levels of a JSON value, of which each takes frames of Python's stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to ingest, and the most that one record or one context may hold."""

    mask: bool = True
    model: str | None = None
    """The model that made traces which name none."""
    family: str | None = None
    """The model's family, whatever the traces say."""
    format: str | None = None
    """A format's name; None detects it."""
    line_bytes: int = 16 << 20
    document_bytes: int = 32 << 20
    context_chars: int = 2_000_000
    """Characters of a state's messages; about 500,000 tokens."""
    session_bytes: int = 64 << 20
    """Memory for sessions whose states wait for the file's end (Claude Code)."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that holds no JSON value, with the reason."""

    reason: str


def lines(path: Path, options: Options, until: int = sys.maxsize) -> Iterator[Any]:
    """Yield the JSON value, or `Bad`, of every line in the first `until` bytes; blank lines are none.

    A line above the limit is skipped in pieces and never held.
    """
    with path.open("rb", buffering=CHUNK_BYTES) as file:
        while raw := file.readline(min(options.line_bytes + 1, until)):
            whole, blank = raw.endswith(b"\n"), raw.isspace()
            until -= len(raw)
            if not whole and len(raw) > options.line_bytes:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(min(CHUNK_BYTES, until))
                    until -= len(raw)
                value: Any = Bad(f"line longer than {options.line_bytes >> 20} MiB")
            else:
                value = None if blank else parse_json(raw, torn=not whole)
            del raw
            if not blank:
                yield value
            del value  # never held beside the next


def document(path: Path, options: Options) -> Any:
    """Return the JSON value of a whole file, or `Bad`."""
    size = os.path.getsize(path)
    if size > options.document_bytes:
        return Bad(f"JSON document larger than {options.document_bytes >> 20} MiB")
    raw = path.read_bytes()
    return parse_json(raw) if raw.strip() else Bad("empty document")


def parse_json(raw: bytes, torn: bool = False) -> Any:
    """Return `raw` as a JSON value, or `Bad`. `torn` marks a last line without its end."""
    value = _decoded(raw, torn)
    # Brackets inside strings count too: a cheap upper bound.
    may_be_deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH
    return Bad("nested too deeply") if may_be_deep and _is_deep(value) else value


def _decoded(raw: bytes, torn: bool) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # Python's reader accepts NaN, lone surrogates and the like.
    try:
        return _without_surrogates(json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return Bad("not UTF-8")
    except RecursionError:
        return Bad("nested too deeply")
    except ValueError:
        return Bad("truncated last line" if torn else "not JSON")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        inner = (node for outer in level for node in (outer.values() if isinstance(outer, dict) else outer))
        level = [node for node in inner if isinstance(node, list | dict)]
    return bool(level)


def _without_surrogates(value: Any) -> Any:
    """Replace what UTF-8 and JSON cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def at(value: Any, *keys: str) -> Any:
    """Return the value at the end of `keys` in nested objects, if any."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def object_at(value: Any, *keys: str) -> dict[str, Any]:
    """Return the object at the end of `keys`, or an empty one."""
    found = at(value, *keys)
    return found if isinstance(found, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; of any other value none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def text_of(content: Any) -> str:
    """Return the text of a string, a block, or a list of either; a mark such as [image] for other content."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part for block in content if (part := text_of(block)))
    return _text_of_block(content) if isinstance(content, dict) else ""


def _text_of_block(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind in ("image", "image_url", "document", "input_image"):
        return f"[{kind}]"
    is_text = kind in ("text", "input_text", "output_text") or (kind is None and "text" in block)
    inner = block.get("text" if is_text else "content")
    return text_of(inner) if isinstance(inner, str | list) else ""


SAMPLE_RECORDS, SAMPLE_BYTES = 64, 4 << 20
"""A sample ends with the record that reaches either limit."""
SNIFF_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStart:
    """The start of a file, which a reader's `matches` looks at."""

    path: Path
    records: list[Any] = field(default_factory=list)
    document: Any = None
    """The value of a file that is one JSON document, or `Bad`."""

    def objects(self, *keys: str) -> list[dict[str, Any]]:
        """Return the records that are objects with all of `keys`."""
        found = (record for record in self.records if isinstance(record, dict))
        return [record for record in found if all(key in record for key in keys)]


def take_sample(path: Path, options: Options | None = None) -> FileStart:
    """Return the start of a file, as one document where that works and as lines otherwise. Raises OSError."""
    options = options or Options()
    if path.is_dir():
        return FileStart(path=path)
    value = document(path, options) if _one_document(path) else None
    if value is not None and not isinstance(value, Bad):
        return FileStart(path=path, document=value)
    records = [record for record in _first(path, options) if not isinstance(record, Bad)]
    if isinstance(value, Bad) and not any(isinstance(record, dict) for record in records):
        return FileStart(path=path, document=value)
    return FileStart(path=path, records=records)


def _first(path: Path, options: Options) -> Iterator[Any]:
    size = 0
    for record in islice(lines(path, options), SAMPLE_RECORDS):
        yield record
        size += 0 if isinstance(record, Bad) else len(msgspec.json.encode(record))
        if size >= SAMPLE_BYTES:
            break


def _one_document(path: Path) -> bool:
    """Check whether a file may be one JSON document, by its name and first line."""
    with path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
        lone = b"\n" not in head.strip() and len(head) < SNIFF_BYTES
    if head.lstrip()[:1] not in (b"[", b"{") or path.suffix in (".jsonl", ".ndjson"):
        return False
    first_line = head.lstrip().split(b"\n", 1)[0].rstrip()
    return lone or path.suffix in (".json", ".traj") or not first_line.endswith((b"}", b"]"))


NO_TRACE = "not a known trace format"
NO_RESULT = "[no result was recorded]"
COPY = "copy of an earlier state"
ERROR_CHARS = 500
MAX_TOOLS, MAX_ARGUMENTS = 128, 64
"""Tools of one file, and arguments of one tool, that are described."""
_TYPES: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]


@dataclass(slots=True)
class Tally:
    """Counts of one file, or the sum over several files."""

    taken: int = 0
    """Records that a reader used."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that no state is made of, by reason."""
    states: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    """Turns that became no state, by reason."""
    masked: Counter[str] = field(default_factory=Counter)
    """Secrets by kind, once in each distinct message."""
    format: str | None = None
    """The reader of the file, if any matched."""

    @property
    def seen(self) -> int:
        return self.taken + self.skipped.total()

    @property
    def turns(self) -> int:
        return self.states + self.passed_over.total()

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def add(self, other: Tally) -> None:
        self.taken += other.taken
        self.states += other.states
        self.skipped += other.skipped
        self.passed_over += other.passed_over
        self.masked += other.masked


@dataclass(slots=True, kw_only=True)
class Call:
    """A tool call. `arguments` is the decoded object, or the text that is none."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(slots=True)
class Turn:
    """One answer of the model, perhaps incomplete, with its calls' results."""

    key: str | None
    model: str | None
    step: int
    several_models: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    aside: str | None = None
    """Why the turn gives no state."""

    def add(self, text: str, calls: Collection[Call], reasoning: str) -> None:
        """Add a part of the answer. Thinking in its text is split off."""
        visible, thought = split_thinking(text)
        # `strip` would copy a text of any size.
        self.text += [visible] if visible and not visible.isspace() else []
        self.reasoning += [part for part in (reasoning, thought) if part and not part.isspace()]
        call_ids = {call.call_id for call in self.calls}
        self.calls += [call for call in calls if call.call_id not in call_ids]

    def answer(self, call_id: str | None, text: str, error: str | None) -> bool:
        """Store the result of a call, or with None of the first without one. Return whether a call took it."""
        if call_id is None:
            call_id = next((call.call_id for call in self.calls if call.call_id not in self.results), None)
        if call_id is None or call_id in self.results or all(call.call_id != call_id for call in self.calls):
            return False
        self.results[call_id] = text
        if error is not None:
            self.fail(error)
        return True

    def fail(self, error: str) -> None:
        self.error = error if self.error is None else self.error


class ObservedTools:
    """The tools that a file's turns call, as OpenAI's function tools."""

    def __init__(self) -> None:
        self._arguments: dict[str, dict[str, str]] = {}

    def add(self, turn: Turn) -> None:
        for call in turn.calls:
            if call.name in self._arguments or len(self._arguments) < MAX_TOOLS:
                arguments = call.arguments if isinstance(call.arguments, dict) else {}
                _note_types(self._arguments.setdefault(call.name, {}), arguments)

    def schemas(self, mask: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return the tools by name, so that their order reveals nothing. `mask` masks names."""
        masked: dict[str, dict[str, str]] = {}
        for name, arguments in self._arguments.items():
            masked.setdefault(mask(name), {}).update({mask(key): kind for key, kind in arguments.items()})
        return [_schema(name, masked[name]) for name in sorted(masked)]


def _note_types(types: dict[str, str], arguments: dict[str, Any]) -> None:
    for name in [each for each in arguments if each not in types][: MAX_ARGUMENTS - len(types)]:
        value = arguments[name]
        types[name] = next((json_type for kind, json_type in _TYPES if isinstance(value, kind)), "")


@dataclass(slots=True, kw_only=True)
class TraceFile:
    """What a format's reader needs to read a file."""

    path: Path
    whole: Any
    """The value of a file that is one JSON document, or `Bad`; else None."""
    options: Options
    tally: Tally
    format: str
    fingerprints: set[bytes] = field(default_factory=set)
    """States seen so far."""
    trace_ids: set[str] = field(default_factory=set)
    tools: ObservedTools | list[dict[str, Any]] = field(default_factory=list)
    """The tools that the file calls; in the first pass, which makes no state, their collector."""
    size: int = sys.maxsize
    """Bytes that are read; what is appended meanwhile is not."""
    ready: list[TraceState] = field(default_factory=list)

    def drain(self) -> list[TraceState]:
        """Return the states that were made since. A reader yields them after each record."""
        states = self.ready.copy()
        self.ready.clear()
        return states

    def records(self) -> Iterator[Any]:
        """Yield the values of a file of lines, and count `Bad` ones.

        A reader must `del` a value before it draws the next: two large ones are never held together.
        """
        if self.path.is_dir():
            self.tally.skip(NO_TRACE)
            return
        for value in lines(self.path, self.options, self.size):
            if isinstance(value, Bad):
                self.tally.skip(value.reason)
            else:
                yield value
            del value

    def unknown(self) -> None:
        """Skip every record."""
        if self.path.is_dir() or self.whole is not None:
            self.tally.skip(self.whole.reason if isinstance(self.whole, Bad) else NO_TRACE)
            return
        for _ in self.records():
            self.tally.skip(NO_TRACE)

    def observe(self, read: Callable[[TraceFile], Iterator[TraceState]]) -> None:
        """Gather the tools that the turns call, without context, masks or counts."""
        gathered = ObservedTools()
        unmasked = replace(self.options, mask=False)
        first = replace(self, tally=Tally(), options=unmasked, fingerprints=set(), trace_ids=set(), tools=gathered)
        for _ in read(first):
            pass
        self.tools = gathered.schemas(Masker(Counter(), self.options.mask).text)


def unique_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a number where it is taken, and note it."""
    numbered, number = name, 1
    while numbered in taken:
        number += 1
        numbered = f"{name}~{number}"
    taken.add(numbered)
    return numbered


class StateMaker:
    """The states of one trace."""

    def __init__(self, file: TraceFile, trace_id: object, model: object = None) -> None:
        """`trace_id`: else the file's name. `model`: the one that the trace names."""
        self._file = file
        self.options = file.options
        self._masker = Masker(file.tally.masked, file.options.mask)
        named = isinstance(trace_id, str | int) and str(trace_id).strip()
        name = str(trace_id)[:200] if named else file.path.stem
        # The name of a file need not be UTF-8.
        masked = self._masker.text(name.encode("utf-8", "replace").decode("utf-8"))
        self._trace_id = unique_name(masked, file.trace_ids)
        self.model = model if isinstance(model, str) and model else None
        """The model that the trace named last."""
        self.gathering = isinstance(file.tools, ObservedTools)
        """Whether a first pass gathers the file's tools."""
        self.tools = [] if isinstance(file.tools, ObservedTools) else file.tools
        """What all states offer."""
        self._observed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        self._listed = False
        self._steps = 0

    def list_tools(self, tools: object, *, always: bool = False) -> None:
        """Offer the tools that the format lists, if any. `always`: an empty list counts too."""
        functions = [tool for tool in objects(tools) if isinstance(at(tool, "function", "name"), str)]
        if functions or (always and tools == []):
            self.tools = [self._with_arguments(tool) for tool in self._masker.value(functions)]
            self._listed = True

    def _with_arguments(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a listed tool, with its calls' arguments where it lists none."""
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            return tool
        name = function["name"]
        observed = self._observed.get(name) or _schema(name, {})["function"]["parameters"]
        return {**tool, "function": {**function, "parameters": observed}}

    def turn(self, key: str | None, model: str | None) -> Turn:
        """Start the next turn. `model` made it and those that follow."""
        self.model = model or self.model
        self._steps += 1
        return Turn(key, self.model, self._steps - 1)

    def message(self, role: str, text: str) -> Message:
        return {"role": role, "content": self._masked(text)}

    def result(self, call_id: str, text: str) -> Message:
        return {"role": "tool", "tool_call_id": call_id, "content": self._masked(text)}

    def finish(self, turn: Turn, messages: list[Message], digest: bytes, missing: str | None) -> Message | None:
        """Make the turn's state, or pass it over. Return what later contexts show of the action, if anything.

        `messages`: the turn's context, with its `digest`. `missing`: why it cannot be shown.
        """
        if isinstance(self._file.tools, ObservedTools):
            self._file.tools.add(turn)
            return None
        action = self._action(turn)
        reason = missing or turn.aside or self._passed_over(action, messages, digest)
        if reason is not None:
            self._file.tally.passed_over[reason] += 1
        else:
            self._file.tally.states += 1
            self._file.ready.append(self._state(turn, action, messages))
        shown = {name: value for name, value in action.items() if name != "reasoning_content"}
        return shown if shown.get("content") or shown.get("tool_calls") else None

    def _action(self, turn: Turn) -> Message:
        action: Message = {"role": "assistant", "content": self._masked("\n\n".join(turn.text)) or None}
        if turn.calls:
            action["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.reasoning:
            action["reasoning_content"] = self._masker.text("\n\n".join(turn.reasoning))
        return action

    def _masked(self, text: str) -> str:
        """Mask a text, unless it is too long to be shown."""
        return text if len(text) > self.options.context_chars else self._masker.text(text)

    def _call(self, call: Call) -> dict[str, Any]:
        masked = self._masker.value(call.arguments)
        text = masked if isinstance(masked, str) else json.dumps(masked, ensure_ascii=False)
        return {
            "id": call.call_id,
            "type": "function",
            "function": {"name": self._masker.text(call.name), "arguments": text},
        }

    def _passed_over(self, action: Message, messages: list[Message], digest: bytes) -> str | None:
        if size_of(action) > self.options.context_chars:
            return f"action over {self.options.context_chars:,} characters"
        calls = action.get("tool_calls") or []
        if not action.get("content") and not calls:
            return "no visible action (thinking only, or empty)"
        if not messages:
            return "nothing before it"
        if not self._listed and any(call["function"]["name"] not in self._observed for call in calls):
            return f"its tool is not among the first {MAX_TOOLS} of the file"
        fingerprint, seen = digest_of(digest, action), self._file.fingerprints
        if fingerprint in seen:
            return COPY
        seen.add(fingerprint)
        return None

    def _state(self, turn: Turn, action: Message, messages: list[Message]) -> TraceState:
        options = self._file.options
        model = None if turn.several_models else turn.model or options.model
        return TraceState(
            trace_id=self._trace_id,
            state_id=f"{self._trace_id}/{turn.step:04d}",
            step=turn.step,
            messages=messages,
            student_action=action,
            source_model=model and self._masker.text(model),
            source_family=options.family or family_of(model),
            tools=self.tools,
            error=None if turn.error is None else self._masker.text(turn.error[: 4 * ERROR_CHARS])[:ERROR_CHARS],
            format=self._file.format,
        )


def too_long(options: Options) -> str:
    """Return why nothing after an overflow can be shown."""
    return f"context over {options.context_chars:,} characters"


def size_of(message: Message) -> int:
    size, calls = len(message.get("content") or ""), message.get("tool_calls")
    return size + sum(len(call["function"]["arguments"]) for call in calls) if calls else size


def digest_of(before: bytes, message: Message) -> bytes:
    """Return 8 bytes for a conversation, the same for copies with other call ids."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = msgspec.json.encode([message["role"], message.get("content"), calls])
    return hashlib.blake2b(before + content, digest_size=8).digest()


def _schema(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {argument: {"type": kind} if kind else {} for argument, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
