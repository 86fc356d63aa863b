"""What travels between a peer's trainer ranks and the rendezvous (ZMQ ROUTER/DEALER, msgpack, CURVE). No torch here.

    PeerHello ----> PeerWelcome                run, layout and settings must be those of the others
    Beat ---------> BeatReply                  alive; is a round open, is this peer's state wanted
    DeltaOffer ---> Received | RoundClosed | RoundNotReady | Gone     the header of a blob; its bytes may come, from
                                               this one on, or there is no room for them yet
    BodyChunk ----> Received | Gone            some of its bytes
    AskRound -----> RoundOutcome | RoundNotReady | Gone     whose deltas make up an outer step
    AskState -----> Current | StateReady | RoundNotReady    whether to join with one's own state or with another peer's;
                                               decided once all ranks of the peer have asked, for all of them
    Get ----------> Piece | Gone               some bytes of a blob that another peer offered
    Unusable -----> Gone                       a state cannot be taken over: ask another source
    (any) --------> RequestRefused             does not belong here, and why

Every request may be repeated: the answer to the second is that to the first.

A blob is a delta or a state. Its header names the body's hash, run, peer, outer step and the global model that it
starts from. It is sealed with a key derived from the run's, and no two are the same. So a relay without the key cannot
alter a delta, and no one can replay one in another round.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from composer_prime.errors import ChecksumError, RunMismatchError, WireError

PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a rank in its run."""

    outer_step: int
    base_hash: str
    training: bool
    """False while it joins: rounds do not wait for it."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a blob is. `kind` is delta or state."""

    protocol: int = PROTOCOL
    kind: str
    run: str
    peer: str
    rank: int
    outer_step: int
    """delta: the step it contributes to; state: the steps that it holds."""
    base_hash: str
    """Hash of this rank's global values at outer_step: all peers of a round start from the same."""
    layout_hash: str
    size: int
    """Bytes of the body."""
    checksum: str
    """blake2b-256 of the body, hexadecimal."""
    fragment: int = -1
    codec: str = ""
    weight: float = 0.0
    """What the delta counts by: tokens, samples or 1."""
    inner_steps: int = 0
    serial: int = 0
    """state: the request that it answers."""
    nonce: str = ""
    """16 random bytes, so that no two headers are the same."""
    mac: str = ""

    @property
    def name(self) -> str:
        """Name of the blob at the rendezvous."""
        number = self.outer_step if self.kind == "delta" else self.serial
        return f"{self.kind}/{number}/{self.peer}/{self.rank}"


def body_checksum(body: bytes | bytearray | memoryview) -> str:
    return running_checksum(body).hexdigest()


def running_checksum(body: bytes | bytearray | memoryview = b"") -> hashlib.blake2b:
    """Return the hash of a body whose further pieces come by `update`."""
    return hashlib.blake2b(body, digest_size=32)


def seal_header(header: Header, key: bytes) -> Header:
    """Return `header` with a fresh nonce and its authentication code."""
    header = msgspec.structs.replace(header, nonce=secrets.token_hex(16))
    return msgspec.structs.replace(header, mac=_mac(header, key))


def authenticate(header: Header, key: bytes, *, run: str) -> None:
    """Raises RunMismatchError for another run or release, ChecksumError when not made with the run's key."""
    if header.protocol != PROTOCOL:
        raise RunMismatchError(f"{header.peer} speaks protocol {header.protocol}, this is {PROTOCOL}: use one release")
    if header.run != run:
        raise RunMismatchError(f"{header.peer} sends for run {header.run!r}, this is {run!r}: check diloco.run")
    if not hmac.compare_digest(header.mac.encode(), _mac(header, key).encode()):
        raise ChecksumError(f"the header of {header.name} was not made with this run's key, or was altered on the way")


def check_body(header: Header, size: int, checksum: str) -> None:
    """Raises ChecksumError when a body of `size` bytes with `checksum` is not the header's."""
    if size != header.size or checksum != header.checksum:
        raise ChecksumError(
            f"{header.name}: {size} bytes with hash {checksum[:16]}..., its header has {header.size} bytes "
            f"with {header.checksum[:16]}...: damaged on the way"
        )


def _mac(header: Header, key: bytes) -> str:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(header, mac=""))
    return hashlib.blake2b(raw, key=key, digest_size=32).hexdigest()


# -- layouts: what peers must have in common ----------------------------------------------------------------------

_DELTA_BYTES, _STATE_BYTES, _MORE_BYTES = 5, 13, 1 << 21
"""Upper bounds of bytes a parameter (fp32: 4; master, momentum and swept values: 12), and of a last block and names."""


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one parameter, as far as peers must agree."""

    name: str
    shape: list[int]
    """Of the whole parameter."""
    local_shape: list[int]
    """Of this rank's shard; equal to `shape` without sharding."""
    fragment: int


def largest_body(tensors: Sequence[TensorLayout], fragment: int | None) -> int:
    """Return the most bytes that a delta of `fragment` can have; None: that a state can have."""
    count = sum(math.prod(each.local_shape) for each in tensors if fragment in (None, each.fragment))
    return _MORE_BYTES + count * (_STATE_BYTES if fragment is None else _DELTA_BYTES)


