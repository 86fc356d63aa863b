"""Read Claude Code sessions: one JSON object a line, a tree by `uuid` and `parentUuid`.

1. Several lines with one `message.id` are one answer of the model, and one turn. Results and notes may be between them.
2. A state's context is the walk along `parentUuid`. Two terminals, or a user who went back, make branches. A line
   without a parent, or whose parent is not in the file, follows the line before it.
3. `compact_boundary` starts a new context, with the summary after it. Messages that it keeps (`preservedSegment`)
   follow the record that it names. A resumed session repeats earlier lines, which count once. After
   `microcompact_boundary` the results of the calls that it names read CLEARED. What Claude Code attaches (a prompt
   typed while the agent worked, a file named with @, a hook's context) is a message of the user.
4. Sidechains (subagents) are another agent's conversation and are skipped.
5. All records of a session are read before its first state is made. A session that does not end within
   `Options.session_bytes` gives the states of its turns so far; what it says after that is skipped.

    note, turn (several records) ──┬── note ── turn         a turn's context is the walk from its parent up to the root
                                   └── note ── turn ── ...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from composer_prime.traces.ingest.trace_file import (
    NO_RESULT,
    Call,
    FileStart,
    StateMaker,
    TraceFile,
    Turn,
    at,
    digest_of,
    object_at,
    objects,
    size_of,
    string,
    text_of,
    too_long,
)
from composer_prime.traces.records import Message, TraceState

CLEARED = "[Old tool result content cleared]"
"""What Claude Code shows instead of a result that it took out."""
Shown = tuple[Message, bytes]
"""A message with its digest."""


@dataclass(slots=True, eq=False)
class SessionNode:
    """A user message, a turn, or neither (a root, a compaction)."""

    maker: StateMaker
    parent: SessionNode | None = None
    line: int = 0
    turn: Turn | None = None
    shown: Shown | None = None
    """The user's message, or a finished turn's action, as later contexts show it."""
    results: dict[str, tuple[int, Shown]] = field(default_factory=dict)
    """(line, message) of each result."""
    before: int = 0
    """Characters of the context above."""
    chars: int = 0
    """Characters of the context up to here."""
    queued: bool = False
    """Whether it was typed while the agent worked, or attached by its program."""
    cleared: tuple[str, ...] = ()
    """Calls above whose results are no longer seen from here on."""
    latest: SessionNode | None = None
    jump: tuple[SessionNode, SessionNode] | None = None
    """(first, summary): above `first` the walk goes on at the summary that kept messages."""

    @property
    def nearest(self) -> SessionNode | None:
        """Return the turn here or above."""
        return next((node for node in walk(self) if node.turn is not None), None)


def walk(node: SessionNode | None) -> Iterator[SessionNode]:
    """Yield the nodes from here up to the root."""
    jumps: dict[SessionNode, SessionNode] = {}
    while node is not None:
        yield node
        if node.jump is not None:
            jumps[node.jump[0]] = node.jump[1]
        node = jumps.pop(node, node.parent)


def context_of(turn: SessionNode) -> tuple[list[Message], bytes]:
    """Return what the agent saw before a turn, with its digest."""
    parts: list[list[Shown]] = []
    cleared: set[str] = set()
    line = turn.line
    for node in walk(turn.parent):
        if node.shown is not None:
            calls = [call["id"] for call in node.shown[0].get("tool_calls") or []]
            parts.append([node.shown, *(_result(node, call_id, line, call_id in cleared) for call_id in calls)])
        cleared.update(node.cleared)
        line = node.line if node.turn is not None else line
    context, digest = list[Message](), hashlib.blake2b(digest_size=8)
    for messages in reversed(parts):
        for message, own in messages:
            context.append(message)
            digest.update(own)
    return context, digest.digest()


def cleared_chars(node: SessionNode, call_ids: Iterable[str]) -> int:
    """Count the characters that such a microcompaction takes out of the context."""
    chars, left = 0, set(call_ids)
    for each in walk(node):
        left.difference_update(each.cleared)
        chars += sum(size_of(each.results[call_id][1][0]) for call_id in left & each.results.keys())
    return chars


def shown(message: Message) -> Shown:
    return message, digest_of(b"", message)


def _result(node: SessionNode, call_id: str, line: int, cleared: bool) -> Shown:
    """Return a call's result as shown before a line."""
    came, result = node.results.get(call_id, (line, None))
    if result is None or came >= line:
        return shown({"role": "tool", "tool_call_id": call_id, "content": NO_RESULT})
    return shown({**result[0], "content": CLEARED}) if cleared else result


