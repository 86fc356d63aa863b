"""The tree of a session's records, for formats whose records name their parent: each context is the walk from a turn's
parent up to the root, wherever in the file the records stand.

    note, note, turn (several records) ──┬── note ── turn          one node a message or turn; a record's id leads to
                                         └── note ── turn ── ...   the node behind which what follows it stands

A turn stays open for its other parts and results until a turn begins below it; several may be open. Memory is bounded:
when the tree holds too much, the records that were followed longest ago are let go of. What follows one of those has no
context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from composer_prime.traces.ingest.reading import Limits
from composer_prime.traces.ingest.turns import NO_RESULT, Before, Call, StateMaker, Turn, digest_of, size_of, too_long
from composer_prime.traces.state import Message, TraceState

MAX_RECORDS = 30_000
"""Records that may be followed."""
CONTEXTS = 2
"""Contexts of the greatest length that are held."""
CLOSED = 8
"""Turns behind which another stands without a walk to the root."""


@dataclass(slots=True, eq=False)
class RecordNode:
    """A message of the user's, a turn, or (without messages) a root."""

    maker: StateMaker
    parent: RecordNode | None = None
    above: RecordNode | None = None
    """Of a message: the nearest turn above it."""
    is_turn: bool = False
    turn: Turn | None = None
    """While it is open."""
    newest: RecordNode | None = None
    """The same turn with the results that came after it was closed."""
    messages: list[Message] = field(default_factory=list)
    digest: bytes = b""
    """Of the messages."""
    chars: int = 0
    """Of the walk, with this node's."""
    held: int = 0
    """Characters that this node holds."""
    missing: str | None = None
    """Why the walk cannot be shown."""
    queued: bool = False
    uses: int = 0
    """Records that lead here, nodes below, and whether it is open or the tip."""

    @property
    def nearest(self) -> RecordNode | None:
        """The turn that it is, or the nearest above."""
        return self if self.is_turn else self.above

    def versions(self) -> list[RecordNode]:
        """It, and the same turn with each result that came late."""
        found: list[RecordNode] = [self]
        while found[-1].newest is not None:
            found.append(found[-1].newest)
        return found


@dataclass(frozen=True, slots=True)
class Context:
    """A walk from the root."""

    messages: list[Message]
    """Shared with the state of the turn that follows."""
    digest: bytes
    chars: int


