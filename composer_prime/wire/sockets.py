"""ZMQ sockets with CURVE: encrypted both ways, and only listed public keys may connect.

Each context has an authenticator in a pyzmq thread; `close` stops it. What a peer can make this process hold is bounded
before it has proven a key: by the size of a frame, by the messages that wait (`bind_router`), and over all connections
by the bytes that nobody has read (unread.py).

Two processes of one machine talk over a private socket pair instead (`Frames`): a little-endian uint32 length, checked
before anything is allocated, and that many bytes of msgpack. A frame that does not decode is skipped, or in a strict
stream an error. A length beyond the limit ends the stream.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import math
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from composer_prime.address import tcp_address
from composer_prime.errors import ConfigError, PortInUseError, WireError
from composer_prime.run.keys import ClientKeys, CurvePair, RunKeys
from composer_prime.wire.unread import FRAME_OVERHEAD, LEAST_FRAME_BYTES, UnreadBytes

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 30
"""Largest message that a client takes from its server."""
MAX_REQUEST_BYTES = 4 << 20
"""Largest message that a server takes by default: 30,000 names of parameters, or 80,000 of samples."""
SERVER_FRAME_BYTES = 64 << 10
"""Of a frame that a server takes. ZMQ has one limit before and after a key is proven, so it is what a stranger can
send; longer messages are cut (`frames_of`)."""
_MAX_UNREAD = 64
"""Messages of one peer that wait."""
_FRAMES_AT_A_TIME = 512
"""Frames of one message that are read before other tasks run: a valid one has a single."""
MAX_FRAMES = 2 * _FRAMES_AT_A_TIME
"""Closes the connection."""
_LEAST_MESSAGE_BYTES = 1 << 20
_BYTES_PER_TOKEN = 32
"""Of a node's answer: id, logprob, and at worst a version span."""
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 256 << 10
"""An option of mallopt, and the least size of mapped buffers."""
_ZAP_DOMAIN, _ZAP_VERSION = b"composer-prime", b"1.0"
_SILENCE_MS = 30_000
"""A connection without a whole message for this long is opened again.

A shorter time would send a large message on a slow link again and again.
"""


class _Authenticator(ThreadAuthenticator):
    """Refuses a client with an unlisted public key (Z85). One at whose key `is_admitted` raises may come again."""

    def __init__(self, context: zmq.asyncio.Context, is_admitted: Callable[[bytes], bool]) -> None:
        super().__init__(context)
        self._is_admitted = is_admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return self._is_admitted(key)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        try:
            await super().handle_zap_message(msg)
        except Exception as error:  # it must not end the thread, which admits everybody
            logger.error("connections are not made for now: %s", error)
            # 300 is a temporary error: ZMQ connects the client again after 30 s.
            self.zap_socket.send_multipart([_ZAP_VERSION, msg[1], b"300", b"", b"", b""])


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConnection:
    """A message of a peer, as far as it is kept."""

    identity: bytes
    key: bytes
    """The public key (Z85) that it has proven to hold."""
    peer: str
    """Its IP address."""
    body: bytes
    """All frames together; b"" for too many."""
    num_frames: int
    num_bytes: int


class SecureServer:
    """A bound ROUTER socket, the thread that admits its peers, and the watch over what they send."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        authenticator: ThreadAuthenticator,
        max_message_bytes: int,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self.context = context
        self.socket = socket
        self.authenticator = authenticator
        self.behind_at = -math.inf
        """Monotonic seconds of the last message of many frames, for whose end others wait."""
        self._direct = zmq.Socket.shadow(socket)
        """For reads that need not wait."""
        self._unread: UnreadBytes | None = None

    def bind(self, address: str) -> None:
        """Bind the socket and watch its port. Raises ZMQError."""
        self.socket.bind(address)
        self._unread = UnreadBytes(tcp_address(self.endpoint, "the bound address").port)
        self._unread.start()

    @property
    def endpoint(self) -> str:
        """The address really bound."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> FromConnection:
        """Return the next message. All must be read with this: the watch closes connections with unread ones.

        A sender of more than a message's limit, or of too many frames, is disconnected.
        """
        direct, unread = self._direct, self._unread
        assert unread is not None, "bind() comes first"
        identity = await self.socket.recv()
        # All frames of a message arrive at once, so no receive below waits.
        key, peer, frames, num_frames, num_bytes, fd = b"", "", [], 0, 0, -1
        more = bool(direct.getsockopt(zmq.RCVMORE))
        while more:
            frame = direct.recv(zmq.NOBLOCK, copy=False)
            if not num_frames:
                key, peer, fd = sender_key(frame), str(frame.get("Peer-Address")), int(frame.get("__fd"))
            num_frames += 1
            num_bytes += len(frame)
            if num_bytes <= self._max_message_bytes:
                frames.append(frame.bytes)
            more = frame.more
            if num_frames % _FRAMES_AT_A_TIME == 0:
                if num_frames >= MAX_FRAMES:
                    self.behind_at = time.monotonic()
                if num_frames == MAX_FRAMES:
                    unread.end(fd, peer, num_bytes + num_frames * LEAST_FRAME_BYTES)
                await asyncio.sleep(0)
        if num_frames:
            unread.read[fd] += num_bytes + num_frames * FRAME_OVERHEAD
        if len(frames) < num_frames:
            frames = []
            unread.end(fd, peer, num_bytes + num_frames * LEAST_FRAME_BYTES)
        return FromConnection(
            identity=identity,
            key=key,
            peer=peer,
            body=b"".join(frames),
            num_frames=num_frames,
            num_bytes=num_bytes,
        )

    def close(self) -> None:
        """Free the address; messages on their way get half a second."""
        if self._unread is not None:
            self._unread.stop()
        self.socket.close(linger=500)
        self.authenticator.stop()
        self.context.term()


