"""How a machine that has only an invite becomes a node of a run.

    orchestrator invite --> one string: addresses, the run's keys, an expiry, a one-time secret
    node --Enroll, under the invite's key pair--> gateway --Enrolled | Rejected--> node
    node --ChunkRequest, under its own key pair--> gateway          model files, weights; then NodeHello as any node

A node draws its own pair, keeps it, and sends the public half. Whoever holds an invite's pair may send an Enroll and
nothing else. A node that enrolled before asks again under its own key, to learn the newest version.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.metadata
import json
import re
import shlex
from typing import Annotated, Self

import msgspec
import zmq
from msgspec import Meta
from zmq.utils import z85

from composer_prime.address import tcp_address
from composer_prime.console import GIB
from composer_prime.errors import ConfigError, InviteError
from composer_prime.run.keys import ClientKeys, CurvePair

PROTOCOL = 5
"""Raised with every change of messages that an older release would misread. 5: prompts are whole, and an answer and its
parts are one message."""
INVITE_VARIABLE = "COMPOSER_INVITE"
INVITE_PREFIX = "cpi2."
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A name that a shell, a page and a file system take as it is."""
_CHECK_BYTES = 4

Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Word = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[ -~]*$")]
Key = Annotated[bytes, Meta(min_length=40, max_length=40)]


def release() -> str:
    """Return the installed version of composer-prime."""
    return importlib.metadata.version("composer-prime")


def release_package() -> str | None:
    """Return what uv installs on another machine to have this release; None where only this machine has it."""
    return package_of(importlib.metadata.distribution("composer-prime").read_text("direct_url.json"))


def package_of(direct_url: str | None) -> str | None:
    """Return the same for the direct_url.json of an installation; None: it came from an index."""
    if direct_url is None:
        return f"composer-prime=={release()}"
    origin = json.loads(direct_url)
    url, vcs = origin["url"], origin.get("vcs_info")
    if url.startswith("file:"):
        return None
    return f"composer-prime @ {vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else f"composer-prime @ {url}"


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    name: Word
    memory: Bytes


class NodeMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node found where it runs."""

    gpus: Annotated[list[Gpu], Meta(max_length=64)]
    driver: Annotated[str, Meta(max_length=40)]
    """The newest CUDA that the driver knows, such as `12.8`; empty without a driver."""
    memory: Bytes
    disk: Bytes
    """Free where the node keeps its files."""
    cores: Annotated[int, Meta(ge=1, le=1 << 14)]

    def __str__(self) -> str:
        gpus = ", ".join(f"{gpu.name} {gpu.memory / GIB:.0f} GiB" for gpu in self.gpus) or "no GPU"
        driver = f", CUDA {self.driver}" if self.driver else ""
        return f"{gpus}{driver}, {self.cores} cores, {self.memory / GIB:.1f} GiB memory, {self.disk / GIB:.1f} GiB disk"


class Enroll(msgspec.Struct, frozen=True, kw_only=True, tag="enroll"):
    run_id: Annotated[str, Meta(max_length=400)]
    release: Word
    protocol: int
    key: Key
    """The node's own public key, Z85."""
    name: Word
    """The name that it would like."""
    machine: NodeMachine


class Enrolled(msgspec.Struct, frozen=True, kw_only=True, tag="enrolled"):
    """What a node needs besides weights."""

    node_id: str
    """The node's name from now on."""
    model: bytes
    """The signed ModelFiles (composer_prime/run/weights.py)."""
    manifest: bytes
    """The newest signed weight manifest, empty while none is published."""
    max_context: int
    inference: bytes
    """The run's [inference] table as JSON, without what concerns the host of the run only."""
    sources: list[str] = []
    """As in NodeWelcome: copies of the weight store besides this link."""


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """What the string holds. Whoever has it can enroll nodes: hand it over as you would a password."""

    addresses: list[str]
    """HOST:PORT, tried in turn."""
    server: bytes
    """The gateway's CURVE key, 32 bytes."""
    secret: bytes
    """The secret half of the invite's own CURVE pair, 32 bytes."""
    verify_key: bytes
    """ed25519 key that signs manifests, 32 bytes."""
    run_id: str
    release: str
    protocol: int
    expires: int
    """Unix seconds."""
    package: str = ""
    """What uv installs to have the run's release; empty where that is not known."""

    @property
    def keys(self) -> ClientKeys:
        """The gateway's key and the invite's pair."""
        secret = z85.encode(self.secret)
        return ClientKeys(z85.encode(self.server), CurvePair(zmq.curve_public(secret), secret))

    def text(self) -> str:
        """Return the string."""
        body = msgspec.msgpack.encode(self)
        check = hashlib.sha256(body).digest()[:_CHECK_BYTES]
        return INVITE_PREFIX + base64.urlsafe_b64encode(check + body).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises InviteError for a string that is cut short, altered, or of another release."""
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
                f"the invite of {len(text)} characters was cut or altered ({error}): copy the line whole, from "
                f"{INVITE_PREFIX!r} to its end"
            ) from None
        run, node = (invite.release, invite.protocol), (release(), PROTOCOL)
        if run != node:
            raise InviteError(other_release(run, node, invite.package))
        return invite


def other_release(run: tuple[str, int], node: tuple[str, int], package: str | None) -> str:
    """Return that run and node have other releases and protocols, and the remedy. `package`: as in Invite."""
    remedy = f", such as with `uvx --from {shlex.quote(package)} inference join ...`" if package else ""
    return (
        f"the run has composer-prime {run[0]} (protocol {run[1]}), this node {node[0]} (protocol {node[1]}): install "
        f"the run's release{remedy}"
    )
