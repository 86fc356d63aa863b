"""Keys of a run: a CURVE pair for each side of the wire, and an ed25519 pair that signs weight manifests.

All are files of mode 0600 in the run directory's keys/. None is ever part of a configuration or a log.

    server.curve, node.curve, trainer.curve    pairs; the server's secret stays on its machine
    node.token, trainer.token  for a process elsewhere: the server's public key and its own pair
    signing.ed25519                            the trainer's; the orchestrator gives nodes its public half
    operator.token                             for commands that steer a live run: `orchestrator nodes`, ban, ...
    nodes.sqlite                               invites and the nodes that joined by them (node_registry.py)
"""

from __future__ import annotations

import base64
import os
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from composer_prime.errors import ConfigError
from composer_prime.run.node_registry import NodeRegistry

_PREFIX = "cp1."
_CLIENTS = ("node", "trainer")


@dataclass(frozen=True, slots=True)
class CurvePair:
    """A CURVE key pair, each key 40 characters of Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def read(cls, path: Path) -> CurvePair:
        """Read a .curve file, as `read_secret`."""
        raw = read_secret(path, 80)
        return cls(raw[:40], raw[40:])


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a connecting process needs: the server's public key and its own pair."""

    server_public: bytes
    own: CurvePair

    def token(self) -> str:
        """Return these keys as one word."""
        return _PREFIX + base64.urlsafe_b64encode(self.server_public + self.own.public + self.own.secret).decode()

    @classmethod
    def from_token(cls, token: str) -> ClientKeys:
        """Read what `token()` wrote. Raises ConfigError for anything else."""
        text = token.strip()
        try:
            if not text.startswith(_PREFIX):
                raise ValueError(f"does not start with {_PREFIX!r}")
            raw = base64.urlsafe_b64decode(text.removeprefix(_PREFIX))
            if len(raw) != 120:
                raise ValueError(f"holds {len(raw)} bytes, expected 120")
        except ValueError as error:
            raise ConfigError(f"the token {error}; copy it whole from the orchestrator's run directory") from None
        return cls(raw[:40], CurvePair(raw[40:80], raw[80:]))


def write_secret(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file that only its owner reads, unless it exists; of several writers the first's stays. Raises OSError.

    With `replace` the last one's stays.
    """
    if not replace and path.exists():  # also on a full disk
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        if not replace:
            os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a disk without links
        replace = not path.exists()
    if replace:
        partial.replace(path)
    partial.unlink(missing_ok=True)


def read_secret(path: Path, size: int | None = None) -> bytes:
    """Return the bytes of a secret, `size` of them.

    Raises FileNotFoundError, and ConfigError for a file that others can read or have made, a link, and another size.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _check_private(path, os.fstat(file.fileno()), 0o077)
            data = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    if size is not None and len(data) != size:
        raise ConfigError(f"key file {path} holds {len(data)} bytes, expected {size}: copy it again, whole")
    return data


def _check_private(path: Path, status: os.stat_result, forbidden: int) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {status.st_uid}, who could choose the keys: remove it")
    if status.st_mode & forbidden:
        what, wanted = ("write", "go-w") if stat.S_ISDIR(status.st_mode) else ("read", "600")
        fault = f"{path} has mode {status.st_mode & 0o777:o}, others may {what} it"
        remedy = f"chmod {wanted} {shlex.quote(str(path))}, or where that changes nothing, take another disk"
        raise ConfigError(f"{fault}: {remedy} (run.output_dir)")


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The key files of one run directory."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> RunKeys:
        """Create the keys that `folder` lacks; the others stay valid."""
        keys = cls(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder, folder.stat(), 0o022)
        for name in ("server", *_CLIENTS):
            write_secret(folder / f"{name}.curve", b"".join(zmq.curve_keypair()))
        write_secret(folder / "signing.ed25519", Ed25519PrivateKey.generate().private_bytes_raw())
        for name in _CLIENTS:
            client = ClientKeys(keys.curve("server").public, keys.curve(name))
            write_secret(folder / f"{name}.token", client.token().encode() + b"\n", replace=True)
        return keys

    def curve(self, name: str) -> CurvePair:
        """Return the pair `server`, or that of a client. Raises ConfigError when its file is missing."""
        path = self.folder / f"{name}.curve"
        try:
            return CurvePair.read(path)
        except FileNotFoundError:
            raise ConfigError(f"key file {path} is missing: start the run with `trainer @ file.toml`") from None

    def client(self, name: str) -> ClientKeys:
        """Return the keys of a client of the wire. Raises ConfigError when its token is missing or damaged."""
        path = self.folder / f"{name}.token"
        try:
            return ClientKeys.from_token(read_secret(path).decode(errors="replace"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing: start the run with `trainer @ file.toml`, or copy it from the "
                "orchestrator's run directory"
            ) from None

    def operator_token(self) -> str:
        """Return the token of commands that steer the run, made by the first call."""
        path = self.folder / "operator.token"
        write_secret(path, secrets.token_urlsafe(24).encode() + b"\n")
        return read_secret(path, 33).decode().strip()

    def signer(self) -> Ed25519PrivateKey:
        """Return the key with which the trainer signs weight manifests."""
        return Ed25519PrivateKey.from_private_bytes(read_secret(self.folder / "signing.ed25519", 32))

    @property
    def registry(self) -> NodeRegistry:
        """Nodes with keys of their own."""
        return NodeRegistry(self.folder)

    def verifier(self) -> Ed25519PublicKey:
        return self.signer().public_key()
