"""Which state a peer joins with: its own, or another peer's. Decided once for all its ranks. No I/O here.

    some peer trains      the joining peer's own state will do if it is theirs or the rounds since are kept. Else it
                          gets another's, but waits until the others passed its own.
    no peer trains        those that come wait for one another, at most gather_s. The highest outer step among them
                          wins, and rounds closed beyond it are void, unless a peer that ended with them is there.

A peer counts as training only if it was heard after the joining peer asked.
A rendezvous that was started a moment ago listens first.

A training peer uploads its state once, for all that join while the rounds since then are kept.
A source that dies, stalls or is refused is replaced by another.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_prime.errors import RunMismatchError, WireError
from diloco.rendezvous.rounds import Base, Blob, Peer, RendezvousSettings, Rounds, leading
from diloco.transport.messages import AskState, Gone, RoundNotReady, StartingState, StateHeader

logger = logging.getLogger(__name__)
JoinAnswer = StartingState | RoundNotReady | Gone
_MOST_CROWDED = 3
"""How often the state that a peer waits for may make room for deltas."""


# -- on its way --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StateTransfer:
    serial: int
    source: str
    ranks: int
    progress_at: float
    """When it last made progress."""
    blobs: dict[int, Blob[StateHeader]] = field(default_factory=dict)
    """By rank."""

    @property
    def complete(self) -> bool:
        return len(self.blobs) == self.ranks and all(blob.complete for blob in self.blobs.values())

    @property
    def outer_step(self) -> int | None:
        """Return what all ranks' parts agree on; None while they differ."""
        steps = {blob.header.outer_step for blob in self.blobs.values()}
        return steps.pop() if len(steps) == 1 else None

    @property
    def first_step(self) -> int | None:
        """Return the lowest of all parts; None before one is offered."""
        return min((blob.header.outer_step for blob in self.blobs.values()), default=None)

    @property
    def base(self) -> Base:
        return tuple(self.blobs[rank].header.base_hash for rank in sorted(self.blobs))

    def progress(self) -> str:
        size = sum(blob.header.size for blob in self.blobs.values())
        received = sum(blob.received for blob in self.blobs.values())
        return f"{received / 1e6:.1f} of {size / 1e6:.1f} MB of rank(s) {sorted(self.blobs)} are here"


# -- which one ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class JoinAttempt:
    instance: int
    attempt: int
    began: float
    crowded_out: int
    asks: dict[int, AskState] = field(default_factory=dict)
    """By rank."""
    over: bool = False
    """The peer trains."""
    own_state: StartingState | None = None
    """The answer that its own state will do."""
    newest_by_state: dict[int, int] = field(default_factory=dict)
    """The last closed round, by the state's serial: one for all ranks."""

    @property
    def outer_step(self) -> int:
        return next(iter(self.asks.values())).outer_step

    @property
    def base(self) -> Base:
        return tuple(self.asks[rank].base_hash for rank in sorted(self.asks))


