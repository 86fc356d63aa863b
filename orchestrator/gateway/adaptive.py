"""Find how many rollouts may run at a time, within bounds.

    no node queues, caches have room, the limit is used  ->  double (start), later + a little
    twice in a row nodes queue or a KV cache fills up    ->  x 0.75

This is additive increase, multiplicative decrease, as in congestion control. Too few rollouts leave nodes idle. Too
many only wait inside the engines and grow stale there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.gateway.nodes import AttachedNode

_KV_HIGH = 0.9
_KV_LOW = 0.75
_QUEUE_SHARE = 0.25
"""Requests waiting inside engines, relative to those running, that count as pressure. A few always wait briefly."""
_IDLE_QUEUE_SHARE = 0.05
"""Below this share the queue counts as empty: turns that begin together wait for their prefill for a moment."""
_DECREASE = 0.75
_PRESSED_IN_ROW = 2
_START = 32
_USED_SHARE = 0.8
"""The limit rises only while at least this share of it is in use: an unused limit proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """The load of the serving nodes and of the gateway's queue."""

    running: int
    waiting: int
    """Inside engines, plus the gateway's own queue."""
    kv_used: float
    """Of the fullest node, 0..1."""

    @classmethod
    def of(cls, nodes: Iterable[AttachedNode], queued: int) -> GatewayLoad | None:
        """Return None until a node has reported: without a report nothing should change."""
        reports = [node.status for node in nodes if node.status is not None]
        if not reports:
            return None
        return cls(
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports) + queued,
            kv_used=max(report.kv_used for report in reports),
        )

    @property
    def pressed(self) -> bool:
        return self.waiting > max(1.0, _QUEUE_SHARE * self.running) or self.kv_used > _KV_HIGH

    @property
    def has_room(self) -> bool:
        return self.waiting <= _IDLE_QUEUE_SHARE * self.running and self.kv_used < _KV_LOW


class AdaptiveLimit:
    """The current limit. `observe` changes it at most once a call."""

    def __init__(self, *, floor: int, ceiling: int) -> None:
        """`floor` must leave room for one group; the configuration keeps it below `ceiling`."""
        self._floor = floor
        self._ceiling = ceiling
        self._limit = float(min(ceiling, max(floor, _START)))
        self._probing = True
        self._pressed_in_row = 0
        self.decreases = 0

    def limit(self) -> int:
        return int(self._limit)

    def observe(self, load: GatewayLoad | None, in_use: int) -> None:
        """Adjust the limit to `load` while `in_use` rollouts run."""
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
