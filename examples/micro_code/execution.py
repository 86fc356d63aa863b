"""Executes what agents wrote, many jobs at a time, in one warm box of this process.

    CodeRunner.run(job) --queue--> one command of the box: runner.py, a fork a job --> results

Starting a command costs more than a fork, so jobs that wait together share a command. A job that takes the command
down with it is found by running the jobs of that command one by one; it alone gets an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding.sandbox.box import Box, CommandResult, open_box

logger = logging.getLogger(__name__)

_COMMAND = ("python", "-I", "-S", "-c", Path(__file__).with_name("runner.py").read_text())
_BATCH = 32
"""Jobs of one command at most."""
_JOB_S = 11.0
"""Longest time of one job, above that of runner.py."""
_START_S = 30.0
_OUTPUT_BYTES = 4 * 2**20
_ENDED = {"passed": False, "error": "the interpreter was ended", "values": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Files, and what to do with them."""

    files: dict[str, str]
    """Texts by name: f.py, and tests.py where `calls` is None."""
    calls: tuple[str, ...] | None = None
    """Calls whose values are wanted; None executes tests.py."""

    def line(self) -> bytes:
        return json.dumps({"files": self.files, "calls": self.calls}).encode() + b"\n"


class CodeRunner:
    """The box of one event loop. It opens on first use and stays open while the process lives."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self._runtime = runtime
        self._box: Box | None = None
        self._waiting: list[tuple[Job, asyncio.Future[dict[str, Any]]]] = []
        self._pump: asyncio.Task[None] | None = None

    async def run(self, job: Job) -> dict[str, Any]:
        """Return the result of a job. Raises SandboxError when no box can be opened."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._serve())
        return await future

    async def close(self) -> None:
        if self._pump is not None:
            await asyncio.gather(self._pump, return_exceptions=True)
        if self._box is not None:
            await self._box.close()
            self._box = None

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            try:
                results: list[dict[str, Any]] = await self._run_all([job for job, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _run_all(self, jobs: list[Job]) -> list[dict[str, Any]]:
        results = await self._command(jobs)
        if results is not None:
            return results
        if len(jobs) == 1:
            return [dict(_ENDED)]
        return [(await self._run_all([job]))[0] for job in jobs]

    async def _command(self, jobs: list[Job]) -> list[dict[str, Any]] | None:
        """Return one result a job; None when the command did not give as many."""
        stdin, timeout_s = b"".join(job.line() for job in jobs), _START_S + _JOB_S * len(jobs)
        try:
            finished = await self._run_in_box(stdin, timeout_s)
            killed = finished.ended_by == "box"  # Code in a box cannot end it.
        except SandboxError:
            killed = True
        if killed:
            await self._drop_box()
            finished = await self._run_in_box(stdin, timeout_s)
        if finished.ended_by == "box":
            await self._drop_box()
            raise SandboxError("the sandbox of micro_code was killed in mid-test, twice; look at the free memory")
        return _results(finished, len(jobs))

    async def _run_in_box(self, stdin: bytes, timeout_s: float) -> CommandResult:
        if self._box is None:
            self._box = await open_box(self._runtime)
        return await self._box.run(_COMMAND, stdin=stdin, timeout_s=timeout_s, output_bytes=_OUTPUT_BYTES)

    async def _drop_box(self) -> None:
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()


def _results(finished: CommandResult, count: int) -> list[dict[str, Any]] | None:
    try:
        results = [json.loads(line) for line in finished.stdout.splitlines()]
    except ValueError:
        results = []
    if len(results) == count and all(isinstance(result, dict) for result in results):
        return results
    logger.warning("micro_code: a command with %d jobs ended without their results: %s", count, finished.stderr[-300:])
    return None


_RUNNERS: dict[tuple[asyncio.AbstractEventLoop, str], CodeRunner] = {}


def shared_runner(runtime: RuntimeConfig) -> CodeRunner:
    """Return the runner of this event loop for a runtime."""
    key = asyncio.get_running_loop(), runtime.model_dump_json()
    if key not in _RUNNERS:
        _RUNNERS[key] = CodeRunner(runtime)
    return _RUNNERS[key]
