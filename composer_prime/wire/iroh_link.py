"""Carry the node link over iroh: QUIC between Ed25519 identities, which finds a way through NAT where there is one.

    node: Tunnel --QUIC, the run's identity pinned--> IrohLeg in the run's host --> the gateway's node port

What passes is CURVE from the node to the gateway, as on a direct link. The run's identity follows from its signing key.
Each stream begins with the pass from the invite (tunnel.py). An address such as `iroh` leaves it to the servers of n0,
the authors of iroh, to find the host and to introduce both sides; they see addresses, and ciphertext where no direct
way is found. `iroh@HOST:PORT` asks nobody: nodes send to that UDP port.

Needs the extra `iroh`, which is imported at the first use.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import ipaddress
import logging
import re
from contextlib import suppress
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from composer_prime.address import Address, reachable, tcp_address
from composer_prime.errors import ConfigError, DeadlineError
from composer_prime.run.retry import backoff_s
from composer_prime.wire.tunnel import Stream, cancel_all, connect_tcp, join_streams, signed_text, spawn

logger = logging.getLogger(__name__)

_PROTOCOL = b"composer-prime/node-link/1"
_NAME = re.compile(r"iroh:(?P<id>[0-9a-f]{64})(?:@(?P<address>.+))?")
_CONNECT_S, _GREETING_S, _FLUSH_S = 8.0, 10.0, 5.0
_MAX_STREAMS = 1024
_PASS_BYTES = 64


def is_iroh(relay: str) -> bool:
    return relay.startswith("iroh")


def iroh_identity(signer: Ed25519PrivateKey) -> Ed25519PrivateKey:
    """Return the key of the run's endpoint. Who has it cannot sign for the run."""
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(b"composer-prime iroh identity" + signer.private_bytes_raw()).digest()
    )


def iroh_name(where: str, signer: Ed25519PrivateKey) -> str:
    """Return what an invite says for `where`, `iroh` or `iroh@HOST:PORT`: iroh:ID or iroh:ID@HOST:PORT."""
    return where.replace("iroh", f"iroh:{iroh_identity(signer).public_key().public_bytes_raw().hex()}", 1)


def check_iroh_name(name: str) -> tuple[str, Address | None]:
    """Return identity and UDP address of what `iroh_name` made. Raises ConfigError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name[:100]!r} is no iroh address; expected iroh:ID or iroh:ID@HOST:PORT")
    return match["id"], iroh_address(match["address"]) if match["address"] else None


def iroh_address(text: str) -> Address:
    """Return IP:PORT, UDP. Raises ConfigError, also for a host name, which iroh does not look up."""
    address = tcp_address(text, "the iroh address", scheme="")
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        raise ConfigError(f"the iroh address is {text!r}: {address.host!r} is no IP address") from None
    return address


def load_iroh() -> Any:
    """Return the module. Raises ConfigError without the extra."""
    try:
        import iroh
        from iroh import iroh_ffi
    except ImportError as error:
        raise ConfigError(f"iroh is not installed here ({error}): install composer-prime[iroh]") from None
    builder = getattr(iroh_ffi, "_UniffiRustBufferBuilder", None)
    if builder is not None:
        builder.write = _write_at_once
    return iroh


def _write_at_once(self: Any, value: bytes) -> None:
    """Copy bytes to Rust in one call. The bindings' own loop over single bytes reaches 3 MB/s."""
    value = bytes(value)
    with self._reserve(len(value)):
        ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, value, len(value))


def _text(error: Exception) -> str:
    message = getattr(error, "message", None)
    return str(message() if callable(message) else error) or type(error).__name__


class _IrohStream:
    """A QUIC stream, alone in its connection, as reader and writer."""

    def __init__(self, connection: Any, stream: Any) -> None:
        self._connection = connection
        self._sender, self._receiver = stream.send(), stream.recv()
        self._unsent = b""
        self._closing: asyncio.Task[None] | None = None

    async def read(self, n: int = -1, /) -> bytes:
        try:
            return await self._receiver.read(n)
        except load_iroh().IrohError as error:
            raise ConnectionError(_text(error)) from None

    def write(self, data: bytes, /) -> None:
        self._unsent += data

    async def drain(self) -> None:
        data, self._unsent = self._unsent, b""
        try:
            await self._sender.write_all(data)
        except load_iroh().IrohError as error:
            raise ConnectionError(_text(error)) from None

    def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        """Let what was sent arrive: closing the connection drops it."""
        with suppress(Exception):
            async with asyncio.timeout(_FLUSH_S):
                await self._sender.finish()
                await self._sender.stopped()
        self._connection.close(0, b"")


