"""`orchestrator join tcp://HOST:PORT`: play a run's rollouts on this machine. hosts.py is the other side.

    hello --> welcome: sources, tokenizer --> WorkerPool of each source --> ready
    ForSource(RunRollout) --> WorkerPool.run --> FromSource(reply)
    worker --HTTP, loopback--> this process --GatewayCall--> orchestrator's gateway --GatewayReply--> worker
    silent orchestrator: rollouts are dropped, hello again, until connect_timeout_s have passed
    SIGTERM, Drain: no more rollouts, those that run end within drain_timeout_s, goodbye

The workers are the same processes as on the orchestrator's machine. They end with this process, and their sandboxes
with them.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from composer_prime.address import tcp_address
from composer_prime.errors import (
    ComposerError,
    ConfigError,
    DeadlineError,
    EnvironmentNotInstalledError,
    EnvironmentWorkerError,
    RunMismatchError,
)
from composer_prime.run.keys import TOKEN_VARIABLE, ClientKeys, join_keys
from composer_prime.run.scratch import Scratch
from composer_prime.wire.node import Drain, Goodbye, HelloAgain, Rejected
from composer_prime.wire.sockets import dealer
from composer_prime.wire.turns import GATEWAY_TOKEN_VARIABLE
from orchestrator.workers.hosts import releases
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import (
    FORM_HEADERS,
    MAX_HOST_MESSAGE_BYTES,
    CancelCall,
    CancelRollout,
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
    SourceSpec,
    ToHost,
    failed_reply,
)

logger = logging.getLogger(__name__)

_HELLO_EVERY_S = 2.0
_MAX_BODY_BYTES = 64 << 20
_LOOPBACK = "127.0.0.1"


class JoinedHost:
    """Plays for one orchestrator until it is drained, refused, or without an orchestrator for too long. Use once."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
        *,
        name: str,
        slots: int,
        workers: int,
        connect_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        """`slots`: rollouts at a time, of all sources together. `workers`: processes of each source."""
        self._address = address
        self._keys = keys
        self._hello = HostHello(name=name, slots=slots, processes=workers, releases=releases())
        self._connect_timeout_s = connect_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._context = zmq.asyncio.Context()
        self._socket = dealer(self._context, address, keys, immediate=True)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToHost)
        self._welcome: HostWelcome | None = None
        """None while the orchestrator does not know this host."""
        self._sources: tuple[list[SourceSpec], dict[str, bytes]] | None = None
        """What is loaded or being loaded."""
        self._pools: dict[str, WorkerPool] = {}
        self._loading: asyncio.Task[None] | None = None
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[GatewayReply]] = {}
        self._numbers = itertools.count()
        self._gateway_url = ""
        self._gateway_token = secrets.token_urlsafe(24)
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason for leaving, or raises why this host cannot continue."""

    def stop(self, reason: str) -> None:
        """Drain; a second call drops the rollouts that still run."""
        if not self._stop.done():
            self._stop.set_result(reason)
        else:
            self._drop_rollouts()

    async def run(self) -> None:
        """Play. Raises DeadlineError (no orchestrator), RunMismatchError (refused), or what keeps the sources from
        loading."""
        os.environ[GATEWAY_TOKEN_VARIABLE] = self._gateway_token  # Only the workers have and send it.
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=500)
            self._scratch = Scratch("host")
            stack.callback(self._scratch.close)
            stack.push_async_callback(self._close_pools)
            await self._serve_gateway(stack)
            tasks = [asyncio.create_task(work) for work in (self._converse(), self._send_heartbeats())]
            try:
                await asyncio.wait([*tasks, self._stop], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                await self._drain(self._stop.result())
            except ComposerError as error:
                self._send(Goodbye(reason=str(error)[:500]))
                raise
            finally:
                tasks += [*self._rollouts.values(), *([self._loading] if self._loading is not None else [])]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, reason: str) -> None:
        logger.info("leaving (%s): %d rollouts run", reason, len(self._rollouts))
        self._send(Drain(reason=reason))
        until = time.monotonic() + self._drain_timeout_s
        while self._rollouts and self._welcome is not None and (left_s := until - time.monotonic()) > 0:
            await asyncio.wait([*self._rollouts.values()], timeout=left_s)
        if self._rollouts:
            logger.warning("%d rollouts did not end within %g s (--drain-timeout): the run plays them again",
                           len(self._rollouts), self._drain_timeout_s)  # fmt: skip
        self._send(Goodbye(reason=reason))

    # -- the orchestrator ----------------------------------------------------------------------------------------

    def _send(self, message: FromHost) -> bool:
        return self._send_raw(self._encoder.encode(message))

    def _send_raw(self, raw: bytes) -> bool:
        """Queue a message. Return False without a connection: what a later one would bring is too late."""
        error = self._socket.send(raw, flags=zmq.NOBLOCK).exception()  # Never blocks, so the future is done.
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    async def _converse(self) -> None:
        heard = time.monotonic()
        hello_at = -_HELLO_EVERY_S
        while True:
            now = time.monotonic()
            if self._welcome is None and now - hello_at >= _HELLO_EVERY_S:
                hello_at = now if self._send(self._hello) else hello_at
            if await self._socket.poll(500):
                heard = time.monotonic()
                self._handle(self._decoder.decode(await self._socket.recv()))
                continue
            silent_s = time.monotonic() - heard
            # While it loads, it plays nothing that others could play.
            is_loaded = self._loading is not None and self._loading.done()
            if self._welcome is not None and is_loaded and silent_s > self._welcome.lost_after_s:
                logger.warning("the orchestrator at %s is silent for %.1f s", self._address, silent_s)
                self._detach()
            if silent_s > self._connect_timeout_s:
                raise DeadlineError(
                    f"waited {silent_s:.0f} s (--connect-timeout) for the orchestrator at {self._address}: check that "
                    "it runs, that this is its orchestrator.worker_address, and that the join token is of this run"
                )

    def _handle(self, message: ToHost) -> None:
        match message:
            case HostWelcome():
                self._begin(message)
            case ForSource(source=source, message=RunRollout() as request) if self._welcome is not None:
                task = self._rollouts[request.rollout_id] = asyncio.create_task(self._play(source, request))
                task.add_done_callback(lambda _: self._rollouts.pop(request.rollout_id, None))
            case ForSource(message=CancelRollout(rollout_id=rollout_id)) if rollout_id in self._rollouts:
                self._rollouts[rollout_id].cancel()
            case GatewayReply(call=call) if call in self._calls and not self._calls[call].done():
                self._calls[call].set_result(message)
            case HelloAgain():
                self._detach()
            case Rejected(reason=reason):
                self._fail(RunMismatchError(f"the orchestrator at {self._address} turned this host away: {reason}"))
            case Drain(reason=reason) if not self._stop.done():
                self._stop.set_result(reason)
            case _:
                pass  # Heard, or a message that came too late.

    def _fail(self, error: BaseException) -> None:
        if not self._stop.done():
            self._stop.set_exception(error)

    def _detach(self) -> None:
        """Drop the rollouts: the orchestrator plays them again. The sources stay loaded."""
        self._welcome = None
        self._drop_rollouts()

    def _drop_rollouts(self) -> None:
        for task in self._rollouts.values():
            task.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._welcome.heartbeat_s if self._welcome is not None else _HELLO_EVERY_S)
            if self._welcome is not None:
                self._send(Heartbeat())

    # -- the sources ---------------------------------------------------------------------------------------------

    def _begin(self, welcome: HostWelcome) -> None:
        logger.info("welcomed by run %s at %s", welcome.run_id, self._address)
        self._welcome = welcome
        sources = (welcome.specs, welcome.files)
        if self._loading is None or sources != self._sources:
            earlier, self._sources = self._loading, sources
            self._loading = asyncio.create_task(self._load(welcome, earlier))
        elif self._loading.done():
            self._report_ready()

    async def _load(self, welcome: HostWelcome, earlier: asyncio.Task[None] | None) -> None:
        """Start the workers of `welcome` once those of `earlier` have ended. A reconnect meanwhile does not matter."""
        try:
            if earlier is not None:
                earlier.cancel()
                await asyncio.wait([earlier])
            await self._close_pools()
            await self._open_pools(welcome)
        except (ComposerError, OSError) as error:
            remedy = ""
            if isinstance(error, EnvironmentNotInstalledError):
                remedy = ". Install its package on this host, or set PYTHONPATH to the folder that has it"
            self._fail(ConfigError(f"host {socket.gethostname()}: {error}{remedy}"))
            return
        logger.info("ready: %d rollouts at a time with %d processes for each of %s", self._hello.slots,
                    self._hello.processes, ", ".join(self._pools))  # fmt: skip
        if self._welcome is not None:
            self._report_ready()

    def _report_ready(self) -> None:
        self._send(HostReady(ready={name: pool.ready for name, pool in self._pools.items() if pool.ready is not None}))

    async def _open_pools(self, welcome: HostWelcome) -> None:
        """Write the policy's files, and start the workers. Raises what keeps them from loading here."""
        model = self._scratch.path / "model"
        model.mkdir(exist_ok=True)
        for name, content in welcome.files.items():
            (model / Path(name).name).write_bytes(content)
        for spec in welcome.specs:
            local = msgspec.structs.replace(spec, model_path=str(model))
            self._pools[spec.name] = WorkerPool(
                local, workers=self._hello.processes, start_timeout_s=welcome.start_timeout_s
            )
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))

    async def _close_pools(self) -> None:
        pools, self._pools = self._pools, {}
        await asyncio.gather(*(pool.close() for pool in pools.values()))

    async def _play(self, source: str, request: RunRollout) -> None:
        try:
            local = msgspec.structs.replace(request, gateway_url=f"{self._gateway_url}/v1")
            reply = await self._pools[source].run(local)
        except EnvironmentWorkerError as error:
            self._fail(error)
            return
        except (ComposerError, KeyError) as error:
            reply = request.failed("worker", f"{type(error).__name__}: {error}")
        raw = self._encoder.encode(FromSource(source=source, reply=reply))
        if len(raw) > MAX_HOST_MESSAGE_BYTES:
            text = f"its reply has {len(raw)} bytes, and a host may send {MAX_HOST_MESSAGE_BYTES}"
            failed = failed_reply(request.rollout_id, reply.task_id, "internal", text, retryable=False)
            raw = self._encoder.encode(FromSource(source=source, reply=failed))
        self._send_raw(raw)

    # -- the workers' requests to the policy -----------------------------------------------------------------------

    async def _serve_gateway(self, stack: AsyncExitStack) -> None:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.post("/{path:.*}", self._forward)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, _LOOPBACK, 0, backlog=4096).start()
        self._gateway_url = f"http://{_LOOPBACK}:{runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(header, f"Bearer {self._gateway_token}".encode()):
            return web.Response(status=401, text="the Authorization header does not carry this host's token")
        number, session = next(self._numbers), request.headers.get("X-Session-ID", "")
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            headers = {name: request.headers[name] for name in FORM_HEADERS if name in request.headers}
            body = await request.read()
            self._send(GatewayCall(call=number, path=request.path, session=session, body=body, headers=headers))
            reply = await future
        except asyncio.CancelledError:
            self._send(CancelCall(call=number))
            raise
        finally:
            del self._calls[number]
        return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type)


