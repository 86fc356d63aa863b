"""The weights that nodes pull through their link, piece by piece.

A node asks for pieces from whatever offset it stopped at. Reading happens off the event loop, so a node that fetches
gigabytes does not delay anyone's tokens. A piece counts against its node until its last byte has left the socket's
queue. A node that asks faster than it reads costs this process 16 pieces (32 MiB), not the model, however many
connections it opens with its own key. What it pulls in total has a bound too: `PullAllowance`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import zmq

from composer_prime.run.weights import Manifest, WeightStore
from composer_prime.wire.node_messages import ChunkRequest, WeightPiece

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""Of one message through the node link; 16 of them are the 32 MiB of docs/explanation/security.md."""
_MAX_OFFSET = 1 << 40
_READERS = 4
_MAX_UNSENT = 16
"""Pieces under way to one node. Requests beyond are dropped; a node asks again after its own deadline."""
MAX_ACCOUNTS = 1024
"""Nodes remembered before those with nothing under way, or that pulled least, are forgotten."""
_ALLOWED_TIMES = 3
"""One pull, one after a lost disk, and one for pieces that a slow node asks for again before they have arrived."""
_LEAST_ALLOWED = 64 << 20
"""Of a model so small that restarts and model files count."""

NameT = TypeVar("NameT")
Place = tuple[bytes, str, int]
"""Connection, sha256 of the chunk and offset in it."""
SendPiece = Callable[[bytes, WeightPiece], zmq.MessageTracker | None]
"""Queues a message for a connection and returns its tracker; None when the connection is gone."""


class UnderWay(Generic[NameT]):
    """Messages under way to each account, by name; None while one is being prepared."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, dict[NameT, zmq.MessageTracker | None]] = {}

    def to(self, account: bytes) -> dict[NameT, zmq.MessageTracker | None]:
        """Return what has not left the queue to `account`, for the caller to add to."""
        if len(self._accounts) >= MAX_ACCOUNTS:
            self._accounts = {other: left for other, messages in self._accounts.items() if (left := _prune(messages))}
        return _prune(self._accounts.setdefault(account, {}))


def _prune(messages: dict[NameT, zmq.MessageTracker | None]) -> dict[NameT, zmq.MessageTracker | None]:
    for name, sent in list(messages.items()):
        if sent is not None and sent.done:
            del messages[name]
    return messages


@dataclass(slots=True)
class _Pulled:
    """Bytes of weights that one account was sent."""

    counted: int = 0
    """Less what versions gave back."""
    is_told: bool = False
    """Whether the log has it that this account gets no more until the next version."""


class PullAllowance:
    """The bytes that each account may pull: some times what the newest version names, model files included.

    A version gives back as many times what it is the first to name, up to nothing pulled. A node that follows each
    version needs no more than that, and one that pulls everything again and again soon waits for the next anchor.
    """

    def __init__(self, num_others: Callable[[], int] = lambda: 0) -> None:
        """`num_others` returns the bytes of the chunks that no manifest names."""
        self._num_others = num_others
        self._named: dict[str, int] = {}
        """Bytes of the newest version's chunks; empty before there is one, when nothing is refused."""
        self._named_bytes = 0
        self._accounts: dict[bytes, _Pulled] = {}

    @property
    def num_bytes(self) -> int:
        return max(_LEAST_ALLOWED, _ALLOWED_TIMES * (self._named_bytes + self._num_others()))

    def grant(self, manifest: Manifest) -> None:
        """Take in the newest version."""
        named = {ref.sha256: ref.size for ref in manifest.refs}
        granted = _ALLOWED_TIMES * sum(size for sha256, size in named.items() if sha256 not in self._named)
        self._named, self._named_bytes = named, sum(named.values())
        for account in self._accounts.values():
            account.counted = max(0, account.counted - granted)
            account.is_told = False

    def charge(self, account: bytes, num_bytes: int) -> None:
        self._accounts.setdefault(account, _Pulled()).counted += num_bytes
        if len(self._accounts) > MAX_ACCOUNTS:
            most = sorted(self._accounts.items(), key=lambda item: item[1].counted)
            self._accounts = dict(most[-MAX_ACCOUNTS // 2 :])

    def refusal(self, account: bytes) -> str | None:
        """Return why `account` gets no more; None while it may pull."""
        pulled = self._accounts.get(account, _Pulled()).counted
        if not self._named or pulled < self.num_bytes:
            return None
        return (
            f"this node pulled {pulled / 1e6:.1f} MB of weights through its link, and {self.num_bytes / 1e6:.1f} MB is "
            "its allowance until the next versions: keep its state folder (--state-dir) over restarts, or give the run "
            "a copy of its weights elsewhere (orchestrator.weights.sources)"
        )

    def tell_once(self, account: bytes) -> bool:
        """Tell whether this is the first refusal of `account` since the last version."""
        pulled = self._accounts.get(account, _Pulled())
        was_told, pulled.is_told = pulled.is_told, True
        return not was_told


class ChunkServer:
    """Reads weight chunks in threads and sends them piece by piece."""

    def __init__(self, store: WeightStore, other: Callable[[str, int, int], bytes | None] = lambda *_: None) -> None:
        """`other` reads chunks that the store lacks, as `store.chunk` does."""
        self.bytes_sent = 0
        """Bytes of pieces handed to the socket."""
        self.dropped = 0
        """Requests of nodes that had too many pieces under way."""
        self._store = store
        self._other = other
        self._readers = asyncio.Semaphore(_READERS)
        self._under_way: UnderWay[Place] = UnderWay()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, account: bytes, identity: bytes, request: ChunkRequest, send: SendPiece) -> None:
        """Answer `request` as soon as a reader is free, unless its answer is under way already.

        `account`: the node, which may have several connections.
        """
        pieces, place = self._under_way.to(account), (identity, request.sha256, request.offset)
        if place in pieces:
            return
        if len(pieces) >= _MAX_UNSENT:
            self.dropped += 1
            return
        pieces[place] = None
        task = asyncio.create_task(self._answer(pieces, place, request, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, pieces: dict[Place, zmq.MessageTracker | None], place: Place, request: ChunkRequest, send: SendPiece
    ) -> None:
        sent = None
        try:
            async with self._readers:
                message = await asyncio.to_thread(self._read, request)
                sent = send(place[0], message)
            if sent is not None and message.data is not None:
                self.bytes_sent += len(message.data)
        finally:
            if sent is None:
                del pieces[place]
            else:
                pieces[place] = sent

    def _read(self, request: ChunkRequest) -> WeightPiece:
        piece = None
        if 0 <= request.offset < _MAX_OFFSET:
            try:
                # Reading one byte more than is sent shows whether this piece is the chunk's last.
                place = request.sha256, request.offset, PIECE_BYTES + 1
                piece = self._store.chunk(*place)
                piece = self._other(*place) if piece is None else piece
            except OSError as error:
                logger.error("weight chunk %s cannot be read: %s", request.sha256, error)
        if piece is None:
            return WeightPiece(sha256=request.sha256, offset=request.offset)
        last = len(piece) <= PIECE_BYTES
        return WeightPiece(sha256=request.sha256, offset=request.offset, data=piece[:PIECE_BYTES], last=last)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
