"""The rendezvous of a joint run: relays deltas and states between clusters, and closes rounds.

    trainer rank (a, 0) ──┐   one CURVE connection each, outwards from the cluster: no cluster needs an open port
    trainer rank (a, 1) ──┼──> rendezvous ──> lighthouse (torchft, loopback): quorum of each round
    trainer rank (b, 0) ──┘        │
                                   └ request_handler.py: rounds (deltas, closed with whom), joins (which peer joins
                                     with which state), bodies (deltas and states on their way)

Order of waiting: a rank that asks for a round waits for the peers that are training, at most round_deadline_s after
the first whole delta; a joining peer for one source's upload. Requests are answered at once or, with RoundNotReady,
after a second. While the process is suspended, no peer counts as silent and no deadline runs: what peers sent meanwhile
is read first.

The rendezvous keeps nothing on disk. Restarted, it learns from the peers' hellos and offers where the run stands: the
highest outer step wins, once start_peers are there or gather_s is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import zmq

from composer_prime.errors import ComposerError, ConfigError, DeadlineError
from composer_prime.wire.sockets import SecureServer, bind_router
from diloco.rendezvous.peers import Base
from diloco.rendezvous.request_handler import RendezvousSettings, RequestHandler
from diloco.transport.connection import WINDOW
from diloco.transport.messages import AskState, FromPeer, RequestRefused, RoundNotReady, ToPeer, encode, from_peer
from diloco.transport.peer_keys import JointKey

logger = logging.getLogger(__name__)
_TICK_S = 0.02
_LONG_POLL_S = 1.0
_QUORUM_TIMEOUT_S = 10.0
HEARTBEAT_TIMEOUT_S = 1.0
_LIGHTHOUSE_TICK_MS = 10
_ATTEMPT_S = 2 * HEARTBEAT_TIMEOUT_S
_MAX_UNSENT = 2 * WINDOW
"""Answers under way to one connection: the pieces that a rank requests at once, and what else it asks."""


class Quorum(NamedTuple):
    id: int
    """Changes with the participants."""
    peers: frozenset[str]


class Lighthouse:
    """torchft's lighthouse server in this process, and a client of it. Calls block: run them in threads.

    It grants a quorum of at least min_peers that are more than half of the peers heard of within `HEARTBEAT_TIMEOUT_S`.
    So a peer that stopped contributing delays one round by that long, and two halves of a split run cannot both
    continue while they share one rendezvous.

    It serves its dashboard, kill button and RPCs on one port without a password. So it listens on loopback only, on a
    port that changes. torchft's Manager is not used: its server listens on every interface and obeys an unauthenticated
    kill, its commit is a vote among one cluster's ranks only, and its healing unpickles what it receives.
    """

    def __init__(self, min_peers: int) -> None:
        """Raises ConfigError when torchft is not installed."""
        # Without it several lines a round are logged; its logger reads this once, when it is imported.
        os.environ.setdefault("RUST_LOG", "warn")
        try:
            from torchft.coordination import LighthouseClient, LighthouseServer
        except ImportError:
            raise ConfigError(
                "torchft is not installed: `diloco rendezvous` needs it for membership; install the extra with "
                "pip install 'composer-prime[diloco]' (Linux)"
            ) from None
        self._make_client = LighthouseClient
        self._make_server = partial(
            LighthouseServer,
            bind="127.0.0.1:0",
            min_replicas=min_peers,
            join_timeout_ms=100,
            quorum_tick_ms=_LIGHTHOUSE_TICK_MS,
            heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1000),
        )
        self._start()

    def _start(self) -> None:
        self._server: Any = self._make_server()
        self.url = f"http://127.0.0.1:{self._server.address().rpartition(':')[2]}"
        """Dashboard; reachable from this machine only."""
        self._clients: dict[str, Any] = {}
        self._members: frozenset[str] = frozenset()

    def restart(self) -> None:
        """Replace a lighthouse that does not answer. It holds no state that matters: quorum ids start over."""
        self.close()
        self._start()

    def quorum(self, peers: Sequence[str], outer_step: int, timeout_s: float) -> Quorum:
        """Return a quorum that holds all of `peers`.

        Raises DeadlineError when the lighthouse grants none within `timeout_s`.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            quorum = self._attempt(peers, outer_step)
            if quorum is not None:
                self._members = quorum.peers
                if quorum.peers >= set(peers):
                    return quorum
        raise DeadlineError(
            f"the lighthouse granted no quorum of {', '.join(sorted(peers))} for outer step {outer_step} within "
            f"{timeout_s:g} s; its view is at {self.url}"
        )

    def _attempt(self, peers: Sequence[str], outer_step: int) -> Quorum | None:
        """Ask for all at once. Newcomers first: once the former members have asked, the quorum is closed."""
        self._beat(peers)  # the lighthouse waits a moment for peers that it has just heard
        order = sorted(peers, key=lambda peer: (peer in self._members, peer))
        with ThreadPoolExecutor(max_workers=len(order)) as threads:
            calls = []
            for index, peer in enumerate(order):
                if index and peer in self._members and order[index - 1] not in self._members:
                    time.sleep(3 * _LIGHTHOUSE_TICK_MS / 1000)
                calls.append(threads.submit(self._ask, peer, outer_step))
            # The waiting peers must stay alive for the lighthouse until it counts those that left as dead.
            while wait(calls, timeout=HEARTBEAT_TIMEOUT_S / 4).not_done:
                self._beat(order)
            answers = [answer for call in calls if (answer := call.result()) is not None]
        return max(answers, key=lambda quorum: quorum.id, default=None)

    def _beat(self, peers: Sequence[str]) -> None:
        for peer in peers:
            with contextlib.suppress(TimeoutError, RuntimeError):
                self._client(peer).heartbeat(peer, timedelta(seconds=_ATTEMPT_S))

    def _client(self, peer: str) -> Any:
        if peer not in self._clients:
            self._clients[peer] = self._make_client(self.url, timedelta(seconds=_ATTEMPT_S))
        return self._clients[peer]

    def _ask(self, peer: str, outer_step: int) -> Quorum | None:
        with contextlib.suppress(TimeoutError, RuntimeError):
            answer = self._client(peer).quorum(
                peer, timedelta(seconds=_ATTEMPT_S), address="", store_address="", step=outer_step, world_size=1
            )
            return Quorum(int(answer.quorum_id), frozenset(member.replica_id for member in answer.participants))
        return None

    def close(self) -> None:
        self._server.shutdown()