# -- the command line ----------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Run `orchestrator join`. Raises ConfigError for what the command line has wrong."""
    options = _parser().parse_args(words)
    address = f"tcp://{tcp_address(options.address.rstrip('/'), 'the worker address')}"
    keys = join_keys(options.token, options.token_file, "worker")
    workers = options.workers or os.cpu_count() or 1
    slots = 8 * workers if options.slots is None else options.slots
    if not 1 <= workers <= slots:
        raise ConfigError(f"--workers is {workers} and --slots {slots}: give 1 <= workers <= slots")
    print(f"{options.name}: {slots} rollouts at a time, {workers} worker processes a source, orchestrator {address}")
    if options.dry_run:
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def serve() -> None:
        host = JoinedHost(
            address,
            keys,
            name=options.name,
            slots=slots,
            workers=workers,
            connect_timeout_s=options.connect_timeout,
            drain_timeout_s=options.drain_timeout,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, host.stop, number.name)
        await host.run()

    asyncio.run(serve())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator join",
        allow_abbrev=False,
        description="Run a run's rollouts on this machine. The host connects outwards, gets the sources' settings and "
        "the tokenizer over the encrypted link, and may leave at any time. It needs the packages of the task sets.",
    )
    parser.add_argument("address", help="the run's orchestrator.worker_address, tcp://HOST:PORT")
    parser.add_argument("--token", help=f"join token (keys/worker.token of the run); prefer ${TOKEN_VARIABLE}")
    parser.add_argument("--token-file", type=Path, help="file that holds the join token")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="this host's name in the run")
    parser.add_argument("--workers", type=int, help="processes per source; default: number of CPUs")
    parser.add_argument("--slots", type=int, help="concurrent rollouts over all sources; default: 8 per worker")
    parser.add_argument("--connect-timeout", type=float, default=120.0,
                        help="seconds to try to reach the orchestrator, at the start and again later")  # fmt: skip
    parser.add_argument("--drain-timeout", type=float, default=60.0, help="seconds to finish rollouts when stopping")
    parser.add_argument("--dry-run", action="store_true", help="check the options, print them and stop")
    return parser
