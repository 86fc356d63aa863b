"""Hold each request until a node has answered it, and recover when one does not.

    generate() -> queue (FIFO) -> node with a free place -> answer -----> generate() returns
                    ^                  |  gone | stalled | draining: another node continues after the streamed tokens
                    |                  |  failed | bad answer: another node starts over
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

requests.py has a request and the checks of its answer, placing.py the choice of a node. `Waits` finds requests that
wait too long or make no progress. Everything runs on one event loop. Only `generate` waits, at most until one of its
deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from composer_prime.console import printable
from composer_prime.errors import DeadlineError, EngineError, RequestError, WireError
from composer_prime.wire.node_messages import (
    NO_TOKENS,
    RUNNING,
    Answer,
    CancelGenerate,
    GenerateFailed,
    NodeHello,
    Sampled,
    Sampling,
    Status,
    ToNode,
)
from orchestrator.gateway.nodes import AttachedNode, Nodes
from orchestrator.gateway.placing import Placing
from orchestrator.gateway.requests import GatewayRequest, Running, ServedPolicy, check_sampled

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Discarded or bad answers after which a request ends. Nodes that vanish or drain do not count."""
_MAX_REFUSALS = 16
"""Nodes that may refuse a request before it ends; it ends sooner when no other node is left."""
_HELD_SHARE = 0.25
"""Share of request_timeout_s after which a node that has not answered is to blame, not the queue."""
_MAX_DOUBLINGS = 2
_MAX_SUSPENSION_S = 3600.0
"""Bounds of a suspension: nothing but its end lets a node that works again show so."""


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
    tokens_resumed: int = 0
    """Tokens that nodes had streamed before they were gone, and after which others continued."""
    tokens_lost: int = 0
    """Streamed tokens that no answer has. What a node sampled and did not stream is not known."""


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        nodes: Nodes,
        send: Callable[[bytes, ToNode], bool],
        *,
        policy: ServedPolicy,
        suspend_s: float,
        request_timeout_s: float,
        placing: Placing | None = None,
    ) -> None:
        """`send` to a connection returns False when it is gone.

        `suspend_s`: how long a node that keeps failing gets no request. `request_timeout_s`: how long a request waits
        at all. `placing` chooses among nodes otherwise.
        """
        self.nodes = nodes
        self.policy = policy
        self.placing = placing or Placing()
        self.counters = RequestCounters()
        self.queue: OrderedDict[str, GatewayRequest] = OrderedDict()
        """Requests without a node, by id, the next one first."""
        self.open: dict[str, GatewayRequest] = {}
        """Every request without an answer, by id."""
        self.request_timeout_s = request_timeout_s
        self._send = send
        self._suspend_s = suspend_s
        # Starts at random: an answer to a lease of an earlier orchestrator must not match one of ours.
        self._leases = itertools.count(secrets.randbits(48))
        self._placing = False
        self._closed: RequestError | None = None

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self.queue)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        session: str,
        prompt_ids: bytes,
        sampling: Sampling,
        *,
        oldest_version: int = 0,
    ) -> Answer:
        """Return the checked answer of a node with `oldest_version` or newer weights.

        Cancelling the awaiting task cancels the request on its node.

        Raises DeadlineError when no node answered in time, EngineError when nodes failed several times, and
        RequestError when no node could serve it as it stands.
        """
        if self._closed is not None:
            raise self._closed
        request = GatewayRequest(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=time.monotonic(),
            done=asyncio.get_running_loop().create_future(),
            oldest_version=oldest_version,
        )
        self.counters.requests += 1
        self.open[request_id] = request
        self.queue[request_id] = request
        try:
            self.place()
            return await request.done
        except asyncio.CancelledError as error:
            self.counters.cancelled += 1
            self.blame_node_of(request)
            self.finish(request, error)
            self.place()
            raise
        finally:
            if session == request_id:  # It is of no conversation, and may have failed.
                self.placing.forget(session)

    def send(self, node: AttachedNode, message: ToNode) -> bool:
        """Return False when the node cannot be reached any more."""
        return self._send(node.identity, message)

    def reissue(self, request: GatewayRequest, reason: str, *, keep: bool, cancel: bool = True) -> None:
        """Take a request back from its node, and queue it at the front: it has waited before.

        With `keep`, another node continues after the streamed tokens. With `cancel`, its former node stops.
        """
        if request.request_id not in self.open:
            return
        streamed = self._release(request, cancel=cancel)
        if keep and streamed:
            request.kept = request.kept.then(streamed)
            self.counters.tokens_resumed += len(streamed)
        else:
            self.counters.tokens_lost += len(streamed)
        request.tried.last_error = reason
        self.queue[request.request_id] = request
        self.queue.move_to_end(request.request_id, last=False)
        self.counters.reissued += 1

    def _start_over(self, request: GatewayRequest) -> None:
        """Give up what was kept of a queued request: no node that serves can continue it."""
        self.counters.tokens_lost += len(request.kept)
        request.kept = NO_TOKENS

    def finish(self, request: GatewayRequest, outcome: Answer | BaseException, *, cancel: bool = True) -> None:
        """Wake the caller of a request, once. With `cancel`, its node stops."""
        if self.open.pop(request.request_id, None) is None:
            return
        self.queue.pop(request.request_id, None)
        streamed = self._release(request, cancel=cancel)
        if isinstance(outcome, Answer):
            self.counters.answered += 1
            self.counters.tokens += len(outcome)
        else:
            self.counters.tokens_lost += len(streamed)
            self.counters.failed += not isinstance(outcome, asyncio.CancelledError)
        if request.done.done():  # Its caller was cancelled.
            return
        if isinstance(outcome, Answer):
            request.done.set_result(outcome)
        else:
            request.done.set_exception(outcome)

    def _release(self, request: GatewayRequest, *, cancel: bool) -> Answer:
        """Take the lease from the node that holds a request. Return what the node has streamed."""
        running, request.running = request.running, None
        if running is None:
            return NO_TOKENS
        node = running.node
        node.leases.pop(running.lease, None)
        if cancel and node.attached:
            self.send(node, CancelGenerate(request_id=request.request_id, lease=running.lease))
        return running.streamed

    def end(self, request: GatewayRequest, error: Exception) -> None:
        """End `request` with `error`, unless it has ended."""
        self.finish(request, error)
        self.place()

    def close(self, reason: str) -> None:
        """End every request, and each later one, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in list(self.open.values()):
            self.end(request, self._closed)

    def forget(self, session: str) -> None:
        """Forget the node of a session that is over."""
        self.placing.forget(session)

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Hand waiting requests to nodes, oldest first, until no node has a free place."""
        if self._placing or self._closed is not None or not self.queue:
            return
        self._placing = True
        try:
            while self._place_waiting():
                pass
        finally:
            self._placing = False

    def serving(self) -> list[AttachedNode]:
        """Return the nodes that may get requests now, full or not."""
        return [node for node in self.nodes.attached() if node.cannot_serve(self.policy) is None]

    def _place_waiting(self) -> bool:
        """Look at each waiting request once. Return whether a node turned out to be gone: its requests came back.

        Requests that need a node that is not free, or that is away for a while, keep their position. Nodes only fill
        up meanwhile, so what has the same needs as one of them is passed over.
        """
        serving, unmet = self.serving(), set[Hashable]()
        roomy = [node for node in serving if node.has_room]
        for request in list(self.queue.values()):
            if not roomy:
                break
            needs = request.least_version, frozenset(request.tried.refused_by), bool(request.kept)
            if needs in unmet:
                continue
            node = self._node_for(request, serving, roomy)
            if node is None:
                unmet.add(needs)
                continue
            self.assign(request, node)
            roomy = [node for node in roomy if node.attached and node.has_room]
        return not all(node.attached for node in serving)

    def _node_for(
        self, request: GatewayRequest, serving: list[AttachedNode], roomy: list[AttachedNode]
    ) -> AttachedNode | None:
        """Return the best of the `roomy` nodes. A request that no node can continue starts over."""
        if request.kept and not any(map(request.may_run_on, serving)):
            self._start_over(request)
        free = [node for node in roomy if request.may_run_on(node)]
        return self.placing.choose(request, free) if free else None

    def assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        """Send `request` to `node`, which continues after the tokens that others have sampled."""
        if request.kept and request.sampling.stop and not node.continues:
            self._start_over(request)
        running = request.running = self.placing.note_placed(request, node, next(self._leases))
        self.queue.pop(request.request_id, None)
        node.leases[running.lease] = request
        if not self.send(node, request.message(running)):
            self.leave(node, "unreachable")

    # -- answers -------------------------------------------------------------------------------------------------

    def on_sampled(self, node: AttachedNode, message: Sampled) -> None:
        """Take in an answer or a part of one. What comes late, after its request was taken back, means nothing."""
        request = self._held(node, message)
        if request is None:
            return
        running = request.running
        assert running is not None, "a lease is of a running request"
        node.heard.progress = time.monotonic()
        if message.finish_reason == "cancelled":
            node.counters.failures += 1
            self._retry(request, node, "the node cancelled it", cancel=False)
            return
        try:
            answer = check_sampled(message, request, running, self.policy)
        except WireError as error:
            self._refuse(request, node, error, cancel=message.is_part)
            return
        if message.is_part:
            self._take_part(running, answer)
        else:
            self._take_answer(request, running, answer)

    def _take_part(self, running: Running, part: Answer) -> None:
        node, running.streamed = running.node, running.streamed.then(part)
        node.speed.streams = True
        node.heard.delivered = time.monotonic()
        if node.speed.note_tokens(len(part)):
            self.place()

    def _take_answer(self, request: GatewayRequest, running: Running, answer: Answer) -> None:
        node = running.node
        self.finish(request, request.kept.then(answer), cancel=False)
        node.note_answer(len(answer))
        node.speed.note_tokens(len(answer) - len(running.streamed))
        self.placing.note_answer(request, running, len(answer), self.nodes.attached())
        # Other nodes refused a request that can be answered. If all refuse, no node is at fault.
        for refuser in self.nodes.attached() if request.tried.refused_by else ():
            if refuser.node_id in request.tried.refused_by:
                self.blame(refuser)
        self.place()

    def _refuse(self, request: GatewayRequest, node: AttachedNode, error: WireError, *, cancel: bool = True) -> None:
        """Take nothing of what `node` sampled for `request`."""
        node.counters.bad_answers += 1
        self.counters.bad_answers += 1
        logger.warning("node %s sent a bad answer to %s: %s", node.node_id, request.request_id, error)
        self._retry(request, node, f"bad answer: {error}", cancel=cancel)

    def on_failed(self, node: AttachedNode, message: GenerateFailed) -> None:
        request = self._held(node, message)
        if request is None:
            return
        node.heard.progress = time.monotonic()
        error = printable(message.error)
        if not message.tried:
            node.draining = True
            self.reissue(request, f"{node.node_id} is leaving: {error}", keep=True, cancel=False)
        elif message.retryable:
            node.counters.failures += 1
            self._retry(request, node, error, cancel=False)
        else:
            node.counters.failures += 1
            self._refused_by(request, node, error)
        self.place()

    def _refused_by(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        """Take note that `node` cannot serve `request`, which ends when no other node may."""
        request.tried.refused_by.add(node.node_id)
        others = [node for node in self.nodes.attached() if not node.draining]
        may_go_on = any(node.node_id not in request.tried.refused_by for node in others)
        if may_go_on and len(request.tried.refused_by) < _MAX_REFUSALS:
            self.reissue(request, f"{node.node_id}: {error}", keep=False, cancel=False)
        else:
            refused = RequestError(f"node {node.node_id}: {error}", code="refused_by_node")
            self.finish(request, refused, cancel=False)

    def _held(self, node: AttachedNode, message: Sampled | GenerateFailed) -> GatewayRequest | None:
        """Return the request that `node` holds under the message's lease; None for a late answer or part."""
        request = node.leases.get(message.lease)
        if request is not None and request.request_id == message.request_id:
            return request
        if not (isinstance(message, Sampled) and message.finish_reason in ("cancelled", RUNNING)):
            node.counters.late_answers += 1
            self.counters.late_answers += 1
        return None

    def _retry(self, request: GatewayRequest, node: AttachedNode, error: str, *, cancel: bool = True) -> None:
        """Count a failure of `node`, then let another one start over, or end the request after _MAX_FAILURES."""
        self.blame(node)
        request.tried.failures += 1
        request.tried.avoid = node.node_id
        if request.tried.failures >= _MAX_FAILURES:
            message = (
                f"{request.tried.failures} attempts failed, the last on node {node.node_id}: {error}; "
                "see that node's log (another attempt may go better)"
            )
            self.finish(request, EngineError(message), cancel=cancel)
        else:
            self.reissue(request, f"{node.node_id}: {error}", keep=False, cancel=cancel)
        self.place()

    def blame(self, node: AttachedNode) -> None:
        """Count a failure of an attached node, which may suspend it."""
        node.note_failure(self._suspend_s)

    def blame_node_of(self, request: GatewayRequest) -> None:
        """Count a failure of the node that had `request` for long, when it ended, and delivered nothing meanwhile."""
        since = time.monotonic() - _HELD_SHARE * self.request_timeout_s
        running = request.running
        if running is not None and running.node.heard.delivered <= running.placed <= since:
            self.blame(running.node)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def attach(self, identity: bytes, hello: NodeHello, key: bytes = b"") -> AttachedNode:
        """Attach the sender of `hello` on connection `identity`. Requests that it held before count as lost."""
        previous = self.nodes.at(identity)
        if previous is not None:
            self.leave(previous, "said hello again")
        former = self.nodes.named(hello.node_id)
        if former is not None and former.attached:
            self.leave(former, "came back on a new connection")
        return self.nodes.add(identity, hello, key, self.policy.newest)

    def update_status(self, node: AttachedNode, status: Status) -> None:
        """Take in a heartbeat."""
        node.note_status(status, self.policy.newest)

    def leave(self, node: AttachedNode, reason: str) -> None:
        """Mark `node` as away, and place elsewhere what it held."""
        if not self.nodes.remove(node, reason):
            return
        if node.leases and node.heard.delivered <= min(node.placed_at()):
            node.note_failure(self._suspend_s)  # Else it could come back for them again and again.
        for request in reversed(list(node.leases.values())):
            self.reissue(request, f"node {node.node_id} is gone: {reason}", keep=True)
        self.place()

    def lose_silent(self, lost_after_s: float) -> None:
        """Mark every node as away that was silent for longer than `lost_after_s`."""
        now = time.monotonic()
        for node in self.nodes.attached():
            if now - node.heard.anything > lost_after_s:
                self.leave(node, f"silent for {now - node.heard.anything:.1f} s")


# -- waits -----------------------------------------------------------------------------------------------------------


class Waits:
    """Deadlines of the requests of one router."""

    def __init__(self, router: Router, no_node_timeout_s: float, join_hint: Callable[[], str]) -> None:
        """`no_node_timeout_s`: how long requests wait while no node can serve. `join_hint()` tells how to start one."""
        self._router = router
        self._no_node_timeout_s = no_node_timeout_s
        self._no_node_since: float | None = time.monotonic()
        self._join_hint = join_hint

    def no_node_s(self) -> float | None:
        """Return for how many seconds no node has been able to serve; None while one is."""
        return None if self._no_node_since is None else time.monotonic() - self._no_node_since

    def enforce(self) -> DeadlineError | None:
        """End requests that waited too long. Return an error if no node came for some of them."""
        now = time.monotonic()
        if self._router.serving():
            self._no_node_since = None
        elif self._no_node_since is None:
            self._no_node_since = now
        for request in list(self._router.open.values()):
            if now - request.since >= self._router.request_timeout_s:
                self._router.blame_node_of(request)
                self._router.end(request, self._too_slow(request, now))
        return self._end_without_node(now)

    def _end_without_node(self, now: float) -> DeadlineError | None:
        since, limit_s = self._no_node_since, self._no_node_timeout_s
        if since is None:
            return None
        overdue = [r for r in self._router.queue.values() if now - max(since, r.since) >= limit_s]
        if not overdue:
            return None
        clock_time = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        error = DeadlineError(
            f"{self._router.queued} requests waited for an inference node, but there has been none since {clock_time} "
            f"({now - since:.1f} s, orchestrator.no_node_timeout_s is {limit_s}): {self.why_no_node()}"
        )
        for request in overdue:
            self._router.end(request, error)
        return error

    def _too_slow(self, request: GatewayRequest, now: float) -> DeadlineError:
        waited = (
            f"request {request.request_id} waited {now - request.since:.1f} s, at most {self._router.request_timeout_s}"
        )
        if request.running is not None:
            return DeadlineError(f"{waited}: node {request.running.node.node_id} has not answered")
        previous = f" (before that, {request.tried.last_error})" if request.tried.last_error else ""
        serving = self._router.serving()
        able = f"{sum(map(request.may_run_on, serving))} of {len(serving)} serving nodes"
        return DeadlineError(f"{waited}: it was queued, all places of the {able} that may take it are used{previous}")

    def why_no_node(self) -> str:
        """Return what each known node lacks, or how to start one."""
        reasons = [f"{node.node_id} {node.cannot_serve(self._router.policy)}" for node in self._router.nodes]
        if reasons:
            return "; ".join(reasons[:8])
        return f"none has connected: {self._join_hint()}, or set inference.nodes to at least 1"


def reclaim_stalled(router: Router, stall_s: float) -> None:
    """Reissue what a node holds that has made no progress for `stall_s`, if another node can serve.

    A node may send heartbeats while its engine hangs. It then misses new weights too, so it may not be serving. It gets
    no request for `stall_s`, doubled with each further stall, up to 4 times that or an hour. Then it gets one at a time
    until it has answered.
    """
    now = time.monotonic()
    for node in router.nodes.attached():
        stalled_s = node.stalled_s(now)
        if stalled_s < stall_s or all(other is node for other in router.serving()):
            continue
        reason = f"node {node.node_id} gave neither answer nor token for {stalled_s:.1f} s"
        standing = node.standing
        suspended_s = min(stall_s * 2 ** min(standing.stalls_in_row, _MAX_DOUBLINGS), _MAX_SUSPENSION_S)
        standing.suspended_until = now + suspended_s
        standing.stalls_in_row += 1
        standing.places = 1
        requests = list(node.leases.values())
        logger.warning(
            "%s, but sends heartbeats. Its %d requests go to other nodes, and it gets none for %.0f s. Check its log "
            "for a hanging engine. A restart does not shorten that time", reason, len(requests), suspended_s,
        )  # fmt: skip
        for request in reversed(requests):
            request.tried.avoid = node.node_id
            router.reissue(request, reason, keep=True)
    router.place()


def reclaim_quarantined(router: Router, node_id: str, reason: str) -> None:
    """Reissue what a node holds whose answers are wrong, without what it has streamed."""
    for node in router.nodes.attached():
        if node.node_id == node_id:
            for request in list(node.leases.values()):
                request.tried.avoid = node_id
                router.reissue(request, f"node {node_id} is {reason}", keep=False)
    router.place()
