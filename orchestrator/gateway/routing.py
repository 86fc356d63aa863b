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
from dataclasses import dataclass, field
from typing import Any

from composer_prime.errors import DeadlineError, EngineError, RequestError, WireError
from composer_prime.wire.node import Cancel, Generate, Generated, GenerateFailed, Sampling, ToNode
from orchestrator.gateway.answers import Answer, check
from orchestrator.gateway.nodes import Node, Nodes

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Failed or bad answers after which a request is given up. Nodes that vanish do not count."""
_MAX_SESSIONS = 1 << 16
"""Sessions whose node is remembered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    request_id: str
    session: str
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    since: float
    """When it came, monotonic seconds."""
    done: asyncio.Future[Answer]
    node: Node | None = None
    """None while it waits in the queue."""
    lease: int = 0
    placed: float = 0.0
    """When it went to its node, monotonic seconds."""
    failures: int = 0
    avoid: str | None = None
    """The node that failed it last."""
    last_error: str = ""


@dataclass(slots=True, kw_only=True)
class Counters:
    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    reissued: int = 0
    late_answers: int = 0
    bad_answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    """Sampled tokens of accepted answers."""
    tokens_by_version: dict[int, int] = field(default_factory=dict)


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        send: Callable[[Node, ToNode], bool],
        *,
        vocab_size: int,
        no_node_timeout_s: float,
        request_timeout_s: float,
        suspend_s: float,
        where_to_connect: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` is False when the node cannot be reached any more."""
        self.nodes = Nodes(self._on_gone, clock)
        self.counters = Counters()
        self.oldest_version = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest_version = 0
        self.where_to_connect = where_to_connect
        self._send = send
        self._vocab_size = vocab_size
        self._no_node_timeout_s = no_node_timeout_s
        self._request_timeout_s = request_timeout_s
        self._suspend_s = suspend_s
        self._clock = clock
        self._queue: OrderedDict[str, Request] = OrderedDict()
        self._open: dict[str, Request] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        # Starts at random: an answer to a lease of an earlier orchestrator must not match one of ours.
        self._leases = itertools.count(secrets.randbits(48))
        self._no_node_since: float | None = clock()
        self._placing = False

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, session: str, prompt_ids: bytes, sampling: Sampling) -> Answer:
        """The checked answer of some node. Cancelling the awaiting task cancels the request on its node.

        Raises DeadlineError (no node, or none answered in time), EngineError (it failed on nodes several times) or
        RequestError (no node could serve it as it stands).
        """
        request = Request(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=self._clock(),
            done=asyncio.get_running_loop().create_future(),
        )
        self.counters.requests += 1
        self._open[request_id] = self._queue[request_id] = request
        self.place()
        try:
            return await request.done
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        finally:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        """The request has ended for its caller, whatever its node is doing."""
        self._open.pop(request.request_id, None)
        self._queue.pop(request.request_id, None)
        node = self._release(request)
        if node is not None:
            self._send(node, Cancel(request_id=request.request_id, lease=request.lease))
            self.place()

    def _release(self, request: Request) -> Node | None:
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
        self._placing = True
        try:
            while self._queue:
                request = next(iter(self._queue.values()))
                node = self._choose(request)
                if node is None:
                    return
                del self._queue[request.request_id]
                self._assign(request, node)
        finally:
            self._placing = False

    def serving(self) -> list[Node]:
        """Nodes that may get requests now, full or not."""
        now, oldest, newest = self._clock(), self.oldest_version, self.newest_version
        return [node for node in self.nodes.attached() if node.cannot_serve(now, oldest, newest) is None]

    def _choose(self, request: Request) -> Node | None:
        free = [node for node in self.serving() if node.free > 0]
        if not free:
            return None
        held = self._sticky.get(request.session)
        for node in free:
            if node.node_id == held and held != request.avoid:
                return node
        return min(free, key=lambda node: (node.node_id == request.avoid, node.load, node.node_id))

    def _assign(self, request: Request, node: Node) -> None:
        request.node, request.lease, request.placed = node, next(self._leases), self._clock()
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

    def _reissue(self, request: Request, why: str) -> None:
        """Back to the front of the queue: it has waited before."""
        self.counters.reissued += 1
        request.last_error = why
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def forget(self, session: str) -> None:
        """The session is over; its node need not be remembered."""
        self._sticky.pop(session, None)

    # -- answers -------------------------------------------------------------------------------------------------

    def on_generated(self, node: Node, message: Generated) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        try:
            answer = check(
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
        self._count(request, answer)
        if not request.done.done():
            request.done.set_result(answer)
        self.place()

    def on_failed(self, node: Node, message: GenerateFailed) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        node.failures += 1
        if message.retryable:
            self._failed(request, node, message.error)
            return
        # Another node would say the same.
        self._give_up(request, RequestError(f"node {node.node_id}: {message.error}", code="refused_by_node"))
        self.place()

    def _claim(self, node: Node, message: Generated | GenerateFailed) -> Request | None:
        """The request that `node` holds under the message's lease; None for a late answer."""
        request = node.leases.get(message.lease)
        if request is None or request.request_id != message.request_id:
            if not (isinstance(message, Generated) and message.finish_reason == "cancelled"):
                node.late_answers += 1
                self.counters.late_answers += 1
            return None
        self._release(request)
        return request

    def _failed(self, request: Request, node: Node, error: str) -> None:
        node.failed(self._clock(), self._suspend_s)
        request.failures += 1
        request.avoid = node.node_id
        if request.failures >= _MAX_FAILURES:
            self._give_up(
                request,
                EngineError(
                    f"{request.failures} attempts failed, the last on node {node.node_id}: {error}; "
                    "see that node's log (another attempt may go better)"
                ),
            )
        else:
            self._reissue(request, f"{node.node_id}: {error}")
        self.place()

    def _give_up(self, request: Request, error: Exception) -> None:
        self.counters.failed += 1
        if not request.done.done():
            request.done.set_exception(error)

    def _count(self, request: Request, answer: Answer) -> None:
        counters = self.counters
        counters.answered += 1
        counters.prompt_tokens += len(request.prompt_ids) // 4
        counters.tokens += len(answer.token_ids)
        for span in answer.version_spans:
            version_tokens = counters.tokens_by_version.get(span.version, 0)
            counters.tokens_by_version[span.version] = version_tokens + span.end - span.start
        while len(counters.tokens_by_version) > 16:
            del counters.tokens_by_version[min(counters.tokens_by_version)]

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def _on_gone(self, node: Node, reason: str) -> None:
        held, node.leases = list(node.leases.values()), {}
        for request in reversed(held):
            request.node = None
            self._reissue(request, f"node {node.node_id} is gone: {reason}")
        self.place()

    def reclaim_lost(self, lost_after_s: float) -> None:
        """Reissue what a node should hold but, by its heartbeats, does not: the request or its answer was lost."""
        now = self._clock()
        for node in self.nodes.attached():
            if node.idle_since is None:
                continue
            for request in list(node.leases.values()):
                if now - max(node.idle_since, request.placed) >= lost_after_s:
                    self._release(request)
                    self._reissue(request, f"node {node.node_id} reports no request for {now - node.idle_since:.1f} s")
        self.place()

    # -- deadlines -----------------------------------------------------------------------------------------------

    def expire(self) -> DeadlineError | None:
        """End what waited too long. Returns the error when requests waited for a node in vain: the run cannot go on."""
        now = self._clock()
        self._no_node_since = None if self.serving() else self._no_node_since or now
        self._expire_requests(now)
        since = self._no_node_since
        if since is None:
            return None
        overdue = [r for r in self._queue.values() if now - max(since, r.since) >= self._no_node_timeout_s]
        if not overdue:
            return None
        error = DeadlineError(
            f"{len(self._queue)} requests waited for an inference node, since {_clock_time(now - since)} "
            f"({now - since:.1f} s, orchestrator.no_node_timeout_s is {self._no_node_timeout_s}): {self._why_no_node()}"
        )
        for request in overdue:
            self._give_up(request, error)
        return error

    def _expire_requests(self, now: float) -> None:
        for request in list(self._open.values()):
            if now - request.since >= self._request_timeout_s and not request.done.done():
                self._give_up(
                    request,
                    DeadlineError(
                        f"request {request.request_id} waited {now - request.since:.1f} s "
                        f"(limit {self._request_timeout_s} s): {self._where(request)}"
                    ),
                )

    def _where(self, request: Request) -> str:
        if request.node is not None:
            return f"node {request.node.node_id} has not answered"
        behind = f", last: {request.last_error}" if request.last_error else ""
        return f"in the queue, all places of {len(self.serving())} serving nodes are taken{behind}"

    def _why_no_node(self) -> str:
        now, oldest, newest = self._clock(), self.oldest_version, self.newest_version
        reasons = [f"{node.node_id} {node.cannot_serve(now, oldest, newest)}" for node in self.nodes]
        if reasons:
            return "; ".join(reasons[:8])
        return (
            f"none has connected to {self.where_to_connect or 'the gateway'}: start one with `inference join`, "
            "or set inference.nodes to at least 1"
        )

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return len(self._open) - len(self._queue)

    def no_node_since(self) -> float | None:
        """Seconds for which no node has been able to serve; None while one is."""
        return None if self._no_node_since is None else self._clock() - self._no_node_since

    def snapshot(self) -> dict[str, Any]:
        """Plain state for /metrics: counters, queue, and who waits for what."""
        now, counters = self._clock(), self.counters
        oldest = sorted(self._open.values(), key=lambda request: request.since)[:8]
        waits = [
            {
                "request_id": request.request_id,
                "session": request.session,
                "since_s": round(now - request.since, 3),
                "for": f"node {request.node.node_id}" if request.node else self._queue_reason(),
            }
            for request in oldest
        ]
        totals = {name: getattr(counters, name) for name in counters.__slots__}
        return {"queued": self.queued, "in_flight": self.in_flight, "longest_waits": waits, **totals}

    def _queue_reason(self) -> str:
        return "a free place" if self.serving() else f"a node: {self._why_no_node()}"


def _clock_time(seconds_ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
