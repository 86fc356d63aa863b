"""Rollouts that hold up their group, and their requests that run on a second node too.

A twin continues after the tokens that the first node has streamed. The first answer is used. The gateway looks for
second nodes on every tick.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.gateway.answers import PartialAnswer
from orchestrator.gateway.nodes import AttachedNode, GatewayRequest, RequestCounters

if TYPE_CHECKING:
    from orchestrator.gateway.routing import Router

_MAX_GROUPS = 1 << 14
_RETRY = re.compile(r"(?<=\d)r\d+$")
"""The end of the name of a further attempt at a rollout."""
_ENDING = 3
"""A group ends when this many times as many of its rollouts are over as are open."""
_GAIN = 2.0
"""How many times faster than the request's node another one must be."""
_LEAST_GAIN_S = 1.0
_OVERDUE = 3.0
"""A request is overdue after this many times its expected time, unless its node streamed tokens lately."""
_QUIET_S = 5.0
_MAX_LOOKS = 512
"""Requests for which a tick looks for a second node. Each takes some 10 us, and the event loop waits for all."""


@dataclass(slots=True)
class _Group:
    open: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)


class SiblingRequests:
    """Which rollouts of each group have begun and ended, by the names of their sessions."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self.next_look = 0
        """Where among the open requests the next tick begins to look for second nodes."""

    def note(self, session: str) -> None:
        """A request of `session` has come."""
        rollout, group = _names(session)
        if group:
            siblings = self._groups.setdefault(group, _Group())
            siblings.open.add(rollout)
            siblings.over.discard(rollout)
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)

    def end(self, session: str) -> None:
        """The rollout of `session` is over."""
        rollout, name = _names(session)
        group = self._groups.get(name)
        if group is not None and rollout in group.open:
            group.open.discard(rollout)
            group.over.add(rollout)
            if not group.open:
                del self._groups[name]

    def holds_up(self, session: str) -> bool:
        """Whether the rest of the session's group is over, but for a few rollouts."""
        group = self._groups.get(_names(session)[1])
        return group is not None and len(group.over) >= _ENDING * len(group.open)


def _names(session: str) -> tuple[str, str]:
    """Return rollout and group of a session `GROUP-SIBLING`; no group for other names.

    `GROUP-SIBLINGr1` is a further attempt at it, `GROUP-SIBLING#AGENT` another agent in it.
    """
    rollout = _RETRY.sub("", session.partition("#")[0])
    return rollout, rollout.rpartition("-")[0]


def start_twins(router: Router, max_looks: int = _MAX_LOOKS) -> None:
    """Start a request that holds up its group on a second node too, if a free node would finish much sooner.

    Skip requests that have failed anywhere: a second node may fail at each tick. After `max_looks` requests, continue
    at the next tick.
    """
    if router.queue:
        return
    now, requests, looks = time.monotonic(), list(router.open.values()), 0
    first = router.siblings.next_look % max(1, len(requests))
    for place, request in enumerate([*requests[first:], *requests[:first]], first):
        if request.node is None or request.twin is not None or request.failures or request.refused_by:
            continue
        if not router.siblings.holds_up(request.session):
            continue
        if looks == max_looks:
            router.siblings.next_look = place
            return
        looks += 1
        slow, twin = request.node, twin_of(request, request.node)
        is_silent = _is_overdue(router, request, slow, now) and slow.stalled_s(now) > _QUIET_S
        free = router.placing.free(twin, now, router.oldest_version, router.newest_version)
        free = [node for node in free if node is not slow and not node.cache_is_full]
        free = [node for node in free if is_silent or _can_hedge(router, twin, slow, node)]
        if not free:
            continue
        node = min(free, key=lambda node: router.placing.seconds(twin, node))
        if is_silent or _is_slow(router, request, slow, router.placing.seconds(twin, node), now):
            request.twin = twin
            router.counters.twins += 1
            router.assign(twin, node)


def _can_hedge(router: Router, twin: GatewayRequest, slow: AttachedNode, other: AttachedNode) -> bool:
    """Whether `other` has room, continues the tokens that `slow` streams, and samples the same ones as `slow` would.

    Otherwise the shorter of two answers would win, and training would see too many short answers.
    """
    if router.placing.crowding(twin, other) > 1:
        return False
    return slow.streams and slow.continues and slow.rounds_like(other) and slow.version == other.version


def _is_slow(router: Router, request: GatewayRequest, node: AttachedNode, elsewhere_s: float, now: float) -> bool:
    left_s = router.placing.seconds_left(request, node)
    if left_s > _GAIN * elsewhere_s + _LEAST_GAIN_S and router.placing.is_measured(node):
        return True
    return _is_overdue(router, request, node, now) and now - request.last_part > _QUIET_S


def _is_overdue(router: Router, request: GatewayRequest, node: AttachedNode, now: float) -> bool:
    expected_s = router.placing.pace(node).seconds(request.cold, router.placing.mean_sampled, request.load)
    return now - request.placed > max(_OVERDUE * expected_s, _QUIET_S)


def twin_of(request: GatewayRequest, node: AttachedNode) -> GatewayRequest:
    """Return a request that continues after what `node` has streamed of `request` so far."""
    kept = request.kept.copy()
    kept.extend(request.streamed)
    return GatewayRequest(
        request_id=request.request_id,
        session=request.session,
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        since=request.since,
        done=request.done,
        oldest_version=request.oldest_version,
        prefix=request.prefix,
        avoid=node.node_id,
        refused_by=set(request.refused_by),
        kept=kept,
    )


def goes_on_without(request: GatewayRequest, first: GatewayRequest | None) -> bool:
    """Whether a second node works on it too, and with none of the tokens that the node of `request` sampled.

    `first`: the open request, of which `request` may be the twin.
    """
    if first is not request:
        return True
    return request.twin is not None and len(request.twin.kept) <= len(request.kept)


def count_lost(counters: RequestCounters, request: GatewayRequest, twin: GatewayRequest) -> None:
    """Count the tokens that the node of `request` streamed and that `twin`, which replaces it, does not have."""
    counters.tokens_lost += max(0, len(request.kept) + len(request.streamed) - len(twin.kept))
    request.streamed = PartialAnswer()


def adopt_twin(counters: RequestCounters, request: GatewayRequest) -> None:
    """Make `request`, which has lost its node, continue as its twin."""
    twin, request.twin = request.twin, None
    assert twin is not None and twin.node is not None, "a twin is on a node"
    count_lost(counters, request, twin)
    request.node, request.lease, request.placed = twin.node, twin.lease, twin.placed
    request.kept, request.streamed, request.last_part = twin.kept, twin.streamed, twin.last_part
    request.load, request.cold = twin.load, twin.cold
    twin.node.leases[twin.lease] = request
