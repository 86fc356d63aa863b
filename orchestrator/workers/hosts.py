"""Hosts of environment workers on other machines: the orchestrator's side. join.py is theirs.

    HostHello --same releases?--> HostWelcome --> the host loads every source --> HostReady --same tasks?--> attached
    WorkerPool.run --> RemoteWorkers --ForSource--> host --FromSource--> reply
    GatewayCall --of a rollout in flight there?--> the gateway's HTTP --> GatewayReply
    silent for lost_after_s, a closed connection, Goodbye --> its rollouts fail, retryably, as a lost worker's do

Hosts hold the run's worker key and are trusted: a reward is what they report. Their keys open nothing else. They reach
the gateway for their own rollouts in flight only, and no message of theirs ends the run.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import zmq

from composer_prime.config import Config
from composer_prime.errors import ConfigError
from composer_prime.monitor.events import event
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node import MAX_PLACES, Drain, Goodbye, Heard, HelloAgain, Rejected
from composer_prime.wire.sockets import bind_router
from composer_prime.wire.turns import GATEWAY_TOKEN_VARIABLE, JSON
from orchestrator.gateway.gateway import how_to_join
from orchestrator.workers.gateway_requests import ask_gateway
from orchestrator.workers.players import RolloutPlayer
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import (
    FORM_HEADERS,
    MAX_HOST_MESSAGE_BYTES,
    CancelCall,
    ForSource,
    FromHost,
    FromSource,
    GatewayCall,
    GatewayReply,
    Heartbeat,
    HostHello,
    HostReady,
    HostWelcome,
    RunRollout,
    ToHost,
)

logger = logging.getLogger(__name__)

_PATHS = ("/inference/v1/generate", "/v1/chat/completions")
"""Routes of the gateway that a worker needs."""
_CALLS_PER_SLOT = 8
"""Requests to the gateway that a host may have open, for each rollout that it may play."""
_MAX_UNREAD = 64
"""Messages of one host that wait in this process."""
_CHAT_FILES = (".json", ".jinja", ".txt", ".model")
_MAX_FILES_BYTES = 256 << 20
_BURST = 64
"""Messages handled before the event loop gets to run something else."""
_WELCOME_AGAIN_S = 60.0
"""A host that repeats its hello sooner has the welcome, which carries the whole tokenizer, still on its way."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerHost:
    """A host that said hello, until it is lost or leaves."""

    identity: bytes
    hello: HostHello
    last_heard: float
    welcomed_at: float
    draining: bool = False
    workers: dict[str, RemoteWorkers] = field(default_factory=dict)
    """By source; empty until the host has loaded them."""
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def running(self) -> int:
        return sum(workers.running for workers in self.workers.values())

    def plays(self, session: str) -> bool:
        rollout_id = session.partition("#")[0]
        return any(workers.plays(rollout_id) for workers in self.workers.values())


class RemoteWorkers(RolloutPlayer):
    """One source's workers on one host."""

    def __init__(self, server: HostServer, host: WorkerHost, source: str) -> None:
        super().__init__(f"worker host {host.hello.name}")
        self.processes = host.hello.processes
        self._server = server
        self._host = host
        self._source = source

    @property
    def has_room(self) -> bool:
        return not self._host.draining and self._host.running < self._host.hello.slots

    def send(self, message: msgspec.Struct) -> None:
        self._server.send(self._host.identity, ForSource(source=self._source, message=message))  # type: ignore[arg-type]

    async def run(self, request: RunRollout):
        try:
            return await super().run(request)
        finally:
            self._server.notify()  # Its slot is free, for every source.


