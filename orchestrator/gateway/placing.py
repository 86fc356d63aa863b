"""Which node a request should go to: where it would take the least time, by the nodes' measured pace.

A conversation stays where its prompt is cached, until a turn there would take much longer than elsewhere with the whole
prompt to compute. When a KV cache cannot hold all conversations of its node, they push one another out of it, and each
turn computes its whole prompt again. So a node without room counts as many times slower than it is.

The pace is measured by the gateway's own clock and counts: nothing that a node claims about itself enters. An answer of
T tokens after C prompt tokens that were not cached, on a node with R requests, takes about

    prompt_s x C + max(fastest_s, token_s x R) x T    seconds

`prompt_s` and `token_s` are fitted to the node's answers by least squares, older answers counting less. `fastest_s`
bounds what a single request can have: a GPU with one request is not faster than with eight.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from orchestrator.gateway.requests import GatewayRequest, Running

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode

UNPROVEN_PLACES = 32
"""As how many places a node counts, at most, whose speed is not measured yet."""
_LEAST_ANSWERS = 3
"""Answers from which a node counts as measured."""
_FORGET = 0.95
"""Weight of the past at each answer: about twenty answers count."""
_PREFILL_GAIN = 20.0
"""Prompt tokens a second over sampled tokens a second, until the answers tell them apart."""
_PRIOR = 0.2
"""How much of an answer that ratio counts as, in the fit."""
_LEAST_SAMPLING = 0.25
"""Share of an answer's time that its tokens took at least, however long its prompt."""
_GAIN_RANGE = (0.5, 400.0)
_MOST_ABOVE_MEDIAN = 16.0
"""No node counts as faster than this many times the fleet's median, whatever its answers look like."""
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
class Pace:
    """Seconds a token; see the module's formula."""

    prompt_s: float
    token_s: float
    fastest_s: float = 0.0

    def seconds(self, cold: float, sampled: float, load: int) -> float:
        """Return how long an answer takes."""
        return self.prompt_s * cold + max(self.fastest_s, self.token_s * load) * sampled


class NodeSpeed:
    """Running sums over one node's answers, for the least-squares fit."""

    def __init__(self) -> None:
        self.answers = 0
        self.tokens = 0
        """Delivered in answers and parts of answers."""
        self.pace: Pace | None = None
        """None while it is not measured."""
        self.streams = False
        """Whether its node has ever delivered a part of an answer."""
        self.is_hopeful = True
        """Whether its node counts as fast while it is idle and not measured, to be tried at all."""
        self._cc = self._cw = self._ww = self._ce = self._we = 0.0
        self._weight = 0.0

    def note_tokens(self, count: int) -> bool:
        """Count delivered tokens. Return whether the pace is not measured yet."""
        self.tokens += count
        return self.pace is None

    def note(self, elapsed_s: float, *, cold: int, sampled: int, load: float) -> None:
        """Take in an answer: its time, and tokens computed and sampled. `load`: mean requests that the node held."""
        work = sampled * load
        self.answers += 1
        sums = (self._cc, self._cw, self._ww, self._ce, self._we)
        terms = (cold * cold, cold * work, work * work, cold * elapsed_s, work * elapsed_s)
        self._cc, self._cw, self._ww, self._ce, self._we = (
            _FORGET * old + new for old, new in zip(sums, terms, strict=True)
        )
        self._weight = _FORGET * self._weight + 1.0
        if self.answers >= _LEAST_ANSWERS:
            self.pace = self._fit(elapsed_s, cold, sampled)

    def _fit(self, elapsed_s: float, cold: int, sampled: int) -> Pace:
        """Solve for both rates, drawn a little towards the usual ratio of the two."""
        gain = 1.0 / _PREFILL_GAIN
        token = (self._we + gain * self._ce) / (self._ww + 2 * gain * self._cw + gain * gain * self._cc)
        prompt = gain * token
        rest_c = self._ce - prompt * self._cc - token * self._cw
        rest_w = self._we - prompt * self._cw - token * self._ww
        draw = 1 + _PRIOR / self._weight
        cc, ww = self._cc * draw + 1e-9, self._ww * draw
        determinant = cc * ww - self._cw * self._cw
        token += (cc * rest_w - self._cw * rest_c) / determinant
        prompt += (ww * rest_c - self._cw * rest_w) / determinant
        token = max(token, 1e-9)
        low, high = _GAIN_RANGE
        prompt = min(max(prompt, token / high), token / low)
        # It rises slowly, so that a node that has slowed down is believed again.
        fastest = max(_LEAST_SAMPLING * elapsed_s, elapsed_s - prompt * cold) / sampled
        if self.pace is not None:
            fastest = min(fastest, 1.02 * self.pace.fastest_s)
        return Pace(prompt, token, fastest)


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
        self.median: Pace | None = None
        """Of the measured nodes: what an unmeasured one counts as, and the bound on measured ones."""
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
        """Return the pace to reckon with for `node`. An unmeasured one counts as slower, the fewer places it has."""
        usual, pace = self.median, node.speed.pace
        places_share = min(node.hello.max_concurrent, UNPROVEN_PLACES) / UNPROVEN_PLACES
        if usual is None:
            return Pace(1.0 / _PREFILL_GAIN, 1.0 / places_share)
        if pace is None:
            return Pace(usual.prompt_s, usual.token_s / places_share, usual.fastest_s)
        least = 1.0 / _MOST_ABOVE_MEDIAN
        return Pace(
            max(pace.prompt_s, least * usual.prompt_s),
            max(pace.token_s, least * usual.token_s),
            max(pace.fastest_s, least * usual.fastest_s),
        )

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
        return self.median is not None and node.speed.pace is not None

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
            self.update_median(other.speed for other in nodes)

    def update_median(self, speeds: Iterable[NodeSpeed]) -> None:
        """Take the median over the measured ones of `speeds` again."""
        paces = [speed.pace for speed in speeds if speed.pace is not None]
        if paces:
            self.median = Pace(
                median(pace.prompt_s for pace in paces),
                median(pace.token_s for pace in paces),
                median(pace.fastest_s for pace in paces),
            )

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
