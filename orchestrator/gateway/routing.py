"""Which node answers which request, and what happens when it does not.

    generate() -> queue (FIFO) -> node with a free place -> Generated ------> generate() returns
                    ^                  |  gone | failed | bad answer
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

A session goes to the node that served it last while that node has a free place (its prefix cache is warm there), any
other request to the least loaded node. Everything runs on one event loop; only `generate` waits, at most until one of
its deadlines, and `waiting_for` says what for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from composer_prime.errors import EngineError, RequestError, WireError
from composer_prime.wire.node import CancelGenerate, Generate, Generated, GenerateFailed, Sampling, ToNode
from orchestrator.event_loop import Notifier
from orchestrator.gateway.nodes import AttachedNode, Counters, GatewayRequest, NodeAnswer, Nodes, check_answer

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Failed or bad answers after which a request is given up. Nodes that vanish or drain do not count."""
_MAX_SESSIONS = 1 << 16
"""Sessions whose node is remembered."""


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        send: Callable[[AttachedNode, ToNode], bool],
        *,
        vocab_size: int,
        suspend_s: float,
        how_to_join: str = "start one with `inference join`",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` is False when the node cannot be reached any more; `how_to_join` ends messages that miss a node."""
        self.nodes = Nodes(self._on_gone, clock)
        self.counters = Counters()
        self.oldest_version = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest_version = 0
        self._how_to_join = how_to_join
        self._send = send
        self._vocab_size = vocab_size
        self._suspend_s = suspend_s
        self.clock = clock
        self.queue: OrderedDict[str, GatewayRequest] = OrderedDict()
        self.open: dict[str, GatewayRequest] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        # Starts at random: an answer to a lease of an earlier orchestrator must not match one of ours.
        self._leases = itertools.count(secrets.randbits(48))
        self._placing = False
        self._closed: RequestError | None = None
        self.changed = Notifier()
        """Beats whenever nodes or their places may have changed."""

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, session: str, prompt_ids: bytes, sampling: Sampling) -> NodeAnswer:
        """The checked answer of some node. Cancelling the awaiting task cancels the request on its node.

        Raises DeadlineError (no node, or none answered in time), EngineError (it failed on nodes several times) or
        RequestError (no node could serve it as it stands).
        """
        request = GatewayRequest(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=self.clock(),
            done=asyncio.get_running_loop().create_future(),
        )
        if self._closed is not None:
            raise self._closed
        self.counters.requests += 1
        self.open[request_id] = self.queue[request_id] = request
        try:
            self.place()
            return await request.done
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        finally:
            self._drop(request)

    def _drop(self, request: GatewayRequest) -> None:
        """The request has ended for its caller, whatever its node is doing."""
        self.open.pop(request.request_id, None)
        self.queue.pop(request.request_id, None)
        node = self._release(request)
        if node is not None:
            self._send(node, CancelGenerate(request_id=request.request_id, lease=request.lease))
            self.place()

    def _release(self, request: GatewayRequest) -> AttachedNode | None:
        """Take the request's lease from its node, and return the node it had."""
        node, request.node = request.node, None
        if node is not None:
            node.leases.pop(request.lease, None)
        return node

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Hand waiting requests to nodes, oldest first, until no node has a free place."""
        if self._placing:
            return
        self.changed.notify()
        self._placing = True
        try:
            while self.queue:
                request = next(iter(self.queue.values()))
                node = self._choose(request)
                if node is None:
                    return
                del self.queue[request.request_id]
                self._assign(request, node)
        finally:
            self._placing = False

    def serving(self) -> list[AttachedNode]:
        """Nodes that may get requests now, full or not."""
        now, oldest, newest = self.clock(), self.oldest_version, self.newest_version
        return [node for node in self.nodes.attached() if node.cannot_serve(now, oldest, newest) is None]

    def _choose(self, request: GatewayRequest) -> AttachedNode | None:
        free = [node for node in self.serving() if node.free > 0]
        if not free:
            return None
        held = self._sticky.get(request.session)
        for node in free:
            if node.node_id == held and held != request.avoid:
                return node
        return min(free, key=lambda node: (node.node_id == request.avoid, node.load, node.node_id))

    def _assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        request.node, request.lease, request.placed = node, next(self._leases), self.clock()
        node.leases[request.lease] = request
        self._sticky[request.session] = node.node_id
        self._sticky.move_to_end(request.session)
        if len(self._sticky) > _MAX_SESSIONS:
            self._sticky.popitem(last=False)
        message = Generate(
            request_id=request.request_id,
            lease=request.lease,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            session=request.session,
        )
        if not self._send(node, message):
            self.nodes.leave(node, "unreachable")

    def _reissue(self, request: GatewayRequest, why: str) -> None:
        """Back to the front of the queue: it has waited before."""
        self.counters.reissued += 1
        request.last_error = why
        self.queue[request.request_id] = request
        self.queue.move_to_end(request.request_id, last=False)

    def close(self, reason: str) -> None:
        """End every request, and each that comes from now on, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in list(self.open.values()):
            self.give_up(request, self._closed)

    def forget(self, session: str) -> None:
        """The session is over; its node need not be remembered."""
        self._sticky.pop(session, None)

    # -- answers -------------------------------------------------------------------------------------------------

    def on_generated(self, node: AttachedNode, message: Generated) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        if message.finish_reason == "cancelled":
            node.failures += 1
            self._failed(request, node, "the node cancelled it")
            return
        try:
            answer = check_answer(
                message,
                max_tokens=request.sampling.max_tokens,
                vocab_size=self._vocab_size,
                newest_version=self.newest_version,
                node_id=node.node_id,
            )
        except WireError as error:
            node.bad_answers += 1
            self.counters.bad_answers += 1
            logger.warning("node %s sent a bad answer to %s: %s", node.node_id, request.request_id, error)
            self._failed(request, node, f"bad answer: {error}")
            return
        node.succeeded(len(answer.token_ids))
        self.counters.accept(request, answer)
        if not request.done.done():
            request.done.set_result(answer)
        self.place()

    def on_failed(self, node: AttachedNode, message: GenerateFailed) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        if not message.tried:
            node.draining = True
            self._reissue(request, f"{node.node_id} is leaving: {message.error}")
            self.place()
            return
        node.failures += 1
        if message.retryable:
            self._failed(request, node, message.error)
            return
        # Another node would say the same.
        self.give_up(request, RequestError(f"node {node.node_id}: {message.error}", code="refused_by_node"))
        self.place()

    def _claim(self, node: AttachedNode, message: Generated | GenerateFailed) -> GatewayRequest | None:
        """The request that `node` holds under the message's lease; None for a late answer."""
        request = node.leases.get(message.lease)
        if request is None or request.request_id != message.request_id:
            if not (isinstance(message, Generated) and message.finish_reason == "cancelled"):
                node.late_answers += 1
                self.counters.late_answers += 1
            return None
        self._release(request)
        return request

    def _failed(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        node.failed(self.clock(), self._suspend_s)
        request.failures += 1
        request.avoid = node.node_id
        if request.failures >= _MAX_FAILURES:
            self.give_up(
                request,
                EngineError(
                    f"{request.failures} attempts failed, the last on node {node.node_id}: {error}; "
                    "see that node's log (another attempt may go better)"
                ),
            )
        else:
            self._reissue(request, f"{node.node_id}: {error}")
        self.place()

    def give_up(self, request: GatewayRequest, error: Exception) -> None:
        """End `request` with `error`."""
        self.counters.failed += 1
        if not request.done.done():
            request.done.set_exception(error)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def _on_gone(self, node: AttachedNode, reason: str) -> None:
        held, node.leases = list(node.leases.values()), {}
        for request in reversed(held):
            request.node = None
            self._reissue(request, f"node {node.node_id} is gone: {reason}")
        self.place()

    def reclaim_lost(self, lost_after_s: float) -> None:
        """Reissue what a node should hold but, by its heartbeats, does not: the request or its answer was lost."""
        now = self.clock()
        for node in self.nodes.attached():
            if node.idle_since is None:
                continue
            for request in list(node.leases.values()):
                if now - max(node.idle_since, request.placed) >= lost_after_s:
                    self._release(request)
                    self._reissue(request, f"node {node.node_id} reports no request for {now - node.idle_since:.1f} s")
        self.place()

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self.queue)

    def why_no_node(self) -> str:
        """What each known node lacks, or how to start one."""
        now, oldest, newest = self.clock(), self.oldest_version, self.newest_version
        reasons = [f"{node.node_id} {node.cannot_serve(now, oldest, newest)}" for node in self.nodes]
        if reasons:
            return "; ".join(reasons[:8])
        return f"none has connected: {self._how_to_join}, or set inference.nodes to at least 1"

    def snapshot(self) -> dict[str, Any]:
        """Plain state for /metrics: counters, queue, and who waits for what."""
        now = self.clock()
        oldest = sorted(self.open.values(), key=lambda request: request.since)[:8]
        waits = [
            {
                "request_id": request.request_id,
                "session": request.session,
                "since_s": round(now - request.since, 3),
                "for": f"node {request.node.node_id}" if request.node else self._queue_reason(),
            }
            for request in oldest
        ]
        counts = self.counters.snapshot()
        return {"queued": self.queued, "in_flight": self.in_flight, "longest_waits": waits, **counts}

    def _queue_reason(self) -> str:
        return "a free place" if self.serving() else f"a node: {self.why_no_node()}"
