"""The encrypted link to inference nodes: one bound ROUTER socket, through which they also pull weights.

    NodeLink.receive --bytes--> decode --> attach | heartbeat | answer --> router
                                      +--> ChunkServer: read in one of 4 threads --> WeightPiece
    NodeSocket.send (wire/sockets.py): never waits; False means that the connection is gone

No byte of a stranger gets in here, and the holder of an invite may enroll, and nothing else. What a node sends is not
trusted either (docs/explanation/security.md): garbage and unrequested messages have one budget. A connection that
spends it is cut off, and stays open: a new one would have a new budget.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from composer_prime.config import Config
from composer_prime.console import printable
from composer_prime.event_loop import end
from composer_prime.run.weights import Manifest, WeightStore
from composer_prime.wire.enrollment import NAME_RULE, NODE_NAME
from composer_prime.wire.node_messages import (
    MAX_PLACES,
    PROTOCOL,
    ChunkRequest,
    Dismissed,
    Enroll,
    Enrolled,
    FromNode,
    GenerateFailed,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    Sampled,
    Status,
    WeightPiece,
)
from composer_prime.wire.sockets import MAX_FRAMES, FromConnection, NodeSocket
from composer_prime.wire.unread import FRAME_OVERHEAD
from orchestrator.gateway.nodes import AttachedNode
from orchestrator.gateway.routing import Router
from orchestrator.swarm import Admission, Auditors, ServedFiles

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(FromNode)
_BURST = 64
"""Messages handled before the event loop runs something else."""
_MAX_REMEMBERED = 4096
_GARBAGE_BYTES = 1 << 8
"""Garbage counts as one message for each of this many: 1 MiB is the budget."""
_UNASKED_MESSAGES = 4096
"""That a node may send at once; two more for each place: answers to requests that were taken back come late."""
_UNASKED_PER_S = 50.0
_HELLO_COST = 16
"""In messages: a Hello attaches the node from scratch."""
_UNASKED_BYTES = 1 << 16
"""A message counts as one more for each of this many bytes."""
_IGNORED_PAUSE_S = 0.01
"""After a burst of messages most of which came from connections that are cut off."""
_MAX_ENROLLING = 256
"""Of one key. Others are dropped, and their nodes ask again."""
_SAY_AGAIN_S = 60.0
"""Between two log lines about refused weights of one key."""
_MAX_UNSENT_REPLIES = 4
"""With a manifest, to one node, which asks again for others."""
PIECE_BYTES = 2 << 20
"""Of one message; 16 of them are the 32 MiB of docs/explanation/security.md."""
_MAX_OFFSET = 1 << 40
_READERS = 4
_MAX_UNSENT = 16
"""Pieces to one node. Requests beyond are dropped, and come again."""
MAX_ACCOUNTS = 1024
"""Beyond, nodes with nothing under way, or that pulled least, are forgotten."""
_ALLOWED_TIMES = 3
"""One pull, one after a lost disk, and one for pieces that a slow node asks for twice."""
_LEAST_ALLOWED = 64 << 20
"""Of so small a model that restarts and model files count."""

UnderWay = dict[bytes, dict[Any, zmq.MessageTracker | None]]
"""Messages that have not left the queue, by account and name; None while one is prepared."""
SendPiece = Callable[[bytes, WeightPiece], zmq.MessageTracker | None]
"""Queues a message and returns its tracker; None when the connection is gone."""


class Conduct:
    """What peers sent that nobody asked for: some at once, and a rate."""

    def __init__(self, burst: float = _UNASKED_MESSAGES, per_s: float = _UNASKED_PER_S) -> None:
        self.garbage = 0
        self.ignored: set[bytes] = set()
        """Connections that are cut off."""
        self.burst = burst
        self._per_s = per_s
        self.used: dict[bytes, tuple[float, float]] = {}
        """By peer: what was used, and when, monotonic seconds."""

    def charge(self, peer: bytes, cost: float, *, extra: float = 0.0) -> bool:
        """Return whether the peer had `cost` left of its burst and `extra`."""
        now = time.monotonic()
        used, counted = self.used.pop(peer, (0.0, now))
        used = max(0.0, used - self._per_s * (now - counted)) + cost
        self.used[peer] = min(used, self.burst + extra + cost), now
        if len(self.used) > _MAX_REMEMBERED:  # The one that sent nothing for the longest time goes.
            del self.used[next(iter(self.used))]
        return used <= self.burst + extra

    def refund(self, peer: bytes, cost: float) -> None:
        """The message turned out to be due."""
        if peer in self.used:
            used, counted = self.used[peer]
            self.used[peer] = used - cost, counted

    def cut(self, identity: bytes) -> None:
        if len(self.ignored) >= _MAX_REMEMBERED:
            self.ignored.clear()
        self.ignored.add(identity)


class ChunkServer:
    """Reads the weights that nodes pull, in threads, and sends them piece by piece.

    A piece counts against its node until it has left the socket's queue. What an account pulls has a bound: some times
    what the newest version names.
    """

    def __init__(self, store: WeightStore, files: ServedFiles | None = None) -> None:
        """`files`: chunks that the store lacks."""
        self.dropped = 0
        """Requests of nodes with too many pieces under way."""
        self.pulled: dict[bytes, int] = {}
        """Bytes that each account was sent, less what versions gave back."""
        self._store = store
        self._files = files
        self._named: dict[str, int] = {}
        """Bytes of the newest version's chunks; while there are none, nothing is refused."""
        self._readers = asyncio.Semaphore(_READERS)
        self._under_way: UnderWay = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def allowance(self) -> int:
        others = self._files.num_bytes if self._files is not None else 0
        return max(_LEAST_ALLOWED, _ALLOWED_TIMES * (sum(self._named.values()) + others))

    def grant(self, manifest: Manifest) -> None:
        named = {ref.sha256: ref.size for ref in manifest.refs}
        new = [size for sha256, size in named.items() if sha256 not in self._named]
        granted = _ALLOWED_TIMES * sum(new)
        self._named = named
        self.pulled = {account: max(0, count - granted) for account, count in self.pulled.items()}

    def charge(self, account: bytes, num_bytes: int) -> None:
        self.pulled[account] = self.pulled.get(account, 0) + num_bytes
        if len(self.pulled) > MAX_ACCOUNTS:
            most = sorted(self.pulled, key=self.pulled.__getitem__)[-MAX_ACCOUNTS // 2 :]
            self.pulled = {kept: self.pulled[kept] for kept in most}

    def refusal(self, account: bytes) -> str | None:
        pulled = self.pulled.get(account, 0)
        if not self._named or pulled < self.allowance:
            return None
        return (
            f"this node pulled {pulled / 1e6:.1f} MB of weights through its link, and "
            f"{self.allowance / 1e6:.1f} MB is its allowance until the next versions: "
            "keep its state folder (--state-dir) over restarts, or give the run "
            "a copy of its weights elsewhere (orchestrator.weights.sources)"
        )

    def serve(self, account: bytes, identity: bytes, request: ChunkRequest, send: SendPiece) -> None:
        """Answer `request` as soon as a reader is free. `account`: the node, which may have several connections."""
        pieces, place = unsent(self._under_way, account), (identity, request.sha256, request.offset)
        if place in pieces:
            return
        if len(pieces) >= _MAX_UNSENT:
            self.dropped += 1
            return
        pieces[place] = None

        async def answer() -> None:
            sent = None
            try:
                async with self._readers:
                    piece = await asyncio.to_thread(self._read, request)
                    sent = send(identity, piece)
                if sent is not None and piece.data is not None:
                    self.charge(account, len(piece.data))
            finally:
                if sent is None:
                    del pieces[place]
                else:
                    pieces[place] = sent

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _read(self, request: ChunkRequest) -> WeightPiece:
        piece = None
        if 0 <= request.offset < _MAX_OFFSET:
            try:
                # One byte more than is sent shows whether this piece is the chunk's last.
                place = request.sha256, request.offset, PIECE_BYTES + 1
                piece = self._store.chunk(*place)
                if piece is None and self._files is not None:
                    piece = self._files.chunk(*place)
            except OSError as error:
                logger.error("weight chunk %s cannot be read: %s", request.sha256, error)
        if piece is None:
            return WeightPiece(sha256=request.sha256, offset=request.offset)
        last = len(piece) <= PIECE_BYTES
        return WeightPiece(sha256=request.sha256, offset=request.offset, data=piece[:PIECE_BYTES], last=last)

    async def close(self) -> None:
        await end(self._tasks)


def unsent(under_way: UnderWay, account: bytes) -> dict[Any, zmq.MessageTracker | None]:
    """Return what has not left the queue, for the caller to add to."""
    for other in list(under_way) if len(under_way) >= MAX_ACCOUNTS else [account]:
        messages = under_way.setdefault(other, {})
        for name, sent in list(messages.items()):
            if sent is not None and sent.done:
                del messages[name]
        if not messages:
            del under_way[other]
    return under_way.setdefault(account, {})


class NodeLink:
    """Turns what nodes send into calls on the router."""

    def __init__(
        self,
        socket: NodeSocket,
        router: Router,
        chunks: ChunkServer,
        admission: Admission,
        config: Config,
        welcome: NodeWelcome,
        auditors: Auditors | None = None,
    ) -> None:
        self.welcome = welcome
        """To every node that attaches; with the newest manifest, signed."""
        self.conduct = Conduct()
        self.chunks = chunks
        self.admission = admission
        self._socket = socket
        self._router = router
        self._config = config
        self._auditors = auditors
        self._enrolling: dict[bytes, dict[bytes, Enroll]] = {}
        """Those that wait, by key and connection."""
        self._answering: asyncio.Task[None] | None = None
        self._said: dict[bytes, float] = {}
        """When a connection was last asked to say Hello, and a key named in the log."""
        self._replies: UnderWay = {}

    def start(self) -> None:
        """Bind the port. Raises PortInUseError, and ConfigError when keys are missing."""
        self.admission.open()
        self._socket.bind(self._config.orchestrator.node_address)

    async def close(self) -> None:
        await self.chunks.close()
        await self._socket.close()

    @property
    def endpoint(self) -> str:
        return self._socket.endpoint

    @property
    def is_behind(self) -> bool:
        """Tell whether heartbeats may have waited behind a message of many frames."""
        return time.monotonic() - self._socket.behind_at < self._config.inference.lost_after_s

    def publish(self, signed: bytes, manifest: Manifest) -> None:
        """Send a new version to every node and auditor, and grant its bytes."""
        self.welcome = msgspec.structs.replace(self.welcome, manifest=signed)
        self.chunks.grant(manifest)
        news = msgspec.structs.replace(self.welcome, is_news=True)
        self._socket.send_all([node.identity for node in self._router.attached()], news)
        if self._auditors is not None:
            self._auditors.publish(signed)

    def tell_all(self, message: Heard | Dismissed) -> None:
        """Tell every node and auditor."""
        auditors = self._auditors.connected if self._auditors is not None else ()
        self._socket.send_all([*(node.identity for node in self._router.attached()), *auditors], message)

    def _is_due(self, name: bytes, pause_s: float) -> bool:
        """Tell whether something was not said for `pause_s`, and count it as said."""
        now = time.monotonic()
        if now - self._said.get(name, -math.inf) < pause_s:
            return False
        if len(self._said) >= _MAX_REMEMBERED:
            self._said.clear()
        self._said[name] = now
        return True

    async def receive(self) -> None:
        while True:
            ignored = 0
            for _ in range(_BURST):
                ignored += not self._handle(await self._socket.receive())
            await asyncio.sleep(_IGNORED_PAUSE_S if ignored > _BURST // 2 else 0)

    def _handle(self, received: FromConnection) -> bool:
        """Return whether the message was looked at."""
        identity, key = received.identity, received.key
        if self._auditors is not None and self.admission.is_auditor(key):
            self._auditors.handle(identity, received.body)
            return True
        if received.num_frames >= MAX_FRAMES:
            self.admission.turn_away(key)
        node = self._router.connections.get(identity)
        is_cut = identity in self.conduct.ignored or key in self.admission.revoked
        if is_cut or (node is not None and node.key != key):
            self.conduct.garbage += 1
            return False
        try:
            message = _DECODER.decode(received.body)
            if not isinstance(message, Enroll) and not self.admission.is_node(key):
                raise msgspec.DecodeError(f"a {type(message).__name__} from a key that may only enroll")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._drop_garbage(received, node, error)
            return True
        if not self._is_in_budget(received, node, message):
            return True
        try:
            self._dispatch(identity, key, node, message)
        except Exception as error:
            # Nothing that one node sends may end the run for all.
            logger.exception("a %s could not be handled", type(message).__name__)
            self._drop_garbage(received, node, error)
        return True

    def _is_in_budget(self, received: FromConnection, node: AttachedNode | None, message: FromNode) -> bool:
        """Count an unrequested message. Cut off who has spent the budget."""
        if isinstance(message, Sampled | GenerateFailed) and node:
            request = node.leases.get(message.lease)
            if request is not None and request.asked.request_id == message.request_id:
                return True
        what = f"unrequested messages, the last a {type(message).__name__}"
        return self._charge(received, node, _HELLO_COST if isinstance(message, NodeHello) else 1, what)

    def _charge(self, received: FromConnection, node: AttachedNode | None, cost: int, what: str) -> bool:
        """Charge the sender's account. When that is spent, cut off who sent `what`."""
        identity, key = received.identity, received.key
        cost += received.num_bytes // _UNASKED_BYTES
        late_answers = 2 * node.hello.max_concurrent if node else 0
        if self.conduct.charge(self._account(identity, key), cost, extra=late_answers):
            return True
        reason = (
            f"{f'node {node.node_id}' if node else 'a connection'} sent {what}: more than "
            f"{_UNASKED_MESSAGES + late_answers} at once and {_UNASKED_PER_S:g} a second; "
            "install the same release on "
            "both sides, and look for a loop in that node's log"
        )
        self.conduct.cut(identity)
        logger.warning("cut off: %s", reason)
        self._socket.send(identity, Dismissed(reason=reason, may_return=True))
        if not self.admission.is_node(key):  # An invite's key also makes no new connection for a while.
            self.admission.turn_away(key)
        if node is not None:
            self._router.leave(node, "cut off for what it sent")
        return False

    def _account(self, identity: bytes, key: bytes) -> bytes:
        """Nodes with a key of their own, and holders of an invite, keep their account over a reconnect."""
        return key if self.admission.is_own(key) else identity

    def _dispatch(self, identity: bytes, key: bytes, node: AttachedNode | None, message: FromNode) -> None:
        router = self._router
        match message:
            case NodeHello():
                self._hello(identity, key, message)
            case Enroll():
                self._enroll(identity, key, message)
            case ChunkRequest():
                self._serve_chunk(identity, key, node, message)
            case _ if node is None:
                if self._is_due(identity, self._config.inference.heartbeat_s):  # Each Hello attaches it from scratch.
                    self._socket.send(identity, Heard(known=False))
            case Sampled():
                router.on_sampled(node, message)
            case GenerateFailed():
                router.on_failed(node, message)
            case Status():
                router.update_status(node, message)
                self._socket.send(identity, Heard())
                router.place()
            case Goodbye():
                router.leave(node, f"said goodbye: {printable(message.reason[:200])}")

    def _serve_chunk(self, identity: bytes, key: bytes, node: AttachedNode | None, request: ChunkRequest) -> None:
        account = self._account(identity, key)

        def send(identity: bytes, piece: WeightPiece) -> zmq.MessageTracker | None:
            if piece.data is not None:  # Its request was due: pieces have a bound of their own.
                self.conduct.refund(account, 1)
            return self._socket.send_large(identity, piece)

        refusal = self.chunks.refusal(account)
        if refusal is None:
            self.chunks.serve(account, identity, request, send)
            return
        self._socket.send(identity, WeightPiece(sha256=request.sha256, offset=request.offset, refusal=refusal))
        if self._is_due(account, _SAY_AGAIN_S):
            name = node.node_id if node is not None else self.admission.name_of(key) or "of a connection"
            logger.warning("node %s gets no more weights through its link for now: %s", name, refusal)

    def _send_with_manifest(self, identity: bytes, key: bytes, reply: Enrolled | NodeWelcome) -> None:
        """Drop a reply whose node has not read the former ones."""
        is_node = self.admission.is_own(key) and self.admission.is_node(key)
        # Holders of one invite read at their own pace.
        replies = unsent(self._replies, key if is_node else identity)
        sent = self._socket.send_large(identity, reply) if len(replies) < _MAX_UNSENT_REPLIES else None
        if sent is not None:
            replies[sent] = sent

    def _drop_garbage(self, received: FromConnection, node: AttachedNode | None, error: Exception) -> None:
        """Empty frames cost time too, so each frame counts as some bytes."""
        self.conduct.garbage += 1
        size = received.num_bytes + received.num_frames * FRAME_OVERHEAD
        if self._charge(received, node, 1 + size // _GARBAGE_BYTES, f"{size} bytes that are not a message"):
            sender = f"node {node.node_id}" if node else "a connection"
            logger.warning("dropped %d bytes from %s: not a message (%s)", size, sender, error)

    def _enroll(self, identity: bytes, key: bytes, message: Enroll) -> None:
        waiting = self._enrolling.setdefault(key, {})
        if len(waiting) < _MAX_ENROLLING:
            waiting.setdefault(identity, message)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_enrollments())

    async def _answer_enrollments(self) -> None:
        """Answer one of each key in turn: an invite's holders do not delay others."""
        while self._enrolling:
            for key in list(self._enrolling):
                waiting = self._enrolling[key]
                identity, message = next(iter(waiting.items()))
                try:
                    await self._answer_enrollment(identity, key, message)
                except Exception:
                    logger.exception("an enrollment could not be answered")
                del waiting[identity]
                if not waiting:
                    del self._enrolling[key]

    async def _answer_enrollment(self, identity: bytes, key: bytes, message: Enroll) -> None:
        nodes = self._router.nodes.values()
        taken_names = {node.node_id for node in nodes if not self.admission.is_own(node.key)}
        reply = self._second_process(message.key)
        reply = reply or await self.admission.answer(key, message, self.welcome.manifest, taken_names)
        if isinstance(reply, Dismissed):
            logger.warning("rejected an enrollment: %s", reply.reason)
            self._socket.send(identity, reply)
        elif reply is not None:
            self._send_with_manifest(identity, key, msgspec.structs.replace(reply, sources=self.welcome.sources))

    def end_revoked(self) -> None:
        """Send away attached nodes that were revoked."""
        self.admission.refresh()
        for node in self._router.attached():
            if (reason := self.admission.revoked.get(node.key)) is not None:
                refusal = f"this node was turned away for good: {reason}"
                self._socket.send(node.identity, Dismissed(reason=refusal, may_return=False))
                self._router.leave(node, f"revoked: {reason}")

    def _hello(self, identity: bytes, key: bytes, hello: NodeHello) -> None:
        refusal = self._refusal(hello) or self.admission.name_refusal(key, hello.node_id)
        reason = refusal or self._refusal_for_now(identity, hello)
        if reason is not None:
            logger.warning("rejected a node: %s", reason)
            self._socket.send(identity, Dismissed(reason=reason, may_return=refusal is None))
            return
        self._router.attach(identity, hello, key)
        self._send_with_manifest(identity, key, self.welcome)
        self._router.place()

    def _refusal_for_now(self, identity: bytes, hello: NodeHello) -> str | None:
        """Return why the node must restart first, or why the holder of its name keeps that."""
        if hello.run_id not in (None, self.welcome.run_id):
            return f"the node served run {hello.run_id!r}, this is run {self.welcome.run_id!r}: restart the node"
        holder = self._router.nodes.get(hello.node_id)
        if holder is None or not holder.attached or holder.identity == identity:
            return None
        is_same = hello.instance and hello.instance == holder.hello.instance
        return None if is_same else self._refusal_by_holder(holder)

    def _second_process(self, key: bytes) -> Dismissed | None:
        """Refuse a key that another process serves with, before the node loads the model."""
        for holder in self._router.attached() if self.admission.is_own(key) else []:
            if holder.key == key and (reason := self._refusal_by_holder(holder)) is not None:
                return Dismissed(reason=reason, may_return=True)
        return None

    def _refusal_by_holder(self, holder: AttachedNode) -> str | None:
        """Return why no other process may be the node `holder`. One whose connection is closed leaves."""
        if not self._socket.send(holder.identity, Heard()):
            self._router.leave(holder, "its connection is closed")
            return None
        heard_s = time.monotonic() - holder.heard
        if self.admission.is_own(holder.key):
            return (
                f"two processes hold the key of node {holder.node_id!r}, the other one spoke {heard_s:.1f} s ago: if "
                "its state folder was copied, join here with an invite and another --state-dir; if that one vanished, "
                "try again after inference.lost_after_s of silence"
            )
        return (
            f"a node named {holder.node_id!r} is attached and spoke {heard_s:.1f} s ago: give this one its own name "
            "(--name, or --node-name); the name of a node that vanished is free after inference.lost_after_s of silence"
        )

    def _refusal(self, hello: NodeHello) -> str | None:
        """Return why this node stays out for good."""
        if hello.protocol != PROTOCOL:
            return f"the node speaks protocol {hello.protocol}, this run {PROTOCOL}: install the same release on both"
        if not NODE_NAME.fullmatch(hello.node_id):
            return f"node id {hello.node_id[:200]!r} is not {NAME_RULE}: choose another --node-name"
        if not 1 <= hello.max_concurrent <= MAX_PLACES or hello.version < 0:
            return (
                f"max_concurrent is {hello.max_concurrent} and version {hello.version}: a node has 1 to {MAX_PLACES} "
                "places (inference.max_concurrent) and a version from 0"
            )
        context = self._config.model.max_context
        if hello.max_context is not None and hello.max_context < context:
            return f"the node has room for {hello.max_context} tokens, the run's model.max_context is {context}"
        return None