class RecordTree:
    """The nodes of a file, of one session or of several."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[str, RecordNode] = {}
        self._open: dict[RecordNode, None] = {}
        self._keys: dict[str, RecordNode] = {}
        self._contexts: dict[RecordNode, Context] = {}
        """Of the turns that were closed last: what stood before each."""
        self._held = 0
        self.tip: RecordNode | None = None
        """Where the last record was placed."""

    def get(self, record: str) -> RecordNode | None:
        """Behind which node it stands; None where it is not held. What is asked for is let go of later."""
        node = self._nodes.pop(record, None)
        if node is not None:
            self._nodes[record] = node
        return node

    def place(self, record: str | None, node: RecordNode) -> None:
        """What follows the record stands behind `node`."""
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
        """A message behind `parent`."""
        above, size = parent.nearest, size_of(message)
        missing = parent.maker.unshown or parent.missing or (above.missing if above else None)
        if missing is None and parent.chars + size > self._limits.context_chars:
            missing = too_long(self._limits)
        if missing is not None:
            # Nothing is shown of this walk: only the turn is needed, for results that are still to come.
            return self._node(RecordNode(parent.maker, above, above, missing=missing))
        node = RecordNode(parent.maker, parent, above, chars=parent.chars + size, queued=queued)
        self._hold(node, [message])
        return self._node(node)

    def turn(self, parent: RecordNode, turn: Turn) -> RecordNode:
        """A turn behind `parent`, open. The turn above it has to be closed."""
        missing = parent.maker.unshown or parent.missing or (parent.nearest.missing if parent.nearest else None)
        node = RecordNode(parent.maker, parent, is_turn=True, turn=turn, chars=parent.chars, missing=missing, uses=1)
        self._open[node] = None
        if turn.key is not None:
            self._keys[turn.key] = node
        return self._node(node)

    def unfinished(self, parent: RecordNode, key: str | None) -> RecordNode | None:
        """The open turn of this key, if another part of it may stand behind `parent`: behind the turn, behind notes
        that follow it, or where the turn itself stands."""
        node = None if key is None else self._keys.get(key)
        return node if node is not None and (parent.nearest is node or node.parent is parent) else None

    def extend(self, node: RecordNode, text: str, calls: list[Call], reasoning: str) -> None:
        """A part of an open turn."""
        assert node.turn is not None
        node.turn.add(text, calls, reasoning)
        self._resize(node, node.held + len(text) + len(reasoning) + sum(_characters(call.arguments) for call in calls))

    def answer(self, parent: RecordNode, call_id: str, text: str, error: str | None) -> RecordNode | None:
        """The result of a call of the turn nearest to `parent`: where what follows it stands. None when the turn made
        no such call, or has its result."""
        node = parent.nearest
        if node is None or node.turn is None:
            return self._late(parent, call_id, text)
        if not node.turn.answer(call_id, text, error):
            return None
        self._resize(node, node.held + len(text))
        return parent

    def _late(self, node: RecordNode, call_id: str, text: str) -> RecordNode | None:
        """A turn that was closed, with the result of a call: another branch went on without it."""
        known = node.versions()[-1]
        waiting = {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}
        if not node.is_turn or waiting not in known.messages:
            return None
        result = node.maker.result(call_id, text)
        known.newest = RecordNode(node.maker, node.parent, is_turn=True, chars=known.chars + size_of(result))
        self._hold(known.newest, [result if message == waiting else message for message in known.messages])
        return self._node(known.newest)

    def move(self, first: RecordNode, last: RecordNode, behind: RecordNode) -> Iterator[TraceState]:
        """What stands from `first` to `last` stands behind another node from now on; nothing moves where `first` is not
        above `last`."""
        walk, firsts = [last], set(first.versions())
        while walk[-1] not in firsts:
            if walk[-1].parent is None:
                return
            walk.append(walk[-1].parent)
        yield from self.close(last.nearest)
        moved: dict[RecordNode, RecordNode] = {}
        for node in reversed(walk):
            copies: list[RecordNode] = []
            for version in (first if node is walk[-1] else node).versions():
                above = None if node.is_turn else behind.nearest
                copy = RecordNode(
                    behind.maker, behind, above, node.is_turn, missing=version.missing, queued=node.queued
                )
                self._hold(copy, version.messages)
                copy.chars = behind.chars + copy.held
                moved[version] = self._node(copy)
                copies.append(copy)
            for copy, newer in pairwise(copies):
                copy.newest = newer
            behind = moved[node]
        for record, node in self._nodes.items():
            if node in moved:
                moved[node].uses += 1
                self._nodes[record] = moved[node]
                self._release(node)

    def close(self, node: RecordNode | None) -> Iterator[TraceState]:
        """End a turn, where it is open: its state."""
        if node is None or node.turn is None:
            return
        turn, node.turn = node.turn, None
        del self._open[node]
        if turn.key is not None and self._keys.get(turn.key) is node:
            del self._keys[turn.key]
        context, node.missing = self._walk(node)
        state, shown = node.maker.finish(turn, Before(context.messages, context.digest, node.missing))
        node.chars = context.chars + sum(map(size_of, shown))
        if node.missing is None and node.chars > self._limits.context_chars:
            node.missing = too_long(self._limits)
        self._hold(node, [] if node.missing else shown)
        if node.missing is None:
            self._contexts[node] = context
            if len(self._contexts) > CLOSED:
                del self._contexts[next(iter(self._contexts))]
        if node.missing is not None and node.parent is not None:
            parent, node.parent = node.parent, None
            self._release(parent)
        self._release(node)
        if state is not None:
            yield state

    def close_all(self) -> Iterator[TraceState]:
        for node in list(self._open):
            yield from self.close(node)

    def trim(self) -> Iterator[TraceState]:
        """Let go of records while there are too many or they hold too much; the states of their turns."""
        most = CONTEXTS * self._limits.context_chars
        while len(self._nodes) > 1 and (len(self._nodes) > MAX_RECORDS or self._held > most):
            node = self._nodes.pop(next(iter(self._nodes)))
            yield from self.close(node.nearest)
            self._release(node)

    def _walk(self, turn: RecordNode) -> tuple[Context, str | None]:
        """(what stands before an open turn, why it cannot be shown). Of the nearest turn above whose context is known
        only what follows is walked."""
        nodes: list[RecordNode] = []
        node = turn
        while node.missing is None and node not in self._contexts and node.parent is not None:
            node = node.parent
            nodes.append(node)
        if node.missing is not None:
            return Context([], b"", 0), node.missing
        known = self._contexts.pop(node, None)
        if known is None:
            known = Context([], b"", 0)
        else:
            self._contexts[node] = known
        digest = known.digest
        for node in reversed(nodes):
            digest = hashlib.blake2b(digest + node.digest, digest_size=8).digest() if node.messages else digest
        messages = [*known.messages, *(message for node in reversed(nodes) for message in node.messages)]
        return Context(messages, digest, known.chars + sum(node.held for node in nodes)), None

    def _node(self, node: RecordNode) -> RecordNode:
        if node.parent is not None:
            node.parent.uses += 1
        return node

    def _hold(self, node: RecordNode, messages: list[Message]) -> None:
        """They are what the node shows."""
        node.messages, node.digest = messages, b""
        for message in messages:
            node.digest = digest_of(node.digest, message)
        self._resize(node, sum(map(size_of, messages)))

    def _resize(self, node: RecordNode, size: int) -> None:
        self._held += size - node.held
        node.held = size

    def _release(self, node: RecordNode) -> None:
        """One use less; with the last one the node goes, and is no longer a use of the node above."""
        at: RecordNode | None = node
        while at is not None:
            at.uses -= 1
            if at.uses:
                return
            self._resize(at, 0)
            self._contexts.pop(at, None)
            at = at.parent


def _characters(value: Any) -> int:
    """Of the strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))
