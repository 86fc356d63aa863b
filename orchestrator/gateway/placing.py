"""Which node a request should go to: where it would take the least time, by the nodes' measured pace.

A conversation stays where its prompt is cached, until a turn there would take much longer than elsewhere with the whole
prompt to compute. When a KV cache cannot hold all conversations of its node, they push one another out of it, and each
turn computes its whole prompt again. So a node without room counts as many times slower than it is.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.gateway.nodes import UNPROVEN_PLACES, AttachedNode
from orchestrator.gateway.request_state import GatewayRequest, Running
from orchestrator.gateway.speed import FleetPace, Pace

_MAX_SESSIONS = 1 << 16
"""Sessions whose node is remembered."""
_STAY_FACTOR, _STAY_S = 1.5, 1.0
"""A conversation leaves its node when a turn there takes this many times as long as elsewhere plus this many seconds:
loads fluctuate, and leaving loses the cache."""
_IDLE_S = 600.0
"""A conversation of which no turn began or ended for so long takes no memory, and its node is forgotten."""
_FULL_FROM, _CROWDED = 0.9, 16.0
"""A KV cache counts as full for a new conversation from this share on, and its node as so many times slower."""
_MEAN_OVER, _MEAN_CONTEXT_OVER = 0.05, 0.005
"""Weight of the newest answer in the running means. Turns of one conversation are alike in their contexts."""
_UPDATE_EVERY = 32
"""The fleet's pace is taken again after so many answers."""


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """What a node has cached of a conversation."""

    node_id: str
    tokens: int
    size: int
    """Tokens that it takes there: with those of a prompt that is still to be computed."""
    version: int
    """Weights that computed the end of it. Most nodes do not use a cache of older ones."""
    since: float
    """Monotonic seconds."""


