"""How a machine that has only an invite becomes a node of a run.

    orchestrator invite --> one string: addresses, the run's keys, an expiry, a one-time secret
    node --Enroll, under the invite's key pair--> gateway --Enrolled | Dismissed--> node
    node --ChunkRequest, under its own key pair--> gateway          model files, weights; then NodeHello as any node

A node draws its own pair and sends the public half. Whoever holds an invite's pair may send an Enroll and nothing else.
A node that enrolled before asks again under its own key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.metadata
import re
from typing import Self

import msgspec
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.utils import z85

from composer_prime.address import tcp_address
from composer_prime.errors import ConfigError, InviteError
from composer_prime.run.keys import ClientKeys, CurvePair
from composer_prime.wire.node_messages import PROTOCOL

INVITE_VARIABLE = "COMPOSER_INVITE"
INVITE_PREFIX = "cpi2."
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "one to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
"""A shell, a page and a file system take it as it is."""
_CHECK_BYTES = 4


def release() -> str:
    """Return the installed version of composer-prime."""
    return importlib.metadata.version("composer-prime")


def key_proof(secret: bytes, public: bytes, connection: bytes) -> bytes:
    """Return what only a holder of the secret of one of two CURVE pairs can make: one's own, and that of `public`.

    `connection`: the public key under which it is sent, so that nobody else can send it.
    """
    own = X25519PrivateKey.from_private_bytes(z85.decode(secret))
    shared = own.exchange(X25519PublicKey.from_public_bytes(z85.decode(public)))
    return hashlib.blake2b(connection, key=shared, digest_size=32).digest()


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """What the string holds. Whoever has it can enroll nodes: it is like a password."""

    addresses: list[str]
    """HOST:PORT, tried in turn."""
    server: bytes
    """The gateway's CURVE key, 32 bytes."""
    secret: bytes
    """Of the invite's own CURVE pair, 32 bytes."""
    verify_key: bytes
    """ed25519 key that signs manifests, 32 bytes."""
    run_id: str
    release: str
    protocol: int
    expires: int
    """Unix seconds."""

    @property
    def keys(self) -> ClientKeys:
        """(the gateway's key, the invite's pair)."""
        secret = z85.encode(self.secret)
        return ClientKeys(z85.encode(self.server), CurvePair(zmq.curve_public(secret), secret))

    def text(self) -> str:
        """Return the string."""
        body = msgspec.msgpack.encode(self)
        check = hashlib.sha256(body).digest()[:_CHECK_BYTES]
        return INVITE_PREFIX + base64.urlsafe_b64encode(check + body).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises InviteError for a string that is cut, altered, or of another release."""
        text = "".join(text.split())
        if not text.startswith(INVITE_PREFIX):
            raise InviteError(f"{text[:20]!r} is not an invite, which starts with {INVITE_PREFIX!r}. Copy all of the "
                              "output of `orchestrator invite RUN_DIR`")  # fmt: skip
        try:
            encoded = text.removeprefix(INVITE_PREFIX)
            raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
            if hashlib.sha256(raw[_CHECK_BYTES:]).digest()[:_CHECK_BYTES] != raw[:_CHECK_BYTES]:
                raise ValueError("its check sum does not match")
            invite = msgspec.msgpack.decode(raw[_CHECK_BYTES:], type=cls)
            if not all(len(key) == 32 for key in (invite.server, invite.secret, invite.verify_key)):
                raise ValueError("a key in it has the wrong length")
            if not invite.addresses:
                raise ValueError("it has no address")
            for address in invite.addresses:
                tcp_address(address, "the invite's address", scheme="")
        except (binascii.Error, msgspec.DecodeError, ConfigError, ValueError) as error:
            raise InviteError(
                f"the invite of {len(text)} characters was cut or altered ({error}): copy the line whole, "
                f"from {INVITE_PREFIX!r} to its end"
            ) from None
        run, node = (invite.release, invite.protocol), (release(), PROTOCOL)
        if run != node:
            raise InviteError(other_release(run, node))
        return invite


def other_release(run: tuple[str, int], node: tuple[str, int]) -> str:
    """Return that run and node have other releases (release, protocol), and the remedy."""
    return (
        f"the run has composer-prime {run[0]} (protocol {run[1]}), this node {node[0]} (protocol {node[1]}): "
        "install the run's release"
    )
