"""Carry the node link's encrypted bytes where nodes cannot reach the run's host: both ends, and the joining of streams.

    node's ZMQ --loopback--> Tunnel --dial KEY PASS--> relay <--take ID-- RelayLeg --> the gateway's node port
                                                         +-- control line: open ID, ping --> RelayLeg

The run's host dials out and proves that it holds the run's signing key, so nobody else can claim the run's place. A
node shows a pass that this key signed. Neither opens the gateway: what passes is CURVE from the node to the gateway,
which admits listed keys only. Whoever alters bytes on the way can end or delay a stream, and nothing else.

Lines end with a newline and hold words of ASCII. Every wait has a deadline; of each stream, little is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from composer_prime.address import Address, reachable, tcp_address
from composer_prime.errors import DeadlineError, WireError
from composer_prime.run.retry import backoff_s

if TYPE_CHECKING:
    from composer_prime.wire.iroh_link import IrohLeg

logger = logging.getLogger(__name__)

PROTOCOL = "composer-relay-1"
HELD_BYTES = 64 << 10
"""Read ahead of a stream in each direction."""
PING_S = 15.0
SILENCE_S = 45.0
"""A control connection without a line for this long is made anew."""
IDLE_S = 120.0
"""A stream without a byte for this long is ended. A node's ZMQ sends every five seconds."""
_REPLY_S = 5.0
_WAIT_FOR_HOST_S = 15.0
"""The relay itself waits for the run's host."""
_FLUSH_S = 5.0
_LINE_BYTES = 512
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_MAX_STREAMS = 1024
"""Streams that one relay may have opened here."""
_NODE_PASS, _HOST_PROOF = b"composer-prime relay: a node", b"composer-prime relay: the host "


class Reader(Protocol):
    async def read(self, n: int = -1, /) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


Stream = tuple[Reader, Writer]
TcpStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def node_pass(signer: Ed25519PrivateKey) -> bytes:
    """Return what an invite holds for relays. It serves any number of nodes and does not expire."""
    return signer.sign(_NODE_PASS)


def host_proof(signer: Ed25519PrivateKey, nonce: bytes) -> bytes:
    return signer.sign(_HOST_PROOF + nonce)


def signed_text(nonce: bytes | None) -> bytes:
    """Return what a host signs for `nonce`; what a pass signs, for None."""
    return _NODE_PASS if nonce is None else _HOST_PROOF + nonce


async def read_words(reader: asyncio.StreamReader, limit_s: float) -> list[str]:
    """Return the words of the next line. Raises TimeoutError, ConnectionError, WireError (no such line)."""
    try:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), limit_s)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection was closed") from None
    except asyncio.LimitOverrunError:
        line = b"\xff"
    if len(line) > _LINE_BYTES or not line.isascii():
        raise WireError(f"what came is no line of at most {_LINE_BYTES} ASCII bytes")
    return line.decode().split()


async def write_words(writer: asyncio.StreamWriter, *words: str) -> None:
    writer.write(" ".join(words).encode() + b"\n")
    await writer.drain()


