"""A relay that holds the transport's keys but not that of the headers, or replays what it saw: peers refuse it all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from composer_prime.errors import ChecksumError, RunMismatchError, WireError
from composer_prime.wire.sockets import bind_router
from diloco.transport.connection import Connection
from diloco.transport.messages import (
    PROTOCOL,
    AskState,
    BlobHeader,
    DeltaHeader,
    JointKey,
    PeerHello,
    Piece,
    RoundOutcome,
    StartingState,
    StateHeader,
    TensorLayout,
    ToPeer,
    body_checksum,
    encode,
    layout_hash,
    seal_header,
)
from diloco.transport.peer_link import Exchange

KEY = JointKey(b"k" * 32)
LAYOUT = [TensorLayout(name="w", shape=[4], local_shape=[2], fragment=0)]


def header(kind: str = "delta", **facts: Any) -> BlobHeader:
    """Of what rank 1 of peer b rightly sends for round 5."""
    right = dict(
        run="joint", peer="b", rank=1, outer_step=5, base_hash="base", layout_hash=layout_hash(LAYOUT),
        size=4, checksum=body_checksum(b"body"),
    )  # fmt: skip
    own = {"serial": 0} if kind == "state" else {"fragment": 0, "codec": "", "weight": 1.0, "inner_steps": 1}
    kinds = {"delta": DeltaHeader, "state": StateHeader}
    return seal_header(kinds[kind](**{**right, **own, **facts}), KEY.derive("headers"))


async def _lied_to(lie: ToPeer, ask: Callable[[Exchange], Awaitable[Any]]) -> Any:
    server = bind_router("tcp://127.0.0.1:0", KEY.server(), [KEY.client().own.public])

    async def answer_all() -> None:
        while True:
            identity, number, _ = await server.socket.recv_multipart()
            await server.socket.send_multipart([identity, number, encode(lie)])

    answering = asyncio.create_task(answer_all())
    connection = Connection(server.endpoint, KEY.client(), "a/1", None)
    hello = PeerHello(
        protocol=PROTOCOL, run="joint", peer="a", rank=1, ranks=2, instance=1, layout=LAYOUT, settings={},
        round_deadline_s=1, outer_step=0, base_hash="", training=False,
    )  # fmt: skip
    try:
        exchange = Exchange(None, KEY, hello, lambda: None)
        exchange.connection = connection
        return await asyncio.wait_for(ask(exchange), 100)
    finally:
        answering.cancel()
        await asyncio.wait({answering})
        await connection.close()
        server.close()


def lied_to(lie: ToPeer, ask: Callable[[Exchange], Awaitable[Any]]) -> Any:
    """What `ask(exchange)` of rank 1 of peer a gives when every request is answered with `lie`."""
    return asyncio.run(_lied_to(lie, ask))


def ask_state(outer_step: int) -> AskState:
    return AskState(peer="a", rank=1, instance=1, attempt=1, outer_step=outer_step, base_hash="base")


def outcome(*headers: BlobHeader) -> RoundOutcome:
    return RoundOutcome(outer_step=5, headers=list(headers), newest=5, digest="d")


# A delta of an earlier round, another rank, another start, another run, another model, twice the same, without the
# key, or changed in transit is not averaged.
@pytest.mark.parametrize(
    ("lie", "error", "message"),
    [
        (outcome(header(outer_step=4)), RunMismatchError, "counts delta/4/b/1 to outer step 5: a replayed"),
        (outcome(header(rank=0)), RunMismatchError, "delta/5/b/0 to rank 1: a misplaced header"),
        (outcome(header(base_hash="other")), RunMismatchError, "a replayed header"),
        (outcome(header(kind="state")), WireError, "not a message of protocol"),
        (outcome(header(run="other")), RunMismatchError, "for run 'other', this is 'joint'"),
        (outcome(header(layout_hash="0ther")), RunMismatchError, "is of layout 0ther, this rank has layout [0-9a-f]+"),
        (outcome(header(), header()), RunMismatchError, r"lists the peers \['b', 'b'\], expected each once"),
        (outcome(seal_header(header(), b"x" * 32)), ChecksumError, "not made with this run's key"),
    ],
)
def test_outcomes(lie, error, message):
    with pytest.raises(error, match=message):
        lied_to(lie, lambda exchange: exchange.take_part(5, "base"))


# A state that cannot be read, is of another rank or model, without the key, or that leads to an earlier outer step than
# the asker's is not taken over.
@pytest.mark.parametrize(
    ("facts", "newest", "error", "message"),
    [
        ({"kind": "delta"}, 6, WireError, "not a message of protocol"),
        ({"rank": 0}, 6, RunMismatchError, "gives state/0/b/0 to rank 1"),
        ({"layout_hash": "0ther"}, 6, RunMismatchError, "is of layout 0ther"),
        ({}, 5, RunMismatchError, "leads to outer step 6, this peer is at 7: a state that would take it back"),
    ],
)
def test_states(facts, newest, error, message):
    lie = StartingState(header=header(**{"kind": "state", **facts}), newest=newest)
    with pytest.raises(error, match=message):
        lied_to(lie, lambda exchange: exchange.fetch_source(ask_state(7)))


# A delta of more bytes than the fragment can have is not fetched: it comes as nothing, which no peer decodes. A state
# of that kind is refused.
def test_bodies_too_large_to_be():
    size = 10**15
    arrived = lied_to(outcome(header(size=size, fragment=0)), lambda exchange: exchange.take_part(5, "base"))
    assert [bytes(body) for body in arrived.bodies] == [b""]
    with pytest.raises(RunMismatchError, match=f"state/0/b/1 has {size} bytes, a state of this layout at most 2097178"):
        lied_to(
            StartingState(header=header(kind="state", size=size), newest=6),
            lambda exchange: exchange.fetch_source(ask_state(5)),
        )


# A body that does not match its header is refused.
def test_altered_body():
    async def download(exchange: Exchange) -> Any:
        return await exchange.connection.download(header())

    with pytest.raises(ChecksumError, match=r"delta/5/b/1: 4 bytes with hash .* damaged on the way"):
        lied_to(Piece(name="delta/5/b/1", offset=0, data=b"bodx"), download)
