"""What a blob (a delta, or a state) is, and who made it: its header, sealed with a key that is derived from the run's.

A header names the body's hash, run, peer, outer step and the global model that it starts from, and no two are the same:
a relay without the key cannot alter a delta, and nobody can replay one in another round.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from composer_prime.errors import ChecksumError, RunMismatchError

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


def body_checksum(body: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(body, digest_size=32).hexdigest()


def seal_header(header: Header, key: bytes) -> Header:
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
