"""Carry the node link's encrypted bytes where nodes cannot reach the run's host: both ends, and the joining of streams.

    node's ZMQ --loopback--> Tunnel --dial KEY PASS--> relay <--take ID-- RelayLeg --> the gateway's node port
                                                         +-- control line: open ID, ping --> RelayLeg

The run's host dials out and proves, to this relay alone, that it holds the run's signing key, so nobody else can claim
the run's place. A node shows a pass that this key signed. Neither opens the gateway: what passes is CURVE from the node
to the gateway, which admits listed keys only. Whoever alters bytes on the way can end or delay a stream, and nothing
else.

Lines end with a newline and hold words of ASCII. Every wait has a deadline; of each stream, little is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from composer_prime.address import Address, has_share, reachable, tcp_address
from composer_prime.console import pluralize
from composer_prime.errors import DeadlineError, WireError
from composer_prime.run.node_registry import utc_text
from composer_prime.run.retry import backoff_s

logger = logging.getLogger(__name__)

PROTOCOL = "composer-relay-2"
"""Raised with every change that an older release would misread. 2: passes expire."""
PASS_BYTES = 8 + 64
HELD_BYTES = 64 << 10
"""Read ahead of a stream in each direction."""
PING_S = 15.0
SILENCE_S = 45.0
"""A control connection without a line for this long is opened again."""
IDLE_S = 120.0
"""A stream without a byte for this long is ended. A node's ZMQ sends every five seconds."""
_REPLY_S = 5.0
_WAIT_FOR_HOST_S = 15.0
"""The relay itself waits for the run's host."""
DIAL_S = _REPLY_S + _WAIT_FOR_HOST_S
"""A dial has failed or succeeded after this long."""
_SERVED_S = 60.0
"""A leg that stood for this long tries again at once; another one pauses longer from time to time."""
_CONTROL_PAUSE_S = 0.02
_FLUSH_S = 5.0
_LINE_BYTES = 512
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_TELL_S = 60.0
"""Streams that were not joined are logged once in this time: their number is the peers' choice."""
MAX_STREAMS = 1024
"""Streams that may be open here. Each relay, and iroh, gets half of what the others leave."""


class Reader(Protocol):
    async def read(self, n: int = -1, /) -> bytes: ...


class Sender(Protocol):
    async def send(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


Writer = asyncio.StreamWriter | Sender
Stream = tuple[Reader, Writer]
TcpStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def signed_text(relay: str, nonce: str) -> bytes:
    """Return what a host signs for the `nonce` of the relay that it dialed as HOST:PORT."""
    return f"composer-prime relay: the host at {relay} {nonce}".encode()


def sign_pass(key: Ed25519PrivateKey, expires: int) -> bytes:
    """Return what nodes show at any relay of the run until `expires`, Unix seconds, which come first in it."""
    return expires.to_bytes(8) + key.sign(_pass_text(expires))


def check_pass(key: Ed25519PublicKey, shown: bytes) -> None:
    """Raises InvalidSignature, of cryptography, or WireError for a pass that has expired."""
    expires = int.from_bytes(shown[:8])
    key.verify(shown[8:], _pass_text(expires))
    if (now := time.time()) > expires:
        raise WireError(
            f"the pass expired at {utc_text(expires)}, here it is {utc_text(now)}: join with a fresh invite"
        )


def _pass_text(expires: int) -> bytes:
    return f"composer-prime relay: a node until {expires}".encode()


async def read_words(reader: asyncio.StreamReader, limit_s: float) -> list[str]:
    """Return the words of the next line. Raises TimeoutError, ConnectionError, WireError (no such line)."""
    try:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), limit_s)
    except TimeoutError:
        raise TimeoutError(f"no line came within {limit_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection was closed") from None
    except asyncio.LimitOverrunError:
        line = b"\xff"
    if len(line) > _LINE_BYTES or not line.isascii():
        raise WireError(f"expected a line of at most {_LINE_BYTES} ASCII bytes")
    return line.decode().split()


async def write_words(writer: asyncio.StreamWriter, *words: str) -> None:
    writer.write(" ".join(words).encode() + b"\n")
    await asyncio.wait_for(writer.drain(), SILENCE_S)


async def read_control(reader: asyncio.StreamReader) -> list[str]:
    """Return the words of a control connection's next line, at most 50 lines a second. Raises as `read_words`."""
    await asyncio.sleep(_CONTROL_PAUSE_S)
    return await read_words(reader, SILENCE_S)


