"""How long requests may wait, for what, and the error messages after that.

every tick: enforce() -> requests past request_timeout_s             -> 503, the run continues
                      -> requests without a node for no_node_timeout_s -> 503, the run ends
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer_prime.errors import DeadlineError
from orchestrator.gateway.nodes import GatewayRequest, able_nodes, node_needs

if TYPE_CHECKING:
    from orchestrator.gateway.routing import Router

_HELD_SHARE = 0.25
"""Share of request_timeout_s after which a node that has not answered is to blame, not the queue."""


class Waits:
    """Deadlines of the requests of one router."""

    def __init__(
        self, router: Router, *, no_node_timeout_s: float, request_timeout_s: float, join_hint: Callable[[], str]
    ) -> None:
        """See Router."""
        self._router = router
        self._no_node_timeout_s = no_node_timeout_s
        self._request_timeout_s = request_timeout_s
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
            if now - request.since >= self._request_timeout_s and not request.done.done():
                self.blame_nodes(request)
                self._router.end(request, self._too_slow(request, now))
        return self._end_without_node(now)

    def blame_nodes(self, request: GatewayRequest) -> None:
        """Count a failure of each node that had `request` for long, when it ended, and delivered nothing meanwhile."""
        since = time.monotonic() - _HELD_SHARE * self._request_timeout_s
        for one in (request, request.twin):
            if one is not None and one.node is not None and one.node.last_delivered <= one.placed <= since:
                self._router.blame(one.node)

    def _end_without_node(self, now: float) -> DeadlineError | None:
        since = self._no_node_since
        if since is None:
            return None
        overdue = [r for r in self._router.queue.values() if now - max(since, r.since) >= self._no_node_timeout_s]
        if not overdue:
            return None
        clock_time = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        error = DeadlineError(
            f"{self._router.queued} requests waited for an inference node, but there has been none since {clock_time} "
            f"({now - since:.1f} s, orchestrator.no_node_timeout_s is {self._no_node_timeout_s}): {self.why_no_node()}"
        )
        for request in overdue:
            self._router.end(request, error)
        return error

    def _too_slow(self, request: GatewayRequest, now: float) -> DeadlineError:
        waited = f"request {request.request_id} waited {now - request.since:.1f} s, at most {self._request_timeout_s}"
        if request.node is not None:
            return DeadlineError(f"{waited}: node {request.node.node_id} has not answered")
        previous = f" (before that, {request.last_error})" if request.last_error else ""
        serving = self._router.serving()
        able = f"{len(able_nodes(request, serving))} of {len(serving)} serving nodes"
        return DeadlineError(f"{waited}: it was queued, all places of the {able} that may take it are used{previous}")

    def for_the_fleet(self) -> int:
        """Return how many queued requests wait because the fleet is full: at least half of its places may serve them.

        Others wait for a few nodes, with a large context or new weights, while most may be idle, or for places that
        nodes get as soon as their pace is measured.
        """
        serving = self._router.serving()
        if not serving:
            return 0
        half = sum(node.places for node in serving) / 2
        places: dict[tuple[int, int, int] | None, int] = {}
        """By what requests need."""
        waiting = 0
        for request in self._router.queue.values():
            needs = node_needs(request, self._router.nodes.contexts)
            if needs is None or needs not in places:
                places[needs] = sum(node.places for node in able_nodes(request, serving))
            waiting += places[needs] >= half
        unmeasured = (node for node in serving if node.speed.pace is None)
        return max(0, waiting - sum(max(0, node.places - len(node.leases)) for node in unmeasured))

    def why_no_node(self) -> str:
        """Return what each known node lacks, or how to start one."""
        now, oldest, newest = time.monotonic(), self._router.oldest_version, self._router.newest_version
        reasons = [f"{node.node_id} {node.cannot_serve(now, oldest, newest)}" for node in self._router.nodes]
        if reasons:
            return "; ".join(reasons[:8])
        return f"none has connected: {self._join_hint()}, or set inference.nodes to at least 1"

    def longest(self) -> list[dict[str, Any]]:
        """Return the requests that have waited longest, and for what."""
        now = time.monotonic()
        queue_reason = "a free place" if self._router.serving() else f"a node: {self.why_no_node()}"
        oldest = sorted(self._router.open.values(), key=lambda request: request.since)[:8]
        return [
            {
                "request_id": request.request_id,
                "session": request.session,
                "since_s": round(now - request.since, 3),
                "for": f"node {request.node.node_id}" if request.node else queue_reason,
            }
            for request in oldest
        ]
