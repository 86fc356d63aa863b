"""Workers and sandboxes are killed while rollouts run; benchmarks/sandbox_chaos.py does it with 256 at once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from examples.micro_code.execution import CodeRunner, Job
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.host_view import processes_of
from tests.sandbox.boxes import need_bubblewrap


# Claim: a box of micro_code that is killed in mid-test is replaced, and the tests run again.
@pytest.mark.process
async def test_a_killed_box_of_micro_code_is_no_failed_test() -> None:
    need_bubblewrap()
    runner = CodeRunner(RuntimeConfig(type="bubblewrap"))
    files = {"f.py": "import time\ntime.sleep(1)\ndef f(x):\n    return x\n"}
    try:
        running = asyncio.create_task(runner.run(Job(files=files, calls=("f(3)",))))
        async with asyncio.timeout(100):
            while not isinstance(runner._box, BubblewrapBox) or len(processes_of(runner._box.init_pid)) < 2:
                await asyncio.sleep(0.01)
        first = runner._box.init_pid
        os.kill(first, signal.SIGKILL)
        result = await running
        assert isinstance(runner._box, BubblewrapBox) and runner._box.init_pid != first
        assert result["values"] == ["3"], result
    finally:
        await runner.close()
