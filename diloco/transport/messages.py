"""What travels between trainer ranks and the rendezvous (ZMQ, msgpack, CURVE). No torch here.

    PeerHello ----> BeatReply | RoundNotReady  run, layout and settings must be those of the others
    Beat ---------> BeatReply | Gone           alive; is a round open, is this peer's state wanted
    DeltaOffer ---> Received | RoundNotReady | Gone     the header of a blob; its bytes may come, from this one on
    Piece --------> Received | Gone            some of its bytes
    AskRound -----> RoundOutcome | RoundNotReady | Gone     whose deltas make up an outer step
    AskState -----> StartingState | RoundNotReady     whose state to join with, once all ranks have asked
    Get ----------> Piece | Gone               some bytes of a blob that another peer offered
    (any) --------> RequestRefused             does not belong here, and why

Every request may be repeated: the answer to the second is that to the first.

A blob is a delta or a state. Its header names the body's hash, run, peer, outer step and base.
It is sealed with a key derived from the run's, and no two are the same:
a relay without the key cannot alter a delta, and no one can replay one in another round.

    run key (32 random bytes) --blake2b--+- CURVE pair of the rendezvous     peers authenticate it
                                         +- CURVE pair of the peers          the rendezvous admits nobody else
                                         +- authentication key of headers    nothing relayed can be altered

Whoever holds the key is a peer; see docs/explanation/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from msgspec import Meta
from msgspec.structs import replace
from zmq.utils import z85

from composer_prime.errors import ChecksumError, ConfigError, RunMismatchError, WireError
from composer_prime.run.keys import ClientKeys, CurvePair, read_secret, write_secret

PROTOCOL = 7
Count = Annotated[int, Meta(ge=0)]
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class JointKey:
    raw: bytes

    @classmethod
    def create(cls, path: Path) -> JointKey:
        """Write a new key to `path`, mode 0600. Raises ConfigError when the file exists."""
        if path.exists():
            raise ConfigError(f"{path} exists and a joint run keeps its key: remove it to make a new one")
        write_secret(path, secrets.token_bytes(_KEY_BYTES).hex().encode() + b"\n")
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> JointKey:
        """Raises ConfigError when `path` is missing, is not a key, or is readable by others. A link is followed."""
        path = path.expanduser().resolve()  # Secrets of a cluster are mounted as links.
        try:
            text = read_secret(path)
        except FileNotFoundError:
            raise ConfigError(
                f"key file {path} is missing: make it once with `diloco keygen {path}`, then copy it to every cluster"
            ) from None
        try:
            raw = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            raw = b""
        if len(raw) != _KEY_BYTES:
            raise ConfigError(f"key file {path} does not hold {_KEY_BYTES} bytes in hexadecimal: copy it again, whole")
        return cls(raw)

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes that are different for each purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.raw, digest_size=32).digest()

    def server(self) -> CurvePair:
        return self._pair("rendezvous")

    def client(self) -> ClientKeys:
        return ClientKeys(self.server().public, self._pair("peer"))

    def _pair(self, purpose: str) -> CurvePair:
        secret = z85.encode(self.derive(purpose))
        return CurvePair(zmq.curve_public(secret), secret)


# -- headers -----------------------------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    peer: str
    rank: Count
    outer_step: Count
    """delta: the step it contributes to; state: the steps that it holds."""
    base_hash: str
    """Hash of this rank's global values at outer_step."""
    layout_hash: str
    size: Count
    checksum: str
    """blake2b-256 of the body, hexadecimal."""
    nonce: str = ""
    """16 random bytes, so that no two headers are the same."""
    mac: str = ""


class DeltaHeader(Header, frozen=True, kw_only=True, tag="delta"):
    fragment: Count
    codec: str
    weight: float
    """What the delta counts by: tokens, samples or 1."""
    inner_steps: Count

    @property
    def name(self) -> str:
        return f"delta/{self.outer_step}/{self.peer}/{self.rank}"


class StateHeader(Header, frozen=True, kw_only=True, tag="state"):
    serial: Count
    """The request that it answers."""

    @property
    def name(self) -> str:
        return f"state/{self.serial}/{self.peer}/{self.rank}"


BlobHeader = DeltaHeader | StateHeader


def body_checksum(body: bytes | bytearray | memoryview) -> str:
    return running_checksum(body).hexdigest()


def running_checksum(body: bytes | bytearray | memoryview = b"") -> hashlib.blake2b:
    """Return the hash of a body whose further pieces come by `update`."""
    return hashlib.blake2b(body, digest_size=32)


def seal_header(header: BlobHeader, key: bytes) -> BlobHeader:
    """Return `header` with a fresh nonce and its authentication code."""
    header = replace(header, nonce=secrets.token_hex(16))
    return replace(header, mac=_mac(header, key))


def authenticate(header: BlobHeader, key: bytes, *, run: str) -> None:
    """Raises RunMismatchError for another run, ChecksumError for another key."""
    if header.run != run:
        raise RunMismatchError(f"{header.peer} sends for run {header.run!r}, this is {run!r}: check diloco.run")
    if not hmac.compare_digest(header.mac.encode(), _mac(header, key).encode()):
        raise ChecksumError(f"the header of {header.name} was not made with this run's key, or was altered on the way")


