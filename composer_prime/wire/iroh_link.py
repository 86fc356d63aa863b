"""Carry the node link over iroh: QUIC between Ed25519 identities, which finds a way through NAT where there is one.

    node: Tunnel --QUIC, the run's identity pinned--> IrohLeg in the run's host --> the gateway's node port

What passes is CURVE from the node to the gateway, as on a direct link. The run's identity follows from its signing key.
Each stream begins with the pass from the invite (tunnel.py). An address such as `iroh` leaves it to the servers of n0,
the authors of iroh, to find the host and to introduce both sides; they see addresses, and ciphertext where no direct
way is found. `iroh@HOST:PORT` needs no server: nodes send to that UDP port.

Needs the extra `iroh`, which is imported at the first use.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from composer_prime.address import Address, has_share, network, tcp_address
from composer_prime.errors import ConfigError, DeadlineError, WireError
from composer_prime.wire.tunnel import (
    PASS_BYTES,
    Leg,
    RelayLeg,
    cancel_all,
    check_pass,
    connect_tcp,
    join_streams,
    spawn,
)

logger = logging.getLogger(__name__)

_PROTOCOL = b"composer-prime/node-link/1"
_NAME = re.compile(r"iroh:(?P<id>[0-9a-f]{64})(?:@(?P<address>.+))?")
_CONNECT_S, _GREETING_S, _FLUSH_S = 8.0, 10.0, 5.0
_MAX_GREETING = 64
"""Connections that may not have shown the pass. Each network gets half of what the others leave."""
_WINDOW_BYTES = 1 << 20
"""That a connection may send before it is read."""


def is_iroh(relay: str) -> bool:
    """Return whether `relay` is iroh, iroh@HOST:PORT or what `iroh_name` made of either."""
    return relay == "iroh" or relay.startswith(("iroh:", "iroh@"))


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
        raise ConfigError(f"{name[:100]!r} is not an iroh address; expected iroh:ID or iroh:ID@HOST:PORT")
    return match["id"], iroh_address(match["address"]) if match["address"] else None


def iroh_address(text: str) -> Address:
    """Return IP:PORT, UDP. Raises ConfigError, also for a host name, which iroh does not look up."""
    address = tcp_address(text, "the iroh address", scheme="")
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        raise ConfigError(f"the iroh address is {text!r}: {address.host!r} is not an IP address") from None
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


@contextmanager
def _plain_errors(name: str) -> Iterator[Any]:
    """Yield the module. Raises ConnectionError, with `name`, for an error of its own, or without the extra."""
    try:
        iroh = load_iroh()
    except ConfigError as error:
        raise ConnectionError(str(error)) from None
    try:
        yield iroh
    except iroh.IrohError as error:
        raise ConnectionError(f"{name}: {error.message()}") from None


async def _bound(iroh: Any, address: Address | None, **options: Any) -> Any:
    """Return an endpoint. Without an address, n0's servers say where the others are."""
    preset = iroh.preset_minimal() if address else iroh.preset_n0()
    return await iroh.Endpoint.bind(iroh.EndpointOptions(preset=preset, **options))


async def _end(endpoint: Any) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(endpoint.close(), _FLUSH_S)


class _IrohStream:
    """A QUIC stream, alone in its connection, as reader and sender."""

    def __init__(self, connection: Any, stream: Any) -> None:
        self._connection = connection
        self._sender, self._receiver = stream.send(), stream.recv()
        self._closing: asyncio.Task[None] | None = None

    async def read(self, n: int = -1, /) -> bytes:
        with _plain_errors("iroh"):
            return await self._receiver.read(n)

    async def send(self, data: bytes, /) -> None:
        with _plain_errors("iroh"):
            await self._sender.write_all(data)

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

    def __init__(self, name: str, relay_pass: Callable[[], bytes]) -> None:
        """`name`: as in the invite. `relay_pass`: what to show, at each dial. Raises ConfigError."""
        self._name = name
        self._id, self._address = check_iroh_name(name)
        self._relay_pass = relay_pass
        self._endpoint: Any = None
        self._binding = asyncio.Lock()

    async def dial(self) -> tuple[_IrohStream, _IrohStream]:
        """Raises DeadlineError or ConnectionError."""
        connection = None
        try:
            with _plain_errors(self._name) as iroh:
                async with asyncio.timeout(_CONNECT_S):
                    async with self._binding:
                        if self._endpoint is None:
                            self._endpoint = await _bound(iroh, self._address)
                    addresses = [str(self._address)] if self._address else []
                    target = iroh.EndpointAddr(iroh.EndpointId.from_string(self._id), None, addresses)
                    connection = await self._endpoint.connect(target, _PROTOCOL)
                    stream = _IrohStream(connection, await connection.open_bi())
                    await stream.send(self._relay_pass())
                    return stream, stream
        except BaseException as error:
            if connection is not None:
                connection.close(1, b"not used")
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self._name} did not answer within {_CONNECT_S:g} s") from None
            raise

    async def close(self) -> None:
        if self._endpoint is not None:
            await _end(self._endpoint)