async def join_streams(one: Stream, other: Stream, idle_s: float = IDLE_S) -> None:
    """Pass bytes both ways until either side ends, or none came for `idle_s`. Closes both."""
    last = time.monotonic()

    async def copy(reader: Reader, writer: Writer) -> None:
        nonlocal last
        with suppress(OSError):
            while data := await reader.read(HELD_BYTES):
                last = time.monotonic()
                if isinstance(writer, asyncio.StreamWriter):
                    writer.write(data)
                    await writer.drain()
                else:
                    await writer.send(data)

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

    Raises DeadlineError or ConnectionError (not reached, silent), WireError (refused, with the relay's reason).
    """
    what = f"relay {relay}"
    reader, writer = await connect_tcp(relay, what)
    try:
        await write_words(writer, PROTOCOL, "dial", run.hex(), proof.hex())
        _expect_ok(await read_words(reader, _WAIT_FOR_HOST_S), what)
        return reader, writer
    except BaseException as error:
        end(writer)
        if isinstance(error, OSError):
            raise ConnectionError(f"{what}: {error}") from None
        raise


def _expect_ok(words: list[str], what: str) -> None:
    if words != ["ok"]:
        raise _refusal(words, what)


def _refusal(words: list[str], what: str) -> WireError:
    if words[:1] == ["no"] and (said := " ".join(words[1:])).isprintable():
        return WireError(f"{what} refused: {said}")
    return WireError(f"{what} sent {' '.join(words)!r}: is that `orchestrator relay` of this release?")


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
        if len(self._tasks) < MAX_STREAMS:
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
        else:
            if self.fault:
                logger.info("%s carries this node's link again", self.name)
            self.fault = ""
            await join_streams((reader, writer), stream)
        finally:
            end(writer)


def spawn(work: Awaitable[None], *groups: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Run `work` as a task of each of `groups`, which it leaves at its end."""
    task = asyncio.ensure_future(work)
    for group in groups:
        group.add(task)
        task.add_done_callback(group.discard)
    return task


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for the end of all; one that is being cancelled already is left to clean up."""
    tasks = list(tasks)
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- the host's end --------------------------------------------------------------------------------------------------


class Leg:
    """The run's host at one place where nodes find it. `run` stays there, again whenever that was lost."""

    def __init__(
        self, name: str, signer: Ed25519PrivateKey, node_endpoint: str, open_streams: Counter[str] | None = None
    ) -> None:
        """`node_endpoint`: tcp://HOST:PORT as the gateway bound it. `open_streams`: those of all legs, by name."""
        self.state = "connecting"
        """In words, for people."""
        self._name = name
        self._signer = signer
        self._target = tcp_address(reachable(node_endpoint), "the node port")
        self._streams: set[asyncio.Task[None]] = set()
        self._open = Counter[str]() if open_streams is None else open_streams
        self._lost = 0
        self._tell_from = 0.0

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                start = time.monotonic()
                try:
                    await self._serve()
                except Exception as error:  # Of iroh's bindings, too. The run continues without it.
                    fault = str(error) or type(error).__name__
                failures = 0 if time.monotonic() - start > _SERVED_S else failures
                pause_s = backoff_s(failures, first_s=_FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S)
                failures += 1
                if fault != self.state:
                    logger.warning("%s; nodes cannot join that way, trying again from %g s on", fault, pause_s)
                self.state = fault
                await asyncio.sleep(pause_s)
        finally:
            await cancel_all(self._streams)

    async def _serve(self) -> NoReturn:
        """Register and carry streams. Raises what ended it."""
        raise NotImplementedError

    def _start(self, carry: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Carry one more stream, unless this leg has its share. Return whether it is carried."""
        if not has_share(self._open, self._name, MAX_STREAMS):
            own, total = self._open[self._name], self._open.total()
            self._tell_lost(
                f"it has {own} of {total} streams; of {MAX_STREAMS}, each relay has half of what others leave"
            )
            return False
        self._open[self._name] += 1
        spawn(carry(), self._streams).add_done_callback(lambda _: self._open.subtract([self._name]))
        return True

    def _tell_lost(self, fault: str) -> None:
        """Log why a stream was not joined, and how many were not since the last line."""
        self._lost += 1
        if (now := time.monotonic()) >= self._tell_from:
            lost = pluralize(self._lost, "stream")
            logger.warning("%s of nodes through %s not joined; the last one: %s", lost, self._name, fault)
            self._lost, self._tell_from = 0, now + _TELL_S


class RelayLeg(Leg):
    """The run's host at one relay, HOST:PORT."""

    async def _serve(self) -> NoReturn:
        what, address = f"relay {self._name}", tcp_address(self._name, "the relay", scheme="")
        reader, writer = await connect_tcp(address, what)
        try:
            await write_words(writer, PROTOCOL, "host", self._signer.public_key().public_bytes_raw().hex())
            words = await read_words(reader, _REPLY_S)
            if len(words) != 2 or words[0] != "nonce":
                raise _refusal(words, what)
            await write_words(writer, str(address), self._signer.sign(signed_text(str(address), words[1])).hex())
            _expect_ok(await read_words(reader, _REPLY_S), what)
            self.state = "registered"
            logger.info("registered at %s: nodes can join through it", what)
            while True:
                match await read_control(reader):
                    case ["ping"]:
                        await write_words(writer, "pong")
                    case ["open", stream]:
                        self._start(partial(self._carry, address, stream))
                    case words:
                        raise _refusal(words, what)
        except OSError as error:
            raise ConnectionError(f"{what}: {str(error) or type(error).__name__}") from None
        finally:
            end(writer)

    async def _carry(self, address: Address, stream: str) -> None:
        """Join one stream of the relay with the gateway's node port."""
        far = None
        try:
            far = await connect_tcp(address, f"relay {self._name}")
            await write_words(far[1], PROTOCOL, "take", stream)
            await join_streams(far, await connect_tcp(self._target, f"the node port {self._target}"))
        except OSError as error:
            self._tell_lost(str(error) or type(error).__name__)
        finally:
            if far is not None:
                end(far[1])
