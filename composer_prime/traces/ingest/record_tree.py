"""The tree of a session's records, for formats whose records name their parent.

A turn's context is the walk from its parent up to the root, wherever in the file the records are.

    note, note, turn (several records) ──┬── note ── turn          one node a message or turn; a record's id leads to
                                         └── note ── turn ── ...   the node behind which what follows it stands

A turn stays open for more parts and results until a turn begins below it. Several turns may be open. The texts of a
file's sessions are held until its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from composer_prime.traces.ingest.agent_turns import Turn, digest_of, size_of, too_long
from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.trace_file import NO_RESULT, StateMaker
from composer_prime.traces.states import Message

CLEARED = "[Old tool result content cleared]"
"""What Claude Code shows instead of a result that it took out of the context."""


@dataclass(slots=True, eq=False)
class RecordNode:
    """A user message, a turn, or a root (which has no messages)."""

    maker: StateMaker
    parent: RecordNode | None = None
    is_turn: bool = False
    turn: Turn | None = None
    """The turn while it is open."""
    before: tuple[list[Message], bytes] = ([], b"")
    """What the agent saw when the turn began, with its digest; kept while the turn is open."""
    messages: list[Message] = field(default_factory=list)
    queued: bool = False
    """Whether it is not a prompt of its own: typed while the agent worked, or attached by its program."""
    cleared: tuple[str, ...] = ()
    """Calls above whose results the agent no longer sees from here on."""
    missing: str | None = None
    """Why nothing that follows can be shown; None when it can."""
    above: RecordNode | None = field(init=False)
    """The nearest turn above it."""
    digest: bytes = field(init=False)
    """Digest of the messages."""

    def __post_init__(self) -> None:
        self.above = None if self.parent is None else self.parent.nearest
        self.missing = self.missing or (None if self.parent is None else self.parent.missing)
        self.show(self.messages)

    @property
    def nearest(self) -> RecordNode | None:
        """Return this turn, or the nearest turn above."""
        return self if self.is_turn else self.above

    def show(self, messages: list[Message]) -> None:
        """Hold these messages, unless nothing of the walk can be shown."""
        self.messages = [] if self.missing else messages
        self.digest = _digest(self.messages)


class RecordTree:
    """The nodes of a file, which holds one session or several."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[str, RecordNode] = {}
        self._open: dict[RecordNode, None] = {}
        self._keys: dict[str, RecordNode] = {}
        self.tip: RecordNode | None = None
        """The node of the last record."""

    def get(self, record: str) -> RecordNode | None:
        """Return the node of a record, None when there is none."""
        return self._nodes.get(record)

    def place(self, record: str | None, node: RecordNode) -> None:
        """Make `node` the parent of what follows the record."""
        self.tip = node
        if record is not None:
            self._nodes[record] = node

    def turn(self, parent: RecordNode, turn: Turn) -> RecordNode:
        """Open a turn behind `parent`. The turn above must be closed."""
        above = parent.nearest
        missing = None if above is None else above.missing
        node = RecordNode(parent.maker, parent, is_turn=True, turn=turn, missing=missing)
        node.before = ([], b"") if node.missing else _context(parent)
        self._open[node] = None
        if turn.key is not None:
            self._keys[turn.key] = node
        return node

    def unfinished(self, parent: RecordNode, key: str | None) -> RecordNode | None:
        """Return the open turn of this key if another part of it may stand behind `parent`.

        That is behind the turn, behind notes that follow it, or where the turn itself stands.
        """
        node = None if key is None else self._keys.get(key)
        return node if node is not None and (parent.nearest is node or node.parent is parent) else None

    def answer(self, parent: RecordNode, call_id: str, text: str, error: str | None) -> bool:
        """Store the result of a call of the turn nearest to `parent`, also of a turn below which another began.

        Return False when the turn made no such call or has its result already.
        """
        node = parent.nearest
        if node is None:
            return False
        if node.turn is not None:
            return node.turn.answer(call_id, text, error)
        waiting = {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}
        if waiting not in node.messages:
            return False
        result = node.maker.result(call_id, text)
        node.show([result if message == waiting else message for message in node.messages])
        return True

    def move(self, first: RecordNode, last: RecordNode, behind: RecordNode) -> None:
        """Move the nodes from `first` to `last` behind another node. Nothing moves when `first` is not above `last`."""
        walk = [last]
        while walk[-1] is not first:
            if walk[-1].parent is None:
                return
            walk.append(walk[-1].parent)
        self.close(last.nearest)
        moved: dict[RecordNode, RecordNode] = {}
        for node in reversed(walk):
            behind = moved[node] = RecordNode(
                behind.maker, behind, node.is_turn, messages=node.messages, queued=node.queued, cleared=node.cleared,
                missing=node.missing,
            )  # fmt: skip
        self._nodes = {record: moved.get(node, node) for record, node in self._nodes.items()}

    def close(self, node: RecordNode | None) -> None:
        """Close a turn if it is open, and make its state."""
        if node is None or node.turn is None:
            return
        turn, node.turn = node.turn, None
        del self._open[node]
        if turn.key is not None and self._keys.get(turn.key) is node:
            del self._keys[turn.key]
        (messages, digest), node.before = node.before, ([], b"")
        chars = sum(map(size_of, messages))
        if chars > self._limits.context_chars:
            node.missing = too_long(self._limits)
        shown = node.maker.finish(turn, messages, digest, node.missing)
        if chars + sum(map(size_of, shown)) > self._limits.context_chars:
            node.missing = node.missing or too_long(self._limits)
        node.show(shown)

    def close_all(self) -> None:
        for node in list(self._open):
            self.close(node)


def _context(last: RecordNode) -> tuple[list[Message], bytes]:
    """Return what the agent saw up to a node, with its digest."""
    cleared: set[str] = set()
    parts: list[tuple[list[Message], bytes]] = []
    node: RecordNode | None = last
    while node is not None:
        messages = _without(node.messages, cleared)
        parts.append((messages, node.digest if messages is node.messages else _digest(messages)))
        cleared.update(node.cleared)
        node = node.parent
    digest, context = b"", list[Message]()
    for messages, own in reversed(parts):
        digest = hashlib.blake2b(digest + own, digest_size=8).digest() if messages else digest
        context += messages
    return context, digest


def _without(messages: list[Message], cleared: set[str]) -> list[Message]:
    """Return the messages with CLEARED as the results of `cleared` calls; the same list without such calls."""
    if not cleared or cleared.isdisjoint(message.get("tool_call_id") for message in messages):
        return messages
    return [{**each, "content": CLEARED} if each.get("tool_call_id") in cleared else each for each in messages]


def _digest(messages: Iterable[Message]) -> bytes:
    digest = b""
    for message in messages:
        digest = digest_of(digest, message)
    return digest
