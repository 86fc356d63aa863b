"""HTTP processes in front of the router, where orchestrator.gateway_processes is above 1: the router's end.

    clients --HTTP, one port--> front 1 ... N (front.py): parse, authorize, render, tokenize, encode answers
                                   | FrontTurn, FrontCancel        ^ FrontAnswer, FrontError    (one socket pair each)
                                   v                               |
                                 Fronts, in the router's process: Generator.answer --> router, records
    any other path: passed on to the router's own HTTP server, on a loopback port

The kernel spreads connections over the fronts (SO_REUSEPORT). A front holds nothing but open requests. When one dies,
its clients lose their connections and find another front; its turns are cancelled, and it is started again. Once it has
died too often, the others go on, and after the last one the router's process serves the port itself.

Who waits: a start at most _START_S; a turn for its answer as long as the router lets it, and front.py a little longer;
a front that is silent for `hang_s` is killed (`end_silent`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.errors import ConfigError, DeadlineError, RoleFailedError, WireError
from composer_prime.run.process import child_options, exit_text, signal_session, stop
from composer_prime.run.retry import Restarts
from composer_prime.wire.frames import Frames
from orchestrator.event_loop import Notifier, watched
from orchestrator.gateway.generation import TurnAnswer, TurnRequest
from orchestrator.gateway.http import to_request_error

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
BUFFER_BYTES = 1 << 20
"""Of a link, read ahead: a long prompt arrives in one piece."""
_START_S = 180.0
_ANSWERS_S, _STOP_S = 1.0, 5.0
"""When the gateway closes: until every open turn has its error, and until the front has passed it on."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True, tag="settings"):
    """What a front serves; the first message to it."""

    host: str
    port: int
    router_url: str
    """Of the router's own HTTP server."""
    token: str | None
    """Bearer token that every request must carry."""
    model_names: tuple[str, ...]
    model_dir: str
    renderer: str | dict[str, Any] | None
    max_context: int
    answer_timeout_s: float
    """How long the router takes for a turn at most."""


class FrontAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    call: int
    answer: TurnAnswer


class FrontError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """A turn that ended with a RequestError of these arguments."""

    call: int
    message: str
    status: int
    code: str
    param: str | None


class FrontReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The front serves the port."""


class FrontTurn(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    call: int
    """Number among the turns of this front."""
    turn: TurnRequest


class FrontCancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The client of this turn has gone."""

    call: int


class FrontHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The front's event loop runs."""


ToFront = FrontSettings | FrontAnswer | FrontError
FromFront = FrontReady | FrontTurn | FrontCancel | FrontHeartbeat