class HostServer:
    """Admits hosts until `close`."""

    def __init__(
        self, config: Config, pools: Mapping[str, WorkerPool], gateway_url: str, keys: RunKeys, run_id: str
    ) -> None:
        """Bind orchestrator.worker_address; needs a running event loop. `pools`: by source.

        Raises PortInUseError, and ConfigError also for a model folder that is too large to be sent.
        """
        assert config.orchestrator.worker_address is not None
        self.hosts: dict[bytes, WorkerHost] = {}
        """By connection."""
        self._closing = False
        self._pools = pools
        self._run_id = run_id
        self._gateway_url = gateway_url
        self._heartbeat_s = config.inference.heartbeat_s
        self._lost_after_s = config.inference.lost_after_s
        self._start_timeout_s = config.orchestrator.worker_start_timeout_s
        self._files = chat_files(Path(next(iter(pools.values())).spec.model_path))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromHost)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        self._socket = bind_router(
            config.orchestrator.worker_address,
            keys.curve("server"),
            [keys.curve("worker").public],
            max_message_bytes=MAX_HOST_MESSAGE_BYTES,
            max_unread=_MAX_UNREAD,
        )
        how = how_to_join(self.endpoint, None, keys.folder / "worker.token")
        logger.info("for hosts of environment workers, %s", how, extra=event("node"))

    @property
    def endpoint(self) -> str:
        """As bound."""
        return self._socket.endpoint

    async def serve(self) -> None:
        """Handle messages and look for hosts that vanished, until cancelled."""
        await asyncio.gather(self._receive(), self._watch())

    async def close(self, *, finished: bool) -> None:
        """Lose every host and free the address. With `finished`, hosts learn that the run is over and leave."""
        self._closing = True
        for host in list(self.hosts.values()):
            if finished:
                self.send(host.identity, Drain(reason="the run is finished"))
            self._lose(host, "the run ends here")
        await self._session.close()
        await asyncio.to_thread(self._socket.close)

    def send(self, identity: bytes, message: ToHost) -> bool:
        """Queue `message`. Return False when the connection is gone."""
        # A ROUTER without a high-water mark never blocks, so the returned future is done already.
        sent = self._socket.socket.send_multipart([identity, self._encoder.encode(message)], flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        error = sent.exception()
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in (errno.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise error

    def notify(self) -> None:
        """Wake rollouts of every source that wait for a worker with room."""
        for pool in self._pools.values():
            pool.changed.notify()

    # -- messages ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            for _ in range(_BURST):
                received = await self._socket.receive()
                try:
                    if received.num_frames != 1:
                        raise msgspec.DecodeError(f"{received.num_frames} frames, expected 1")
                    self._handle(received.identity, self._decoder.decode(received.first))
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    logger.warning("dropped %d bytes from a worker host: %s", received.num_bytes, error)
            await asyncio.sleep(0)

    def _handle(self, identity: bytes, message: FromHost) -> None:
        host = self.hosts.get(identity)
        if isinstance(message, HostHello):
            self._welcome(identity, message)
            return
        if host is None:
            self.send(identity, HelloAgain())
            return
        host.last_heard = time.monotonic()
        match message:
            case HostReady():
                self._attach(host, message)
            case FromSource() if message.source in host.workers:
                host.workers[message.source].answer(message.reply)
            case GatewayCall():
                self._begin_call(host, message)
            case CancelCall(call=number):
                if (call := host.calls.get(number)) is not None:
                    call.cancel()
            case Heartbeat():
                self.send(identity, Heard())
            case Drain(reason=reason):
                host.draining = True
                logger.info("worker host %s leaves (%s): %d rollouts run there", host.hello.name, reason, host.running)
            case Goodbye(reason=reason):
                self._lose(host, f"it said goodbye: {reason[:500]}")

    def _welcome(self, identity: bytes, hello: HostHello) -> None:
        now = time.monotonic()
        if (earlier := self.hosts.get(identity)) is not None:
            is_repeated = hello == earlier.hello and not earlier.workers
            if is_repeated and now - earlier.welcomed_at < _WELCOME_AGAIN_S:
                earlier.last_heard = now
                self.send(identity, Heard())
                return
            self._lose(earlier, "it started over")
        if reason := _refusal(hello):
            self._refuse(identity, hello, reason)
        elif any(pool.is_loading for pool in self._pools.values()):
            self.send(identity, Heard())  # It says hello again: by then the run knows its tasks.
        else:
            self.hosts[identity] = WorkerHost(identity=identity, hello=hello, last_heard=now, welcomed_at=now)
            welcome = HostWelcome(
                run_id=self._run_id,
                specs=[pool.spec for pool in self._pools.values()],
                files=self._files,
                heartbeat_s=self._heartbeat_s,
                lost_after_s=self._lost_after_s,
                start_timeout_s=self._start_timeout_s,
            )
            self.send(identity, welcome)

    def _refuse(self, identity: bytes, hello: HostHello, reason: str) -> None:
        logger.warning("rejected worker host %.200r: %s", hello.name, reason)
        self.send(identity, Rejected(reason=reason, may_return=False))

    def _attach(self, host: WorkerHost, message: HostReady) -> None:
        if host.workers:
            return
        try:
            for source, pool in self._pools.items():
                if (ready := message.ready.get(source)) is None:
                    raise ConfigError(f"the host loaded {sorted(message.ready)}, the run has {sorted(self._pools)}")
                workers = RemoteWorkers(self, host, source)
                pool.attach(workers, ready)
                host.workers[source] = workers
        except ConfigError as error:
            self._refuse(host.identity, host.hello, str(error))
            self._lose(host, "its tasks are not those of this run")
            return
        logger.info("worker host %s joined: %d rollouts at a time", host.hello.name, host.hello.slots,
                    extra=event("node"))  # fmt: skip

    def _begin_call(self, host: WorkerHost, call: GatewayCall) -> None:
        if call.path not in _PATHS or not host.plays(call.session) or call.call in host.calls:
            reply = _refused(call, 403, f"{call.path} for session {call.session!r}: no rollout of this host")
            self.send(host.identity, reply)
        elif len(host.calls) >= _CALLS_PER_SLOT * host.hello.slots:
            self.send(host.identity, _refused(call, 429, f"{len(host.calls)} requests of this host are open"))
        else:
            host.calls[call.call] = task = asyncio.create_task(self._forward(host, call))
            task.add_done_callback(lambda _: host.calls.pop(call.call, None))

    async def _forward(self, host: WorkerHost, call: GatewayCall) -> None:
        form = {name: call.headers[name] for name in FORM_HEADERS if name in call.headers}
        headers = {"Content-Type": JSON, **form, "X-Session-ID": call.session}
        if token := os.environ.get(GATEWAY_TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        try:
            status, content_type, body = await ask_gateway(
                self._session, "POST", self._gateway_url + call.path, call.body, headers
            )
            reply = GatewayReply(call=call.call, status=status, body=body, content_type=content_type)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply = _refused(call, 503, f"{type(error).__name__}: {error}")
        self.send(host.identity, reply)

    # -- upkeep --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look for hosts that vanished, every half heartbeat."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._heartbeat_s / 2)
            now = time.monotonic()
            # After a stall of this process, heartbeats wait in the socket: read them first.
            stalled, last = now - last > self._lost_after_s / 2, now
            for host in [] if stalled else list(self.hosts.values()):
                silent_s = now - host.last_heard
                if silent_s > self._lost_after_s:
                    self._lose(host, f"silent for {silent_s:.1f} s (inference.lost_after_s = {self._lost_after_s:g})")
                elif not self.send(host.identity, Heard()):
                    self._lose(host, "its connection is closed")

    def _lose(self, host: WorkerHost, reason: str) -> None:
        """Fail the host's rollouts, which are retried elsewhere. What it still sends is dropped."""
        del self.hosts[host.identity]
        running = host.running
        for call in host.calls.values():
            call.cancel()
        for workers in host.workers.values():
            workers.end(f"{workers.label} is gone: {reason}")
        log = logger.info if self._closing else logger.warning
        log("worker host %s is gone: %s; %d rollouts ran there", host.hello.name, reason, running)


def releases() -> dict[str, str]:
    """Return the versions of the packages that play a rollout."""
    return {name: importlib.metadata.version(name) for name in ("composer-prime", "verifiers", "renderers")}


def chat_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model folder other than weights. Raises ConfigError when they are too large to be sent."""
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in _CHAT_FILES and path.is_file()]
    total = sum(path.stat().st_size for path in paths)
    if total > _MAX_FILES_BYTES:
        raise ConfigError(
            f"{folder} has {total} bytes in files other than weights, at most {_MAX_FILES_BYTES} are sent to worker "
            "hosts: remove files that the tokenizer does not need"
        )
    return {path.name: path.read_bytes() for path in paths}


def _refusal(hello: HostHello) -> str | None:
    ours = releases()
    if hello.releases != ours:
        theirs = {name: hello.releases.get(name) for name in ours}
        return f"the host has {theirs}, this run {ours}: install the same releases on both sides"
    if not 1 <= len(hello.name) <= 200 or not hello.name.isprintable():
        return f"its name {hello.name[:200]!r} is not 1 to 200 printable characters: choose another --name"
    if not (1 <= hello.slots <= MAX_PLACES and 1 <= hello.processes <= hello.slots):
        return (
            f"it offers {hello.slots} slots with {hello.processes} processes a source: offer 1 to {MAX_PLACES} slots "
            "(--slots) and at least one for each process (--workers)"
        )
    return None


def _refused(call: GatewayCall, status: int, message: str) -> GatewayReply:
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": "worker_host"}}
    return GatewayReply(call=call.call, status=status, body=msgspec.json.encode(body))