class IrohDialer:
    """A node's endpoint, made at the first `dial`."""

    def __init__(self, name: str, proof: bytes) -> None:
        """`name`: as in the invite. Raises ConfigError."""
        self._name = name
        self._id, self._address = check_iroh_name(name)
        self._proof = proof
        self._endpoint: Any = None

    async def dial(self) -> Stream:
        """Raises DeadlineError or ConnectionError."""
        try:
            iroh = load_iroh()
        except ConfigError as error:
            raise ConnectionError(str(error)) from None
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._endpoint is None:
                    preset = iroh.preset_minimal() if self._address else iroh.preset_n0()
                    self._endpoint = await iroh.Endpoint.bind(iroh.EndpointOptions(preset=preset))
                addresses = [str(self._address)] if self._address else []
                target = iroh.EndpointAddr(iroh.EndpointId.from_string(self._id), None, addresses)
                connection = await self._endpoint.connect(target, _PROTOCOL)
                stream = _IrohStream(connection, await connection.open_bi())
                stream.write(self._proof)
                await stream.drain()
        except TimeoutError:
            raise DeadlineError(f"{self._name} did not answer within {_CONNECT_S:g} s") from None
        except iroh.IrohError as error:
            raise ConnectionError(f"{self._name}: {_text(error)}") from None
        return stream, stream

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()


class IrohLeg:
    """The run's host as an iroh endpoint, from `run` until it is cancelled."""

    def __init__(self, where: str, signer: Ed25519PrivateKey, node_endpoint: str) -> None:
        """`where`: iroh or iroh@HOST:PORT. `node_endpoint`: tcp://HOST:PORT as the gateway bound it."""
        self.state = "connecting"
        self._address = iroh_address(where.removeprefix("iroh@")) if "@" in where else None
        self._signer = signer
        self._target = tcp_address(reachable(node_endpoint), "the node port")
        self._streams: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                await self._serve()
                self.state = "its endpoint was closed"
            except Exception as error:  # Of bindings; the run goes on without.
                self.state = _text(error)
            pause_s = backoff_s(failures, first_s=1.0, longest_s=60.0)
            failures += 1
            logger.warning("no node joins through iroh, again in %g s: %s", pause_s, self.state)
            await asyncio.sleep(pause_s)

    async def _serve(self) -> None:
        iroh = load_iroh()
        preset = iroh.preset_minimal() if self._address else iroh.preset_n0()
        bind = None
        if self._address is not None:
            bind = str(Address("::" if self._address.is_ipv6 else "0.0.0.0", self._address.port))
        key = iroh_identity(self._signer).private_bytes_raw()
        options = iroh.EndpointOptions(preset=preset, bind_addr=bind, secret_key=key, alpns=[_PROTOCOL])
        endpoint = await iroh.Endpoint.bind(options)
        self.state = "registered"
        logger.info("nodes can join through iroh at %s", ", ".join(endpoint.bound_sockets()))
        try:
            while (incoming := await endpoint.accept_next()) is not None:
                if len(self._streams) < _MAX_STREAMS:
                    spawn(self._carry(incoming), self._streams)
        finally:
            await cancel_all(self._streams)
            await endpoint.close()

    async def _carry(self, incoming: Any) -> None:
        connection = None
        try:
            async with asyncio.timeout(_GREETING_S):
                connection = await (await incoming.accept()).connect()
                connection.set_max_concurrent_uni_streams(0)
                stream = await connection.accept_bi()
                proof = await stream.recv().read_exact(_PASS_BYTES)
                self._signer.public_key().verify(proof, signed_text(None))
                near = await connect_tcp(self._target, f"the node port {self._target}")
        except (load_iroh().IrohError, InvalidSignature, OSError, DeadlineError) as error:
            logger.warning("a node's stream through iroh was not joined: %s", _text(error))
            if connection is not None:
                connection.close(1, b"refused")
            return
        far = _IrohStream(connection, stream)
        await join_streams((far, far), near)
