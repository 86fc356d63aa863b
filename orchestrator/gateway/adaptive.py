"""Find how many rollouts may run at a time: the sum of what each node seems to take, within bounds.

    the node queues nothing, its cache has room, the limit is used     ->  double (start), later + a little
    twice in a row the node queues or its KV cache fills up            ->  x 0.75

This is additive increase, multiplicative decrease, as in congestion control. Too few rollouts leave nodes idle. Too
many only wait inside the engines and grow stale there.

Each node has a part of its own in the sum. A single full one changes the sum by its part only. The parts bound the sum,
not what a node gets: placing.py goes by expected seconds, and by the room in its cache. A node that joins adds to the
sum. One that leaves takes its part with it, after some time: a node that swaps weights is back soon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from composer_prime.wire.node import Status

KV_FULL = 0.9
"""Share of KV caches in use from which they count as full."""
_KV_LOW = 0.75
_QUEUE_SHARE = 0.25
"""Requests waiting inside an engine, relative to those running, that count as pressure. A few always wait briefly."""
_IDLE_QUEUE_SHARE = 0.05
"""Below this share the queue counts as empty: turns that begin together wait for their prefill for a moment."""
_DECREASE = 0.75
_PRESSED_IN_ROW = 2
_MISSED_IN_ROW = 15
_START = 32
"""Limit of the whole fleet at first."""
_USED_SHARE = 0.8
"""A limit rises only while at least this share of it is in use: an unused limit proves nothing."""


@dataclass(slots=True)
class _NodeLimit:
    rollouts: float
    probing: bool = True
    pressed_in_row: int = 0
    missed: int = 0
    """Observations in a row without a report of it."""


class AdaptiveLimit:
    """The current limit. `observe` changes each node's part at most once a call."""

    def __init__(self, *, floor: int, ceiling: int) -> None:
        """`floor` must leave room for one group; the configuration keeps it below `ceiling`."""
        self._floor = floor
        self._ceiling = ceiling
        self._start = float(min(ceiling, max(floor, _START)))
        self._nodes: dict[str, _NodeLimit] = {}
        self.decreases = 0

    def limit(self) -> int:
        return int(min(self._ceiling, max(self._floor, self._sum())))

    def _sum(self) -> float:
        return sum(node.rollouts for node in self._nodes.values()) if self._nodes else self._start

    def observe(self, reports: Mapping[str, Status], *, queued: int, in_use: int, held: int = 0) -> None:
        """Adjust the limit to the serving nodes' reports and the gateway's queue, while `in_use` rollouts run.

        `queued` requests wait because the fleet is full. `held` ones wait for a few nodes while others may be idle: the
        limit does not rise with them, and does not fall.
        """
        if not reports:
            return
        self._keep_nodes(reports)
        total, least = self._sum(), max(1.0, self._floor / len(reports))
        running = sum(report.running for report in reports.values())
        used = min(1.0, max(in_use, self._floor) / total)
        may_rise = held <= _IDLE_QUEUE_SHARE * running and total < self._ceiling
        for node_id, report in reports.items():
            node = self._nodes[node_id]
            share = report.running / running if running else 1 / len(reports)
            waiting = report.waiting + share * queued
            if waiting > max(1.0, _QUEUE_SHARE * report.running) or report.kv_used > KV_FULL:
                node.pressed_in_row += 1
            else:
                node.pressed_in_row = 0
            has_room = waiting <= _IDLE_QUEUE_SHARE * report.running and report.kv_used < _KV_LOW
            if node.pressed_in_row >= _PRESSED_IN_ROW:
                node.pressed_in_row, node.probing = 0, False
                self.decreases += 1
                node.rollouts = max(least, _DECREASE * used * node.rollouts)
            elif has_room and may_rise and share * in_use >= _USED_SHARE * node.rollouts:
                node.rollouts += node.rollouts if node.probing else max(1.0, 0.05 * node.rollouts)

    def _keep_nodes(self, reports: Mapping[str, Status]) -> None:
        """Give new nodes what the others have on average, and forget those that have not served for a while."""
        total = self._sum()
        for node_id, node in list(self._nodes.items()):
            node.missed = 0 if node_id in reports else node.missed + 1
            if node.missed > _MISSED_IN_ROW:
                del self._nodes[node_id]
        known = [node_id for node_id in reports if node_id in self._nodes]
        usual = sum(self._nodes[node_id].rollouts for node_id in known) / len(known) if known else total / len(reports)
        probing = not known or all(self._nodes[node_id].probing for node_id in known)
        for node_id in reports:
            if node_id not in self._nodes:
                self._nodes[node_id] = _NodeLimit(max(1.0, usual), probing)
