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
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta
from zmq.utils import z85

from composer_prime.address import tcp_address
from composer_prime.console import GIB
from composer_prime.errors import ConfigError, InviteError, SignatureError, WireError
from composer_prime.run.keys import ClientKeys, CurvePair
from composer_prime.run.weights import CHUNK_BYTES, ChunkRef, is_chunk_name, opened, sign

PROTOCOL = 4
"""Raised with every change of messages that an older release would misread. 4: an invite has no relays."""
INVITE_VARIABLE = "COMPOSER_INVITE"
INVITE_PREFIX = "cpi2."
_CHECK_BYTES = 4
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")

Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Word = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[ -~]*$")]
Key = Annotated[bytes, Meta(min_length=40, max_length=40)]


def release() -> str:
    """Return the installed version of composer-prime."""
    return importlib.metadata.version("composer-prime")


def release_package(extra: str = "") -> str | None:
    """Return what uv installs on another machine to have this release; None where only this machine has it."""
    return package_of(importlib.metadata.distribution("composer-prime").read_text("direct_url.json"), extra)


def package_of(direct_url: str | None, extra: str = "") -> str | None:
    """Return the same for the direct_url.json of an installation; None: it came from an index."""
    name = f"composer-prime[{extra}]" if extra else "composer-prime"
    if direct_url is None:
        return f"{name}=={release()}"
    origin = json.loads(direct_url)
    url, vcs = origin["url"], origin.get("vcs_info")
    if url.startswith("file:"):
        return None
    return f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else f"{name} @ {url}"


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
    """The signed ModelFiles."""
    manifest: bytes
    """The newest signed weight manifest, empty while none is published."""
    max_context: int
    inference: bytes
    """The run's [inference] table as JSON, without what concerns the host of the run only."""
    sources: list[str] = []
    """As in NodeWelcome: copies of the weight store besides this link."""


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    chunks: list[ChunkRef]

    @property
    def size(self) -> int:
        return sum(ref.size for ref in self.chunks)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True, tag="model_files"):
    """The files of the model folder: configuration and tokenizer, and the weights where versions are adapters."""

    run_id: str
    files: list[ModelFile]

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        return sign(self, key)

    @classmethod
    def open_signed(cls, raw: bytes, verify_key: bytes, *, run_id: str) -> Self:
        """Raises WireError (no such list, or a name that leaves the folder), SignatureError (not this run's)."""
        try:
            files = opened(raw, Ed25519PublicKey.from_public_bytes(verify_key), cls)
        except InvalidSignature:
            raise SignatureError(
                f"the list of model files is not signed by run {run_id!r}: join the right run with a fresh invite"
            ) from None
        except msgspec.DecodeError as error:
            raise WireError(f"{len(raw)} bytes are not a signed list of model files: {error}") from None
        if files.run_id != run_id:
            raise SignatureError(f"the list of model files belongs to run {files.run_id!r}, this is run {run_id!r}")
        for file in files.files:
            if not _FILE_NAME.fullmatch(file.name):
                raise WireError(f"model file {file.name[:80]!r} has no plain name: its run is not to be trusted")
            for ref in file.chunks:
                if not is_chunk_name(ref.sha256) or not 0 < ref.size <= CHUNK_BYTES:
                    raise WireError(f"model file {file.name} has a chunk of {ref.size} bytes, {ref.sha256[:80]!r}")
        return files


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
