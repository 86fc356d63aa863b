"""Which peers a round may close with, as torchft's lighthouse grants it.

    rendezvous --heartbeat and quorum request of each peer that contributed--> lighthouse (torchft, on loopback)
               <--the quorum: who is alive and has asked---------------------

The rendezvous asks for all peers, which reach it over CURVE alone: the lighthouse has no password.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

from composer_prime.errors import ConfigError, DeadlineError

HEARTBEAT_TIMEOUT_S = 1.0
_TICK_MS = 10
_ATTEMPT_S = 2 * HEARTBEAT_TIMEOUT_S


class Lighthouse:
    """torchft's lighthouse server in this process, and a client. Calls block: run them in threads.

    A quorum is min_peers or more, and more than half of those heard within `HEARTBEAT_TIMEOUT_S`: two halves of a
    split run cannot both continue.

    Its port has a kill button and no password: it is on loopback. torchft's Manager unpickles and is not used.
    """

    def __init__(self, min_peers: int) -> None:
        """Raises ConfigError when torchft is not installed."""
        # Else several lines a round are logged; its logger reads this when it is imported.
        os.environ.setdefault("RUST_LOG", "warn")
        try:
            from torchft.coordination import LighthouseClient, LighthouseServer
        except ImportError:
            raise ConfigError(
                "torchft is not installed: `diloco rendezvous` needs it for membership; install the extra with "
                "pip install 'composer-prime[diloco]' (Linux)"
            ) from None
        self._make_client = LighthouseClient
        self._server: Any = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_peers,
            join_timeout_ms=100,
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1000),
        )
        self.url = f"http://127.0.0.1:{self._server.address().rpartition(':')[2]}"
        self._clients: dict[str, Any] = {}
        self._members: frozenset[str] = frozenset()

    def quorum(self, peers: Sequence[str], outer_step: int, timeout_s: float) -> frozenset[str]:
        """Return the peers of a quorum that holds all of `peers`. Raises DeadlineError."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            quorum = self._attempt(peers, outer_step)
            self._members = quorum or self._members
            if quorum >= set(peers):
                return quorum
        raise DeadlineError(
            f"the lighthouse granted no quorum of {', '.join(sorted(peers))} for outer step {outer_step} within "
            f"{timeout_s:g} s; its view is at {self.url}. If this repeats, restart `diloco rendezvous`"
        )

    def _attempt(self, peers: Sequence[str], outer_step: int) -> frozenset[str]:
        """Ask for all at once, newcomers first: former members close the quorum."""
        self._beat(peers)  # the lighthouse waits a moment for peers that it has just heard
        order = sorted(peers, key=lambda peer: (peer in self._members, peer))
        with ThreadPoolExecutor(max_workers=len(order)) as threads:
            calls = []
            for index, peer in enumerate(order):
                if index and peer in self._members and order[index - 1] not in self._members:
                    time.sleep(3 * _TICK_MS / 1000)
                calls.append(threads.submit(self._ask, peer, outer_step))
            # The waiting peers stay alive until the lighthouse counts those that left as dead.
            while wait(calls, timeout=HEARTBEAT_TIMEOUT_S / 4).not_done:
                self._beat(order)
        newest = max((call.result() for call in calls), key=lambda answer: answer[0])
        return newest[1]

    def _beat(self, peers: Sequence[str]) -> None:
        for peer in peers:
            with contextlib.suppress(TimeoutError, RuntimeError):
                self._client(peer).heartbeat(peer, timedelta(seconds=_ATTEMPT_S))

    def _client(self, peer: str) -> Any:
        if peer not in self._clients:
            self._clients[peer] = self._make_client(self.url, timedelta(seconds=_ATTEMPT_S))
        return self._clients[peer]

    def _ask(self, peer: str, outer_step: int) -> tuple[int, frozenset[str]]:
        with contextlib.suppress(TimeoutError, RuntimeError):
            answer = self._client(peer).quorum(
                peer, timedelta(seconds=_ATTEMPT_S), address="", store_address="", step=outer_step, world_size=1
            )
            return int(answer.quorum_id), frozenset(member.replica_id for member in answer.participants)
        return -1, frozenset()

    def close(self) -> None:
        self._server.shutdown()
