"""The tree of a session's records, for formats whose records name their parent.

A turn's context is the walk from its parent up to the root, wherever in the file the records are.

    note, note, turn (several records) ──┬── note ── turn          one node a message or turn; a record's id leads to
                                         └── note ── turn ── ...   the node behind which what follows it stands

A turn stays open for more parts and results until a turn begins below it. Several turns may be open. Memory is bounded:
when the tree holds too much, it drops the records that were used longest ago. What follows a dropped record has no
context.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.trace_file import NO_RESULT, StateMaker
from composer_prime.traces.ingest.turns import Call, Turn, digest_of, size_of, too_long
from composer_prime.traces.states import Message

MAX_RECORDS = 30_000
"""Records that are kept as possible parents."""
CLEARED = "[Old tool result content cleared]"
"""What Claude Code shows instead of a result that it took out of the context."""
CONTEXTS = 2
"""The tree holds the characters of this many contexts of the greatest length."""
_ID_CHARS = 64
"""What a call id that is kept counts as, in characters, beside its own."""


@dataclass(slots=True, eq=False)
class RecordNode:
    """A user message, a turn, or a root (which has no messages)."""

    maker: StateMaker
    parent: RecordNode | None = None
    above: RecordNode | None = None
    """For a message: the nearest turn above it."""
    is_turn: bool = False
    turn: Turn | None = None
    """The turn while it is open."""
    newest: RecordNode | None = None
    """The same turn with results that arrived after it was closed."""
    messages: list[Message] = field(default_factory=list)
    digest: bytes = b""
    """Digest of the messages."""
    chars: int = 0
    """Characters of the walk, this node included. The ids in `cleared` count too."""
    since_turn: bool = False
    """Whether `chars` begins behind the nearest turn: how much was cleared is counted with the next one."""
    held: int = 0
    """Characters that this node holds itself."""
    missing: str | None = None
    """Why the walk cannot be shown; None when it can."""
    queued: bool = False
    """Whether it is not a prompt of its own: typed while the agent worked, or attached by its program."""
    cleared: tuple[str, ...] = ()
    """Calls above whose results the agent no longer sees from here on."""
    uses: int = 0
    """Number of records that lead here and of nodes below, plus one each while open and while the tip."""

    @property
    def nearest(self) -> RecordNode | None:
        """Return this turn, or the nearest turn above."""
        return self if self.is_turn else self.above

    @property
    def unshown(self) -> str | None:
        """Return why nothing that follows this node can be shown; None when it can."""
        return self.maker.unshown or self.missing or (self.nearest.missing if self.nearest else None)

    def versions(self) -> list[RecordNode]:
        """Return this node and its later versions, one for each late result."""
        versions: list[RecordNode] = [self]
        while versions[-1].newest is not None:
            versions.append(versions[-1].newest)
        return versions


class RecordTree:
    """The nodes of a file, which holds one session or several."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[str, RecordNode] = {}
        self._open: dict[RecordNode, None] = {}
        self._keys: dict[str, RecordNode] = {}
        self._calls = Counter[str]()
        """Number of nodes that made each call."""
        self._held = 0
        self.tip: RecordNode | None = None
        """The node of the last record."""

    def get(self, record: str) -> RecordNode | None:
        """Return the node of a record, None when it is not held. A record that is used is dropped later."""
        node = self._nodes.pop(record, None)
        if node is not None:
            self._nodes[record] = node
        return node

    def place(self, record: str | None, node: RecordNode) -> None:
        """Make `node` the parent of what follows the record."""
        node.uses += 1
        before, self.tip = self.tip, node
        if record is not None:
            node.uses += 1
            other, self._nodes[record] = self._nodes.pop(record, None), node
            if other is not None:
                self._release(other)
        if before is not None:
            self._release(before)

    def note(self, parent: RecordNode, message: Message, queued: bool = False) -> RecordNode:
        """Add a message behind `parent`."""
        above, size, missing = parent.nearest, size_of(message), parent.unshown
        if missing is None and parent.chars + size > self._limits.context_chars:
            missing = too_long(self._limits)
        if missing is not None:
            # Nothing of this walk is shown. The turn is still needed for results to come.
            return self._node(RecordNode(parent.maker, above, above, missing=missing))
        node = RecordNode(parent.maker, parent, above, chars=parent.chars + size, queued=queued)
        node.since_turn = parent.since_turn
        self._hold(node, [message])
        return self._node(node)

    def clear(self, parent: RecordNode, call_ids: Collection[str]) -> RecordNode:
        """Return a node from which on the results of these calls read CLEARED. Calls that no node made are not kept.

        How much that takes out of the context is counted when the next turn is closed.
        """
        known = tuple(dict.fromkeys(call_id for call_id in call_ids if call_id in self._calls))
        if not known or parent.unshown is not None:
            return parent
        above = parent.nearest
        chars = parent.chars - (0 if above is None or parent.since_turn else above.chars)
        node = RecordNode(parent.maker, parent, above, cleared=known, since_turn=True)
        self._hold(node, [])
        node.chars = chars + node.held
        if node.chars > self._limits.context_chars:
            self._resize(node, 0)
            return self._node(RecordNode(parent.maker, above, above, missing=too_long(self._limits)))
        return self._node(node)

    def turn(self, parent: RecordNode, turn: Turn) -> RecordNode:
        """Open a turn behind `parent`. The turn above must be closed."""
        node = RecordNode(
            parent.maker, parent, is_turn=True, turn=turn, chars=parent.chars, missing=parent.unshown, uses=1
        )
        self._open[node] = None
        if turn.key is not None:
            self._keys[turn.key] = node
        self._calls.update(_call_ids(node))
        return self._node(node)

    def unfinished(self, parent: RecordNode, key: str | None) -> RecordNode | None:
        """Return the open turn of this key if another part of it may stand behind `parent`.

        That is behind the turn, behind notes that follow it, or where the turn itself stands.
        """
        node = None if key is None else self._keys.get(key)
        return node if node is not None and (parent.nearest is node or node.parent is parent) else None

    def extend(self, node: RecordNode, text: str, calls: list[Call], reasoning: str) -> None:
        """Add a part to an open turn."""
        assert node.turn is not None
        self._forget_calls(node)
        node.turn.add(text, calls, reasoning)
        self._calls.update(_call_ids(node))
        self._resize(node, node.held + len(text) + len(reasoning) + sum(_characters(call.arguments) for call in calls))

    def answer(self, parent: RecordNode, call_id: str, text: str, error: str | None) -> RecordNode | None:
        """Store the result of a call of the turn nearest to `parent`. Return the node that the next record follows.

        None when the turn made no such call or has its result already.
        """
        node = parent.nearest
        if node is None or node.turn is None:
            return self._late(parent, call_id, text)
        if not node.turn.answer(call_id, text, error):
            return None
        self._resize(node, node.held + len(text))
        return parent

    def _late(self, node: RecordNode, call_id: str, text: str) -> RecordNode | None:
        """Add a late result to a closed turn, as a new version: another branch continued without it."""
        latest = node.versions()[-1]
        waiting = {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}
        if not node.is_turn or waiting not in latest.messages:
            return None
        result = node.maker.result(call_id, text)
        latest.newest = RecordNode(node.maker, node.parent, is_turn=True, chars=latest.chars + size_of(result))
        self._hold(latest.newest, [result if message == waiting else message for message in latest.messages])
        return self._node(latest.newest)

    def move(self, first: RecordNode, last: RecordNode, behind: RecordNode) -> None:
        """Move the nodes from `first` to `last` behind another node. Nothing moves when `first` is not above `last`."""
        walk, firsts = [last], set(first.versions())
        while walk[-1] not in firsts:
            if walk[-1].parent is None:
                return
            walk.append(walk[-1].parent)
        self.close(last.nearest)
        moved: dict[RecordNode, RecordNode] = {}
        for node in reversed(walk):
            older: RecordNode | None = None
            above = None if node.is_turn else behind.nearest
            for version in (first if node is walk[-1] else node).versions():
                copy = RecordNode(
                    behind.maker,
                    behind,
                    above,
                    node.is_turn,
                    missing=version.missing,
                    queued=node.queued,
                    cleared=node.cleared,
                    since_turn=behind.since_turn and not node.is_turn,
                )
                self._hold(copy, version.messages)
                copy.chars = behind.chars + copy.held
                moved[version] = self._node(copy)
                if older is not None:
                    older.newest = copy
                older = copy
            behind = moved[node]
        for record, node in self._nodes.items():
            if node in moved:
                moved[node].uses += 1
                self._nodes[record] = moved[node]
                self._release(node)

    def close(self, node: RecordNode | None) -> None:
        """Close a turn if it is open, and make its state."""
        if node is None or node.turn is None:
            return
        self._forget_calls(node)
        turn, node.turn = node.turn, None
        del self._open[node]
        if turn.key is not None and self._keys.get(turn.key) is node:
            del self._keys[turn.key]
        walk = self._walk(node)
        self._clear_once(walk)
        messages, digest = _context(walk)
        node.chars = sum(map(size_of, messages))
        if node.missing is None and node.chars > self._limits.context_chars:
            node.missing = too_long(self._limits)
        shown = node.maker.finish(turn, messages, digest, node.missing)
        node.chars += sum(map(size_of, shown))
        if node.missing is None and node.chars > self._limits.context_chars:
            node.missing = too_long(self._limits)
        self._hold(node, [] if node.missing else shown)
        if node.missing is not None and node.parent is not None:
            parent, node.parent = node.parent, None
            self._release(parent)
        self._release(node)

    def close_all(self) -> None:
        for node in list(self._open):
            self.close(node)

    def trim(self) -> None:
        """Drop records while there are too many or they hold too much. Make the states of their turns."""
        most = CONTEXTS * self._limits.context_chars
        while len(self._nodes) > 1 and (len(self._nodes) > MAX_RECORDS or self._held > most):
            node = self._nodes.pop(next(iter(self._nodes)))
            self.close(node.nearest)
            self._release(node)

    def _walk(self, turn: RecordNode) -> list[RecordNode]:
        """Return the nodes above a turn, the root first. Where they cannot be shown, note why in the turn."""
        nodes = [turn]
        while nodes[-1].missing is None and nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        turn.missing = nodes[-1].missing
        return [] if turn.missing else nodes[:0:-1]

    def _clear_once(self, walk: list[RecordNode]) -> None:
        """Forget ids that a node above clears too: an agent may list all that it ever cleared."""
        cleared: set[str] = set()
        for node in walk:
            if not node.cleared:
                continue
            new = tuple(call_id for call_id in node.cleared if call_id not in cleared)
            if len(new) < len(node.cleared):
                self._resize(node, node.held - _room(node.cleared) + _room(new))
                node.cleared = new
            cleared.update(new)

    def _node(self, node: RecordNode) -> RecordNode:
        if node.parent is not None:
            node.parent.uses += 1
        return node

    def _hold(self, node: RecordNode, messages: list[Message]) -> None:
        self._forget_calls(node)
        node.messages, node.digest = messages, _digest(messages)
        self._calls.update(_call_ids(node))
        self._resize(node, sum(map(size_of, messages)) + _room(node.cleared))

    def _forget_calls(self, node: RecordNode) -> None:
        for call_id in _call_ids(node):
            self._calls[call_id] -= 1
            if not self._calls[call_id]:
                del self._calls[call_id]

    def _resize(self, node: RecordNode, size: int) -> None:
        self._held += size - node.held
        node.held = size

    def _release(self, node: RecordNode) -> None:
        """Drop one use. Without uses a node is removed, and so is its use of the node above."""
        at: RecordNode | None = node
        while at is not None:
            at.uses -= 1
            if at.uses:
                return
            self._forget_calls(at)
            self._resize(at, 0)
            at = at.parent


def _context(walk: list[RecordNode]) -> tuple[list[Message], bytes]:
    """Return (messages, digest) of a walk as its end sees it."""
    cleared: set[str] = set()
    parts: list[tuple[list[Message], bytes]] = []
    for node in reversed(walk):
        messages = _without(node.messages, cleared)
        parts.append((messages, node.digest if messages is node.messages else _digest(messages)))
        cleared.update(node.cleared)
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


def _room(call_ids: Collection[str]) -> int:
    return sum(len(call_id) + _ID_CHARS for call_id in call_ids)


def _call_ids(node: RecordNode) -> list[str]:
    """Return the calls of a turn, where it is closed those with a place for their result."""
    if node.turn is not None:
        return [call.call_id for call in node.turn.calls]
    return [message["tool_call_id"] for message in node.messages if "tool_call_id" in message]


def _digest(messages: list[Message]) -> bytes:
    digest = b""
    for message in messages:
        digest = digest_of(digest, message)
    return digest


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))
