"""Find how many rollouts may run at a time, within bounds.

    no node queues, caches have room, the limit is used     ->  double (start), later + a little
    twice in a row nodes queue or their KV caches fill up   ->  x 0.75

This is additive increase, multiplicative decrease, as in congestion control. Too few rollouts leave nodes idle. Too
many only wait inside the engines and grow stale there.

The limit is the whole fleet's: it follows sums and means over the nodes. A single full node changes it by that node's
share only, and the router gives it no further conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from composer_prime.wire.node import Status

KV_FULL = 0.9
"""Share of KV caches in use from which they count as full."""
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

    def observe(self, reports: Sequence[Status], *, queued: int, in_use: int, held: int = 0) -> None:
        """Adjust the limit to the serving nodes' reports and the gateway's queue, while `in_use` rollouts run.

        `queued` requests wait because the fleet is full. `held` ones wait for a few nodes while others may be idle: the
        limit does not rise with them, and does not fall.
        """
        if not reports:
            return
        running = sum(report.running for report in reports)
        waiting = sum(report.waiting for report in reports) + queued
        kv_used = fmean(report.kv_used for report in reports)
        pressed = waiting > max(1.0, _QUEUE_SHARE * running) or kv_used > KV_FULL
        has_room = waiting + held <= _IDLE_QUEUE_SHARE * running and kv_used < _KV_LOW
        self._pressed_in_row = self._pressed_in_row + 1 if pressed else 0
        if self._pressed_in_row >= _PRESSED_IN_ROW:
            self._pressed_in_row = 0
            self._probing = False
            self.decreases += 1
            self._limit = max(self._floor, min(self._limit, max(in_use, self._floor)) * _DECREASE)
        elif has_room and in_use >= _USED_SHARE * self.limit():
            step = self._limit if self._probing else max(1.0, 0.05 * self._limit)
            self._limit = min(float(self._ceiling), self._limit + step)
