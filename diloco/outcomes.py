"""How rounds end, alike on all ranks of a peer: each hears it over a link of its own, and all must take the same turn.

Who waits on whom: a rank that knows how a round ended waits for the others to know the same, which needs all of them to
take part; while they wait they serve their state to who joins.

A peer that trains serves its global state to those that join; which one is asked, the rendezvous decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError
from diloco.global_model import GlobalModel
from diloco.ranks import SLICE_S, Ranks
from diloco.state_file import packed
from diloco.transport.exchange import MustRejoin, RoundResult
from diloco.transport.link import PeerLink

logger = logging.getLogger(__name__)


class StateServer:
    def __init__(self, link: PeerLink, model: GlobalModel, peer: str) -> None:
        """`peer`: this one's name."""
        self._link, self._model, self._peer = link, model, peer
        self._damaged = ""
        """Hash of the global model that was found damaged last."""

    def serve(self, serial: int) -> None:
        """Copy the global state and upload the copy: training may go on at once. A damaged one is not served.

        `serial`: of the request, `PeerLink.state_wanted` on all ranks.
        """
        model = self._model
        if model.hash == self._damaged or not model.intact:  # joiners ask again and again: it is read once
            self._damaged = model.hash
            problem = f"its global model was damaged in memory since outer step {model.outer_step}"
            logger.error("the state of peer %s is not served: %s", self._peer, problem)
            self._link.refuse_state(serial, problem)
            return
        body = packed(model.tensors(), {})
        header = self._link.header("state", body, model.outer_step, model.hash, serial=serial)
        logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
        self._link.serve_state(header, body)


_TELLINGS = 3
"""How often in a row the ranks may be told of different outcomes; a rendezvous that was restarted tells them once."""


class RoundResults:
    def __init__(
        self, config: DilocoConfig, link: PeerLink, model: GlobalModel, server: StateServer, ranks: Ranks
    ) -> None:
        self._config, self._link, self._model, self._server, self._ranks = config, link, model, server, ranks
        self._disputes = 0
        """How often in a row the ranks were told of different outcomes."""
        self._heard = time.monotonic()

    def wait(self, timeout_s: float, stopping: Callable[[], bool] = lambda: False) -> RoundResult | MustRejoin | None:
        """How the round that was begun ended, alike on all ranks: Left when one of them must join anew; None while it
        has not, after `timeout_s` or once `stopping`. A collective.

        Raises RunMismatchError when the ranks are told of different outcomes again and again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            result = self._link.wait(min(SLICE_S, timeout_s))
            known = {RoundResult: 2, MustRejoin: 1}.get(type(result), 0)
            least, wanted, in_time = self._ranks.smallest(
                [known, self._link.state_wanted, time.monotonic() < deadline and not stopping()]
            )
            if wanted:
                self._server.serve(wanted)
            if least == 2 and isinstance(result, RoundResult):
                if self._told_alike(result):
                    return result
                time.sleep(SLICE_S)  # a rendezvous may be taking another's place
                self._link.repeat()
            elif least == 0 and known == 2 and self._link.outdated:  # another rank gets nothing without this one
                self._link.repeat()
            if least == 1:
                return (
                    result
                    if isinstance(result, MustRejoin)
                    else MustRejoin("another rank of this peer was left behind")
                )
            if not in_time:
                return None

    def next(self, newest: int, timeout_s: float) -> RoundResult | MustRejoin | None:
        """The next closed round of those up to `newest`; None when there is none. A collective."""
        if self._ranks.smallest([newest])[0] < self._model.outer_step:
            return None
        self._link.fetch(self._model.outer_step, self._model.hash)
        return self.wait(timeout_s)

    def _told_alike(self, arrived: RoundResult) -> bool:
        """Whether all ranks of this peer were told of the same outcome. A collective."""
        ((lowest, highest),) = self._ranks.bounds([arrived.digest])
        self._disputes = 0 if lowest == highest else self._disputes + 1
        if self._disputes == _TELLINGS:
            raise RunMismatchError(
                f"the ranks of peer {self._config.peer_id} were told {_TELLINGS} times in a row of different outcomes "
                f"of outer step {self._model.outer_step} ({lowest:015x} and {highest:015x}), so their parts of the "
                f"model would not fit together. Is {self._config.rendezvous} the address of more than one rendezvous? "
                "Leave one, and go on with --resume"
            )
        return not self._disputes

    # -- silence -------------------------------------------------------------------------------------------------

    def heard(self) -> None:
        """This peer stands where the others stand."""
        self._heard = time.monotonic()

    def silent_s(self) -> float:
        """Since then. A collective. Raises DeadlineError after diloco.offline_timeout_s."""
        silent_s = time.monotonic() - self._heard
        if self._ranks.any(silent_s > self._config.offline_timeout_s):
            raise DeadlineError(
                f"no outcome of outer step {self._model.outer_step} for {silent_s:.0f} s "
                f"(diloco.offline_timeout_s = {self._config.offline_timeout_s:g}): the rendezvous at "
                f"{self._config.rendezvous} said last that it waits for {self._link.waiting_for}. Is it reachable, and "
                "are enough peers alive? Go on with --resume"
            )
        return silent_s
