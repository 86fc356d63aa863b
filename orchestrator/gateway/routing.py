"""Choose which node answers which request, and recover when one does not.

    generate() -> queue (FIFO) -> node with a free place -> Generated ------> generate() returns
                    ^                  |  gone | failed | bad answer
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

    every tick: enforce_deadlines() -> requests past request_timeout_s         -> 503, the run goes on
                                    -> requests that waited for a node in vain -> 503, and the run ends

A session goes to the node that served it last while that node has a free place and room in its KV cache, because its
prefixes are warm there. Any other request goes to the least loaded node, to one with a full cache last. Everything runs
on one event loop. Only `generate` waits, at most until one of its deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from composer_prime.errors import DeadlineError, EngineError, RequestError, WireError
from composer_prime.wire.node import CancelGenerate, Generate, Generated, GenerateFailed, Sampling, ToNode
from orchestrator.gateway.nodes import AttachedNode, GatewayRequest, NodeAnswer, Nodes, able_nodes, check_answer

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Failed or bad answers after which a request ends. Nodes that vanish or drain do not count."""
_FAILURES_IN_ROW = 4
"""After this many failed answers in a row a node gets no request for a while."""
_MAX_SESSIONS = 1 << 16
"""Sessions whose node is remembered."""


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Counts over all requests."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    reissued: int = 0
    late_answers: int = 0
    bad_answers: int = 0
    tokens: int = 0
    """Sampled tokens of accepted answers."""


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        send: Callable[[AttachedNode, ToNode], bool],
        *,
        vocab_size: int,
        suspend_s: float,
        no_node_timeout_s: float,
        request_timeout_s: float,
        join_hint: Callable[[], str],
    ) -> None:
        """`send` returns False when the node cannot be reached any more.

        `suspend_s`: how long a node that keeps failing gets no request. `no_node_timeout_s`: how long requests wait
        while no node can serve. `request_timeout_s`: how long one waits at all. `join_hint()` tells how to start
        a node.
        """
        self.nodes = Nodes(self._on_gone)
        self.counters = RequestCounters()
        self.oldest_version = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest_version = 0
        self.queue: OrderedDict[str, GatewayRequest] = OrderedDict()
        """Requests without a node, by id, in the order in which they are placed."""
        self.open: dict[str, GatewayRequest] = {}
        """Every request without an answer, by id."""
        self._send = send
        self._vocab_size = vocab_size
        self._suspend_s = suspend_s
        self._no_node_timeout_s = no_node_timeout_s
        self._request_timeout_s = request_timeout_s
        self._no_node_since: float | None = time.monotonic()
        self._join_hint = join_hint
        self._node_of_session: OrderedDict[str, str] = OrderedDict()
        # Starts at random: an answer to a lease of an earlier orchestrator must not match one of ours.
        self._leases = itertools.count(secrets.randbits(48))
        self._placing = False
        self._closed: RequestError | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, session: str, prompt_ids: bytes, sampling: Sampling, *, oldest_version: int = 0
    ) -> NodeAnswer:
        """Return the checked answer of a node with `oldest_version` or newer weights.

        Cancelling the awaiting task cancels the request on its node.

        Raises DeadlineError when no node answered in time, EngineError when nodes failed several times, and
        RequestError when no node could serve it as it stands.
        """
        request = GatewayRequest(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=time.monotonic(),
            done=asyncio.get_running_loop().create_future(),
            oldest_version=oldest_version,
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
        """Forget a request that has ended for its caller, and cancel it on its node."""
        self.open.pop(request.request_id, None)
        self.queue.pop(request.request_id, None)
        node = self._release(request)
        if node is not None:
            self._send(node, CancelGenerate(request_id=request.request_id, lease=request.lease))
            self.place()

    def _release(self, request: GatewayRequest) -> AttachedNode | None:
        """Take the request's lease from its node, and return that node."""
        node = request.node
        request.node = None
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
            while (placement := self._next_placement()) is not None:
                request, node = placement
                del self.queue[request.request_id]
                if isinstance(node, RequestError):
                    self.end(request, node)
                else:
                    self._assign(request, node)
        finally:
            self._placing = False

    def serving(self) -> list[AttachedNode]:
        """Return the nodes that may get requests now, full or not."""
        now, oldest, newest = time.monotonic(), self.oldest_version, self.newest_version
        return [node for node in self.nodes.attached() if node.cannot_serve(now, oldest, newest) is None]

    def _next_placement(self) -> tuple[GatewayRequest, AttachedNode | RequestError] | None:
        """Return the first request that a free node can take, or whose prompt no known node has room for.

        Requests that need a node that is not free, or that is away for a while, keep their position.
        """
        serving = self.serving()
        free = [node for node in serving if len(node.leases) < node.places]
        if not free:
            return None
        smallest_context = min(node.context for node in serving)
        largest_known = self.nodes.largest_context(self._no_node_timeout_s)
        for request in self.queue.values():
            if request.num_prompt >= largest_known:
                return request, _too_long(request, int(largest_known))
            if self._is_served_by_all(request, smallest_context):
                return request, self._choose(request, free)
            able = [node for node in able_nodes(request, serving) if len(node.leases) < node.places]
            if able:
                return request, self._choose(request, able)
        return None

    def _is_served_by_all(self, request: GatewayRequest, smallest_context: float) -> bool:
        """Whether any serving node may answer `request`; the smallest has room for `smallest_context` tokens."""
        is_limited = request.refused_by or request.oldest_version > self.oldest_version
        return not is_limited and request.num_wanted <= smallest_context

    def _choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        warm = self._node_of_session.get(request.session)
        for node in free:
            if node.node_id == warm and warm != request.avoid:
                if not node.cache_is_full or all(other.cache_is_full for other in free):
                    return node
                break
        avoid = request.avoid
        return min(
            free,
            key=lambda node: (
                node.node_id == avoid,
                node.cache_is_full,
                len(node.leases) / node.credible_places,
                node.node_id,
            ),
        )

    def _assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        request.node = node
        request.lease = next(self._leases)
        request.placed = time.monotonic()
        node.leases[request.lease] = request
        self._node_of_session[request.session] = node.node_id
        self._node_of_session.move_to_end(request.session)
        if len(self._node_of_session) > _MAX_SESSIONS:
            self._node_of_session.popitem(last=False)
        message = Generate(
            request_id=request.request_id,
            lease=request.lease,
            prompt_ids=request.prompt_ids,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=request.tokens_on(node)),
            session=request.session,
        )
        if not self._send(node, message):
            self.nodes.leave(node, "unreachable")

    def _reissue(self, request: GatewayRequest, reason: str) -> None:
        """Put `request` back at the front of the queue: it has waited before."""
        self.counters.reissued += 1
        request.last_error = reason
        self.queue[request.request_id] = request
        self.queue.move_to_end(request.request_id, last=False)

    def close(self, reason: str) -> None:
        """End every request, and each later one, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in list(self.open.values()):
            self.end(request, self._closed)

    def forget(self, session: str) -> None:
        """Forget the node of a session that is over."""
        self._node_of_session.pop(session, None)

    # -- answers -------------------------------------------------------------------------------------------------

    def on_generated(self, node: AttachedNode, message: Generated) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        if message.finish_reason == "cancelled":
            node.failures += 1
            self._retry(request, node, "the node cancelled it")
            return
        try:
            answer = check_answer(
                message,
                max_tokens=request.tokens_on(node),
                vocab_size=self._vocab_size,
                newest_version=self.newest_version,
                node_id=node.node_id,
            )
        except WireError as error:
            node.bad_answers += 1
            self.counters.bad_answers += 1
            logger.warning("node %s sent a bad answer to %s: %s", node.node_id, request.request_id, error)
            self._retry(request, node, f"bad answer: {error}")
            return
        node.note_answer(len(answer.token_ids))
        self.counters.answered += 1
        self.counters.tokens += len(answer.token_ids)
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
            self._retry(request, node, message.error)
            return
        request.refused_by.add(node.node_id)
        if len(request.refused_by) < _MAX_FAILURES and self._has_other_node(request):
            self._reissue(request, f"{node.node_id}: {message.error}")
        else:
            self.end(request, RequestError(f"node {node.node_id}: {message.error}", code="refused_by_node"))
        self.place()

    def _has_other_node(self, request: GatewayRequest) -> bool:
        """Whether a node that has not refused `request` may serve it, now or later."""
        return any(
            not node.draining and node.node_id not in request.refused_by and request.tokens_on(node) >= 1
            for node in self.nodes.attached()
        )

    def _claim(self, node: AttachedNode, message: Generated | GenerateFailed) -> GatewayRequest | None:
        """Take the request that `node` holds under the message's lease; None for a late answer."""
        request = node.leases.get(message.lease)
        if request is None or request.request_id != message.request_id:
            if not (isinstance(message, Generated) and message.finish_reason == "cancelled"):
                node.late_answers += 1
                self.counters.late_answers += 1
            return None
        self._release(request)
        node.last_progress = time.monotonic()
        return request

    def _retry(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        """Count a failure of `node`, then reissue `request` or end it after _MAX_FAILURES."""
        node.failures_in_row += 1
        if node.failures_in_row >= _FAILURES_IN_ROW:
            node.suspended_until = time.monotonic() + self._suspend_s
        request.failures += 1
        request.avoid = node.node_id
        if request.failures >= _MAX_FAILURES:
            message = (
                f"{request.failures} attempts failed, the last on node {node.node_id}: {error}; "
                "see that node's log (another attempt may go better)"
            )
            self.end(request, EngineError(message))
        else:
            self._reissue(request, f"{node.node_id}: {error}")
        self.place()

    def end(self, request: GatewayRequest, error: Exception) -> None:
        """End `request` with `error`."""
        self.counters.failed += 1
        if not request.done.done():
            request.done.set_exception(error)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def _on_gone(self, node: AttachedNode, reason: str) -> None:
        requests = list(node.leases.values())
        node.leases = {}
        for request in reversed(requests):
            request.node = None
            self._reissue(request, f"node {node.node_id} is gone: {reason}")
        self.place()

    def reclaim_lost(self, lost_after_s: float) -> None:
        """Reissue what a node should hold but, by its heartbeats, does not: the request or its answer was lost."""
        now = time.monotonic()
        for node in self.nodes.attached():
            if node.idle_since is None:
                continue
            for request in list(node.leases.values()):
                if now - max(node.idle_since, request.placed) >= lost_after_s:
                    self._release(request)
                    self._reissue(request, f"node {node.node_id} reports no request for {now - node.idle_since:.1f} s")
        self.place()

    def reclaim_stalled(self, stall_s: float) -> None:
        """Reissue what a node holds that has made no progress for `stall_s`, if another node can serve.

        Its heartbeats may go on while its engine hangs. It then misses new weights too, so it may not even serve. It
        gets no request for `stall_s`, doubled for each further stall, and then a single one until it has answered.
        """
        now = time.monotonic()
        for node in self.nodes.attached():
            stalled_s = node.stalled_s(now)
            if stalled_s < stall_s or all(other is node for other in self.serving()):
                continue
            reason = f"node {node.node_id} gave neither answer nor token for {stalled_s:.1f} s"
            node.suspended_until = now + stall_s * 2 ** min(node.stalls_in_row, 10)
            node.stalls_in_row += 1
            node.places = 1
            requests = list(node.leases.values())
            logger.warning(
                "%s, though its heartbeats go on: its %d requests go elsewhere; look at its log, and restart it if its "
                "engine hangs", reason, len(requests),
            )  # fmt: skip
            for request in reversed(requests):
                self._release(request)
                self._send(node, CancelGenerate(request_id=request.request_id, lease=request.lease))
                request.avoid = node.node_id
                self._reissue(request, reason)
        self.place()

    # -- deadlines -----------------------------------------------------------------------------------------------

    def no_node_s(self) -> float | None:
        """Return for how many seconds no node has been able to serve; None while one is."""
        return None if self._no_node_since is None else time.monotonic() - self._no_node_since

    def enforce_deadlines(self) -> DeadlineError | None:
        """End what waited too long. Return the error when requests waited for a node in vain."""
        now = time.monotonic()
        if self.serving():
            self._no_node_since = None
        elif self._no_node_since is None:
            self._no_node_since = now
        for request in list(self.open.values()):
            if now - request.since >= self._request_timeout_s:
                self.end(request, self._too_slow(request, now))
        return self._end_without_node(now)

    def _end_without_node(self, now: float) -> DeadlineError | None:
        since = self._no_node_since
        if since is None:
            return None
        overdue = [r for r in self.queue.values() if now - max(since, r.since) >= self._no_node_timeout_s]
        if not overdue:
            return None
        clock_time = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        error = DeadlineError(
            f"{self.queued} requests waited for an inference node; since {clock_time} ({now - since:.1f} s, "
            f"orchestrator.no_node_timeout_s is {self._no_node_timeout_s}) there is none: {self.why_no_node()}"
        )
        for request in overdue:
            self.end(request, error)
        return error

    def _too_slow(self, request: GatewayRequest, now: float) -> DeadlineError:
        waited = f"request {request.request_id} waited {now - request.since:.1f} s, at most {self._request_timeout_s}"
        if request.node is not None:
            return DeadlineError(f"{waited}: node {request.node.node_id} has not answered")
        previous = f" (before that, {request.last_error})" if request.last_error else ""
        serving = self.serving()
        able = f"{len(able_nodes(request, serving))} of {len(serving)} serving nodes"
        return DeadlineError(f"{waited}: it was queued, all places of the {able} that may take it are used{previous}")

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self.queue)

    def waiting_for_the_fleet(self) -> int:
        """Return how many queued requests wait because the fleet is full: at least half of its places may serve them.

        Others wait for a few nodes, with a large context or new weights, while most may be idle.
        """
        serving = self.serving()
        if not serving:
            return 0
        smallest_context = min(node.context for node in serving)
        half = sum(node.places for node in serving) / 2
        return sum(
            self._is_served_by_all(request, smallest_context)
            or sum(node.places for node in able_nodes(request, serving)) >= half
            for request in self.queue.values()
        )

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self.queue)

    def why_no_node(self) -> str:
        """Return what each known node lacks, or how to start one."""
        now, oldest, newest = time.monotonic(), self.oldest_version, self.newest_version
        reasons = [f"{node.node_id} {node.cannot_serve(now, oldest, newest)}" for node in self.nodes]
        if reasons:
            return "; ".join(reasons[:8])
        return f"none has connected: {self._join_hint()}, or set inference.nodes to at least 1"

    def snapshot(self) -> dict[str, Any]:
        """Return counters, queue and the longest waits, for /metrics."""
        now = time.monotonic()
        queue_reason = "a free place" if self.serving() else f"a node: {self.why_no_node()}"
        oldest = sorted(self.open.values(), key=lambda request: request.since)[:8]
        waits = [
            {
                "request_id": request.request_id,
                "session": request.session,
                "since_s": round(now - request.since, 3),
                "for": f"node {request.node.node_id}" if request.node else queue_reason,
            }
            for request in oldest
        ]
        return {"queued": self.queued, "in_flight": self.in_flight, "longest_waits": waits, **asdict(self.counters)}


def _too_long(request: GatewayRequest, context: int) -> RequestError:
    # Clients recognize this sentence; renderers' own check uses it too.
    return RequestError(
        f"Prompt length ({request.num_prompt}) exceeds maximum context length ({context}) less one token for the "
        "reply, on the node with the largest context: shorten the conversation or start a node with a larger "
        "--max-context",
        code="context_length_exceeded",
        param="token_ids",
    )
