"""A gateway process: `python -m orchestrator.gateway.processes.http_end --link-fd N`. Only router_end.py starts it.

    client --HTTP--> http.py: parse, check, render --AskTurn--> router's process
    client <-------- http.py: encode     <--AnsweredTurn | FailedTurn--+
    a client hangs up: CancelTurn; the link ends: answer what is open with 503, and leave

It ends with its parent. A turn's answer is waited for _GRACE_S longer than the router waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import signal
import socket
from pathlib import Path

import aiohttp
from aiohttp import web

from composer_prime.errors import DeadlineError, RequestError
from composer_prime.run.process import end_with_parent
from composer_prime.wire.frames import Frames
from composer_prime.wire.turns import PackedAnswer
from orchestrator.event_loop import freeze_startup
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import TurnRequest
from orchestrator.gateway.http import HttpServer
from orchestrator.gateway.processes.messages import (
    BUFFER_BYTES,
    AnsweredTurn,
    AskTurn,
    CancelTurn,
    FailedTurn,
    ProcessSettings,
    ServingBeat,
    ToProcess,
)

_BEAT_S = 2.0
_GRACE_S = 30.0
_FORWARD_S = 60.0
_KEPT_HEADERS = ("Authorization", "Accept")


class RouterLink:
    """Has turns answered by the router's process."""

    def __init__(self, frames: Frames[ToProcess], answer_timeout_s: float) -> None:
        self._frames = frames
        self._timeout_s = answer_timeout_s + _GRACE_S
        self._turn_ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[PackedAnswer]] = {}

    async def answer(self, turn: TurnRequest) -> PackedAnswer:
        """Return the router's answer. Raises RequestError as the router's process does, and DeadlineError."""
        turn_id = next(self._turn_ids)
        waiting = self._waiting[turn_id] = asyncio.get_running_loop().create_future()
        try:
            self._frames.send(AskTurn(turn_id=turn_id, turn=turn))
            async with asyncio.timeout(self._timeout_s):
                return await waiting
        except TimeoutError:
            self._frames.send(CancelTurn(turn_id=turn_id))
            raise DeadlineError(f"the router did not answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._frames.send(CancelTurn(turn_id=turn_id))
            raise
        finally:
            del self._waiting[turn_id]

    async def receive(self) -> None:
        """Hand out answers until the router's process has closed the link. What then waits gets a 503."""
        while (message := await self._frames.receive()) is not None:
            match message:
                case AnsweredTurn(turn_id=turn_id, answer=answer):
                    self._end(turn_id, answer)
                case FailedTurn(turn_id=turn_id, message=text, status=status, code=code, param=param):
                    self._end(turn_id, RequestError(text, status=status, code=code, param=param))
        for turn_id in self._waiting:
            self._end(turn_id, RequestError("the orchestrator is stopping", status=503, code="closing"))

    def _end(self, turn_id: int, outcome: PackedAnswer | RequestError) -> None:
        waiting = self._waiting.get(turn_id)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, RequestError):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

    async def beat(self) -> None:
        while True:
            self._frames.send(ServingBeat())
            await asyncio.sleep(_BEAT_S)


def forward_route(session: aiohttp.ClientSession, router_url: str) -> web.RouteDef:
    """Return the route that passes any other request on to the router's own HTTP server, which reads no bodies."""

    async def forward(request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in _KEPT_HEADERS if name in request.headers}
        url = f"{router_url}{request.rel_url}"
        try:
            async with session.request(request.method, url, headers=headers) as reply:
                return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestError(
                f"the router does not answer: {type(error).__name__}", status=503, code="router_unavailable"
            ) from error

    return web.route("*", "/{path:.*}", forward)


async def serve(link: socket.socket) -> None:
    """Serve as the first message says, until the router's process closes the link."""
    reader, writer = await asyncio.open_unix_connection(sock=link, limit=BUFFER_BYTES)
    frames: Frames[ToProcess] = Frames(reader, writer, ToProcess, "router")
    settings = await frames.receive()
    if not isinstance(settings, ProcessSettings):
        return
    router = RouterLink(frames, settings.answer_timeout_s)
    chat = ChatFormat(Path(settings.model_dir), settings.renderer)
    timeout = aiohttp.ClientTimeout(total=_FORWARD_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False, auto_decompress=False) as session:
        server = HttpServer(
            router.answer,
            chat,
            model_names=settings.model_names,
            max_context=settings.max_context,
            token=settings.token,
            others=[forward_route(session, settings.router_url)],
        )
        await server.start(socket.create_server((settings.host, settings.port), reuse_port=True))
        freeze_startup()
        beating = asyncio.create_task(router.beat())
        try:
            await router.receive()
        finally:
            beating.cancel()
            await server.close()
            chat.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A gateway process; the orchestrator starts it.")
    parser.add_argument("--link-fd", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    end_with_parent(signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(socket.socket(fileno=args.link_fd)))


if __name__ == "__main__":
    main()