def bind_router(
    address: str,
    server: CurvePair,
    clients: list[bytes] | Callable[[bytes], bool],
    *,
    max_message_bytes: int = MAX_REQUEST_BYTES,
    max_unread: int = _MAX_UNREAD,
    max_unsent: int = 0,
    handover: bool = True,
) -> SecureServer:
    """Bind a CURVE ROUTER at `address` (port 0 takes a free one) for peers holding one of the public keys `clients`.

    `clients` may be a function of the key, called in another thread at each handshake.

    A peer whose message is above `max_message_bytes`, or a frame above 64 KiB, is disconnected. Of each connection at
    most `max_unread` messages are held; then the peer's own queue grows. Neither bounds a message without an end
    (unread.py does). To each at most `max_unsent` messages wait (0: any number); then sending waits, or raises
    zmq.Again. With `handover`, a client that names an identity takes it from the connection that had it.

    Raises PortInUseError when another process holds the address, ConfigError when this machine has no such one.
    """
    is_ipv6 = tcp_address(address, "the address to listen on", bind=True).is_ipv6
    context = zmq.asyncio.Context()
    is_admitted = clients if callable(clients) else frozenset(clients).__contains__
    authenticator = _Authenticator(context, is_admitted)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN.decode(), credentials_provider=authenticator)
    socket = context.socket(zmq.ROUTER)
    # With an enforced domain, a dead authenticator refuses every peer.
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, handover)
    socket.setsockopt(zmq.SNDHWM, max_unsent)
    socket.setsockopt(zmq.RCVHWM, max_unread)
    socket.setsockopt(zmq.MAXMSGSIZE, SERVER_FRAME_BYTES + FRAME_OVERHEAD)
    socket.setsockopt(zmq.IPV6, is_ipv6)
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = server.secret, server.public, True
    bound = SecureServer(context, socket, authenticator, max_message_bytes)
    try:
        bound.bind(address)
    except zmq.ZMQError as error:
        bound.close()
        raise _cannot_bind(address, error) from None
    return bound


def frames_of(raw: bytes) -> list[bytes]:
    """Cut a message into the frames that such a server takes."""
    return [raw[at : at + SERVER_FRAME_BYTES] for at in range(0, len(raw), SERVER_FRAME_BYTES)]


def check_request(raw: bytes, name: str) -> list[bytes]:
    """Return the frames of `raw` for a server. Raises WireError for a request that is too large."""
    if len(raw) > MAX_REQUEST_BYTES:
        raise WireError(
            f"a {name} has {len(raw)} bytes and the other side takes at most {MAX_REQUEST_BYTES}: train "
            "fewer parameters by name, or fewer samples a step"
        )
    return frames_of(raw)


def sender_key(frame: zmq.Frame) -> bytes:
    """Return the public key (Z85) that a frame's connection has proven to hold."""
    return str(frame.get("User-Id")).encode()


