"""The process of an environment worker.

python -m orchestrator.workers.worker --socket-fd N --scratch DIR

pool --SourceSpec--> worker     once
pool --RunRollout--> task per rollout --> Environment.run --> gateway (HTTP)
                          |                    ^ deadline: RunRollout.timeout_s
pool <--RolloutReply------+       CancelRollout aborts the task, and with it the open request
pool <--WorkerReady-- every HEARTBEAT_S; the pool kills a worker that stays silent. One whose event loop stands
                      still for STALL_S writes its stack and the rollout that blocks it to its log
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.console import start_log
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.import_path import frame_text
from composer_prime.monitor.events import event, join_events
from composer_prime.plan.sandboxes import probe_bubblewrap
from composer_prime.run.process import end_with_parent
from composer_prime.wire.sockets import Frames
from orchestrator.workers.pool import (
    BLOCKED_BY,
    DUMP,
    EVAL,
    STALL_S,
    TRAIN,
    CancelRollout,
    RunRollout,
    SourceSpec,
    ToWorker,
    WorkerReady,
    is_own,
)

logger = logging.getLogger("orchestrator.worker")

HEARTBEAT_S = 2.0
_ABORT_S = 3.0
"""For aborted rollouts to end; environments close after that."""
_PLAYED: ContextVar[str] = ContextVar("played", default="")
"""The rollout that a task belongs to."""
_FORK = "the environment forked its worker (os.fork): the child is ended; call subprocess instead"
_ALARM = "the environment sets an alarm, of which there is one for all rollouts of a worker: use asyncio.timeout"
_FLOOD = 10_000_000
_COMPARED = 512
"""Held-out prompts that are looked for among training prompts."""


class Worker:
    def __init__(self, spec: SourceSpec, frames: Frames, scratch: Path) -> None:
        """Import verifiers and load everything. Raises ConfigError."""
        from orchestrator.chat_renderer import build_renderer, unread_call
        from orchestrator.workers.verifiers_adapter import Environment, install_renderer, keep_folders_in

        sys.path += [folder for folder in spec.import_from if folder not in sys.path]
        keep_folders_in(scratch)
        self._frames = frames
        self._beat_s = time.monotonic() + STALL_S
        """When the event loop last ran, monotonic seconds. Loading may take longer than a beat."""
        self._running: dict[str, asyncio.Task[None]] = {}
        threading.Thread(target=self._name_blockers, args=(asyncio.get_running_loop(),), daemon=True).start()
        config, renderer = build_renderer(spec.model_path, spec.renderer)
        install_renderer(spec.model_path, config, renderer)
        self.environments = {name: Environment(spec, name, config) for name in spec.tasksets}
        for environment in self.environments.values():
            check_runtimes(environment)
            if environment.has_tools and (call := unread_call(renderer)) is not None:
                raise ConfigError(
                    f"source {spec.name!r} has tools, but the chat template of {spec.model_path} writes a call as "
                    f"{call!r}, which cannot be read back: name a renderer that knows the model in model.renderer"
                )
        self._waits: dict[tuple[str, str, int, str], float] = {}
        """Since when a rollout's own code waits at a place; infinite once said."""

    async def serve(self) -> None:
        """Serve until the parent closes the connection."""
        async with AsyncExitStack() as stack:
            for environment in self.environments.values():
                await stack.enter_async_context(environment.serving())
            num_tasks = {name: environment.num_tasks for name, environment in self.environments.items()}
            notes = [*(each.repeated for each in self.environments.values()), overlap(self.environments)]
            ready = WorkerReady(num_tasks=num_tasks, notes=[note for note in notes if note is not None])
            loop = asyncio.get_running_loop()
            loop.set_task_factory(_named_task)
            # The connections of the event loop are the parent's.
            os.register_at_fork(after_in_child=partial(loop.call_soon, os._exit, 1))
            heartbeats = asyncio.create_task(self._heartbeats(ready))
            try:
                while (message := await self._frames.receive()) is not None:
                    self._handle(message)
            finally:
                tasks = [heartbeats, *self._running.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_ABORT_S)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, RunRollout):
            self._running[message.rollout_id] = asyncio.create_task(self._rollout(message), name=message.rollout_id)
        elif isinstance(message, CancelRollout) and (task := self._running.get(message.rollout_id)):
            task.cancel()

    async def _rollout(self, request: RunRollout) -> None:
        from orchestrator.workers.verifiers_adapter import read_traceback

        started = time.monotonic()
        _PLAYED.set(request.rollout_id)
        try:
            reply = await self.environments[request.taskset].run(request)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                reply = request.failed("cancelled", "cancelled by the orchestrator", retryable=False)
            else:
                detail, where = read_traceback(traceback.format_exc())
                reply = request.failed("internal", f"{type(error).__name__}: {error}", detail=detail, where=where)
        finally:
            self._running.pop(request.rollout_id, None)
        try:
            self._frames.send(msgspec.structs.replace(reply, wall_s=time.monotonic() - started))
        except (ValueError, TypeError, OverflowError) as error:
            # A text is not Unicode, or a metric no number. The rollout must still end.
            self._frames.send(request.failed("internal", f"its reply cannot be encoded: {error}"))

    async def _heartbeats(self, ready: WorkerReady) -> None:
        try:
            while True:
                self._frames.send(ready)
                self._beat_s = time.monotonic()
                self._name_waits()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            self._beat_s = math.inf

    def _name_waits(self) -> None:
        """Say where a rollout's own code waits: its limit may be minutes away."""
        now = time.monotonic()
        self._waits = {wait: self._waits.get(wait, now) for wait in waiting() if wait[0] in self._running}
        for wait, since_s in self._waits.items():
            if now - since_s > 2 * STALL_S:
                self._waits[wait], place = math.inf, frame_text(*wait[1:])
                message = f"a rollout has waited for {now - since_s:.0f} s at {place}; timeout_s of the source ends it"
                logger.warning(message, extra=event("warning", where=place, same_as=f"waits at {place}"))

    def _name_blockers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write where the loop stands still, and in which rollout. Runs in a thread of its own.

        faulthandler's own thread needs no GIL, but can crash reading frames of code that runs: it writes only when this
        one gets no GIL.
        """
        told_s = 0.0
        while self._beat_s < math.inf:
            faulthandler.dump_traceback_later(2 * STALL_S)
            time.sleep(1)
            if time.monotonic() - max(self._beat_s, told_s) > STALL_S:
                task, told_s = asyncio.current_task(loop), time.monotonic()
                os.write(2, f"{DUMP} again)!\n".encode())
                faulthandler.dump_traceback()
                name = task.get_name() if task else ""
                os.write(2, f"{BLOCKED_BY}{name if name in self._running else ''}\n".encode())
        faulthandler.cancel_dump_traceback_later()


def _own_place() -> str:
    """Return where this thread stands in the user's code, if it does."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    codes = ((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames)
    return next((frame_text(*code) for code in codes if is_own(code[0])), "")


