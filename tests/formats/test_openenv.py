"""An OpenEnv server as a source: episodes through tool calls, refused calls, and servers that fail.

openenv-core and verifiers need different versions of `mcp`, so the server runs in a Python environment of its own.
OPENENV_PYTHON names one that exists; without it, the test makes one from the package index.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web

from composer_prime.address import free_port
from composer_prime.errors import ConfigError
from tests.chat_server import http_server
from tests.scripted_node import call, play, source_spec_of

ID = "orchestrator.coding.formats.openenv"
HARNESS = {"id": "orchestrator.environments.tool_loop", "max_turns": 8}
SERVER = Path(__file__).with_name("openenv_server.py")
WAIT_S = 150.0


def taskset(url: str, **settings: Any) -> dict[str, Any]:
    return {"id": ID, "base_url": url, "num_tasks": 4, **settings}


@pytest.fixture(scope="module")
def server_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if named := os.environ.get("OPENENV_PYTHON"):
        return named
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv, which makes an environment for openenv-core")
    folder = tmp_path_factory.mktemp("openenv")
    python = folder / "bin" / "python"
    for command in (
        ["venv", "--quiet", "--python", sys.executable, str(folder), "--clear"],
        ["pip", "install", "--quiet", "--python", str(python), "openenv-core==0.3.0"],
    ):
        made = subprocess.run([uv, *command], capture_output=True, text=True, timeout=WAIT_S)
        if made.returncode:
            pytest.skip(f"openenv-core cannot be installed here: {made.stderr[-500:]}")
    return str(python)


@pytest.fixture(scope="module")
def url(server_python: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([server_python, str(SERVER), str(port)], cwd=SERVER.parent)
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)


@pytest.mark.slow
async def test_an_episode_is_played_through_tool_calls(url: str) -> None:
    # The seed decides the episode, the server the reward and the end; the schema of the action becomes the tool.
    number = random.Random(2).randint(1, 9)
    wrong = number - 1 if number > 1 else number + 1
    source = source_spec_of(taskset(url, reset={"up_to": 9}), HARNESS)
    reply = await play(source, lambda _: [call("step", number=wrong), call("step", number=number)], task_index=2)
    assert (reply.failure, reply.reward, reply.metrics["steps"], reply.metrics["done"]) == (None, 1.0, 2.0, 1.0)
    assert [turn.role for turn in reply.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(reply.turns[1].text.partition("\n\n")[2])["says"] == "Guess a number from 1 to 9."
    assert json.loads(reply.turns[3].text)["says"] in ("higher", "lower")
    (tool,) = reply.sessions[0].tools
    assert tool["function"]["name"] == "step"
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]


@pytest.mark.slow
async def test_a_call_that_the_server_refuses_is_an_error_turn(url: str) -> None:
    # A wrong type, a crash of the environment and an unknown tool are errors that the policy sees; it plays on.
    script = [call("step", number="x"), call("step", number=13), call("guess", number=1), "I give up."]
    reply = await play(source_spec_of(taskset(url), HARNESS), lambda _: script)
    errors = [turn.error for turn in reply.turns if turn.role == "tool"]
    assert errors[0] and errors[0].startswith("Error: Invalid message: number: Input should be a valid integer")
    assert errors[1:] == ["Error: thirteen breaks the machine", "Tool not found: guess"]
    assert (reply.failure, reply.reward) == (None, 0.0)


@pytest.mark.slow
async def test_a_full_server_says_what_to_set(url: str) -> None:
    # The server admits two sessions; the third rollout fails as data, with the setting that admits more.
    import aiohttp

    async with aiohttp.ClientSession() as session:
        held = [await session.ws_connect(f"{url}/ws") for _ in range(2)]
        for connection in held:
            await connection.send_json({"type": "reset", "data": {}})
            await connection.receive_json()
        reply = await play(source_spec_of(taskset(url), HARNESS), lambda _: ["no"])
        for connection in held:
            await connection.close()
    assert reply.reward is None and reply.failure and reply.failure.kind == "toolset" and reply.failure.retryable
    assert "max_concurrent_envs >= orchestrator.max_concurrent" in reply.failure.message


@asynccontextmanager
async def answering(answer: Any, silent: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Yield the URL of a server that gives every message one answer, or that serves nothing for None.

    With `silent` it sets that at a step, and does not answer it.
    """

    async def socket_of(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        async for message in connection:
            if silent is not None and message.json()["type"] == "step":
                silent.set()
            else:
                await connection.send_json(answer)
        return connection

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"title": "Guess", "properties": {}}})

    async with http_server(*([web.get("/ws", socket_of), web.get("/schema", schema)] if answer else [])) as url:
        yield url


@pytest.mark.process
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "no answer to /schema"),
        ({"unexpected": 1}, "not a message of its protocol"),
        ({"type": "error", "data": {"code": "FACTORY_ERROR", "message": "no such game"}}, "no such game"),
        ({"type": "observation", "data": {"observation": 3}}, "{'observation': 3}"),
    ],
)
async def test_a_server_that_fails_fails_the_rollout_not_the_policy(answer: Any, says: str) -> None:
    # Nothing there, another protocol, an environment that cannot be made: each is an error, never a zero reward.
    async with answering(answer) as url:
        reply = await play(source_spec_of(taskset(url), HARNESS), lambda _: ["no"])
    assert reply.reward is None and reply.failure and reply.failure.kind == "toolset"
    assert says in reply.failure.message


# After a call that was given up, its late answer is not the next call's: that one fails.
@pytest.mark.process
async def test_a_call_that_was_given_up_ends_the_episode() -> None:
    pytest.importorskip("verifiers.v1")
    from orchestrator.coding.formats.openenv import OpenEnvEpisode, ToolsetError

    silent = asyncio.Event()
    async with answering({"type": "observation", "data": {"observation": {}}}, silent) as url:
        episode = OpenEnvEpisode(url, {})
        try:
            await episode.start()
            given_up = asyncio.create_task(episode.call("step", "{}"))
            await silent.wait()
            given_up.cancel()
            await asyncio.wait([given_up])
            with pytest.raises(ToolsetError):
                await episode.call("step", "{}")
        finally:
            await episode.finish(Mock())


@pytest.mark.process
@pytest.mark.parametrize("depth", [300, 100_000])
async def test_deep_arguments_are_an_error_of_the_policy(depth: int) -> None:
    # The episode goes on after a call that Python's JSON cannot read or write.
    pytest.importorskip("verifiers.v1")
    from orchestrator.coding.formats.openenv import OpenEnvEpisode

    async with answering({"type": "observation", "data": {"observation": {}, "reward": 1.0}}) as url:
        episode = OpenEnvEpisode(url, {})
        trace = Mock()
        try:
            await episode.start()
            answer = await episode.call("step", f'{{"a": {"[" * depth}{"]" * depth}}}')
            assert answer == ("{}" if depth < 1000 else "Invalid JSON in tool call")
            assert await episode.call("step", "{}") == "{}"
        finally:
            await episode.finish(trace)
    trace.record_reward.assert_called_once_with("openenv", 2.0 if depth < 1000 else 1.0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"reset": {"seed": 3}}, r"taskset\.first_seed"),
    ],
)
def test_settings_that_cannot_work_say_why(settings: dict[str, Any], says: str) -> None:
    from orchestrator.workers.verifiers_adapter import Environment

    with pytest.raises(ConfigError, match=says):
        Environment(source_spec_of(taskset("http://127.0.0.1:1", **settings), HARNESS), "train", None)
