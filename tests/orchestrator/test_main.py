"""The console script: exit statuses, signals, a parent that dies, and one step with real environment workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from orch_peers import RUN_ID, PeerTrainer, RunNode, make_config
from waiting import wait_until

from composer_prime.config import load
from composer_prime.run.keys import RunKeys
from composer_prime.run.process import ORCHESTRATOR_END, PARENT_VARIABLE
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE
from orchestrator.main import main
from tests.waiting import until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "orchestrator.main"]
TOOLSMITH = {
    "name": "toolsmith",
    "taskset": {"id": "orchestrator.environments.toolsmith", "split": "train", "num_tasks": 16},
    "timeout_s": 30.0,
}


@pytest.fixture
def prepared(run_dir: RunDir, tmp_path: Path) -> Callable[..., RunDir]:
    """The run directory as the launcher leaves it to its roles."""

    def prepare(**orchestrator: Any) -> RunDir:
        config = make_config(tmp_path, max_steps=1, **({"source": [TOOLSMITH]} | orchestrator))
        run_dir.config.write_text(load.dump(config))
        (run_dir.root / "run_id").write_text(RUN_ID)
        return run_dir

    return prepare


@contextlib.contextmanager
def started(run_dir: RunDir) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([*COMMAND, "--run-dir", str(run_dir.root)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            child.kill()
        process.communicate()


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Run the console script in this process; returns its exit status and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["orchestrator", *words])
        monkeypatch.setenv(GATEWAY_TOKEN_VARIABLE, "secret")
        try:
            status = main()
        except SystemExit as error:
            status = error.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.mark.slow
def test_an_environment_that_is_not_installed_is_a_configuration_error(prepared, call):
    """Exit status 2, and the message names the id."""
    run_dir = prepared(source=[{"name": "s", "taskset": {"id": "no_such_env"}}])
    status, said = call("--run-dir", str(run_dir.root))
    assert status == 2, said
    assert "no_such_env" in said


# --help and a mistyped command show the commands. A file without @ and --help SECTION mean what they meant.
def test_commands_are_listed(call):
    status, said = call("--help")
    assert status == 0 and "orchestrator nodes RUN_DIR" in said and "--help SECTION" in said
    status, said = call("nodez", "outputs/a")
    assert status == 2 and "unknown command 'nodez'; did you mean nodes?" in said and "orchestrator invite" in said
    assert "put @ before a configuration file" in call("configs/a1.toml")[1]
    assert "orchestrator nodes" not in call("--help", "run")[1]


def test_a_port_in_use_is_a_configuration_error(prepared, call):
    """Another process holds the node address: exit status 2, and the message names it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        status, said = call("--run-dir", str(prepared(node_address=address).root))
    assert status == 2, said
    assert address in said


def test_a_wrong_run_directory_is_a_configuration_error(tmp_path, call):
    """A directory that the launcher never prepared: status 2 and a way out, no traceback."""
    status, said = call("--run-dir", str(tmp_path / "nothing"))
    assert status == 2
    assert "start the run with `trainer @ file.toml`" in said


@pytest.mark.process
@pytest.mark.parametrize("launched", [False, True])
def test_a_signal_ends_it_and_its_workers(prepared, monkeypatch, launched):
    """Stopped while its workers load: no process is left. With a launcher, what all processes get ends nothing."""
    run_dir, number = prepared(), ORCHESTRATOR_END if launched else signal.SIGTERM
    if launched:
        monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))
    with started(run_dir) as process:
        parent = psutil.Process(process.pid)
        children = wait_until(lambda: parent.children(recursive=True))
        for each in [signal.SIGTERM, signal.SIGINT, number] if launched else [number]:
            process.send_signal(each)
            time.sleep(0.2)
        assert process.wait(100) == 128 + number
        assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.process
def test_alone_it_prepares_its_run_directory_and_stops_at_ctrl_c(tmp_path, call):
    """`orchestrator @ file`: keys and addresses are there for others; Ctrl-C gives 130; the folder is not reused."""
    words = ["@", str(ROOT / "configs/a1.toml"), "--run.output_dir", str(tmp_path), "--run.name", "alone"]
    run_dir = RunDir(tmp_path / "alone")
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.DEVNULL)
    wait_until(run_dir.endpoints.exists)
    assert (run_dir.keys / "node.token").exists()
    wait_until(run_dir.metrics.exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 130
    status, said = call(*words)
    assert status == 2
    assert "continue it with --resume" in said


@pytest.mark.process
def test_it_does_not_outlive_its_parent(prepared):
    """The launcher is killed with -9: the orchestrator and its workers end within seconds."""
    run_dir = prepared()
    command = [*COMMAND, "--run-dir", str(run_dir.root)]
    code = f"import subprocess; subprocess.run({command!r})"
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    parent = psutil.Process(launcher.pid)
    wait_until(run_dir.endpoints.exists)
    family = wait_until(lambda: parent.children(recursive=True) if len(parent.children(recursive=True)) > 1 else None)
    launcher.kill()
    launcher.wait()
    assert not psutil.wait_procs(family, timeout=100)[1]


@pytest.mark.slow
async def test_real_workers_from_task_to_micro_batch(prepared):
    """One step of toolsmith: what the workers say of their turns agrees with the gateway's tokens."""
    run_dir = prepared(filter_zero_advantage=False)
    with started(run_dir) as process:
        await until(run_dir.endpoints.exists)
        endpoints = json.loads(run_dir.endpoints.read_text())
        keys = RunKeys(run_dir.keys)
        async with RunNode(endpoints["node"], keys), PeerTrainer(run_dir, endpoints["step"]) as trainer:
            await trainer.attach(0)
            [reply] = await trainer.train(1)
            await trainer.checkpoint(1)
            assert await asyncio.to_thread(process.wait, 15) == 0
        assert reply.metrics["rollout/failed"] == 0
        assert reply.totals.samples >= 8
        lines = [json.loads(line) for line in run_dir.rollouts(1).read_text().splitlines()]
        assert all(line["turns"] and line["reward"] is not None for line in lines)
        sampled = sum(turn["token_count"] for line in lines for turn in line["turns"] if turn["role"] == "assistant")
        assert sampled == reply.totals.tokens
