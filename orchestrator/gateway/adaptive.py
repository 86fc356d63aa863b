"""How many rollouts may run at a time: found by trying, within bounds.

    no node queues, caches have room, the limit is used  ->  double (start), later + a little
    twice in a row nodes queue or a KV cache fills up    ->  x 0.75

Additive increase, multiplicative decrease, as congestion control does it: too few rollouts leave nodes idle, too many
only wait inside the engines and grow stale there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.gateway.nodes import Node

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
class Load:
    """What the serving nodes and the gateway's queue say now."""

    running: int
    waiting: int
    """Inside engines, plus the gateway's own queue."""
    kv_used: float
    """Of the fullest node, 0..1."""
    places: int
    """Requests that all nodes take together."""

    @classmethod
    def of(cls, nodes: Iterable[Node], queued: int) -> Load | None:
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

    def observe(self, load: Load | None, in_use: int) -> None:
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
