"""A verifiers task set and in-process harness for the worker tests: `turns` model calls a rollout, no tools.

The reply `boom` makes the reward function raise, so tests can cross the task boundary on purpose.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import verifiers.v1 as vf


class BenchConfig(vf.TasksetConfig):
    num_tasks: int = 8
    prompt: str = "count"
    crash_at: int | None = None
    """This task's setup ends the worker process at once."""
    exit_at: int | None = None
    """This task's setup calls sys.exit."""
    fork_at: int | None = None
    """This task's setup goes on in two processes."""
    fault_at: int | None = None
    """This task's setup ends the worker process by SIGSEGV."""
    close_at: int | None = None
    """This task's setup closes descriptors that are not its own."""
    hang_at: int | None = None
    """This task's setup blocks the worker's event loop for ever."""
    fail_at: int | None = None
    """This task's reward raises."""
    sleep_s: float = 0.0
    """Extra wait before the first model call."""
    sleep_at: int | None = None
    """The only task that waits; None lets every task wait."""
    mark: str | None = None
    """A file in which every rollout says when that wait begins and that it cleaned up after it."""


class BenchData(vf.TaskData):
    crash: bool = False
    exits: bool = False
    forks: bool = False
    faults: bool = False
    closes: bool = False
    hang: bool = False
    fail: bool = False
    sleep_s: float = 0.0
    mark: str | None = None


class BenchTask(vf.Task[BenchData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.crash:
            os.write(2, b"the engine room is on fire\n")
            os._exit(41)
        if self.data.exits:
            sys.exit(3)
        if self.data.forks:
            os.fork()
        if self.data.faults:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.data.closes:
            os.closerange(3, 4096)
        while self.data.hang:
            pass
        self._mark("waiting")
        try:
            await asyncio.sleep(self.data.sleep_s)
        finally:
            self._mark("cleaned up")

    def _mark(self, word: str) -> None:
        if self.data.mark is not None:
            Path(self.data.mark).write_text(word)

    @vf.reward(weight=2.0)
    async def length(self, trace: vf.Trace) -> float:
        if self.data.fail:
            raise KeyError("the reward function broke")
        return float(len(trace.last_reply) > 0)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class BenchTaskset(vf.Taskset[BenchTask, BenchConfig]):
    def load(self) -> Iterable[BenchTask]:
        c = self.config
        for i in range(c.num_tasks):
            data = BenchData(
                prompt=f"{c.prompt} {i}",
                name=f"count-{i}",
                sleep_s=c.sleep_s if c.sleep_at in (None, i) else 0.0,
                mark=c.mark,
                crash=i == c.crash_at,
                exits=i == c.exit_at,
                forks=i == c.fork_at,
                faults=i == c.fault_at,
                closes=i == c.close_at,
                hang=i == c.hang_at,
                fail=i == c.fail_at,
            )
            yield BenchTask(data, c.task)


class BenchHarnessConfig(vf.HarnessConfig):
    turns: int = 1


class BenchHarness(vf.Harness[BenchHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(self.config.turns):
                body = {"model": ctx.model, "messages": messages}
                async with client.post(f"{endpoint}/chat/completions", json=body) as reply:
                    if reply.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await reply.text())
                    message = (await reply.json())["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "Error: not enough. Go on."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["BenchHarness", "BenchTaskset"]
