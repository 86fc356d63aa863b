"""`orchestrator relay`: join nodes with a run whose host nobody can reach, on a box that both reach.

    run's host --host KEY, signed nonce--> relay          at most one host a run: the one that proved the key last
    node --dial KEY PASS--> relay --open ID--> host --take ID--> relay          then both streams are one

It holds public keys only and passes ciphertext that it cannot read (composer_prime/wire/tunnel.py). It serves the runs
that were named to it. Connections that have not said what they want, streams in all and of one address, bytes held and
silence are bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.address import Address, tcp_address
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, PortInUseError, WireError
from composer_prime.wire import tunnel
from composer_prime.wire.tunnel import PROTOCOL, TcpStream, end, join_streams, read_words, write_words

logger = logging.getLogger(__name__)

_GREETING_S = 10.0
"""How long a connection may take to say what it wants, and the run's host to take a stream."""
_MAX_GREETING = 256


class _RefusedError(Exception):
    """The message is what the other side is told."""


class Relay:
    """Serves from `start` to `close`."""

    def __init__(self, runs: Collection[bytes], *, max_streams: int = 256, idle_s: float = tunnel.IDLE_S) -> None:
        """`runs`: their public signing keys."""
        self.address = Address("", 0)
        """As bound."""
        self._runs = {run.hex(): Ed25519PublicKey.from_public_bytes(run) for run in runs}
        self._max_streams = max_streams
        self._idle_s = idle_s
        self._hosts: dict[str, asyncio.StreamWriter] = {}
        self._dials: dict[str, asyncio.Future[TcpStream]] = {}
        """Streams that the host of their run has not taken yet, by id."""
        self._streams: Counter[str] = Counter()
        """Waiting and joined, by the address that dialed."""
        self._num_greeting = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: Address) -> None:
        """Listen at `address`; port 0 takes a free one. Raises PortInUseError or ConfigError."""
        host = None if address.host == "*" else address.host
        try:
            self._server = await asyncio.start_server(self._accept, host, address.port, limit=tunnel.HELD_BYTES)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"{address} is held by another process: relay at another port") from None
            raise ConfigError(f"cannot relay at {address}: {error.strerror}") from None
        self.address = Address(address.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await tunnel.cancel_all(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_greeting >= _MAX_GREETING:
            writer.transport.abort()
            return
        tunnel.spawn(self._greet(reader, writer), self._tasks)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. It is closed at the end, unless it is one that a dial has taken over."""
        self._num_greeting += 1
        try:
            words = await read_words(reader, _GREETING_S)
        except (OSError, WireError):
            end(writer)
            return
        finally:
            self._num_greeting -= 1
        handed_over = False
        try:
            match words:
                case [name, "take", stream] if name == PROTOCOL:
                    dial = self._dials.pop(stream, None)
                    if dial is not None and not dial.done():
                        handed_over = True
                        dial.set_result((reader, writer))
                case [name, "host", run] if name == PROTOCOL:
                    await self._keep_host(run, reader, writer)
                case [name, "dial", run, proof] if name == PROTOCOL:
                    await self._dial(run, proof, reader, writer)
                case _:
                    raise _RefusedError(f"it speaks {PROTOCOL}: install one release on relay, run and nodes")
        except _RefusedError as refusal:
            logger.warning("refused %s: %s", _peer(writer), refusal)
            with suppress(OSError):
                await write_words(writer, "no", str(refusal))
        except (OSError, WireError) as error:
            logger.info("a connection of %s ended: %s", _peer(writer), error or type(error).__name__)
        finally:
            if not handed_over:
                end(writer)

    def _check(self, run: str, proof: str, nonce: bytes | None) -> None:
        """Raise _RefusedError unless this relay serves `run` and that run signed `proof`."""
        if run not in self._runs:
            known = re.fullmatch("[0-9a-f]{64}", run) is not None
            raise _RefusedError(f"it does not serve run {run if known else '?'}: start it with --run and that key")
        try:
            self._runs[run].verify(bytes.fromhex(proof), tunnel.signed_text(nonce))
        except (InvalidSignature, ValueError):
            raise _RefusedError(f"what was shown is not signed by run {run}: join with an invite of that run") from None

    async def _keep_host(self, run: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit the host of `run`, in place of an earlier one, and hear it until it is silent."""
        nonce = secrets.token_hex(32)
        await write_words(writer, "nonce", nonce)
        words = await read_words(reader, _GREETING_S)
        self._check(run, "".join(words), nonce.encode())
        if (earlier := self._hosts.get(run)) is not None:
            end(earlier)
        self._hosts[run] = writer
        await write_words(writer, "ok")
        logger.info("the host of run %s is here, from %s", run, _peer(writer))
        pinging = asyncio.create_task(_ping(writer))
        try:
            while await read_words(reader, tunnel.SILENCE_S) == ["pong"]:
                pass
        finally:
            pinging.cancel()
            if self._hosts.get(run) is writer:
                del self._hosts[run]
                logger.warning("the host of run %s is gone", run)

    async def _dial(self, run: str, proof: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._check(run, proof, None)
        host, peer = self._hosts.get(run), _peer(writer)
        if host is None:
            raise _RefusedError(f"the host of run {run} is not connected to it: is the run up?")
        total, share = self._streams.total(), max(1, self._max_streams // 4)
        if total >= self._max_streams:
            raise _RefusedError(f"it is full: {total} streams, and --streams is {self._max_streams}")
        if self._max_streams > 4 and self._streams[peer] >= share:
            raise _RefusedError(f"{peer} has {share} streams, a quarter of --streams {self._max_streams}")
        self._streams[peer] += 1
        start, stream = time.monotonic(), secrets.token_hex(16)
        try:
            far = await self._taken(stream, host)
            await write_words(writer, "ok")
            await join_streams((reader, writer), far, self._idle_s)
            logger.info("a stream of %s ended after %.0f s", peer, time.monotonic() - start)
        finally:
            self._streams -= Counter({peer: 1})

    async def _taken(self, stream: str, host: asyncio.StreamWriter) -> TcpStream:
        """Return the host's end of a new stream. Raises _RefusedError."""
        taken = self._dials[stream] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_GREETING_S):
                await write_words(host, "open", stream)
                return await taken
        except OSError:  # TimeoutError is one.
            raise _RefusedError(f"the run's host did not answer within {_GREETING_S:g} s") from None
        finally:
            self._dials.pop(stream, None)


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else "a connection that is gone"


async def _ping(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            await asyncio.sleep(tunnel.PING_S)
            await write_words(writer, "ping")


def main(words: list[str]) -> int:
    from orchestrator.main import until_signal

    options = _parser().parse_args(words)
    address = tcp_address(options.listen, "--listen", bind=True, scheme="")
    if options.streams < 1:
        raise ConfigError(f"--streams is {options.streams}: a node needs one")
    relay = Relay([_run_key(text) for text in options.run], max_streams=options.streams)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    async def serve() -> None:
        await relay.start(address)
        print(f"relaying at {relay.address} for {pluralize(len(options.run), 'run')}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await relay.close()

    async def until_stopped() -> int:
        return await until_signal(serve())

    return asyncio.run(until_stopped())


def _run_key(text: str) -> bytes:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise ConfigError(
            f"--run is {text[:80]!r}, expected the 64 hexadecimal digits that `orchestrator invite RUN_DIR --relay "
            "HOST:PORT` prints"
        )
    return bytes.fromhex(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator relay",
        allow_abbrev=False,
        description="Join nodes with runs whose hosts cannot be reached from outside, on a box that both reach. It "
        "passes ciphertext and holds no secret.",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="such as 0.0.0.0:5600")
    parser.add_argument("--run", required=True, action="append", metavar="KEY",
                        help="public key of a run to serve: `orchestrator invite RUN_DIR --relay HOST:PORT`; "
                        "may be repeated")  # fmt: skip
    parser.add_argument("--streams", type=int, default=256, help="at most at a time, a node needs one; default 256")
    return parser
