"""Find requests that wait too long or make no progress. The gateway calls all of this on every tick.

    Waits.enforce         past request_timeout_s -> 503, the run continues
                          without a node for no_node_timeout_s -> 503, the run ends
    reclaim_stalled       the node sends heartbeats, but neither answers nor tokens
    reclaim_quarantined   an audit found that the node's answers are wrong

Another node continues a reclaimed request after the streamed tokens. Tokens of a quarantined node are discarded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from composer_prime.errors import DeadlineError
from orchestrator.gateway.request_state import Discarded, GatewayRequest, Lost
from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)

_MAX_DOUBLINGS = 2
_MAX_SUSPENSION_S = 3600.0
"""Bounds of a suspension: nothing but its end lets a node that works again show so."""


class Waits:
    """Deadlines of the requests of one router."""

    def __init__(self, router: Router, join_hint: Callable[[], str]) -> None:
        """`join_hint()` tells how to start a node."""
        self._router = router
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
        since, limit_s = self._no_node_since, self._router.no_node_timeout_s
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
        if request.node is not None:
            return DeadlineError(f"{waited}: node {request.node.node_id} has not answered")
        previous = f" (before that, {request.tried.last_error})" if request.tried.last_error else ""
        serving = self._router.serving()
        able = f"{sum(map(request.may_run_on, serving))} of {len(serving)} serving nodes"
        return DeadlineError(f"{waited}: it was queued, all places of the {able} that may take it are used{previous}")

    def why_no_node(self) -> str:
        """Return what each known node lacks, or how to start one."""
        now, oldest, newest = time.monotonic(), self._router.oldest_version, self._router.newest_version
        reasons = [f"{node.node_id} {node.cannot_serve(now, oldest, newest)}" for node in self._router.nodes]
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
            router.apply(request, Lost(reason))
    router.place()


def reclaim_quarantined(router: Router, node_id: str, reason: str) -> None:
    """Reissue what a node holds whose answers are wrong, without what it has streamed."""
    for node in router.nodes.attached():
        if node.node_id == node_id:
            for request in list(node.leases.values()):
                request.tried.avoid = node_id
                router.apply(request, Discarded(f"node {node_id} is {reason}"))
    router.place()