NAME, VERSION = "claude_code", 2
"""Written for the lines of Claude Code 1 and 2."""
SYNTHETIC = "not the model's own words (synthetic)"
RECORD_BYTES, TRACE_BYTES = 1 << 10, 1 << 10
"""Memory of a record's node beside its text, and of a trace beside its records."""
LOOK_BACK = 1_000
"""Messages and turns that are searched for a queued prompt."""
_KNOWN_ASIDE = {
    "summary",
    "file-history-snapshot",
    "queue-operation",
    "progress",
    "attachment",
    "custom-title",
    "ai-title",
    "agent-name",
    "last-prompt",
    "permission-mode",
    "pr-link",
    "tag",
}
_USES = ("tool_use", "server_tool_use", "mcp_tool_use")
"""Those of tools that the provider runs have no result in the session."""
_ASIDE_NAMES = {"sessionId", "leafUuid", "messageId"}


def matches(sample: FileStart) -> bool:
    spoken = [record for record in sample.objects("type", "uuid", "message") if record["type"] in ("user", "assistant")]
    aside = [record for record in sample.objects("type") if string(record["type"]) in _KNOWN_ASIDE]
    linked = any("parentUuid" in record or "sessionId" in record for record in spoken)
    return linked or any(not _ASIDE_NAMES.isdisjoint(record) for record in aside)


def read(file: TraceFile) -> Iterator[TraceState]:
    session = _Session(file, _Memory(given_up=set()))
    for record in file.records():
        session.record(record)
        del record
        if session.memory.held > file.options.session_bytes:
            session.give_up()
            yield from session.states()
            session = _Session(file, _Memory(given_up=session.memory.given_up))
    yield from session.states()


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What the tree holds."""

    given_up: set[str]
    """Sessions of earlier trees: what they still say cannot be shown."""
    held: int = 0
    """Bytes, about."""
    sessions: set[str] = field(default_factory=set)
    retries: set[str] = field(default_factory=set)
    """uuids of the endpoint's errors and of records on them."""


