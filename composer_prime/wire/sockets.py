"""ZMQ sockets with CURVE: encrypted both ways, and only listed public keys may connect.

Each context has an authenticator in a pyzmq thread; `close` stops it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from composer_prime.address import tcp_address
from composer_prime.errors import ConfigError, PortInUseError
from composer_prime.run.keys import ClientKeys, CurvePair

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
"""Largest message of a peer that is trusted to send one."""
_ZAP_DOMAIN = b"composer-prime"
_SILENCE_MS = 30_000
"""A connection on which no whole message arrives for this long is dropped and made anew.

With a shorter time, a large message on a slow link would be sent again and again. A host that vanishes silently is
noticed this much later.
"""


class _AllowList:
    """ZAP credentials provider: refuses a client with an unlisted public key (Z85) before its first message."""

    def __init__(self, is_admitted: Callable[[bytes], bool]) -> None:
        self._is_admitted = is_admitted

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether `key` may connect. An error refuses it, and must not end the authenticator's thread."""
        try:
            return self._is_admitted(key)
        except Exception:
            logger.exception("a connection was refused: its key could not be looked up")
            return False


@dataclass(slots=True)
class SecureServer:
    """A bound ROUTER socket and the thread that admits its peers."""

    context: zmq.asyncio.Context
    socket: zmq.asyncio.Socket
    authenticator: ThreadAuthenticator

    @property
    def endpoint(self) -> str:
        """The address really bound, with its port."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self.socket.close(linger=500)
        self.authenticator.stop()
        self.context.term()


def bind_router(
    address: str,
    server: CurvePair,
    clients: list[bytes] | Callable[[bytes], bool],
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_unread: int = 0,
    max_unsent: int = 0,
) -> SecureServer:
    """Bind a CURVE ROUTER at `address` (port 0 takes a free one) for peers holding one of the public keys `clients`.

    `clients` may be a function of the key, called in another thread at each handshake. Messages carry the key that
    their connection proved: `sender_key`.

    A peer that sends a frame above `max_message_bytes` is disconnected. Of each connection at most `max_unread`
    messages are held (0: any number); then the peer's own queue grows, not this process. Neither bounds the number of
    frames in a message: a peer that holds a key can still send many. To each connection at most `max_unsent` messages
    wait (0: any number); then sending waits, or raises zmq.Again.

    Raises PortInUseError when another process holds the address, ConfigError when this machine has no such address.
    """
    is_ipv6 = tcp_address(address, "the address to listen on", bind=True).is_ipv6
    context = zmq.asyncio.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    is_admitted = clients if callable(clients) else frozenset(clients).__contains__
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN.decode(), credentials_provider=_AllowList(is_admitted))
    socket = context.socket(zmq.ROUTER)
    # With an enforced domain, a dead authenticator refuses every peer instead of admitting all.
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.SNDHWM, max_unsent)
    socket.setsockopt(zmq.RCVHWM, max_unread)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.IPV6, is_ipv6)
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = server.secret, server.public, True
    bound = SecureServer(context, socket, authenticator)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        bound.close()
        raise _cannot_bind(address, error) from None
    return bound


def sender_key(frame: zmq.Frame) -> bytes:
    """Return the public key (Z85) that the connection of a received frame has proven to hold."""
    return str(frame.get("User-Id")).encode()


def _cannot_bind(address: str, error: zmq.ZMQError) -> ConfigError:
    reason = zmq.strerror(error.errno or 0)
    match error.errno:
        case errno.EADDRINUSE | zmq.EADDRINUSE:
            return PortInUseError(f"{address} is held by another process: stop it, or give this role another address")
        case errno.EADDRNOTAVAIL | zmq.EADDRNOTAVAIL | errno.ENODEV:
            return ConfigError(
                f"cannot listen at {address}: this machine has no such address ({reason}). `ip address` lists "
                "those it has; if it is an overlay network's, is that up (`wg show`)?"
            )
        case _:
            return ConfigError(f"cannot listen at {address}: {reason}; give this role another address")


def dealer(
    context: zmq.Context, address: str, keys: ClientKeys, identity: bytes | None = None, *, immediate: bool = False
):
    """Return a DEALER, plain or asyncio as `context`, that connects to a server made by `bind_router`.

    Connecting is asynchronous. A wrong key or address shows as silence, so callers wait with a deadline. With
    `immediate`, sending without a connection raises zmq.Again or waits; else messages queue until there is one. A host
    name is looked up as IPv4, because ZMQ tries only one address family. Raises ConfigError unless `address` is
    tcp://HOST:PORT.
    """
    is_ipv6 = tcp_address(address, "the address to connect to").is_ipv6
    socket = context.socket(zmq.DEALER)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.IMMEDIATE, immediate)
    socket.setsockopt(zmq.IPV6, is_ipv6)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 3000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    socket.connect(address)
    return socket
