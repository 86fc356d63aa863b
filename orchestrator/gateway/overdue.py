"""What waited too long at the gateway, and what it waited for.

every tick: end_overdue() -> requests past request_timeout_s             -> 503, the run goes on
                          -> requests that no node could take in time    -> 503, and the run cannot go on
"""

from __future__ import annotations

import time

from composer_prime.errors import DeadlineError
from orchestrator.gateway.request import Request
from orchestrator.gateway.routing import Router


class Overdue:
    def __init__(self, router: Router, *, no_node_timeout_s: float, request_timeout_s: float) -> None:
        self._router = router
        self._no_node_timeout_s, self._request_timeout_s = no_node_timeout_s, request_timeout_s
        self._no_node_since: float | None = router.clock()

    def no_node_s(self) -> float | None:
        """For how many seconds no node has been able to serve; None while one is."""
        return None if self._no_node_since is None else self._router.clock() - self._no_node_since

    def end_overdue(self) -> DeadlineError | None:
        """End what waited too long. Returns the error when requests waited for a node in vain."""
        router = self._router
        now = router.clock()
        if router.serving():
            self._no_node_since = None
        elif self._no_node_since is None:
            self._no_node_since = now
        for request in list(router.open.values()):
            if now - request.since >= self._request_timeout_s:
                router.give_up(request, self._too_slow(request, now))
        return self._no_node(now)

    def _no_node(self, now: float) -> DeadlineError | None:
        router, since = self._router, self._no_node_since
        if since is None:
            return None
        overdue = [r for r in router.queue.values() if now - max(since, r.since) >= self._no_node_timeout_s]
        if not overdue:
            return None
        clock_time = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        error = DeadlineError(
            f"{router.queued} requests waited for an inference node; since {clock_time} ({now - since:.1f} s, "
            f"orchestrator.no_node_timeout_s is {self._no_node_timeout_s}) there is none: {router.why_no_node()}"
        )
        for request in overdue:
            router.give_up(request, error)
        return error

    def _too_slow(self, request: Request, now: float) -> DeadlineError:
        waited = f"request {request.request_id} waited {now - request.since:.1f} s, at most {self._request_timeout_s}"
        if request.node is not None:
            return DeadlineError(f"{waited}: node {request.node.node_id} has not answered")
        behind = f" (before that, {request.last_error})" if request.last_error else ""
        nodes = len(self._router.serving())
        return DeadlineError(f"{waited}: it was queued, all places of {nodes} serving nodes are taken{behind}")
