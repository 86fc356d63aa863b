"""The rendezvous of a joint run: relays deltas and states between clusters, and closes rounds.

    trainer rank (a, 0) ──┐   one CURVE connection each, outwards from the cluster: no cluster needs an open port
    trainer rank (a, 1) ──┼──> rendezvous ──> lighthouse.py (torchft): quorum of each round
    trainer rank (b, 0) ──┘        │
                                   └ request_handler.py: rounds.py (deltas, closed with whom), starting_state.py

Requests are answered at once or, with RoundNotReady, after a second.

Nothing is kept on disk. Restarted, it learns from the peers where the run stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter

import zmq

from composer_prime.errors import ComposerError, DeadlineError
from composer_prime.wire.sockets import SecureServer, bind_router
from diloco.rendezvous.lighthouse import Lighthouse
from diloco.rendezvous.request_handler import RequestHandler
from diloco.rendezvous.rounds import Base, RendezvousSettings
from diloco.transport.connection import WINDOW
from diloco.transport.messages import (
    AskState,
    FromPeer,
    JointKey,
    RequestRefused,
    RoundNotReady,
    ToPeer,
    encode,
    from_peer,
)

logger = logging.getLogger(__name__)
_TICK_S = 0.02
_LONG_POLL_S = 1.0
_QUORUM_TIMEOUT_S = 10.0
_MAX_UNSENT = 2 * WINDOW
"""Answers under way to one connection."""
_MAX_OPEN = 64
"""Open requests of one connection; others are dropped, and come again."""


class Rendezvous:
    """`async with Rendezvous(settings, key) as server: await server.serve()`."""

    def __init__(self, settings: RendezvousSettings, key: JointKey) -> None:
        """Raises PortInUseError, or ConfigError (address, torchft)."""
        self.settings = settings
        self.lighthouse = Lighthouse(settings.min_peers)
        self._server: SecureServer = bind_router(
            settings.bind, key.server(), [key.client().own.public], max_unsent=_MAX_UNSENT
        )
        self.endpoint = self._server.endpoint
        self.handler = RequestHandler(settings, key.derive("headers"), time.monotonic, self._wake_waiting)
        self.rounds = self.handler.rounds
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: Counter[bytes] = Counter()
        """Requests without an answer, by connection."""
        self._present: set[str] = set()

    async def __aenter__(self) -> Rendezvous:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        await asyncio.to_thread(self.lighthouse.close)

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._close_rounds())
            group.create_task(self._receive())

    # -- requests ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            received = await self._server.receive()
            identity, number, raw = received.identity, received.body[:8], received.body[8:]
            if raw and self._open[identity] < _MAX_OPEN:
                self._open[identity] += 1
                task = asyncio.create_task(self._respond(identity, number, raw))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)

    async def _respond(self, identity: bytes, number: bytes, raw: bytes) -> None:
        answer = await self._answer(raw)
        # A peer without a route or room is answered when it asks again. Without DONTWAIT all others would wait.
        with contextlib.suppress(zmq.ZMQError):
            await self._server.socket.send_multipart([identity, number, encode(answer)], flags=zmq.DONTWAIT)
        self._open[identity] -= 1
        if not self._open[identity]:
            del self._open[identity]

    async def _answer(self, raw: bytes) -> ToPeer:
        try:
            return await self._answer_request(from_peer(raw))
        except ComposerError as error:
            logger.warning("refused: %s", error)
            return RequestRefused(error=str(error))
        except Exception as error:  # one peer's odd request must not end the rendezvous for the others
            logger.exception("a request could not be handled")
            return RequestRefused(error=f"the rendezvous could not handle this request ({type(error).__name__})")

    async def _answer_request(self, request: FromPeer) -> ToPeer:
        """Return another answer than RoundNotReady, if one comes within a second."""
        deadline, answer = time.monotonic() + _LONG_POLL_S, self.handler.answer(request)
        if isinstance(request, AskState):  # ranks wait for one another
            self._wake_waiting()
        while isinstance(answer, RoundNotReady) and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
            answer = self.handler.answer(request)
        return answer

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- closing rounds ------------------------------------------------------------------------------------------

    async def _close_rounds(self) -> None:
        beat_s, last = self.settings.beat_timeout_s / 5, time.monotonic()
        while True:
            if time.monotonic() - last > beat_s:  # it was suspended: beats wait in the socket, hear them first
                logger.warning("this process stood still: rounds close when its peers had time for a beat")
                await asyncio.sleep(beat_s)
            now = time.monotonic()
            self._log_arrivals(now)
            may_close, members = self.handler.may_close(now), self.rounds.closable(now, self.settings.min_peers)
            if may_close and members is not None:
                await self._close(members)
            last = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _log_arrivals(self, now: float) -> None:
        present = {peer.name: peer for peer in self.rounds.alive(now)}
        for name in sorted(present.keys() - self._present):
            logger.info("peer %s is here: %s", name, ", ".join(sorted(present)))
        for name in sorted(self._present - present.keys()):
            if self.rounds.peers[name].training:
                silence_s = self.settings.beat_timeout_s
                logger.warning("peer %s is gone, silent for %g s: rounds continue without it", name, silence_s)
            else:  # it ended, or stopped while it joined
                logger.info("peer %s has left", name)
        self._present = set(present)

    async def _close(self, members: dict[str, Base]) -> None:
        current = self.rounds.open_round()
        assert current is not None
        try:
            quorum = await asyncio.to_thread(
                self.lighthouse.quorum, list(members), current.outer_step, _QUORUM_TIMEOUT_S
            )
        except DeadlineError as error:
            logger.warning("round %d stays open: %s", current.outer_step, error)
            return
        if self.rounds.open_round() is not current:
            return
        # A process that was replaced meanwhile has no contribution any more.
        whole = current.contributors(self.rounds.peers)
        still = {name: base for name, base in members.items() if name in quorum and whole.get(name) == base}
        if len(still) < self.settings.min_peers:
            return
        late = sorted(peer.name for peer in self.rounds.training(time.monotonic()) if peer.name not in still)
        closed = self.handler.close(still)
        without = f"; without {', '.join(late)}" if late else ""
        logger.info("round %d closed with %s%s", closed.outer_step, ", ".join(closed.members), without)
        self._wake_waiting()