class _Session:
    """The tree of the file's records. A trace is a session, with those that continue it."""

    def __init__(self, file: TraceFile, memory: _Memory) -> None:
        self._file = file
        self.memory = memory
        self._turns: list[SessionNode] = []
        self._line = 0
        self._nodes: dict[str, SessionNode] = {}
        """By uuid: the node behind which a following record stands."""
        self._answers: dict[str, SessionNode] = {}
        """By message.id."""
        self._tip: SessionNode | None = None
        self._seen = set[tuple[str, str]]()
        """(session, uuid) of the records that were read."""
        self._maker: StateMaker | None = None
        self._session: object = None
        self._linked = False
        self._kept: dict[str, Any] | None = None
        """What a compaction keeps, while its summary is still to come."""

    def states(self) -> Iterator[TraceState]:
        for node in self._turns:
            self._finish(node)
            yield from self._file.drain()

    def give_up(self) -> None:
        """Take no more of the sessions so far. The last turn, perhaps open, gives no state."""
        self.memory.given_up |= self.memory.sessions
        turn = None if self._tip is None else self._tip.nearest
        if turn is not None and turn.turn is not None:
            turn.turn.aside = self._endless()

    def _endless(self) -> str:
        return f"session not over after {self._file.options.session_bytes >> 20} MiB"

    def _finish(self, node: SessionNode) -> None:
        assert node.turn is not None
        options = self._file.options
        missing = too_long(options) if node.before > options.context_chars else None
        messages, digest = ([], b"") if missing or node.maker.gathering else context_of(node)
        action = node.maker.finish(node.turn, messages, digest, missing)
        node.shown = None if action is None else shown(action)
        node.turn.text, node.turn.reasoning = [], []

    def record(self, record: Any) -> None:
        self._line += 1
        reason = self._unread(record)
        if reason is not None:
            self._file.tally.skip(reason)
            return
        match kind := string(record.get("type")):
            case "user" | "assistant":
                self._spoken(kind, record)
            case "system":
                self._system(record)
            case "attachment":
                self._attachment(record)
            case _:
                self._aside(record, f"record type {kind}" if kind in _KNOWN_ASIDE else "unknown record type")

    def _unread(self, record: Any) -> str | None:
        """Return why a record is skipped whatever it says, if so."""
        if not isinstance(record, dict):
            return "not an object"
        if record.get("isSidechain") is True:
            return "subagent (sidechain)"
        if _session_of(record) in self.memory.given_up:
            return self._endless()
        uuid = string(record.get("uuid"))
        return "repeated uuid" if uuid is not None and _key(record, uuid) in self._seen else None

    def _spoken(self, kind: str, record: dict[str, Any]) -> None:
        reason, message = _unusable(kind, record), object_at(record, "message")
        if reason is not None:
            self._aside(record, reason, read=reason == SYNTHETIC)
            return
        parent = self._parent(record) or self._begin(record)
        if kind == "assistant":
            self._assistant(record, message, parent)
        else:
            self._user(record, message, parent)
            self._keep(record)

    def _parent(self, record: dict[str, Any]) -> SessionNode | None:
        """Return the node that the record follows, if any."""
        link = string(record.get("parentUuid"))
        node = None if link is None else self._nodes.get(link)
        if link in self.memory.retries and record.get("type") == "user":
            # The answer that came at last stands beside the errors.
            while node is not None and node.latest is not None:
                node = node.latest
        if node is None and (self._maker is None or record.get("sessionId") != self._session):
            return None
        if node is None:
            node = self._root() if link is None and self._linked else self._tip
        self._linked = self._linked or link is not None
        self._session = record.get("sessionId")
        self._maker = node.maker if node else self._maker
        return node

    def _begin(self, record: dict[str, Any]) -> SessionNode:
        self._session = record.get("sessionId")
        self.memory.held += TRACE_BYTES
        self._maker = StateMaker(self._file, self._session)
        self._linked = string(record.get("parentUuid")) is not None
        return self._root()

    def _root(self) -> SessionNode:
        assert self._maker is not None
        return SessionNode(self._maker)

    def _below(self, parent: SessionNode, message: Message | None = None, **fields: Any) -> SessionNode:
        chars = parent.chars + (0 if message is None else size_of(message))
        node = SessionNode(parent.maker, parent, self._line, before=parent.chars, chars=chars, **fields)
        if message is not None and not parent.maker.gathering:
            node.shown = shown(message)
        parent.latest = node
        return node

    def _stands(self, record: dict[str, Any], node: SessionNode, read: bool = True) -> None:
        """Make `node` the parent of what follows. A record that was not read may come again."""
        self._tip = node
        self.memory.held += RECORD_BYTES
        self.memory.sessions.add(_session_of(record))
        uuid = string(record.get("uuid"))
        if uuid is not None:
            self._nodes[uuid] = node
            self.memory.held += sum(map(sys.getsizeof, _key(record, uuid)))
            if read:
                self._seen.add(_key(record, uuid))

    def _assistant(self, record: dict[str, Any], message: dict[str, Any], parent: SessionNode) -> None:
        key, model = string(message.get("id")), string(message.get("model"))
        node = None if key is None else self._answers.get(key)
        above = parent.nearest
        if node is not None and above is node:
            behind = parent
        elif node is not None and node.parent is parent:
            behind = node
        else:
            node = behind = self._below(parent, turn=parent.maker.turn(key, model))
            self._turns.append(node)
            if key is not None:
                self._answers[key] = node
        assert node.turn is not None
        text, calls, thinking = assistant_parts(message)
        node.turn.add(text, calls, thinking)
        arguments = [str(call.arguments) for call in calls]
        behind.chars += len(text) + sum(map(len, arguments))
        self.memory.held += sum(map(sys.getsizeof, (text, thinking, key, *arguments)))
        self._stands(record, behind)
        self._file.tally.taken += 1

    def _user(self, record: dict[str, Any], message: dict[str, Any], parent: SessionNode) -> None:
        blocks = _blocks(message)
        results = [block for block in objects(blocks) if block.get("type") == "tool_result"]
        paired = False
        for block in results:
            paired = self._result(parent, block) or paired
        texts = [part for block in blocks if block not in results and (part := text_of(block)).strip()]
        if texts:
            if record.get("isCompactSummary") is True and self._kept is None:
                parent = self._root()
            self._note(record, parent, "\n\n".join(texts), queued=False, paired=paired)
            return
        self._stands(record, parent)
        if paired:
            self._file.tally.taken += 1
        else:
            self._file.tally.skip("tool result without its call" if results else "no text in the message")

    def _result(self, parent: SessionNode, block: dict[str, Any]) -> bool:
        """Store the result of a call of the turn nearest to `parent`, if there is one."""
        node = parent.nearest
        text, call_id = text_of(block.get("content")), str(block.get("tool_use_id"))
        error = (text or "error") if block.get("is_error") is True else None
        if node is None or node.turn is None or not node.turn.answer(call_id, "", error):
            return False
        parent.chars += len(text)
        self.memory.held += sys.getsizeof(text)
        if not node.maker.gathering:
            node.results[call_id] = self._line, shown(node.maker.result(call_id, text))
        return True

    def _note(
        self, record: dict[str, Any], parent: SessionNode, text: str, *, queued: bool, paired: bool = False
    ) -> None:
        """Add a text of the user. `paired`: its record holds results too."""
        message = parent.maker.message("user", text)
        self.memory.held += sys.getsizeof(text)
        repeated = _is_said(parent, message, queued)
        self._stands(record, parent if repeated else self._below(parent, message, queued=queued))
        if repeated and not paired:
            self._file.tally.skip("queued prompt that is there already")
        else:
            self._file.tally.taken += 1

    def _attachment(self, record: dict[str, Any]) -> None:
        attachment = object_at(record, "attachment")
        text = _attached(attachment).strip()
        if text:
            self._note(record, self._parent(record) or self._begin(record), text, queued=True)
        else:
            kind = string(attachment.get("type"))
            self._aside(record, f"attachment {kind if kind and len(kind) <= 40 else 'without type'}")

    def _system(self, record: dict[str, Any]) -> None:
        subtype = string(record.get("subtype"))
        label = subtype if subtype and len(subtype) <= 40 else "without subtype"
        if subtype == "compact_boundary" and self._maker is not None and record.get("sessionId") == self._session:
            self._stands(record, self._root())
            self._kept = object_at(record, "compactMetadata", "preservedSegment")
            self._keep(record)
            self._file.tally.skip(f"system record: {label}")
        elif subtype == "microcompact_boundary" and (parent := self._parent(record)) is not None:
            listed = object_at(record, "microcompactMetadata").get("compactedToolIds")
            known = listed if isinstance(listed, list) else []
            call_ids = tuple(call_id for call_id in known if isinstance(call_id, str))
            node = self._below(parent, cleared=call_ids)
            node.chars -= cleared_chars(parent, call_ids)
            self._stands(record, node)
            self._file.tally.taken += 1
        else:
            self._aside(record, f"system record: {label}")

    def _keep(self, record: dict[str, Any]) -> None:
        """Show the messages that a compaction keeps behind the record that it names."""
        kept, tip = self._kept or {}, self._tip
        uuid = string(record.get("uuid"))
        if uuid is not None and uuid == kept.get("anchorUuid") and tip is not None:
            first, last = (self._nodes.get(str(kept.get(name))) for name in ("headUuid", "tailUuid"))
            if first is not None and last is not None and first in walk(last):
                node = self._below(last, jump=(first, tip))
                node.chars = tip.chars + last.chars - first.before
                self._nodes[str(kept["tailUuid"])] = node
        if record.get("isCompactSummary") is True:
            self._kept = None

    def _aside(self, record: dict[str, Any], reason: str, read: bool = True) -> None:
        """Skip a record without a message, but for its place."""
        if record.get("subtype") == "api_error" or string(record.get("parentUuid")) in self.memory.retries:
            self.memory.retries.add(str(record.get("uuid")))
        parent = None if string(record.get("uuid")) is None else self._parent(record)
        if parent is not None:
            self._stands(record, parent, read)
        self._file.tally.skip(reason)


