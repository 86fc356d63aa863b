"""How many rollouts may run at a time: found by trying, within bounds.

    no node queues, caches have room, the limit is used  ->  double (start), later + a little
    twice in a row nodes queue or a KV cache fills up    ->  x 0.75

Additive increase, multiplicative decrease, as congestion control does it: too few rollouts leave nodes idle, too many
only wait inside the engines and grow stale there.

What waited too long at the gateway, and what it waited for.

every tick: end_overdue() -> requests past request_timeout_s             -> 503, the run goes on
                          -> requests that no node could take in time    -> 503, and the run cannot go on
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from composer_prime.errors import DeadlineError
from orchestrator.gateway.nodes import AttachedNode, GatewayRequest
from orchestrator.gateway.routing import Router

_KV_HIGH = 0.9
_KV_LOW = 0.75
_QUEUE_SHARE = 0.25
"""Requests waiting inside engines, relative to those running, that count as pressure; a few always wait shortly."""
_IDLE_QUEUE_SHARE = 0.05
"""Below this share the queue counts as empty: turns that begin together wait for their prefill for a moment."""
_DECREASE = 0.75
_PRESSED_IN_ROW = 2
_START = 32
_USED_SHARE = 0.8
"""The limit rises only while at least this share of it is in use: an unused limit proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """What the serving nodes and the gateway's queue say now."""

    running: int
    waiting: int
    """Inside engines, plus the gateway's own queue."""
    kv_used: float
    """Of the fullest node, 0..1."""
    places: int
    """Requests that all nodes take together."""

    @classmethod
    def of(cls, nodes: Iterable[AttachedNode], queued: int) -> GatewayLoad | None:
        """None while no node has reported: nothing is known, so nothing should change."""
        reporting = [(node, node.status) for node in nodes if node.status is not None]
        if not reporting:
            return None
        return cls(
            running=sum(status.running for _, status in reporting),
            waiting=sum(status.waiting for _, status in reporting) + queued,
            kv_used=max(status.kv_used for _, status in reporting),
            places=sum(node.max_concurrent for node, _ in reporting),
        )

    @property
    def pressed(self) -> bool:
        return self.waiting > max(1.0, _QUEUE_SHARE * self.running) or self.kv_used > _KV_HIGH

    @property
    def has_room(self) -> bool:
        return self.waiting <= _IDLE_QUEUE_SHARE * self.running and self.kv_used < _KV_LOW


class AdaptiveLimit:
    """The current limit; `observe` moves it, at most one move a call."""

    def __init__(self, *, floor: int, ceiling: int) -> None:
        """`floor`: never below (a group must fit)."""
        if not 1 <= floor <= ceiling:
            raise ValueError(f"floor is {floor} and ceiling {ceiling}: need 1 <= floor <= ceiling")
        self._floor, self._ceiling = floor, ceiling
        self._limit = float(min(ceiling, max(floor, _START)))
        self._probing = True
        self._pressed_in_row = 0
        self.decreases = 0

    def limit(self) -> int:
        return int(self._limit)

    def observe(self, load: GatewayLoad | None, in_use: int) -> None:
        """Take notice of `load` while `in_use` rollouts run."""
        if load is None:
            return
        self._pressed_in_row = self._pressed_in_row + 1 if load.pressed else 0
        if self._pressed_in_row >= _PRESSED_IN_ROW:
            self._pressed_in_row = 0
            self._probing = False
            self.decreases += 1
            self._limit = max(self._floor, min(self._limit, max(in_use, self._floor)) * _DECREASE)
        elif load.has_room and in_use >= _USED_SHARE * self.limit():
            step = self._limit if self._probing else max(1.0, 0.05 * self._limit)
            self._limit = min(float(self._ceiling), self._limit + step)


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

    def _too_slow(self, request: GatewayRequest, now: float) -> DeadlineError:
        waited = f"request {request.request_id} waited {now - request.since:.1f} s, at most {self._request_timeout_s}"
        if request.node is not None:
            return DeadlineError(f"{waited}: node {request.node.node_id} has not answered")
        behind = f" (before that, {request.last_error})" if request.last_error else ""
        nodes = len(self._router.serving())
        return DeadlineError(f"{waited}: it was queued, all places of {nodes} serving nodes are taken{behind}")