def telling(call: Any, text: str, spare: int = 0) -> Any:
    """Return `call`, which says where the user's code calls it; with `spare`, for so many characters once."""
    left = spare

    def told(*words: Any) -> Any:
        nonlocal left
        left -= len(words[0]) if spare else 1
        if left < 0:
            left, place = spare, _own_place()
            if place or spare:
                logger.warning(text, extra=event("warning", where=place, same_as=f"{text} {place}"))
        return call(*words)

    return told


async def _without_exit(work: Any) -> Any:
    """Turn sys.exit, which would end the worker, into an error of the rollout."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) in an environment: return a value, or raise an error") from error


def _named_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(_without_exit(work), loop=loop, **options)
    if rollout_id := _PLAYED.get():
        task.set_name(rollout_id)
    return task


def waiting() -> set[tuple[str, str, int, str]]:
    """Return task, file, line and function of each place where the user's code waits."""
    waits = set()
    for task in asyncio.all_tasks():
        step: Any = task.get_coro()
        while frame := getattr(step, "cr_frame", None):
            if is_own(frame.f_code.co_filename):
                waits.add((task.get_name(), frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            step = step.cr_await
    return waits


def overlap(environments: Mapping[str, Any]) -> str | None:
    """Return a sentence where held-out prompts are training prompts too."""
    train, held_out = environments.get(TRAIN), environments.get(EVAL)
    if train is None or held_out is None:
        return None
    training_prompts = {train.describe(index)[1] for index in range(train.num_tasks)} - {"", None}
    count = min(held_out.num_tasks, _COMPARED)
    both = sum(held_out.describe(index)[1] in training_prompts for index in range(count))
    if both == 0:
        return None
    return (
        f"{both} of {count} held-out tasks have the prompt of a training task, so their reward may only show what was "
        "memorized: let eval_taskset have a split that shares no task with taskset"
    )


def check_runtimes(environment: Any) -> None:
    """Raise ConfigError when bubblewrap is wanted, and does not work on this machine."""
    from verifiers.v1.configs.agent import agent_config_fields

    config = environment._env.config
    types = {agent.runtime.type for agent in agent_config_fields(config).values()}
    if (taskset_runtime := getattr(config.taskset, "runtime", None)) is not None:
        kind = getattr(taskset_runtime, "type", taskset_runtime)
        types.add("bubblewrap" if kind == "auto" else kind)
    if "bubblewrap" in types and not probe_bubblewrap().works:
        raise ConfigError(
            f"source {environment.spec.name!r} executes code in the runtime 'bubblewrap', which does not work here: "
            f"{probe_bubblewrap().text}"
        )


async def serve_worker(connection: socket.socket, scratch: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    frames: Frames[ToWorker] = Frames(reader, writer, ToWorker, "pool")
    spec = await frames.receive()
    if not isinstance(spec, SourceSpec):
        return
    try:
        worker = Worker(spec, frames, scratch)
        for environment in worker.environments.values():
            await environment.make_images()
    except ComposerError as error:
        frames.send(WorkerReady(error=type(error).__name__, message=str(error)))
        frames.close()
        await writer.wait_closed()
        return
    await worker.serve()


def main() -> None:
    parser = argparse.ArgumentParser(description="An environment worker; the orchestrator starts it.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    end_with_parent(signal.SIGKILL)
    start_log(logging.WARNING)
    signal.signal(signal.SIGALRM, lambda *_: None)  # SIG_IGN would be inherited by what the user's code starts.
    os.fork = telling(os.fork, _FORK)
    signal.alarm, signal.setitimer = telling(signal.alarm, _ALARM), telling(signal.setitimer, _ALARM)
    for stream in (sys.stdout, sys.stderr):
        stream.write = telling(stream.write, f"the environment printed {_FLOOD:,} characters: print less", _FLOOD)
    join_events("environment")
    faulthandler.enable()
    try:
        asyncio.run(serve_worker(socket.socket(fileno=args.socket_fd), args.scratch))
    except (SystemExit, OSError) as error:
        if getattr(error, "errno", errno.EBADF) != errno.EBADF:
            raise
        from orchestrator.workers.verifiers_adapter import describe_exception

        closed = ": it closed files not its own (os.close, os.closerange)" if isinstance(error, OSError) else ""
        print(f"the environment ended its worker: {describe_exception(error)}{closed}", file=sys.stderr, flush=True)
        os._exit(code if isinstance(code := getattr(error, "code", 1), int) else 1)


if __name__ == "__main__":
    main()