class Joins:
    def __init__(self, rounds: Rounds, settings: RendezvousSettings, now: float) -> None:
        self.rounds = rounds
        self._settings = settings
        self._listens_until = now + settings.listen_s
        self._joins: dict[str, JoinAttempt] = {}
        """By peer."""
        self.current: StateTransfer | None = None
        """A state under way, or complete."""
        self._serial = secrets.randbits(48)  # ranks that got answers before and after a restart must notice
        self._failures: Counter[str] = Counter()
        self._crowded_out = 0
        """How often a state made room for deltas."""

    def answer(self, ask: AskState, now: float) -> JoinAnswer:
        """Answer one rank. Raises RunMismatchError."""
        report = self.rounds.report(ask.peer, ask.rank, ask.instance, now)
        if report is None:
            return Gone(reason="send a hello first")
        self._refuse(ask.refused, f"peer {ask.peer} reports: {ask.reason}")
        peer, join = self.rounds.peers[ask.peer], self._joins.get(ask.peer)
        if join is None or join.instance != ask.instance or join.attempt < ask.attempt:
            join = JoinAttempt(ask.instance, ask.attempt, now, self._crowded_out)
            self._joins[ask.peer] = join
        if join.attempt > ask.attempt or join.over:  # a request that was sent again, and came late
            return RoundNotReady(waiting_for="the same answer on all ranks")
        if ask.rank not in join.asks:
            report.note(ask.outer_step, ask.base_hash, now, training=False)
        join.asks[ask.rank] = ask
        absent = [str(rank) for rank in range(peer.ranks) if rank not in join.asks]
        if absent:
            return RoundNotReady(waiting_for=f"rank {', '.join(absent)} of peer {peer.name}")
        steps = sorted({each.outer_step for each in join.asks.values()})
        if len(steps) > 1:
            raise RunMismatchError(
                f"the ranks of peer {peer.name} stand at outer steps {steps}: resume all of them from one checkpoint, "
                "or start without --resume"
            )
        return join.own_state or self._decide(peer, join, ask.rank, now)

    def note_training(self, peer: str) -> None:
        if (join := self._joins.get(peer)) is not None:
            join.over = True

    def _decide(self, peer: Peer, join: JoinAttempt, rank: int, now: float) -> JoinAnswer:
        training = [each for each in self.rounds.training(now) if each.name != peer.name]
        silent = [each.name for each in training if each.heard < join.began]
        if silent:
            return RoundNotReady(waiting_for=f"a sign of life of {', '.join(sorted(silent))}")
        if not training:
            return self._gather(peer, join, now)
        leaders = leading(training)
        front = max(leaders[0].outer_step, self.rounds.newest + 1)
        if join.outer_step > front:
            return self._ahead(peer, join, front)
        return self._catch_up(join, training, rank, now)

    def _catch_up(self, join: JoinAttempt, training: list[Peer], rank: int, now: float) -> JoinAnswer:
        newest, step, leaders = self.rounds.newest, join.outer_step, leading(training)
        same = any(each.outer_step == step and each.base == join.base for each in leaders)
        if same or self._replayable(step, join.base):
            return self._keep(join)
        if step == newest + 1 and leaders[0].outer_step <= newest:
            behind = ", ".join(each.name for each in leaders)
            return RoundNotReady(waiting_for=f"the outcome of round {newest} to reach {behind}")
        sources = [each for each in training if each in leaders or self._replayable(each.outer_step, each.base)]
        return self._state(join, sources, rank, now)

    def _replayable(self, outer_step: int, base: Base) -> bool:
        closed = self.rounds.closed(outer_step)
        return closed is not None and closed.base == base

    def _keep(self, join: JoinAttempt) -> StartingState:
        join.own_state = StartingState(newest=self.rounds.newest)
        return join.own_state

    def _ahead(self, peer: Peer, join: JoinAttempt, front: int) -> JoinAnswer:
        if not self.rounds.settled:
            self._go_to(join.outer_step, [peer])
            return self._keep(join)
        return RoundNotReady(
            waiting_for=f"the others, which are at outer step {front}, to pass outer step {join.outer_step} of peer "
            f"{peer.name}, which would be lost. To give it up, restart that peer without --resume, or resume all"
        )

    # -- when no peer trains ---------------------------------------------------------------------------------------

    def _gather(self, peer: Peer, join: JoinAttempt, now: float) -> JoinAnswer:
        if (left_s := self._listens_until - now) > 0:
            return RoundNotReady(waiting_for=f"clusters that train already to be heard, {left_s:.0f} s at most")
        here = [each for each in self.rounds.alive(now) if self._waits(each)]
        if peer not in here:
            return RoundNotReady(waiting_for=f"a sign of life of every rank of peer {peer.name}")
        leaders = leading(here)
        lead, newest = leaders[0].outer_step, self.rounds.newest
        if newest < 0 and not any(each.outer_step for each in self.rounds.alive(now)):  # a new run
            return self._keep(join)
        missing = max(self._settings.start_peers, len(self.rounds.peers)) - len(here)
        left_s = self._settings.gather_s - (now - min(self._joins[each.name].began for each in here))
        if missing > 0 and left_s > 0:
            return RoundNotReady(waiting_for=f"{missing} more peer(s) to come, {left_s:.0f} s at most")
        if newest >= 0 and lead != newest + 1:
            if lead <= newest and self._ended_with(newest, now) and self._replayable(join.outer_step, join.base):
                return self._keep(join)
            self._go_to(lead, leaders)
        if peer not in leaders:
            return RoundNotReady(waiting_for=f"peer {leaders[0].name}, at outer step {lead}, to stand ready")
        return self._keep(join)

    def _ended_with(self, newest: int, now: float) -> bool:
        """Return whether a peer is there that ended with all rounds."""
        beyond = [each for each in self.rounds.alive(now) if each.outer_step > newest]
        return any(not each.training and not self._waits(each) for each in beyond)

    def _waits(self, peer: Peer) -> bool:
        join = self._joins.get(peer.name)
        if join is None or join.over or join.instance != peer.instance:
            return False
        return len(join.asks) == peer.ranks

    def _go_to(self, lead: int, leaders: list[Peer]) -> None:
        names, newest = ", ".join(sorted(each.name for each in leaders)), self.rounds.newest
        logger.warning("the run continues from outer step %d of %s; the last closed round was %s", lead, names, newest)
        self.rounds.go_to(lead)
        self.current = None

    # -- with another peer's state -----------------------------------------------------------------------------------

    def _state(self, join: JoinAttempt, sources: list[Peer], rank: int, now: float) -> JoinAnswer:
        if self._crowded_out - join.crowded_out >= _MOST_CROWDED:
            raise WireError(
                f"the state made room for deltas {_MOST_CROWDED} times, for they do not fit in memory together: start "
                "`diloco rendezvous` with a larger --memory-gb"
            )
        transfer = self._request(sources, self.rounds.oldest, now)
        if transfer is None:
            return RoundNotReady(waiting_for="a peer that trains")
        if not transfer.complete:
            return RoundNotReady(waiting_for=f"the state of peer {transfer.source}: {transfer.progress()}")
        if transfer.outer_step is None:  # its ranks answered at different steps
            self.current = None
            return RoundNotReady(waiting_for="a state that is of one outer step on all ranks")
        closed = self.rounds.closed(transfer.outer_step)
        if closed is not None and closed.base != transfer.base:  # it fits no round that would follow on it
            self._refuse(transfer.serial, f"it is not the others' of outer step {closed.outer_step}")
            return RoundNotReady(waiting_for="a state that the later rounds build on")
        newest = join.newest_by_state.setdefault(transfer.serial, self.rounds.newest)
        return StartingState(header=transfer.blobs[rank].header, newest=newest)

    def _request(self, sources: Sequence[Peer], oldest_useful: int, now: float) -> StateTransfer | None:
        """Return the current transfer, or a new one. `oldest_useful`: the first step of use."""
        if self.current is not None and self._useful(self.current, sources, oldest_useful, now):
            return self.current
        if self.current is not None and not self.current.complete:
            self._failures[self.current.source] += 1
        self.current = None
        if sources:
            source = min(sources, key=lambda peer: (self._failures[peer.name], peer.name))
            self._serial += 1
            self.current = StateTransfer(self._serial, source.name, source.ranks, now)
        return self.current

    def _useful(self, transfer: StateTransfer, sources: Sequence[Peer], oldest_useful: int, now: float) -> bool:
        if transfer.complete:
            return transfer.outer_step is not None and transfer.outer_step >= oldest_useful
        alive = any(peer.name == transfer.source for peer in sources)
        return alive and now - transfer.progress_at <= 2 * self._settings.beat_timeout_s

    def requested_from(self, peer: str, rank: int | None = None) -> int:
        """Return the serial of what this peer must serve; 0 for none."""
        current = self.current
        if current is None or current.source != peer or current.complete:
            return 0
        blob = current.blobs.get(rank) if rank is not None else None
        return 0 if blob is not None and blob.complete else current.serial

    def state(self, header: StateHeader, now: float) -> Blob[StateHeader] | None:
        """Return the blob of a state that was requested."""
        current = self.current
        if current is None or header.serial != current.serial or header.peer != current.source:
            return None
        if header.rank >= current.ranks:
            return None
        others = {rank: blob.header.outer_step for rank, blob in current.blobs.items() if rank != header.rank}
        if max(others.values(), default=-1) > header.outer_step:  # its rank will serve a newer one
            return None
        for rank in [rank for rank, step in others.items() if step < header.outer_step]:
            del current.blobs[rank]
        blob = current.blobs.get(header.rank)
        if blob is None or blob.header.checksum != header.checksum:
            blob = current.blobs[header.rank] = Blob(header)
        current.progress_at = now
        return blob

    def _refuse(self, serial: int, reason: str) -> None:
        if self.current is not None and self.current.serial == serial:
            logger.warning("the state of peer %s is dropped: %s", self.current.source, reason)
            self._failures[self.current.source] += 1
            self.current = None

    def crowd_out(self, current: StateTransfer) -> None:
        logger.warning(
            "the state of peer %s makes room for deltas: start `diloco rendezvous` with a larger --memory-gb",
            current.source,
        )
        self._crowded_out += 1
        self.current = None

    def expire(self, oldest_useful: int) -> None:
        """Drop a state from which no peer can catch up any more."""
        current = self.current
        if current is None or (step := current.first_step) is None or step >= oldest_useful:
            return
        if not current.complete:
            self._failures[current.source] += 1
            logger.warning(
                "the state of peer %s is given up: %s, and the rounds since it are gone. If a peer still joins, start "
                "`diloco rendezvous` with a larger --memory-gb, or raise diloco.sync_every, or the source's "
                "diloco.rate_limit_mbit", current.source, current.progress(),
            )  # fmt: skip
        self.current = None
