"""Rules of the whole test suite."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

_PROCESS_EVENTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}
_MAY_START_PROCESSES = ("process", "slow", "vllm", "gpu")
_TOKEN = "COMPOSER_GATEWAY_TOKEN"
_unit_test: str | None = None

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # No test asks a server that is not its own.

# `nohup`, and a script that starts the tests with `&`, leave these signals ignored. Tests send them.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# Every run draws the same examples, and no example has a time limit. `--hypothesis-profile random` draws anew.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if _unit_test is not None and event in _PROCESS_EVENTS and "ldconfig" not in str(arguments[0]):  # torch's import
        raise AssertionError(f"{_unit_test} starts a process ({event}): mark it with @pytest.mark.process")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Keep unit tests free of processes: an audit hook fails one that starts any.

    A command that a test calls in this process may leave a gateway's token behind. It ends with the test.
    """
    global _unit_test
    token = os.environ.get(_TOKEN)
    _unit_test = None if any(map(item.get_closest_marker, _MAY_START_PROCESSES)) else item.nodeid
    try:
        return (yield)
    finally:
        _unit_test = None
        os.environ.pop(_TOKEN, None)
        if token is not None:
            os.environ[_TOKEN] = token


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Seed the generators that a test may use without a seed of its own."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
