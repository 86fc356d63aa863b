"""The tree of a Claude Code session: a node a message or turn, and what the agent saw at a place of it.

    note, turn (several records) ──┬── note ── turn         a turn's context is the walk from its parent up to the root
                                   └── note ── turn ── ...

All records are read before the first context is made, so the texts of a file's sessions are held until its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from composer_prime.traces.ingest.trace_file import NO_RESULT, StateMaker, Turn, digest_of, size_of
from composer_prime.traces.states import Message

CLEARED = "[Old tool result content cleared]"
"""What Claude Code shows instead of a result that it took out of the context."""
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
    """The user's message, or the action of a finished turn, as later contexts show it."""
    results: dict[str, tuple[int, Shown]] = field(default_factory=dict)
    """The line and message of each result of the turn's calls."""
    before: int = 0
    """Characters of the context above."""
    chars: int = 0
    """Characters of the context up to here, with the turn's results so far."""
    queued: bool = False
    """Whether it is not a prompt of its own: typed while the agent worked, or attached by its program."""
    cleared: tuple[str, ...] = ()
    """Calls above whose results the agent no longer sees from here on."""
    jump: tuple[SessionNode, SessionNode] | None = None
    """(first, summary): above `first` the walk goes on at the summary of a compaction that kept messages."""

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
    """Return what the agent saw before a turn, with its digest. It did not see a result that came later."""
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
    """Count the characters of the results above that such a microcompaction takes out of the context."""
    chars, left = 0, set(call_ids)
    for each in walk(node):
        left.difference_update(each.cleared)
        chars += sum(size_of(each.results[call_id][1][0]) for call_id in left & each.results.keys())
    return chars


def shown(message: Message) -> Shown:
    """Return a message with its digest."""
    return message, digest_of(b"", message)


def _result(node: SessionNode, call_id: str, line: int, cleared: bool) -> Shown:
    """Return the result of a call as it is shown before a line."""
    came, result = node.results.get(call_id, (line, None))
    if result is None or came >= line:
        return shown({"role": "tool", "tool_call_id": call_id, "content": NO_RESULT})
    return shown({**result[0], "content": CLEARED}) if cleared else result