def layout_hash(tensors: Sequence[TensorLayout]) -> str:
    """Return the blake2b-128 of a layout, hexadecimal."""
    return hashlib.blake2b(msgspec.json.encode(list(tensors)), digest_size=16).hexdigest()


def difference(ours: Sequence[TensorLayout], theirs: Sequence[TensorLayout]) -> str:
    """Return the first parameter that differs, with both sides; empty when none does."""
    mine, other = {each.name: each for each in ours}, {each.name: each for each in theirs}
    differing = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
    if not differing:
        return ""
    name = min(differing, key=lambda name: (name in mine and name in other, name))
    return f"parameter {name}: {_description(mine.get(name))} here, {_description(other.get(name))} there"


def _description(tensor: TensorLayout | None) -> str:
    if tensor is None:
        return "not trained"
    return f"shape {tensor.shape}, shard {tensor.local_shape}, fragment {tensor.fragment}"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


class FromRank(Message, frozen=True, kw_only=True):
    """What a rank says of itself."""

    peer: str
    rank: int
    instance: int
    """Random, the same on all ranks of one start of a peer: it tells a restarted peer from its predecessor."""
    outer_step: int
    base_hash: str
    """Of its global values."""


class PeerHello(FromRank, frozen=True, tag="hello"):
    run: str
    ranks: int
    training: bool
    """As in a beat: a rendezvous that was restarted learns from it where the run stands."""
    layout: list[TensorLayout]
    settings: dict[str, str]
    """What all peers must agree on, as text."""
    round_deadline_s: float
    frozen: str = ""
    """Digest of what this rank holds of the parameters that are not trained."""
    delta_bytes: int = 0
    """The most that a delta of this rank has: the rendezvous must have room for those of all peers at once."""
    protocol: int = 0
    """0 for releases before protocol 3, which did not send it."""


class Beat(FromRank, frozen=True, tag="beat"):
    training: bool
    """False while it joins: rounds do not wait for it."""
    inner_steps: int = 0
    """Taken since its start: while the number stays, no second round waits for this peer."""


class DeltaOffer(Message, frozen=True, tag="offer"):
    header: Header
    instance: int
    """As in its hello."""


class BodyChunk(Message, frozen=True, tag="chunk"):
    name: str
    offset: int
    data: bytes
    instance: int


class AskRound(FromRank, frozen=True, tag="ask_round"):
    """Whose deltas made up the outer step."""


class AskState(FromRank, frozen=True, tag="ask_state"):
    attempt: int
    """Which of this process's joins it is for; the same on all ranks."""


class Get(Message, frozen=True, tag="get"):
    name: str
    offset: int
    length: int


class Unusable(Message, frozen=True, tag="unusable"):
    peer: str
    """The sender."""
    instance: int
    serial: int
    reason: str


class PeerWelcome(Message, frozen=True, tag="welcome"):
    beat_s: float
    """Seconds between beats."""


class BeatReply(Message, frozen=True, tag="beat_reply"):
    known: bool
    """False: send a hello (again); the rendezvous was restarted."""
    open_round: int | None
    left_s: float | None
    """Until the open round's deadline."""
    state_wanted: int
    """Serial of a request for this rank's part of the state; 0 for none."""


class Received(Message, frozen=True, tag="received"):
    name: str
    size: int
    """Bytes so far, from the first."""


class RoundClosed(Message, frozen=True, tag="closed"):
    outer_step: int


class Gone(Message, frozen=True, tag="gone"):
    """What was requested does not exist and never will: rejoin."""

    reason: str


class RoundNotReady(Message, frozen=True, tag="not_ready"):
    waiting_for: str


class RoundOutcome(Message, frozen=True, tag="outcome"):
    outer_step: int
    headers: list[Header]
    """This rank's part of the contributions, sorted by peer."""
    newest: int
    """The last closed round: more outcomes are available up to it."""
    digest: str
    """Hash of all ranks' headers: ranks that got different outcomes notice."""


class Current(Message, frozen=True, tag="current"):
    """The peer's own state will do: it is the others', can catch up from rounds that are kept, or the peer is alone."""

    newest: int
    """The last closed round; -1 for none."""


class StateReady(Message, frozen=True, tag="state_ready"):
    header: Header
    newest: int


class Piece(Message, frozen=True, tag="piece"):
    name: str
    offset: int
    data: bytes


class RequestRefused(Message, frozen=True, tag="refused"):
    error: str


FromPeer = PeerHello | Beat | DeltaOffer | BodyChunk | AskRound | AskState | Get | Unusable
ToPeer = (
    PeerWelcome | BeatReply | Received | RoundClosed | Gone | RoundNotReady | RoundOutcome | Current | StateReady
    | Piece | RequestRefused
)  # fmt: skip

_FROM_PEER, _TO_PEER = msgspec.msgpack.Decoder(FromPeer), msgspec.msgpack.Decoder(ToPeer)
encode = msgspec.msgpack.Encoder().encode


def from_peer(raw: bytes) -> FromPeer:
    """Raises WireError when `raw` is not a request."""
    return _decoded(_FROM_PEER, raw)


def to_peer(raw: bytes) -> ToPeer:
    """Raises WireError when `raw` is not an answer."""
    return _decoded(_TO_PEER, raw)


def _decoded(decoder: msgspec.msgpack.Decoder, raw: bytes):
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(f"{len(raw)} bytes are not a message of protocol {PROTOCOL}: {error}") from None