class SuspendAwareClock:
    """Counts the seconds in which this process ran. Peers must not count as silent while it could not hear them.

    Of a time in which the process stood still (SIGSTOP, a frozen machine) at most `longest_s` counts.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`longest_s`: the most that passes from one call to the next, so it must be called more often."""
        self._longest_s = longest_s
        self._clock = clock
        self._now = 0.0
        self._called_at = clock()

    def __call__(self) -> float:
        called_at = self._clock()
        passed_s, self._called_at = called_at - self._called_at, called_at
        if passed_s > self._longest_s:
            logger.warning("this process stood still for %.1f s: no peer counts as silent for that", passed_s)
        self._now += min(passed_s, self._longest_s)
        return self._now


class Rendezvous:
    """`async with Rendezvous(settings, key) as server: await server.serve()`."""

    def __init__(self, settings: RendezvousSettings, key: JointKey) -> None:
        """Raises PortInUseError, or ConfigError when torchft is not installed."""
        self.settings = settings
        self.lighthouse = Lighthouse(settings.min_peers)
        self._server: SecureServer = bind_router(
            settings.bind, key.server(), [key.client().own.public], max_unsent=_MAX_UNSENT
        )
        self.endpoint = self._server.endpoint
        self._clock = SuspendAwareClock(settings.beat_timeout_s / 5)
        self.handler = RequestHandler(settings, key.derive("headers"), self._clock, self._wake_waiting)
        self.rounds = self.handler.rounds
        self.transfers = self.handler.transfers
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._present: set[str] = set()
        """Peers that were alive at the last check."""

    async def __aenter__(self) -> Rendezvous:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        await asyncio.to_thread(self.lighthouse.close)

    async def serve(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time())
            group.create_task(self._close_rounds())
            group.create_task(self._receive())

    # -- requests ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            received = await self._server.receive(keep=2)
            if received.num_frames == 2:
                task = asyncio.create_task(self._respond(received.identity, *received.frames))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _respond(self, identity: bytes, number: bytes, raw: bytes) -> None:
        answer = await self._answer(raw)
        # A peer that disconnected meanwhile has no route, and one that reads too little has no room: its request is
        # answered when it asks again. Without DONTWAIT all others would wait for the one that does not read.
        with contextlib.suppress(zmq.ZMQError):
            await self._server.socket.send_multipart([identity, number, encode(answer)], flags=zmq.DONTWAIT)

    async def _answer(self, raw: bytes) -> ToPeer:
        try:
            request = from_peer(raw)
            answer = self.handler.answer(request)
            if isinstance(request, AskState):  # ranks wait for one another
                self._wake_waiting()
            return await self._poll(request) if isinstance(answer, RoundNotReady) else answer
        except ComposerError as error:
            logger.warning("refused: %s", error)
            return RequestRefused(error=str(error))
        except Exception as error:  # one peer's odd request must not end the rendezvous for the others
            logger.exception("a request could not be handled")
            return RequestRefused(error=f"the rendezvous could not handle this request ({type(error).__name__})")

    async def _poll(self, request: FromPeer) -> ToPeer:
        """Return another answer than RoundNotReady, if there is one within a second."""
        deadline = self._clock() + _LONG_POLL_S
        while True:
            answer = self.handler.answer(request)
            left_s = deadline - self._clock()
            if not isinstance(answer, RoundNotReady) or left_s <= 0:
                return answer
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_time(self) -> None:
        """Call the clock so often that only a suspended process misses a call."""
        while True:
            self._clock()
            await asyncio.sleep(_TICK_S)

    # -- closing rounds ------------------------------------------------------------------------------------------

    async def _close_rounds(self) -> None:
        while True:
            now = self._clock()
            self._log_arrivals(now)
            may_close, members = self.handler.may_close(now), self.rounds.closable(now, self.settings.min_peers)
            if may_close and members is not None:
                await self._close(dict(members))
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
        step = current.outer_step
        try:
            quorum = await asyncio.to_thread(self.lighthouse.quorum, list(members), step, _QUORUM_TIMEOUT_S)
        except DeadlineError as error:
            logger.warning("round %d stays open, and the lighthouse is restarted: %s", step, error)
            await asyncio.to_thread(self.lighthouse.restart)
            return
        if self.rounds.open_round() is not current:
            return
        # A member whose process was replaced while the lighthouse deliberated has no contribution any more.
        whole = current.contributors(self.rounds.peers)
        still = {name: base for name, base in members.items() if name in quorum.peers and whole.get(name) == base}
        if len(still) < self.settings.min_peers:
            return
        late = sorted(peer.name for peer in self.rounds.training(self._clock()) if peer.name not in still)
        closed = self.handler.close(still, quorum.id)
        logger.info(
            "round %d closed with %s (quorum %d)%s", step, ", ".join(closed.members), quorum.id,
            f"; without {', '.join(late)}" if late else "",
        )  # fmt: skip
        self._wake_waiting()