def give_back_buffers() -> None:
    """Have glibc map large buffers of this process one by one, so that freed ones leave its memory.

    By default it stops doing so after a burst of weight pieces, which then leaves holes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _cannot_bind(address: str, error: zmq.ZMQError) -> ConfigError:
    reason = zmq.strerror(error.errno or 0)
    match error.errno:
        case errno.EADDRINUSE | zmq.EADDRINUSE:
            return PortInUseError(
                f"{address} is held by another process: stop it, or set another for --bind, "
                "orchestrator.node_address or orchestrator.step_address"
            )
        case errno.EADDRNOTAVAIL | zmq.EADDRNOTAVAIL | errno.ENODEV:
            return ConfigError(
                f"cannot listen at {address}: this machine has no such address ({reason}). `ip address` lists "
                "those it has; if it is an overlay network's, is that up (`wg show`)?"
            )
        case _:
            return ConfigError(f"cannot listen at {address}: {reason}; give this role another address")


def dealer(context: zmq.Context, address: str, keys: ClientKeys, identity: bytes | None = None):
    """Return a DEALER, plain or asyncio as `context`, that connects to a server made by `bind_router`.

    Messages queue until there is a connection. A wrong key or address shows as silence, so callers need a deadline. A
    host name is looked up as IPv4. Raises ConfigError unless `address` is tcp://HOST:PORT.
    """
    is_ipv6 = tcp_address(address, "the address to connect to").is_ipv6
    socket = context.socket(zmq.DEALER)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.IPV6, is_ipv6)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 3000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    socket.connect(address)
    return socket


class NodeSocket:
    """The socket to all nodes, from `bind` to `close`."""

    def __init__(self, keys: RunKeys, max_context: int, is_admitted: Callable[[bytes], bool] | None = None) -> None:
        """`max_context`: tokens of the longest answer. `is_admitted` decides by public key, in another thread, who may
        connect; None admits the run's node key."""
        self.endpoint = ""
        """As bound."""
        self.max_message_bytes = max(_LEAST_MESSAGE_BYTES, _BYTES_PER_TOKEN * max_context)
        self._keys = keys
        self._is_admitted = is_admitted
        self._server: SecureServer | None = None
        self._encoder = msgspec.msgpack.Encoder()

    def bind(self, address: str) -> None:
        """Raises PortInUseError when another process holds `address`, ConfigError when a key is missing."""
        self._server = bind_router(
            address,
            self._keys.curve("server"),
            self._is_admitted or [self._keys.curve("node").public],
            max_message_bytes=self.max_message_bytes,
            handover=False,  # nodes name none
        )
        give_back_buffers()
        self.endpoint = self._server.endpoint

    @property
    def behind_at(self) -> float:
        return -math.inf if self._server is None else self._server.behind_at

    def send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """Queue `message` for a connection. Return False when the connection is gone."""
        return self._queue(identity, self._encoder.encode(message)) is not None

    def send_all(self, identities: Iterable[bytes], message: msgspec.Struct) -> None:
        """Queue `message` for each connection; all share its bytes."""
        raw = self._encoder.encode(message)
        for identity in identities:
            self._queue(identity, raw, copy=False)

    def send_large(self, identity: bytes, message: msgspec.Struct) -> zmq.MessageTracker | None:
        """Queue `message` without a copy. Return a tracker of its sending; None when the connection is gone."""
        queued = self._queue(identity, self._encoder.encode(message), copy=False, track=True)
        return None if queued is None else queued.result()

    async def receive(self) -> FromConnection:
        assert self._server is not None, "bind() comes first"
        return await self._server.receive()

    async def close(self) -> None:
        """Free the address, as SecureServer."""
        server, self._server = self._server, None
        if server is not None:
            server.socket.close(linger=500)
            await asyncio.to_thread(server.close)

    def _queue(self, identity: bytes, raw: bytes, **options: bool) -> Any:
        """Return the send's future, done; None for a gone connection."""
        if self._server is None:
            return None
        # A ROUTER without a high-water mark never blocks.
        socket: Any = self._server.socket
        sent = socket.send_multipart([identity, raw], flags=zmq.NOBLOCK, **options)
        error = sent.exception()
        if error is None:
            return sent
        if isinstance(error, zmq.ZMQError) and error.errno in (errno.EHOSTUNREACH, zmq.EAGAIN):
            return None
        raise error


MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
MessageT = TypeVar("MessageT")


class Frames(Generic[MessageT]):
    """Sends any message, and receives those of one union."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        receives: Any,
        peer: str,
        *,
        strict: bool = False,
    ) -> None:
        """`strict`: a message that does not decode is a WireError, because someone would wait for it."""
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._strict = strict
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; a closed connection drops it."""
        body = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> MessageT | None:
        """Return the next message, or None once the peer has closed. Raises WireError where the stream cannot go on."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"{self._peer}: a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if self._strict:
                    raise WireError(f"{self._peer}: a frame of {length} bytes does not decode: {error}") from None
                logger.warning("%s: dropped a frame of %d bytes: %s", self._peer, length, error)

    def close(self) -> None:
        self._writer.close()
