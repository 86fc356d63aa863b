"""`orchestrator relay`: connect nodes with a run that accepts no inbound connections, on a box that both can reach.

    run's host --host KEY--> relay --nonce--> run's host --HOST:PORT as dialed, both signed--> relay
                                                      at most one host a run: the one that proved the key last
    node --dial KEY PASS--> relay --open ID--> host --take ID--> relay          then both streams are one

It holds public keys only and passes ciphertext that it cannot read (composer_prime/wire/tunnel.py). It serves the runs
that were named to it. A proof names the relay that it is for, so another relay cannot pass it on. Connections that
have not proved what they claim, streams, bytes held and silence are bounded; of the first two, each network gets half
of what the others leave.
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

from composer_prime.address import Address, has_share, network, tcp_address
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, PortInUseError, WireError
from composer_prime.wire import tunnel
from composer_prime.wire.tunnel import (
    TcpStream,
    check_pass,
    end,
    join_streams,
    read_words,
    signed_text,
    write_words,
)

logger = logging.getLogger(__name__)

_GREETING_S = 10.0
"""How long a connection may take for each line of its greeting, and the run's host to take a stream."""
_MAX_GREETING = 256


class _RefusedError(Exception):
    """A refusal. The other side gets the message."""


class Relay:
    """Serves from `start` to `close`."""

    def __init__(
        self, runs: Collection[bytes], names: Collection[str] = (), *, max_streams: int = 256,
        idle_s: float = tunnel.IDLE_S,
    ) -> None:  # fmt: skip
        """`runs`: their public signing keys. `names`: HOST:PORT at which hosts dial it; else the address bound."""
        self.address = Address("", 0)
        """As bound."""
        self._runs = {run.hex(): Ed25519PublicKey.from_public_bytes(run) for run in runs}
        self._names = {name.lower() for name in names}
        self._max_streams = max_streams
        self._idle_s = idle_s
        self._hosts: dict[str, asyncio.StreamWriter] = {}
        self._dials: dict[str, asyncio.Future[TcpStream]] = {}
        """Streams that the host of their run has not taken yet, by id."""
        self._streams: Counter[str] = Counter()
        """Waiting and joined, by the network that dialed."""
        self._greeting: Counter[str] = Counter()
        """Connections that have not proved what they claim, by network."""
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
        if has_share(self._greeting, peer := _peer(writer), _MAX_GREETING):
            self._greeting[peer] += 1
            tunnel.spawn(self._serve(peer, reader, writer), self._tasks)
        else:
            writer.transport.abort()

    async def _serve(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. It is closed at the end, unless it is one that a dial has taken over."""
        handed_over = False
        try:
            try:
                wanted, of = await self._hear(reader, writer)
            finally:
                self._greeting -= Counter({peer: 1})
            if wanted == "host":
                await self._keep_host(of, reader, writer)
            elif wanted == "dial":
                await self._dial(of, reader, writer)
            elif (dial := self._dials.pop(of, None)) is not None and not dial.done():
                handed_over = True
                dial.set_result((reader, writer))
        except _RefusedError as refusal:
            logger.warning("refused %s: %s", peer, refusal)
            with suppress(OSError):
                await write_words(writer, "no", str(refusal))
        except (OSError, WireError) as error:
            logger.info("a connection of %s ended: %s", peer, str(error) or type(error).__name__)
        finally:
            if not handed_over:
                end(writer)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, str]:
        """Return what a connection wants, `host`, `dial` or `take`, and of which run or stream, once that is proved."""
        match await read_words(reader, _GREETING_S):
            case [tunnel.PROTOCOL, "take", stream]:
                return "take", stream
            case [tunnel.PROTOCOL, "dial", run, shown]:
                self._verify(run, shown)
                return "dial", run
            case [tunnel.PROTOCOL, "host", run]:
                self._key(run)
                nonce = secrets.token_hex(32)
                await write_words(writer, "nonce", nonce)
                match await read_words(reader, _GREETING_S):
                    case [name, proof]:
                        host, port, *_ = writer.get_extra_info("sockname")
                        if name.lower() not in (self._names or {str(self.address), str(Address(host, port))}):
                            raise _RefusedError(f"it does not know itself as {name!r}: start it with --name and that")
                        self._verify(run, proof, signed_text(name, nonce))
                        return "host", run
        raise _RefusedError(f"it speaks {tunnel.PROTOCOL}: install one release on relay, run and nodes")

    def _key(self, run: str) -> Ed25519PublicKey:
        if run not in self._runs:
            known = re.fullmatch("[0-9a-f]{64}", run) is not None
            raise _RefusedError(f"it does not serve run {run if known else '?'}: start it with --run and that key")
        return self._runs[run]

    def _verify(self, run: str, shown: str, text: bytes | None = None) -> None:
        """Check the signature of `text`; without one, a pass."""
        key = self._key(run)
        try:
            if text is None:
                check_pass(key, bytes.fromhex(shown))
            else:
                key.verify(bytes.fromhex(shown), text)
        except WireError as error:
            raise _RefusedError(str(error)) from None
        except (InvalidSignature, ValueError):
            raise _RefusedError(f"what was shown is not signed by run {run}: join with an invite of that run") from None

    async def _keep_host(self, run: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit the host of `run`, in place of an earlier one, and hear it until it is silent."""
        if (earlier := self._hosts.get(run)) is not None:
            earlier.write(b"no another host of this run came\n")
            end(earlier)
        pinging = asyncio.create_task(_ping(writer))
        try:
            self._hosts[run] = writer
            await write_words(writer, "ok")
            logger.info("the host of run %s is here, from %s", run, _peer(writer))
            while (words := await tunnel.read_control(reader)) == ["pong"]:
                pass
            raise WireError(f"the host of run {run} sent {' '.join(words)!r}, expected pong")
        finally:
            pinging.cancel()
            if self._hosts.get(run) is writer:
                del self._hosts[run]
                logger.warning("the host of run %s is gone", run)

    async def _dial(self, run: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, peer = self._hosts.get(run), _peer(writer)
        if host is None:
            raise _RefusedError(f"the host of run {run} is not connected to it: is the run up?")
        held, total = self._streams[peer], self._streams.total()
        if not has_share(self._streams, peer, self._max_streams):
            raise _RefusedError(f"it is full: {peer} has {held} of {total} streams, --streams is {self._max_streams}")
        self._streams[peer] += 1
        start, stream = time.monotonic(), secrets.token_hex(16)
        try:
            far = await self._taken(stream, host)
            writer.write(b"ok\n")
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
        except BaseException as error:
            if taken.done() and not taken.cancelled():
                end(taken.result()[1])
            if not isinstance(error, OSError):  # TimeoutError is one.
                raise
            raise _RefusedError(f"the run's host did not answer within {_GREETING_S:g} s") from None
        finally:
            self._dials.pop(stream, None)


def _peer(writer: asyncio.StreamWriter) -> str:
    """Return the network that a connection comes from."""
    name = writer.get_extra_info("peername")
    return network(str(name[0])) if name else "a connection that is gone"


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
    names = [str(tcp_address(text, "--name", scheme="")) for text in options.name]
    relay = Relay([_run_key(text) for text in options.run], names, max_streams=options.streams)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    async def serve() -> None:
        await relay.start(address)
        print(f"relaying at {relay.address} for {pluralize(len(options.run), 'run')}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await relay.close()

    return asyncio.run(until_signal(serve()))


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
        description="Connect nodes with runs that accept no inbound connections, on a box that both reach. The "
        "relay sees only ciphertext and has no secrets.",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="such as 0.0.0.0:5600")
    parser.add_argument("--name", action="append", default=[], metavar="HOST:PORT",
                        help="the relay's address, as in `orchestrator invite RUN_DIR --relay HOST:PORT`; default: "
                        "the address that a connection reached; may be repeated")  # fmt: skip
    parser.add_argument("--run", required=True, action="append", metavar="KEY",
                        help="public key of a run to serve: `orchestrator invite RUN_DIR --relay HOST:PORT`; "
                        "may be repeated")  # fmt: skip
    parser.add_argument("--streams", type=int, default=256, help="maximum connections, one per node; default 256")
    return parser
