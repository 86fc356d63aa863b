"""The `inference` process: its command lines, its exit statuses, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from composer_prime.config import load
from composer_prime.run.run_dir import RunDir
from inference.main import _main
from inference.serving import Assignment, _serve
from inference.weight_sources import WeightSources
from tests.configs_made import config_of
from tests.engines.models import MAX_CONTEXT
from tests.inference.gateway_peer import GatewayPeer
from tests.inference.publisher import RUN_ID


def start(*words: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "inference.main", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def run_dir(tmp_path, folder, keys):
    run_dir = RunDir(tmp_path)
    config = config_of(
        model={"path": str(folder), "max_context": MAX_CONTEXT},
        orchestrator={"max_concurrent": 8},
        inference={"device": "cpu", "heartbeat_s": 0.2, "lost_after_s": 1.0, "connect_timeout_s": 2.0},
    )
    run_dir.config.write_text(load.dump(config))
    return run_dir


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", "tcp://127.0.0.1:5500", "--model", "tiny"], "--token-file"),
        (["audit", "tcp://127.0.0.1:5500", "--model", "tiny", "--token-file", "/no/file"], "/no/file"),
        (["join"], "cpi2."),
        (["joim"], "unknown command 'joim'; did you mean join?"),
        (["join", "cpi2.abcdef"], "of 11 characters was cut or altered"),
        (["--run-dir", "/no/such/run"], "config.json"),
        (["@", "/no/such/file.toml"], "/no/such/file.toml"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(words, said, monkeypatch, capsys):
    # Each wrong input ends with status 2 and a message that holds the wrong value.
    monkeypatch.setattr("sys.argv", ["inference", *words, "--dry-run"])
    with pytest.raises(SystemExit) as end:
        _main()  # main() may end the process at once, and this one is pytest's.
    assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.process
def test_a_node_that_is_stopped_while_it_loads_ends_at_once(run_dir):
    # Even when loading takes long, as for a large model: status 0, and the interpreter does not crash under the thread
    # that loads.
    code = """
import sys, torch
from inference.engines.local.local_engine import Computer
from inference.main import main

def load(self):
    print("loading for long", flush=True)
    while True:
        torch.randn(256, 256) @ torch.randn(256, 256)

Computer._load = load
sys.exit(main())
"""
    words = ["--run-dir", str(run_dir.root)]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "loading for long\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.stdout.close()


def test_a_node_that_is_stopped_while_it_installs_ends_at_once(publisher, folder, config, monkeypatch):
    # Its first version never comes; without the stop the pull would wait for it.
    async def read(self, sha256: str, offset: int) -> bytes | None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(1000)

    monkeypatch.setattr(WeightSources, "read", read)
    assignment = Assignment(
        node_name="box",
        inference=config.model_copy(update={"threads": 1}),
        model=str(folder),
        max_context=MAX_CONTEXT,
        keys=lambda: publisher.keys.client("node"),
        address=lambda: None,
        run_dir=None,
        first=(publisher.publish(1), publisher.verify_key, RUN_ID),
    )
    asyncio.run(asyncio.wait_for(_serve(assignment, folder), 200))


@pytest.mark.process
async def test_a_launched_node_reads_the_run_directory(keys, publisher, run_dir):
    # With --run-dir the node waits for endpoints.json, takes weights from the folder, and goes when the gateway goes.
    gateway = GatewayPeer(keys, publisher.store)
    gateway.manifest = publisher.publish(1)
    process = start("--run-dir", str(run_dir.root), "--node-name", "node-7")
    try:
        await asyncio.sleep(0.5)
        run_dir.endpoints.write_text(json.dumps({"step": "", "node": gateway.endpoint}))
        until = time.monotonic() + 240
        while not (gateway.statuses and gateway.statuses[-1].version == 1):
            assert process.poll() is None and time.monotonic() < until
            await asyncio.sleep(0.05)
        await gateway.close()
        text, _ = await asyncio.to_thread(process.communicate, timeout=120)
        status = process.returncode
    finally:
        process.kill()
    assert gateway.hellos[0].node_id == "node-7" and not gateway.chunk_requests
    assert status == 1 and "connect_timeout_s" in text and "Traceback" not in text
