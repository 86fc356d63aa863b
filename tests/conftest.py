"""Rules of the whole test suite."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

_PROCESS_EVENTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}
_MAY_START_PROCESSES = ("process", "slow", "vllm", "gpu")
_TOKEN = "COMPOSER_GATEWAY_TOKEN"
_unit_test: str | None = None
_CONTRACT = [
    line for line in (Path(__file__).parent / "contract.txt").read_text().split("\n") if line[:1] not in ("#", "")
]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # No test asks a server that is not its own.

# Every run draws the same examples, and no example has a time limit. `--hypothesis-profile random` draws anew.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the modules that tests/contract.txt names.

    A file says the marks of its tests in full, or its folder's conftest.py does: .ci/run finds it by them.
    """
    for path, mark in {(item.path, mark.name) for item in items for mark in item.iter_markers()}:
        texts = [file.read_text() for file in (path, path.with_name("conftest.py")) if file.exists()]
        if mark in _MAY_START_PROCESSES and f"pytest.mark.{mark}" not in "".join(texts):
            raise pytest.UsageError(f"{path} has tests of the mark {mark}: write pytest.mark.{mark} in it")
    for item in items:
        if item.path.stem in _CONTRACT:
            item.add_marker(pytest.mark.contract)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Look for garbage neither while modules are imported nor, later, among their many objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if _unit_test is None or event not in _PROCESS_EVENTS:
        return
    # torch's import starts ldconfig.
    if "ldconfig" not in str(arguments[0]):
        raise AssertionError(f"{_unit_test} starts a process ({event}): it needs the mark `process`")


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
def _signals_arrive() -> Iterator[None]:
    """Take back what a shell left ignored: SIGHUP under nohup, the others where a script starts the tests with `&`."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Seed the generators that a test may use without a seed of its own."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
