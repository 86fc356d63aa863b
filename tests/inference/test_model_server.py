"""The server of local teachers: it imports, loads a tiny model and answers over loopback."""

import asyncio
import json

import aiohttp
import pytest

from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.errors import ModelNotFoundError
from composer_prime.traces.replay.teacher_pool import models_at
from inference.model_server import main, serve_models

QUESTION = [{"role": "user", "content": "Say something."}]


async def first_line(task: asyncio.Task[None], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the server prints once it serves."""
    async with asyncio.timeout(120):
        while not task.done():
            if line := capsys.readouterr().out:
                return line
            await asyncio.sleep(0.05)
    await task
    raise AssertionError("the server ended without a word")


async def test_a_tiny_model_is_served(capsys, monkeypatch):
    # Who waits for it finds it. Chat answers within max_tokens and counts them, a seed fixes the answer; an unknown
    # model and a wrong body are refused by name.
    async def post(session, path, **body):
        async with session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    task = asyncio.create_task(serve_models(["tiny/teacher_a"], 0))
    monkeypatch.setenv(MODELS_VARIABLE, json.loads(await first_line(task, capsys))["url"])
    chat = {"model": "tiny/teacher_a", "messages": QUESTION, "max_tokens": 8, "seed": 5}
    try:
        async with models_at(["tiny/teacher_a"], []) as found, aiohttp.ClientSession(found + "/") as session:
            status, done = await post(session, "chat/completions", **chat)
            again = await post(session, "chat/completions", **chat)
            assert status == 200 and done["model"] == "tiny/teacher_a" and 1 <= done["usage"]["completion_tokens"] <= 8
            assert done["choices"][0]["message"] == again[1]["choices"][0]["message"]
            status, refused = await post(session, "chat/completions", **chat | {"model": "other"})
            assert status == 400 and "no model 'other' here, only tiny/teacher_a" in refused["error"]["message"]
            status, refused = await post(session, "chat/completions", model="tiny/teacher_a")
            assert status == 400 and "messages" in refused["error"]["message"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_model_that_is_not_there_ends_the_server(tmp_path, capsys):
    # The error names the folder, and help works without one.
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        asyncio.run(serve_models([str(tmp_path / "nowhere")], 0))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--model" in capsys.readouterr().out
