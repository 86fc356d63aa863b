"""The rendezvous without sockets and with a clock of its own: what it answers, without waiting."""

from typing import Any

from diloco.rendezvous.request_handler import RequestHandler
from diloco.rendezvous.rounds import RendezvousSettings, Round
from diloco.transport.messages import (
    PROTOCOL,
    AskState,
    Beat,
    DeltaHeader,
    DeltaOffer,
    PeerHello,
    Piece,
    StateHeader,
    ToPeer,
    body_checksum,
    layout_hash,
    seal_header,
)

KEY = b"k" * 32
BEAT_TIMEOUT_S, GATHER_S, DEADLINE_S = 10.0, 30.0, 5.0


def base(outer_step: int, rank: int = 0, run: str = "") -> str:
    """Hash of the global values that a healthy rank has at `outer_step`; of another `run` they differ."""
    return f"{run}{outer_step}.{rank}"


class RendezvousState:
    def __init__(self, *, just_started: bool = False, **settings: Any) -> None:
        self.now = 100.0
        given = {"start_peers": 2, "beat_timeout_s": BEAT_TIMEOUT_S, "gather_s": GATHER_S, **settings}
        settings = RendezvousSettings(bind="unused", run="joint", **given)
        self.handler = RequestHandler(settings, KEY, lambda: self.now, lambda: None)
        self.rounds, self.joins = self.handler.rounds, self.handler.joins
        if not just_started:
            self.now += settings.listen_s

    def hello(
        self, peer: str, outer_step: int = 0, *, ranks: int = 1, instance: int = 1, run: str = "", **facts: Any
    ) -> list[ToPeer]:
        """From all ranks, as a process that was started a moment ago."""
        return [
            self.handler.answer(PeerHello(**{
                "protocol": PROTOCOL, "run": "joint", "peer": peer, "rank": rank, "ranks": ranks, "instance": instance,
                "outer_step": outer_step, "base_hash": base(outer_step, rank, run), "training": False, "layout": [],
                "settings": {}, "round_deadline_s": DEADLINE_S, **facts,
            }))
            for rank in range(ranks)
        ]  # fmt: skip

    def beat(self, peer: str, outer_step: int, *, training: bool = True, run: str = "", **facts: Any) -> None:
        known = self.rounds.peers[peer]
        for rank in range(known.ranks):
            self.handler.answer(Beat(
                peer=peer, rank=rank, instance=known.instance, outer_step=outer_step,
                base_hash=base(outer_step, rank, run), training=training, **facts,
            ))  # fmt: skip

    def ask(
        self, peer: str, outer_step: int, *, rank: int = 0, attempt: int = 1, base_hash: str | None = None
    ) -> ToPeer:
        """What `peer` is to join with."""
        known = self.rounds.peers[peer]
        return self.handler.answer(AskState(
            peer=peer, rank=rank, instance=known.instance, attempt=attempt, outer_step=outer_step,
            base_hash=base(outer_step, rank) if base_hash is None else base_hash,
        ))  # fmt: skip

    def offer(
        self, peer: str, outer_step: int, *, kind: str = "delta", rank: int = 0, body: bytes = b"delta",
        brought: int | None = None, **facts: Any,
    ) -> ToPeer:  # fmt: skip
        """Announce a body, and bring it over, or its first bytes."""
        kinds = {"delta": DeltaHeader, "state": StateHeader}
        own = {"fragment": 0, "codec": "fp32", "weight": 1.0, "inner_steps": 1} if kind == "delta" else {"serial": 0}
        header = kinds[kind](
            run="joint", peer=peer, rank=rank, outer_step=outer_step, size=len(body),
            checksum=body_checksum(body),
            **{"layout_hash": layout_hash([]), "base_hash": base(outer_step, rank), **own, **facts},
        )  # fmt: skip
        instance = self.rounds.peers[peer].instance if peer in self.rounds.peers else 1
        answer = self.handler.answer(DeltaOffer(header=seal_header(header, KEY), instance=instance))
        self.handler.answer(Piece(name=header.name, offset=0, data=body[:brought], instance=instance))
        return answer

    def close(self, outer_step: int, *peers: str, body: bytes = b"delta") -> Round:
        """A round that these peers, all ranks of them, contribute to."""
        for peer in peers:
            self.beat(peer, outer_step)
            for rank in range(self.rounds.peers[peer].ranks):
                self.offer(peer, outer_step, rank=rank, body=body)
        members = self.rounds.closable(self.now, len(peers))
        assert members is not None and set(members) == set(peers)
        return self.handler.close(members)

    def serve(self, peer: str, outer_step: int) -> None:
        """`peer` uploads the state that it is asked for."""
        for rank in range(self.rounds.peers[peer].ranks):
            self.offer(peer, outer_step, kind="state", rank=rank, body=b"state", serial=self.joins.requested_from(peer))

    def begin(self, *peers: str, ranks: int = 1, rounds: int = 0) -> None:
        """These peers start together and close so many rounds."""
        for peer in peers:
            self.hello(peer, ranks=ranks)
            self.beat(peer, 0)
        for outer_step in range(rounds):
            self.close(outer_step, *peers)
        for peer in peers:
            self.beat(peer, rounds)
