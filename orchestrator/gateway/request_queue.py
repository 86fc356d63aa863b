"""Requests without a node, in groups of equal needs: what no free node gives one of them, it gives none of them.

Placing looks at the first of each group only. So it costs as much as there are different needs, however many requests
wait.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orchestrator.gateway.request_state import GatewayRequest


class Needs(NamedTuple):
    """What is equal for requests that the same nodes may answer."""

    least_version: int
    wanted: int
    """Position of prompt and longest answer among the contexts of all nodes: two lengths between the same two of them
    make no difference."""
    prompt: int
    """The same of the prompt and one token."""
    refused_by: frozenset[str]
    is_begun: bool
    """It may start over where no node can continue it."""


class RequestQueue:
    """Gives out requests in the order of their arrival; those that come back go first."""

    def __init__(self) -> None:
        self.looked_at = 0
        """Requests that placing has looked at."""
        self._contexts: list[float] = []
        self._groups: dict[Needs, OrderedDict[str, GatewayRequest]] = {}
        self._places: dict[str, tuple[Needs, int]] = {}
        """Group and rank of each request, by id. The lowest rank goes first."""
        self._last, self._first = itertools.count(), itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[GatewayRequest]:
        """Yield all requests, the next one first."""
        waiting = [request for group in self._groups.values() for request in group.values()]
        yield from sorted(waiting, key=self._rank)

    def _rank(self, request: GatewayRequest) -> int:
        return self._places[request.request_id][1]

    def add(self, request: GatewayRequest, *, first: bool = False) -> None:
        """Queue a request at the end, or before all others."""
        self.discard(request)
        group = self._join(request, next(self._first if first else self._last))
        if first:
            group.move_to_end(request.request_id, last=False)

    def _join(self, request: GatewayRequest, rank: int) -> OrderedDict[str, GatewayRequest]:
        """Put a request at the end of the group with its needs, which is returned."""
        needs = Needs(
            request.least_version,
            bisect_left(self._contexts, request.num_wanted),
            bisect_left(self._contexts, request.num_prompt + 1),
            frozenset(request.tried.refused_by),
            bool(request.kept),
        )
        self._places[request.request_id] = needs, rank
        group = self._groups.setdefault(needs, OrderedDict())
        group[request.request_id] = request
        return group

    def discard(self, request: GatewayRequest) -> None:
        place = self._places.pop(request.request_id, None)
        if place is None:
            return
        group = self._groups[place[0]]
        del group[request.request_id]
        if not group:
            del self._groups[place[0]]

    def use_contexts(self, contexts: Sequence[float]) -> None:
        """Group by these contexts of nodes, ascending."""
        if list(contexts) == self._contexts:
            return
        waiting = [(request, self._rank(request)) for request in self]
        self._contexts, self._groups = list(contexts), {}
        for request, rank in waiting:
            self._join(request, rank)

    def heads(self) -> list[tuple[Needs, GatewayRequest]]:
        """Return the first request of each group, the next one first."""
        heads = [(needs, next(iter(group.values()))) for needs, group in self._groups.items()]
        return sorted(heads, key=lambda head: self._rank(head[1]))