def check_body(header: BlobHeader, size: int, checksum: str) -> None:
    if size != header.size or checksum != header.checksum:
        raise ChecksumError(
            f"{header.name}: {size} bytes with hash {checksum[:16]}..., its header has {header.size} bytes "
            f"with {header.checksum[:16]}...: damaged on the way"
        )


def _mac(header: BlobHeader, key: bytes) -> str:
    raw = msgspec.msgpack.encode(replace(header, mac=""))
    return hashlib.blake2b(raw, key=key, digest_size=32).hexdigest()


# -- layouts: what peers must have in common ----------------------------------------------------------------------

_DELTA_BYTES, _STATE_BYTES, _MORE_BYTES = 5, 13, 1 << 21
"""Most bytes a parameter, and of a last block and names."""


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one parameter, as far as peers must agree."""

    name: str
    shape: list[int]
    local_shape: list[int]
    """Of this rank's shard; equal to `shape` without sharding."""
    fragment: int


def largest_body(tensors: Sequence[TensorLayout], header: BlobHeader) -> int:
    """Return the most bytes of a delta of this fragment, or of a state."""
    fragment = header.fragment if isinstance(header, DeltaHeader) else None
    count = sum(math.prod(each.local_shape) for each in tensors if fragment in (None, each.fragment))
    return _MORE_BYTES + count * (_STATE_BYTES if fragment is None else _DELTA_BYTES)


def layout_hash(tensors: Sequence[TensorLayout]) -> str:
    """Return the blake2b-128 of a layout, hexadecimal."""
    return hashlib.blake2b(msgspec.json.encode(list(tensors)), digest_size=16).hexdigest()


def difference(ours: Sequence[TensorLayout], theirs: Sequence[TensorLayout]) -> str:
    """Return the first parameter that differs; empty when none does."""
    mine, other = ({each.name: each for each in side} for side in (ours, theirs))
    differing = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
    if not differing:
        return ""
    name = min(differing, key=lambda name: (name in mine and name in other, name))
    here, there = (
        f"shape {each.shape}, shard {each.local_shape}, fragment {each.fragment}" if each else "not trained"
        for each in (mine.get(name), other.get(name))
    )
    return f"parameter {name}: {here} here, {there} there"


# -- requests and answers ----------------------------------------------------------------------------------------


class FromRank(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself."""

    peer: str
    rank: Count
    instance: int
    """Random, the same on all ranks of one start of a peer."""
    outer_step: Count
    base_hash: str


class PeerHello(FromRank, frozen=True, kw_only=True, tag="hello"):
    run: str
    ranks: Count
    training: bool
    layout: list[TensorLayout]
    settings: dict[str, str]
    round_deadline_s: Annotated[float, Meta(gt=0)]
    delta_bytes: Count = 0
    """The most that a delta of this rank has."""
    protocol: int


class Beat(FromRank, frozen=True, kw_only=True, tag="beat"):
    training: bool
    """False while it joins: rounds do not wait for it."""
    inner_steps: Count = 0
    """Taken since its start."""


class DeltaOffer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    header: BlobHeader
    instance: int
    """As in its hello."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """Some bytes of a blob, in either direction."""

    name: str
    offset: Count
    data: bytes
    instance: int = 0
    """As in the hello of the peer that sends it; 0 from the rendezvous."""


class AskRound(FromRank, frozen=True, kw_only=True, tag="ask_round"):
    """Whose deltas made up the outer step."""


class AskState(FromRank, frozen=True, kw_only=True, tag="ask_state"):
    attempt: int
    """Which of this process's joins it is for."""
    refused: int = 0
    """Serial of a state that this rank could not take over."""
    reason: str = ""


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    name: str
    offset: Count
    length: Count


class BeatReply(msgspec.Struct, frozen=True, kw_only=True, tag="beat_reply"):
    beat_s: float
    """Seconds between beats."""
    open_round: int | None = None
    left_s: float | None = None
    """Until the open round's deadline."""
    state_wanted: int = 0
    """Serial of a request for this rank's state; 0 for none."""


class Received(msgspec.Struct, frozen=True, kw_only=True, tag="received"):
    size: int
    """Bytes of the blob so far, from the first."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """It does not exist and never will: say hello, or rejoin."""

    reason: str


class RoundNotReady(msgspec.Struct, frozen=True, kw_only=True, tag="not_ready"):
    waiting_for: str


class RoundOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    outer_step: int
    headers: list[DeltaHeader]
    """This rank's part of the contributions, sorted by peer."""
    newest: int
    """The last closed round."""
    digest: str
    """Hash of all ranks' headers."""


class StartingState(msgspec.Struct, frozen=True, kw_only=True, tag="starting_state"):
    newest: int
    """The last closed round; -1 for none."""
    header: StateHeader | None = None
    """None: the peer's own state will do."""


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    error: str


FromPeer = PeerHello | Beat | DeltaOffer | Piece | AskRound | AskState | Get
ToPeer = BeatReply | Received | Gone | RoundNotReady | RoundOutcome | StartingState | Piece | RequestRefused

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(raw)} bytes are not a message of protocol {PROTOCOL}: {error}") from None