@dataclass(slots=True, eq=False)
class Front:
    """A running front process."""

    process: asyncio.subprocess.Process
    frames: Frames[FromFront]
    heard_at: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    end_reason: str | None = None
    turns: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Without an answer, by call."""


class Fronts:
    """Runs `count` fronts from `start` to `close`."""

    def __init__(
        self,
        count: int,
        answer: Callable[[TurnRequest], Awaitable[TurnAnswer]],
        on_error: Callable[[BaseException], None],
        *,
        hang_s: float = 60.0,
        max_restarts: int = 5,
    ) -> None:
        """`on_error` gets why `on_none_left` of `start` failed. `hang_s`: how long a front may be silent."""
        self.restarts = 0
        self._count = count
        self._answer = answer
        self._on_error = on_error
        self._fronts: dict[int, Front] = {}
        self._given_up: dict[int, str] = {}
        """Why fronts are not started again, by number."""
        self._changed = Notifier()
        self._hang_s = hang_s
        self._max_restarts = max_restarts
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, settings: FrontSettings, on_none_left: Callable[[], Awaitable[None]]) -> None:
        """Serve as `settings` say, at a port that this process holds. Returns once every front does.

        `on_none_left` serves the port in this process once every front has died too often.

        Raises ConfigError on a system that does not spread connections, RoleFailedError when a front cannot start,
        DeadlineError when that takes longer than _START_S.
        """
        if sys.platform != "linux":
            raise ConfigError(
                f"orchestrator.gateway_processes is {self._count}, but {sys.platform} does not spread the connections "
                "to one port over several processes as Linux does: set orchestrator.gateway_processes to 1"
            )
        keep_alive = (self._keep_alive(number, settings, on_none_left) for number in range(self._count))
        self._tasks = [watched(each, self._on_error) for each in keep_alive]
        await self._changed.wait_for(lambda: self._given_up or self.num_ready == self._count, _START_S)
        if self._given_up:
            raise RoleFailedError(f"a gateway process does not start: {', '.join(self._given_up.values())}; see above")
        if self.num_ready < self._count:
            raise DeadlineError(
                f"{self.num_ready} of {self._count} gateway processes (orchestrator.gateway_processes) serve "
                f"port {settings.port} after {_START_S:g} s: set a lower number on a slow machine"
            )

    @property
    def num_ready(self) -> int:
        return sum(front.is_ready for front in self._fronts.values())

    @property
    def pids(self) -> list[int]:
        return [front.process.pid for front in self._fronts.values()]

    def figures(self, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}serving": self.num_ready, f"{prefix}restarts": self.restarts}

    def end_silent(self) -> None:
        """Kill fronts that do not run. Call it now and then, not after a stall of this process."""
        for front in self._fronts.values():
            silent_s = time.monotonic() - front.heard_at
            if silent_s > (self._hang_s if front.is_ready else _START_S):
                front.end_reason = f"was silent for {silent_s:.0f} s and is killed"
                signal_session(front.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End every front. What the router answers to open turns still reaches their clients."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- one front -----------------------------------------------------------------------------------------------

    async def _keep_alive(
        self, number: int, settings: FrontSettings, on_none_left: Callable[[], Awaitable[None]]
    ) -> None:
        """Run front `number`, again and again, until it has died too often."""
        restarts = Restarts()
        while True:
            started = time.monotonic()
            try:
                reason = await self._run(number, settings)
            except OSError as error:
                reason = f"cannot be started: {error}"
            pause_s = restarts.pause_s(time.monotonic() - started, self._max_restarts)
            if pause_s is None:
                break
            self.restarts += 1
            logger.warning(
                "gateway process %d %s; clients go to the others, and it is started again in %.0f s (restart %d of %d)",
                number, reason, pause_s, restarts.count, self._max_restarts,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
        self._given_up[number] = reason
        logger.error(
            "gateway process %d %s; it has died too often and is not started again, %d of %d remain",
            number, reason, self._count - len(self._given_up), self._count,
        )  # fmt: skip
        self._changed.notify()
        if len(self._given_up) == self._count:
            logger.error("no gateway process is left: the orchestrator's own process serves port %d", settings.port)
            await on_none_left()

    async def _run(self, number: int, settings: FrontSettings) -> str:
        """Start front `number` and serve it until it has ended. Return how."""
        front = self._fronts[number] = await _spawn(number)
        front.frames.send(settings)
        try:
            while (message := await front.frames.receive()) is not None:
                self._take(front, message)
        except WireError as error:
            front.end_reason = f"is killed: {error}"
        finally:
            if self._closing and front.turns:
                await asyncio.wait(front.turns.values(), timeout=_ANSWERS_S)
            for task in front.turns.values():
                task.cancel()
            front.frames.close()
            await stop(front.process, _STOP_S, request=False)
            del self._fronts[number]
        return front.end_reason or exit_text(front.process.returncode)

    def _take(self, front: Front, message: FromFront) -> None:
        front.heard_at = time.monotonic()
        match message:
            case FrontTurn(call=call):
                front.turns[call] = task = asyncio.create_task(self._answer_turn(front, message))
                task.add_done_callback(lambda _: front.turns.pop(call, None))
            case FrontCancel(call=call) if call in front.turns:
                front.turns[call].cancel()
            case FrontReady():
                front.is_ready = True
                self._changed.notify()

    async def _answer_turn(self, front: Front, message: FrontTurn) -> None:
        try:
            reply = FrontAnswer(call=message.call, answer=await self._answer(message.turn))
        except Exception as error:
            told = to_request_error(error, f"a turn of session {message.turn.session}")
            reply = FrontError(
                call=message.call, message=str(told), status=told.status, code=told.code, param=told.param
            )
        front.frames.send(reply)


async def _spawn(number: int) -> Front:
    """Return a front that waits for its settings. Its log goes where this process's goes."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orchestrator.gateway.fronts.front", "--link-fd", str(theirs.fileno())),
                **child_options(_ENVIRONMENT, pass_fds=[theirs.fileno()]),
            )
        except BaseException:
            writer.close()
            raise
    return Front(process, Frames(reader, writer, FromFront, f"gateway process {number}"))