class Placing:
    """What the choice of a node rests on: the pace of all, and where conversations are warm."""

    def __init__(self) -> None:
        self.fleet = FleetPace()
        self.mean_sampled = 256.0
        """Tokens of an answer; a running mean."""
        self.mean_context = 0.0
        """Tokens of a conversation after a turn; a running mean."""
        self.warm_tokens = self.prompt_tokens = 0
        """Over all placements: prompt tokens, and those of them that were cached where the request went."""
        self._sessions: OrderedDict[str, WarmPrefix] = OrderedDict()
        """The one that had a turn last comes last."""
        self._sizes: Counter[str] = Counter()
        """Tokens that conversations take, without what is being sampled, by node id."""
        self._answers = 0

    @property
    def warm_share(self) -> float:
        """Share of all prompt tokens that were cached where their requests went, as far as this gateway knows."""
        return self.warm_tokens / max(1, self.prompt_tokens)

    def pace(self, node: AttachedNode) -> Pace:
        """Return the pace to reckon with for `node`."""
        return self.fleet.of(node.speed, min(node.hello.max_concurrent, UNPROVEN_PLACES) / UNPROVEN_PLACES)

    def _hopeful_pace(self, node: AttachedNode) -> Pace:
        """Return the pace to sort by. Without `fastest_s`, an idle node that is not measured gets requests."""
        pace, speed = self.pace(node), node.speed
        return Pace(pace.prompt_s, pace.token_s) if speed.pace is None and speed.is_hopeful else pace

    def crowding(self, request: GatewayRequest, node: AttachedNode) -> float:
        """Return how many times as slow `node` counts for `request`: more than once without room in its KV cache.

        Where a conversation joins others, some room is left, and it counts as an average one at least: they grow.
        """
        warm = self._sessions.get(request.session)
        joins = warm is None or warm.node_id != node.node_id
        room = node.status.kv_tokens if node.status is not None else 0
        size = float(self._sizes[node.node_id])
        if joins:
            size += max(request.num_prompt, self.mean_context if size else 0.0)
        is_full = room > 0 and size > (_FULL_FROM if joins else 1.0) * room
        return _CROWDED if is_full or (node.cache_is_full and (joins or not room)) else 1.0

    def is_measured(self, node: AttachedNode) -> bool:
        """Tell whether its pace is in seconds. Before the fleet has a median, a pace only tells loads apart."""
        return self.fleet.median is not None and node.speed.pace is not None

    # -- the choice ----------------------------------------------------------------------------------------------

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        """Return the node of `free` on which `request` takes the least time, or its conversation's own."""
        best = min(free, key=lambda node: self._rank(request, node))
        warm_id = self._sessions[request.session].node_id if request.session in self._sessions else None
        warm = next((node for node in free if node.node_id == warm_id), best)
        if warm is best or warm.node_id == request.tried.avoid:
            return best
        here, there = self.crowding(request, warm), self.crowding(request, best)
        if there > 1:  # It would take the room of others, so its own lack of room is no reason.
            here = 1.0
        if here == 1 and not (self.is_measured(warm) and self.is_measured(best)):
            return warm
        if here * self.seconds(request, warm) <= _STAY_FACTOR * there * self.seconds(request, best) + _STAY_S:
            return warm
        return best

    def _rank(self, request: GatewayRequest, node: AttachedNode) -> tuple[bool, float, str]:
        seconds = self._seconds(request, node, self._hopeful_pace(node))
        return node.node_id == request.tried.avoid, seconds * self.crowding(request, node), node.node_id

    def seconds(self, request: GatewayRequest, node: AttachedNode) -> float:
        """Return how long `request` would take on `node`."""
        return self._seconds(request, node, self.pace(node))

    def _seconds(self, request: GatewayRequest, node: AttachedNode, pace: Pace) -> float:
        sampled = max(1.0, min(self.mean_sampled, request.num_left))
        return pace.seconds(self.cold(request, node), sampled, len(node.leases) + 1)

    def cold(self, request: GatewayRequest, node: AttachedNode) -> int:
        """Return how many prompt tokens `node` has to compute for `request`."""
        warm = self._sessions.get(request.session)
        if warm is None or warm.node_id != node.node_id:
            return request.num_prompt
        if warm.version != node.version:
            return request.num_prompt
        return max(1, request.num_prompt - warm.tokens)

    # -- what happens --------------------------------------------------------------------------------------------

    def note_placed(self, request: GatewayRequest, node: AttachedNode, lease: int) -> Running:
        """Remember where the conversation is now. Call it before the request is counted there."""
        cold = self.cold(request, node)
        self.prompt_tokens += request.num_prompt
        self.warm_tokens += request.num_prompt - cold
        warm, size, now = self._sessions.get(request.session), request.num_prompt, time.monotonic()
        if warm is None or warm.node_id != node.node_id:
            self._remember(request.session, WarmPrefix(node.node_id, 0, size, node.version, now))
        else:
            self._remember(request.session, replace(warm, size=max(warm.size, size), since=now))
        return Running(node, lease, now, load=len(node.leases) + 1, cold=cold)

    def note_answer(
        self, request: GatewayRequest, running: Running, sampled: int, nodes: Iterable[AttachedNode]
    ) -> None:
        """Take in an answer of `sampled` tokens. Its node, one of `nodes`, no longer holds the request."""
        node = running.node
        load = (running.load + len(node.leases) + 1) / 2
        elapsed_s = time.monotonic() - running.placed
        node.speed.note(max(elapsed_s, 1e-6), cold=running.cold, sampled=sampled, load=load)
        self.mean_sampled += _MEAN_OVER * (sampled - self.mean_sampled)
        self._answers += 1
        size = request.num_prompt + sampled
        self.mean_context += max(_MEAN_CONTEXT_OVER, 1 / self._answers) * (size - self.mean_context)
        if request.session == request.request_id:  # It is of no conversation.
            self.forget(request.session)
        else:
            self._remember(request.session, WarmPrefix(node.node_id, size, size, node.version, time.monotonic()))
        if self._answers % _UPDATE_EVERY == 0:
            self.fleet.update(other.speed for other in nodes)

    def _remember(self, session: str, warm: WarmPrefix) -> None:
        self.forget(session)
        self._sessions[session] = warm
        self._sizes[warm.node_id] += warm.size
        oldest = next(iter(self._sessions))
        while len(self._sessions) > _MAX_SESSIONS or self._sessions[oldest].since < warm.since - _IDLE_S:
            self.forget(oldest)
            oldest = next(iter(self._sessions))

    def forget(self, session: str) -> None:
        """Forget a conversation that is over."""
        warm = self._sessions.pop(session, None)
        if warm is not None:
            self._sizes[warm.node_id] -= warm.size