class IrohLeg(Leg):
    """The run's host as an iroh endpoint, at iroh or iroh@HOST:PORT."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._greeting: Counter[str] = Counter()
        """Connections that have not shown the pass, by where they come from."""

    async def _serve(self) -> NoReturn:
        address = iroh_address(self._name.removeprefix("iroh@")) if "@" in self._name else None
        bind = str(Address("::" if address.is_ipv6 else "0.0.0.0", address.port)) if address else None
        key = iroh_identity(self._signer).private_bytes_raw()
        with _plain_errors("iroh") as iroh:
            endpoint = await _bound(iroh, address, bind_addr=bind, secret_key=key, alpns=[_PROTOCOL])
            try:
                self.state = "registered"
                logger.info("nodes can join through iroh at %s", ", ".join(endpoint.bound_sockets()))
                while (incoming := await endpoint.accept_next()) is not None:
                    try:
                        await self._admit(incoming)
                    except iroh.IrohError as error:
                        self._tell_lost(error.message())
                raise ConnectionError("iroh: its endpoint was closed")
            finally:
                await cancel_all(self._streams)
                self._greeting.clear()
                await _end(endpoint)

    async def _admit(self, incoming: Any) -> None:
        """Greet a connection if its network has a place left. A forged address takes nobody's: it cannot try again."""
        remote = await incoming.remote_addr()
        source = _source(remote)
        if not has_share(self._greeting, source, _MAX_GREETING):
            self._tell_lost(f"{self._greeting[source]} connections of {source} have not shown a pass yet")
            await incoming.refuse()
        elif remote.is_ip() and not await incoming.remote_addr_validated():
            await incoming.retry()
        elif self._start(partial(self._carry, incoming, source)):
            self._greeting[source] += 1
        else:
            await incoming.refuse()

    async def _carry(self, incoming: Any, source: str) -> None:
        connection = None
        try:
            with _plain_errors("iroh"):
                async with asyncio.timeout(_GREETING_S):
                    connection = await (await incoming.accept()).connect()
                    connection.set_max_concurrent_uni_streams(0)
                    connection.set_max_concurrent_bi_streams(1)
                    connection.set_receive_window(_WINDOW_BYTES)
                    stream = await connection.accept_bi()
                    check_pass(self._signer.public_key(), await stream.recv().read_exact(PASS_BYTES))
                    near = await connect_tcp(self._target, f"the node port {self._target}")
        except BaseException as error:
            if connection is not None:
                connection.close(1, b"refused")
            if not isinstance(error, InvalidSignature | WireError | OSError):
                raise
            if isinstance(error, InvalidSignature):
                self._tell_lost(f"{source} has no pass of this run: join with a fresh invite")
            else:
                self._tell_lost(f"{source}: {str(error) or f'no pass came within {_GREETING_S:g} s'}")
            return
        finally:
            self._greeting -= Counter({source: 1})
        far = _IrohStream(connection, stream)
        await join_streams((far, far), near)


class RelayLegs:
    """The run's host at all of its relays, and at iroh."""

    def __init__(self, signer: Callable[[], Ed25519PrivateKey]) -> None:
        """`signer` reads the run's signing key."""
        self._signer = signer
        self._legs: dict[str, tuple[Leg, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Also of legs that are ending."""
        self._open: Counter[str] = Counter()

    def update(self, relays: Iterable[str], node_endpoint: str) -> None:
        """Stay registered at exactly these, HOST:PORT or as for `IrohLeg`, for the node port at `node_endpoint`."""
        relays = set(relays)
        for relay in self._legs.keys() - relays:
            self._legs.pop(relay)[1].cancel()
        for relay in relays - self._legs.keys():
            leg = (IrohLeg if is_iroh(relay) else RelayLeg)(relay, self._signer(), node_endpoint, self._open)
            self._legs[relay] = leg, spawn(leg.run(), self._tasks)

    def states(self) -> dict[str, str]:
        return {relay: leg.state for relay, (leg, _) in self._legs.items()}

    async def close(self) -> None:
        await cancel_all(self._tasks)
        self._legs = {}


def _source(remote: Any) -> str:
    """Return what one site has of `Incoming.remote_addr`: its network, or the relay of iroh that it comes through."""
    if remote.is_ip():
        return network(remote.addr.rpartition(":")[0].strip("[]"))
    return remote.url if remote.is_relay() else "another transport"