def _unusable(kind: str, record: dict[str, Any]) -> str | None:
    message = record.get("message")
    if not isinstance(message, dict):
        return "message is not an object"
    if message.get("role", kind) != kind:
        return "role differs from the record's type"
    content = message.get("content")
    if not isinstance(content, str | list):
        return "message without content"
    if kind == "assistant" and (message.get("model") == "<synthetic>" or record.get("isApiErrorMessage") is True):
        return SYNTHETIC
    return None


def assistant_parts(message: dict[str, Any]) -> tuple[str, list[Call], str]:
    """Return (text, calls, thinking)."""
    text, thinking, calls = [], [], []
    for block in objects(_blocks(message)):
        kind = block.get("type")
        if kind == "text":
            text.append(text_of(block))
        elif kind == "thinking":
            thinking.append(string(block.get("thinking")) or "")
        elif kind in _USES:
            calls += _call(block)
    return "\n\n".join(text), calls, "\n\n".join(thinking)


def _call(block: dict[str, Any]) -> list[Call]:
    name, call_id, written = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(call_id, str):
        return []
    arguments = written if isinstance(written, dict) else str(written or "")
    return [Call(call_id=call_id, name=name, arguments=arguments)]


def _attached(attachment: dict[str, Any]) -> str:
    """Return what the model was shown of an attachment, as far as known."""
    kind, content = attachment.get("type"), attachment.get("content")
    name = attachment.get("filename") or attachment.get("path") or object_at(content).get("path")
    hook = f"{attachment.get('hookName') or attachment.get('hookEvent')} hook"
    match kind:
        case "queued_command":
            return text_of(attachment.get("prompt"))
        case "file":
            return _reminder(f"Contents of {name}:", text_of(at(content, "file", "content") or content))
        case "directory":
            return _reminder(f"Files in {name}:", text_of(content))
        case "nested_memory":
            return _reminder(f"Contents of {name}:", text_of(at(content, "content") or content))
        case "edited_text_file":
            return _reminder(f"{name} was modified by the user or a linter:", text_of(attachment.get("snippet")))
        case "selected_lines_in_ide":
            return _reminder(f"The user selected these lines of {name}:", text_of(content))
        case "hook_additional_context":
            return _reminder(f"{hook}:", text_of(content))
        case "hook_success" if attachment.get("hookEvent") in ("SessionStart", "UserPromptSubmit"):
            return _reminder(f"{hook}:", text_of(content))
        case "hook_blocking_error":
            return _reminder(f"{hook} blocked:", text_of(at(attachment, "blockingError", "blockingError")))
        case "critical_system_reminder":
            return _reminder("", text_of(content))
    return ""


def _reminder(title: str, text: str) -> str:
    """Return a text as Claude Code marks what no person wrote."""
    return f"<system-reminder>\n{title}\n{text}\n</system-reminder>" if text.strip() else ""


def _is_said(parent: SessionNode, message: Message, queued: bool) -> bool:
    """Check, back to the previous prompt, whether this one is there: first queued and then alone, or the reverse."""
    for node in islice(walk(parent), LOOK_BACK):
        if node.turn is None and node.shown is not None:
            if node.queued != queued and node.shown[0] == message:
                return True
            if not node.queued:
                return False
    return False


def _session_of(record: dict[str, Any]) -> str:
    return str(record.get("sessionId"))[:200]


def _key(record: dict[str, Any], uuid: str) -> tuple[str, str]:
    return str(record.get("sessionId")), uuid


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
