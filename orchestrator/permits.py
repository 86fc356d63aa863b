"""Bounded concurrency of rollouts, shared by training and evaluation.

    acquire(lane, order) -> waits -> granted lowest order first within its lane -> release

The limit moves (the gateway raises and lowers it with the nodes' load), so it is asked for at each grant. While both
lanes wait, evaluation gets at most `eval_share` of the limit; a lane that waits alone may take all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from enum import Enum


class Lane(Enum):
    TRAIN = "train"
    EVAL = "eval"


class Permits:
    def __init__(self, limit: Callable[[], int], eval_share: float) -> None:
        self._limit = limit
        self.eval_share = eval_share
        self.running = {lane: 0 for lane in Lane}
        self._waiting: dict[Lane, list[tuple[int, int, asyncio.Future[None]]]] = {lane: [] for lane in Lane}
        self._ticket = itertools.count()

    @contextlib.asynccontextmanager
    async def hold(self, lane: Lane, order: int) -> AsyncIterator[None]:
        """A place for one rollout; lower `order` goes first."""
        await self._acquire(lane, order)
        try:
            yield
        finally:
            self.running[lane] -= 1
            self.grant()

    def waiting(self, lane: Lane) -> int:
        return sum(not future.done() for _, _, future in self._waiting[lane])

    def grant(self) -> None:
        """Hand out what the limit allows now. Called at each release; call it also when the limit may have risen."""
        limit = max(1, self._limit())
        while sum(self.running.values()) < limit and (lane := self._next_lane(limit)) is not None:
            future = heapq.heappop(self._waiting[lane])[2]
            self.running[lane] += 1
            future.set_result(None)

    async def _acquire(self, lane: Lane, order: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[lane], (order, next(self._ticket), future))
        self.grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.running[lane] -= 1
                self.grant()
            raise

    def _next_lane(self, limit: int) -> Lane | None:
        for waiters in self._waiting.values():
            while waiters and waiters[0][2].done():
                heapq.heappop(waiters)
        train, evaluation = self._waiting[Lane.TRAIN], self._waiting[Lane.EVAL]
        if train and evaluation:
            return Lane.EVAL if self.running[Lane.EVAL] < self.eval_share * limit else Lane.TRAIN
        return Lane.TRAIN if train else Lane.EVAL if evaluation else None
