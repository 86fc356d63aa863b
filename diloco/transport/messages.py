"""Messages between a peer's trainer ranks and the rendezvous (ZMQ ROUTER/DEALER, msgpack, CURVE).

    Hello ------> Welcome                      run, layout and settings must be those of the others
    Beat -------> BeatReply                    alive; is a round open, is this peer's state wanted
    Offer ------> Received | Closed | Gone     the header of a blob; its bytes may come, from this one on
    Chunk ------> Received | Gone              some of its bytes
    AskRound ---> Outcome | NotReady | Gone    whose deltas make up an outer step
    AskState ---> Current | StateReady | NotReady    whether to join with what one has, or with another peer's state;
                                               decided once all ranks of the peer have asked, for all of them
    Get --------> Piece | Gone                 some bytes of a blob that another peer offered
    Unusable ---> Gone                         a state cannot be served, or cannot be taken over: ask another source
    (any) ------> Refused                      does not belong here; says why

Every request may be repeated: the answer to the second is that to the first. The header of a blob says what it is and
who made it (header.py).

What peers tell one another about their parameters; no torch here, for the rendezvous has none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from composer_prime.errors import WireError
from diloco.transport.header import PROTOCOL, Header

_DELTA_BYTES, _STATE_BYTES, _MORE_BYTES = 5, 13, 1 << 21
"""At most, of a parameter: fp32 has 4; master, momentum and swept values 12. And beside them: a last block, names."""


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where one parameter lies, as far as peers must agree on it."""

    name: str
    shape: list[int]
    """Of the whole parameter."""
    local_shape: list[int]
    """Of this rank's shard; equal to `shape` without sharding."""
    fragment: int


def largest_body(tensors: Sequence[TensorLayout], fragment: int | None) -> int:
    """Bytes that no delta of this fragment exceeds; None: no state."""
    count = sum(math.prod(each.local_shape) for each in tensors if fragment in (None, each.fragment))
    return _MORE_BYTES + count * (_STATE_BYTES if fragment is None else _DELTA_BYTES)


def layout_hash(tensors: Sequence[TensorLayout]) -> str:
    """blake2b-128, hexadecimal."""
    return hashlib.blake2b(msgspec.json.encode(list(tensors)), digest_size=16).hexdigest()


def difference(ours: Sequence[TensorLayout], theirs: Sequence[TensorLayout]) -> str:
    """The first thing that differs, in words that give both sides; empty when nothing does."""
    mine, other = {each.name: each for each in ours}, {each.name: each for each in theirs}
    differing = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
    if not differing:
        return ""
    name = min(differing, key=lambda name: (name in mine and name in other, name))
    return f"parameter {name}: {_words(mine.get(name))} here, {_words(other.get(name))} there"


def _words(tensor: TensorLayout | None) -> str:
    if tensor is None:
        return "not trained"
    return f"shape {tensor.shape}, shard {tensor.local_shape}, fragment {tensor.fragment}"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what follows."""


class PeerHello(Message, tag="hello"):
    run: str
    peer: str
    rank: int
    ranks: int
    instance: int
    """Random, the same on all ranks of a peer's start: a restarted peer is told from its predecessor."""
    outer_step: int
    base_hash: str
    training: bool
    """As in a beat: a rendezvous that was restarted learns from it where the run stands."""
    layout: list[TensorLayout]
    settings: dict[str, str]
    """What all peers must agree on, as text."""
    round_deadline_s: float
    frozen: str = ""
    """Digest of what this rank holds of the parameters that are not trained."""
    protocol: int = 0
    """0 for releases before protocol 3, which did not tell."""


class Beat(Message, tag="beat"):
    peer: str
    rank: int
    instance: int
    outer_step: int
    base_hash: str
    training: bool
    """False while it joins: rounds do not wait for it."""


class DeltaOffer(Message, tag="offer"):
    header: Header
    instance: int
    """Which start of the peer brings it; as in its hello."""


class BodyChunk(Message, tag="chunk"):
    name: str
    offset: int
    data: bytes
    instance: int


class AskRound(Message, tag="ask_round"):
    peer: str
    rank: int
    instance: int
    outer_step: int
    base_hash: str


class AskState(Message, tag="ask_state"):
    peer: str
    rank: int
    instance: int
    attempt: int
    """Which of this process's joins it is for; the same on all ranks."""
    outer_step: int
    base_hash: str


class Get(Message, tag="get"):
    name: str
    offset: int
    length: int


class Unusable(Message, tag="unusable"):
    peer: str
    """Who says so."""
    instance: int
    serial: int
    reason: str


class PeerWelcome(Message, tag="welcome"):
    beat_s: float
    """How often a beat is expected."""


class BeatReply(Message, tag="beat_reply"):
    known: bool
    """False: say hello (again); the rendezvous was restarted."""
    open_round: int | None
    left_s: float | None
    """Until the open round's deadline."""
    state_wanted: int
    """Serial of a request for this peer's state; 0 for none."""


class Received(Message, tag="received"):
    name: str
    size: int
    """Bytes so far, from the first."""


class RoundClosed(Message, tag="closed"):
    outer_step: int


class Gone(Message, tag="gone"):
    """What was asked for is not there and will not be: join anew."""

    reason: str


class RoundNotReady(Message, tag="not_ready"):
    waiting_for: str


class RoundOutcome(Message, tag="outcome"):
    outer_step: int
    quorum_id: int
    headers: list[Header]
    """Of the contributions, this rank's part, sorted by peer."""
    newest: int
    """The last round that is closed: more outcomes are to be had up to it."""
    digest: str
    """Of all ranks' headers: ranks that were told of different outcomes notice."""


class Current(Message, tag="current"):
    """The asker's own state will do: it is the others', can catch up from rounds that are kept, or it is alone."""

    newest: int
    """The last closed round; -1 for none."""


class StateReady(Message, tag="state_ready"):
    header: Header
    newest: int


class Piece(Message, tag="piece"):
    name: str
    offset: int
    data: bytes


class RequestRefused(Message, tag="refused"):
    error: str


FromPeer = PeerHello | Beat | DeltaOffer | BodyChunk | AskRound | AskState | Get | Unusable
ToPeer = (
    PeerWelcome
    | BeatReply
    | Received
    | RoundClosed
    | Gone
    | RoundNotReady
    | RoundOutcome
    | Current
    | StateReady
    | Piece
    | RequestRefused
)

_FROM_PEER, _TO_PEER = msgspec.msgpack.Decoder(FromPeer), msgspec.msgpack.Decoder(ToPeer)
encode = msgspec.msgpack.Encoder().encode


def from_peer(raw: bytes) -> FromPeer:
    """Raises WireError when `raw` is no request."""
    return _decoded(_FROM_PEER, raw)


def to_peer(raw: bytes) -> ToPeer:
    """Raises WireError when `raw` is no answer."""
    return _decoded(_TO_PEER, raw)


def _decoded(decoder: msgspec.msgpack.Decoder, raw: bytes):
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(f"{len(raw)} bytes are no message of protocol {PROTOCOL}: {error}") from None
