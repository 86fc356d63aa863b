"""The joint run's key: one file that every cluster holds, from which all other keys are derived.

    run key (32 random bytes) ──blake2b──┬─ CURVE pair of the rendezvous     peers authenticate it
                                         ├─ CURVE pair of the peers          the rendezvous admits nobody else
                                         └─ authentication key of headers    nothing relayed can be altered

Whoever holds the key is a peer: it can train, and it can send bad deltas. Peers are not protected from one another
beyond the guards; see docs/explanation/security.md.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from composer_prime.errors import ConfigError
from composer_prime.run.keys import ClientKeys, CurvePair

_SIZE = 32


@dataclass(frozen=True, slots=True)
class JointKey:
    raw: bytes
    """32 bytes."""

    @classmethod
    def create(cls, path: Path) -> JointKey:
        """Write a new key to `path`, mode 0600. Raises ConfigError when the file exists."""
        raw = secrets.token_bytes(_SIZE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists and a joint run keeps its key: remove it to make a new one") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw.hex().encode() + b"\n")
        return cls(raw)

    @classmethod
    def read(cls, path: Path) -> JointKey:
        """Raises ConfigError when `path` is missing, is not a key, or is readable by others on this machine."""
        path = path.expanduser()
        try:
            text, mode = path.read_bytes().strip(), path.stat().st_mode
        except FileNotFoundError:
            raise ConfigError(
                f"key file {path} is missing: make it once with `diloco keygen {path}`, then copy it to every cluster"
            ) from None
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
        if mode & 0o077:
            raise ConfigError(f"key file {path} has mode {mode & 0o777:o}, others may read it: chmod 600 {path}")
        try:
            raw = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            raw = b""
        if len(raw) != _SIZE:
            raise ConfigError(f"key file {path} does not hold {_SIZE} bytes in hexadecimal: copy it again, whole")
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
