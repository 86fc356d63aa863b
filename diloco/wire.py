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

Every request may be repeated: the answer to the second is that to the first. Headers are authenticated with a key that
is derived from the run's, and name the body's hash, run, peer, outer step and the global model that they start from: a
relay without the key cannot alter a delta, and nobody can replay one in another round.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from composer_prime.errors import ChecksumError, RunMismatchError, WireError
from diloco.layout import TensorLayout

PROTOCOL = 3


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a blob is. `kind` is delta or state."""

    protocol: int = PROTOCOL
    kind: str
    run: str
    peer: str
    rank: int
    outer_step: int
    """delta: the step it contributes to; state: steps that it has behind it."""
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
        """Of the blob at the rendezvous."""
        number = self.outer_step if self.kind == "delta" else self.serial
        return f"{self.kind}/{number}/{self.peer}/{self.rank}"


class RunningChecksum:
    """The checksum of a body whose pieces come one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        self._hash.update(piece)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def checksum(body: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(body, digest_size=32).hexdigest()


def sealed(header: Header, key: bytes) -> Header:
    """`header` with a fresh nonce and its authentication code."""
    header = msgspec.structs.replace(header, nonce=secrets.token_hex(16))
    return msgspec.structs.replace(header, mac=_mac(header, key))


def authenticate(header: Header, key: bytes, *, run: str) -> None:
    """Raises RunMismatchError (another run or release) or ChecksumError (not made with the run's key)."""
    if header.protocol != PROTOCOL:
        raise RunMismatchError(f"{header.peer} speaks protocol {header.protocol}, this is {PROTOCOL}: use one release")
    if header.run != run:
        raise RunMismatchError(f"{header.peer} sends for run {header.run!r}, this is {run!r}: check diloco.run")
    if not hmac.compare_digest(header.mac.encode(), _mac(header, key).encode()):
        raise ChecksumError(f"the header of {header.name} was not made with this run's key, or was altered on the way")


def check_body(header: Header, size: int, found: str) -> None:
    """Raises ChecksumError when a body of `size` bytes with checksum `found` is not what the header says."""
    if size != header.size or found != header.checksum:
        raise ChecksumError(
            f"{header.name}: {size} bytes with hash {found[:16]}..., its header says {header.size} bytes "
            f"with {header.checksum[:16]}...: damaged on the way"
        )


def _mac(header: Header, key: bytes) -> str:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(header, mac=""))
    return hashlib.blake2b(raw, key=key, digest_size=32).hexdigest()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what follows."""


class Hello(Message, tag="hello"):
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


class Offer(Message, tag="offer"):
    header: Header
    instance: int
    """Which start of the peer brings it; as in its hello."""


class Chunk(Message, tag="chunk"):
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


class Welcome(Message, tag="welcome"):
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


class Closed(Message, tag="closed"):
    outer_step: int


class Gone(Message, tag="gone"):
    """What was asked for is not there and will not be: join anew."""

    reason: str


class NotReady(Message, tag="not_ready"):
    waiting_for: str


class Outcome(Message, tag="outcome"):
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


class Refused(Message, tag="refused"):
    error: str


FromPeer = Hello | Beat | Offer | Chunk | AskRound | AskState | Get | Unusable
ToPeer = Welcome | BeatReply | Received | Closed | Gone | NotReady | Outcome | Current | StateReady | Piece | Refused

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
