"""A trainer rank's standing with the rendezvous: it says hello, beats every few seconds, and hellos again when asked.

Runs in the event loop of the link's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError, WireError
from diloco.rendezvous.peer import Position
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.header import PROTOCOL
from diloco.transport.messages import Beat, BeatReply, PeerHello, PeerWelcome, RoundNotReady, TensorLayout

logger = logging.getLogger(__name__)
_BEAT_TIMEOUT_S = 3.0
"""A beat is not sent again: the next one knows better where the rank stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which rank of which peer this is."""

    rank: int
    ranks: int
    instance: int
    """Random, the same on all ranks."""
    layout: list[TensorLayout]
    frozen: str
    """Digest of what it holds of the parameters that are not trained."""
    settings: dict[str, str]
    """What all peers must agree on."""


def agreed_settings(config: DilocoConfig) -> dict[str, str]:
    """What decides the global model, as `diloco.` keys and text: the same for all peers."""
    unused = {"outer": {"muon_lr"}} if config.outer.type != "muon" else None
    included = {"fragments", "partition", "outer", "weighting", "guard"}
    values = config.model_dump(mode="json", include=included, exclude=unused)
    flat: dict[str, str] = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"diloco.{name}.{key}".rstrip("."): str(each) for key, each in inner.items()}
    return flat


class Session:
    def __init__(self, config: DilocoConfig, member: Member) -> None:
        self._config, self._member = config, member
        self.position = Position(0, "", False)
        self.status = BeatReply(known=True, open_round=None, left_s=None, state_wanted=0)
        self.status_at = 0.0
        self.hellos = 0
        """How often the rendezvous was greeted: more than once when it was restarted."""
        self.failure: BaseException | None = None
        """Why the rendezvous does not want this peer any more."""
        self._beat_s = 2.0

    async def hello(self, connection: Connection) -> None:
        """Raises DeadlineError after diloco.connect_timeout_s, or RefusedError."""
        config, member, timeout_s = self._config, self._member, self._config.connect_timeout_s
        began = time.monotonic()
        while True:
            where = self.position
            answer = await connection.call(
                PeerHello(
                    protocol=PROTOCOL, run=config.run, peer=config.peer_id, rank=member.rank, ranks=member.ranks,
                    instance=member.instance, layout=member.layout, frozen=member.frozen, settings=member.settings,
                    round_deadline_s=config.round_deadline_s, outer_step=where.outer_step,
                    base_hash=where.base_hash, training=where.training,
                ),
                timeout_s,
            )  # fmt: skip
            if isinstance(answer, PeerWelcome):
                self._beat_s, self.hellos = answer.beat_s, self.hellos + 1
                return
            waiting = answer.waiting_for if isinstance(answer, RoundNotReady) else type(answer).__name__
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(f"the rendezvous did not admit peer {config.peer_id}: it waits for {waiting}")
            await asyncio.sleep(0.2)

    async def keep_beating(self, connection: Connection) -> None:
        """Until cancelled or refused; an outage is nothing special: whoever waits for an outcome has a deadline."""
        silent = False
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self.beat(connection)
                silent = False
            except WireError as error:  # RefusedError, or an answer of another release
                self.failure = RunMismatchError(str(error))
                logger.warning("%s", error)
                return
            except DeadlineError as error:
                if not silent:
                    logger.warning("%s", error)
                silent = True

    async def beat(self, connection: Connection) -> None:
        """Tell where this rank stands. Raises DeadlineError or RefusedError."""
        where, member = self.position, self._member
        beat = Beat(
            peer=self._config.peer_id, rank=member.rank, instance=member.instance, outer_step=where.outer_step,
            base_hash=where.base_hash, training=where.training,
        )  # fmt: skip
        answer = await connection.call(beat, _BEAT_TIMEOUT_S)
        if not isinstance(answer, BeatReply):
            return
        if answer.known:
            self.status, self.status_at = answer, time.monotonic()
            return
        logger.info("the rendezvous does not know this peer (any more): saying hello")
        await self.hello(connection)

    async def tell(self, connection: Connection) -> None:
        """A beat ahead of time; when it is lost the next one says the same."""
        with contextlib.suppress(DeadlineError, RefusedError):
            await self.beat(connection)