async def join_streams(one: Stream, other: Stream, idle_s: float = IDLE_S) -> None:
    """Pass bytes both ways until either side ends, or none came for `idle_s`. Closes both."""
    last = time.monotonic()

    async def copy(reader: Reader, writer: Writer) -> None:
        nonlocal last
        with suppress(OSError):
            while data := await reader.read(HELD_BYTES):
                last = time.monotonic()
                writer.write(data)
                await writer.drain()

    copies = {asyncio.create_task(copy(one[0], other[1])), asyncio.create_task(copy(other[0], one[1]))}
    try:
        while time.monotonic() - last < idle_s:
            done, _ = await asyncio.wait(copies, timeout=idle_s / 4, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
    finally:
        for task in copies:
            task.cancel()
        end(one[1])
        end(other[1])


def end(writer: Writer) -> None:
    """Close a stream; what is still to be sent gets a few seconds."""
    writer.close()
    if isinstance(writer, asyncio.StreamWriter):
        asyncio.get_running_loop().call_later(_FLUSH_S, writer.transport.abort)


async def connect_tcp(address: Address, what: str) -> TcpStream:
    """Raises DeadlineError or ConnectionError, which name `what`."""
    try:
        return await asyncio.wait_for(asyncio.open_connection(*address, limit=HELD_BYTES), _REPLY_S)
    except TimeoutError:
        raise DeadlineError(f"{what} took no connection within {_REPLY_S:g} s") from None
    except OSError as error:
        raise ConnectionError(f"{what} took no connection: {error.strerror or error}") from None


# ---- the node's end --------------------------------------------------------------------------------------------------


async def dial(relay: Address, run: bytes, proof: bytes) -> TcpStream:
    """Return a stream to the node port of the run with public key `run`.

    Raises DeadlineError, WireError (refused, with the relay's reason), ConnectionError.
    """
    what = f"relay {relay}"
    reader, writer = await connect_tcp(relay, what)
    try:
        await write_words(writer, PROTOCOL, "dial", run.hex(), proof.hex())
        _expect_ok(await read_words(reader, _WAIT_FOR_HOST_S), what)
        return reader, writer
    except BaseException as error:
        end(writer)
        if isinstance(error, TimeoutError):
            raise DeadlineError(f"{what} did not answer within {_WAIT_FOR_HOST_S:g} s") from None
        if isinstance(error, OSError):
            raise ConnectionError(f"{what}: {error}") from None
        raise


def _expect_ok(words: list[str], what: str) -> None:
    if words != ["ok"]:
        raise _refusal(words, what)


def _refusal(words: list[str], what: str) -> WireError:
    said = " ".join(words[1:] if words[:1] == ["no"] else words)
    return WireError(f"{what} refused: {said if said.isprintable() else 'with bytes that are no text'}")


class Tunnel:
    """A free port of 127.0.0.1 behind which the run's node port lies, from `start` to `close`."""

    def __init__(self, name: str, connect: Callable[[], Awaitable[Stream]]) -> None:
        """`connect` makes a stream to the run, once for each connection to the port."""
        self.name = name
        self.address = ""
        """HOST:PORT to connect to."""
        self.fault = ""
        """Why the last connection could not be carried; empty when it could."""
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HELD_BYTES)
        self.address = str(Address(*self._server.sockets[0].getsockname()))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await cancel_all(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) < _MAX_STREAMS:
            spawn(self._carry(reader, writer), self._tasks)
        else:
            end(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            stream = await self._connect()
        except Exception as error:  # Of iroh's bindings, too; ZMQ is to learn of it.
            if str(error) != self.fault:
                logger.warning("%s", error)
            self.fault = str(error)
            await asyncio.sleep(_FIRST_RETRY_S)  # ZMQ tries again at once.
            end(writer)
            return
        if self.fault:
            logger.info("%s carries this node's link again", self.name)
        self.fault = ""
        await join_streams((reader, writer), stream)


def spawn(work: Awaitable[None], tasks: set[asyncio.Task[None]]) -> None:
    """Run `work` as one of `tasks`, which it leaves at its end."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- the host's end --------------------------------------------------------------------------------------------------


class RelayLeg:
    """The run's host at one relay. `run` registers there, again whenever the relay was lost, until it is cancelled."""

    def __init__(self, relay: str, signer: Ed25519PrivateKey, node_endpoint: str) -> None:
        """`relay`: HOST:PORT; `node_endpoint`: tcp://HOST:PORT as the gateway bound it."""
        self.state = "connecting"
        """In words, for people."""
        self._relay = tcp_address(relay, "the relay", scheme="")
        self._what = f"relay {relay}"
        self._signer = signer
        self._target = tcp_address(reachable(node_endpoint), "the node port")
        self._streams: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    await self._serve()
                except TimeoutError:
                    fault = f"{self._what} was silent for {SILENCE_S:g} s"
                except (OSError, WireError, DeadlineError) as error:
                    fault = str(error)
                failures = 0 if self.state == "registered" else failures
                pause_s = backoff_s(failures, first_s=_FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S)
                failures += 1
                if fault != self.state:
                    logger.warning("%s; nodes cannot join through it, trying again from %g s on", fault, pause_s)
                self.state = fault
                await asyncio.sleep(pause_s)
        finally:
            await cancel_all(self._streams)

    async def _serve(self) -> None:
        """Register and carry streams. Returns never; raises what ended it."""
        reader, writer = await connect_tcp(self._relay, self._what)
        try:
            await write_words(writer, PROTOCOL, "host", self._signer.public_key().public_bytes_raw().hex())
            words = await read_words(reader, _REPLY_S)
            if len(words) != 2 or words[0] != "nonce":
                raise _refusal(words, self._what)
            await write_words(writer, host_proof(self._signer, words[1].encode()).hex())
            _expect_ok(await read_words(reader, _REPLY_S), self._what)
            self.state = "registered"
            logger.info("registered at %s: nodes can join through it", self._what)
            while True:
                match await read_words(reader, SILENCE_S):
                    case ["open", stream] if len(self._streams) < _MAX_STREAMS:
                        spawn(self._carry(stream), self._streams)
                    case ["ping"]:
                        await write_words(writer, "pong")
        except ConnectionError as error:
            raise ConnectionError(f"{self._what}: {error}") from None
        finally:
            end(writer)

    async def _carry(self, stream: str) -> None:
        """Join one stream of the relay with the gateway's node port."""
        try:
            far = await connect_tcp(self._relay, self._what)
            await write_words(far[1], PROTOCOL, "take", stream)
            try:
                near = await connect_tcp(self._target, f"the node port {self._target}")
            except BaseException:
                end(far[1])
                raise
        except (OSError, DeadlineError) as error:
            logger.warning("a node's stream through %s was not joined: %s", self._what, error)
            return
        await join_streams(far, near)


class RelayLegs:
    """The run's host at all of its relays."""

    def __init__(self, signer: Callable[[], Ed25519PrivateKey]) -> None:
        """`signer` reads the run's signing key."""
        self._signer = signer
        self._legs: dict[str, tuple[IrohLeg | RelayLeg, asyncio.Task[None]]] = {}

    def update(self, relays: Iterable[str], node_endpoint: str) -> None:
        """Stay registered at exactly these, HOST:PORT or as iroh_link.py says, for the node port at `node_endpoint`."""
        from composer_prime.wire.iroh_link import IrohLeg, is_iroh

        relays = set(relays)
        for relay in self._legs.keys() - relays:
            self._legs.pop(relay)[1].cancel()
        for relay in relays - self._legs.keys():
            leg = (IrohLeg if is_iroh(relay) else RelayLeg)(relay, self._signer(), node_endpoint)
            self._legs[relay] = leg, asyncio.create_task(leg.run())

    def states(self) -> dict[str, str]:
        return {relay: leg.state for relay, (leg, _) in self._legs.items()}

    async def close(self) -> None:
        await cancel_all(task for _, task in self._legs.values())
        self._legs = {}
