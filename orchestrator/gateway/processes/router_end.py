"""The router's end of gateway processes, where orchestrator.gateway_processes is above 1.

    clients --HTTP, one port--> gateway process 0 ... (http_end.py): parse, authorize, render, tokenize, encode answers
                                   | AskTurn, CancelTurn           ^ AnsweredTurn, FailedTurn   (one socket pair each)
                                   v                               |
                                 GatewayProcesses, in the router's process: Generator.answer --> router, records
    any other path: passed on to the router's own HTTP server, on a loopback port

The kernel spreads connections over the processes (SO_REUSEPORT). They hold nothing but open requests. When one dies,
its clients lose their connections and find another one; its turns are cancelled, and it is restarted. After too many
deaths it stays down and the others continue. After the last one, the router's process serves the port itself.

Who waits: a start at most _START_S; a turn for its answer as long as the router lets it, and http_end.py a little
longer; a process that is silent for `hang_s` is killed (`end_silent`).
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

from composer_prime.errors import ConfigError, DeadlineError, RoleFailedError, WireError
from composer_prime.run.process import WORKER_ENVIRONMENT, child_options, exit_text, signal_session, stop
from composer_prime.run.retry import Restarts
from composer_prime.wire.frames import Frames
from composer_prime.wire.turns import PackedAnswer
from orchestrator.event_loop import Notifier, watched
from orchestrator.gateway.generation import TurnRequest
from orchestrator.gateway.http import to_request_error
from orchestrator.gateway.processes.messages import (
    BUFFER_BYTES,
    AnsweredTurn,
    AskTurn,
    CancelTurn,
    FailedTurn,
    FromProcess,
    ProcessSettings,
    ServingBeat,
)

logger = logging.getLogger(__name__)

_START_S = 600.0
_ANSWERS_S, _STOP_S = 1.0, 5.0
"""When the gateway closes: until every open turn has its error, and until its process has passed it on."""


@dataclass(slots=True, eq=False)
class GatewayProcess:
    """A running one."""

    process: asyncio.subprocess.Process
    frames: Frames[FromProcess]
    heard_at: float = field(default_factory=time.monotonic)
    is_serving: bool = False
    end_reason: str | None = None
    turns: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Without an answer, by id."""


class GatewayProcesses:
    """Runs `count` gateway processes from `start` to `close`."""

    def __init__(
        self,
        count: int,
        answer: Callable[[TurnRequest], Awaitable[PackedAnswer]],
        on_error: Callable[[BaseException], None],
        *,
        hang_s: float = 60.0,
        max_restarts: int = 5,
    ) -> None:
        """`on_error` gets why `on_none_left` of `start` failed. `hang_s`: how long one may be silent."""
        self.restarts = 0
        self._count = count
        self._answer = answer
        self._on_error = on_error
        self._running: dict[int, GatewayProcess] = {}
        self._given_up: dict[int, str] = {}
        """Why processes are not started again, by number."""
        self._changed = Notifier()
        self._hang_s = hang_s
        self._max_restarts = max_restarts
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, settings: ProcessSettings, on_none_left: Callable[[], Awaitable[None]]) -> None:
        """Serve as `settings` say, at a port that this process holds. Returns once every process does.

        `on_none_left` serves the port in this process once every other has died too often.

        Raises ConfigError on a system that does not spread connections, RoleFailedError when one cannot start,
        DeadlineError when that takes longer than _START_S.
        """
        if sys.platform != "linux":
            raise ConfigError(
                f"orchestrator.gateway_processes is {self._count}, but {sys.platform} does not spread the connections "
                "to one port over several processes as Linux does: set orchestrator.gateway_processes to 1"
            )
        keep_alive = (self._keep_alive(number, settings, on_none_left) for number in range(self._count))
        self._tasks = [watched(each, self._on_error) for each in keep_alive]
        await self._changed.wait_for(lambda: self._given_up or self.num_serving == self._count, _START_S)
        if self._given_up:
            raise RoleFailedError(f"a gateway process does not start: {', '.join(self._given_up.values())}; see above")
        if self.num_serving < self._count:
            raise DeadlineError(
                f"{self.num_serving} of {self._count} gateway processes (orchestrator.gateway_processes) serve "
                f"port {settings.port} after {_START_S:g} s: set a lower number on a slow machine"
            )

    @property
    def num_serving(self) -> int:
        return sum(one.is_serving for one in self._running.values())

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self._running.values()]

    def figures(self, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}serving": self.num_serving, f"{prefix}restarts": self.restarts}

    def end_silent(self) -> None:
        """Kill processes that do not run. Call it now and then, not after a stall of this process."""
        for one in self._running.values():
            silent_s = time.monotonic() - one.heard_at
            if silent_s > (self._hang_s if one.is_serving else _START_S):
                one.end_reason = f"was silent for {silent_s:.0f} s and is killed"
                signal_session(one.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End every process. What the router answers to open turns still reaches their clients."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- one process ---------------------------------------------------------------------------------------------

    async def _keep_alive(
        self, number: int, settings: ProcessSettings, on_none_left: Callable[[], Awaitable[None]]
    ) -> None:
        """Run process `number`, again and again, until it has died too often."""
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

    async def _run(self, number: int, settings: ProcessSettings) -> str:
        """Start process `number` and serve it until it has ended. Return how."""
        one = self._running[number] = await _spawn(number)
        one.frames.send(settings)
        try:
            while (message := await one.frames.receive()) is not None:
                self._take(one, message)
        except WireError as error:
            one.end_reason = f"is killed: {error}"
        finally:
            if self._closing and one.turns:
                await asyncio.wait(one.turns.values(), timeout=_ANSWERS_S)
            for task in one.turns.values():
                task.cancel()
            one.frames.close()
            await stop(one.process, _STOP_S, request=False)
            del self._running[number]
        return one.end_reason or exit_text(one.process.returncode)

    def _take(self, one: GatewayProcess, message: FromProcess) -> None:
        one.heard_at = time.monotonic()
        match message:
            case AskTurn(turn_id=turn_id):
                one.turns[turn_id] = task = asyncio.create_task(self._answer_turn(one, message))
                task.add_done_callback(lambda _: one.turns.pop(turn_id, None))
            case CancelTurn(turn_id=turn_id) if turn_id in one.turns:
                one.turns[turn_id].cancel()
            case ServingBeat():
                one.is_serving = True
                self._changed.notify()

    async def _answer_turn(self, one: GatewayProcess, asked: AskTurn) -> None:
        try:
            reply = AnsweredTurn(turn_id=asked.turn_id, answer=await self._answer(asked.turn))
        except Exception as error:
            told = to_request_error(error, f"a turn of session {asked.turn.session}")
            reply = FailedTurn(
                turn_id=asked.turn_id, message=str(told), status=told.status, code=told.code, param=told.param
            )
        one.frames.send(reply)


async def _spawn(number: int) -> GatewayProcess:
    """Return a process that waits for its settings. Its log goes where this process's goes."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orchestrator.gateway.processes.http_end", "--link-fd", str(theirs.fileno())),
                **child_options(WORKER_ENVIRONMENT, pass_fds=[theirs.fileno()]),
            )
        except BaseException:
            writer.close()
            raise
    return GatewayProcess(process, Frames(reader, writer, FromProcess, f"gateway process {number}"))
