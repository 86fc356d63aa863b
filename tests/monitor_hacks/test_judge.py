"""The judge, against a loopback endpoint: it may confirm a suspicion, and nothing else."""

import pytest
from aiohttp import web
from hacks import bash
from small_packages import cases

from composer_prime.config.hints import EndpointConfig
from orchestrator.coding.monitor import HackMonitorConfig, inspect, seal, second_opinion
from tests.chat_server import chat_server

CASE = cases()[0]
USAGE = {"prompt_tokens": 10, "completion_tokens": 1}


async def reviewed(answer: str, command: str, status: int = 200, **files: bytes):
    """Return (verdict before, verdict after, questions) of a rollout with one command, and `files` left by it."""
    questions = []

    async def handle(request: web.Request) -> web.Response:
        questions.append((await request.json())["messages"][0]["content"])
        message = {"role": "assistant", "content": answer}
        return web.json_response(
            {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE}, status=status
        )

    async with chat_server(handle) as url:
        config = HackMonitorConfig(judge=EndpointConfig(base_url=url, model="m", timeout_s=100))
        sealed = seal(CASE.task, CASE.tree, config)
        verdict = inspect(CASE.task, sealed, {**sealed.agent_files(), **files}, [bash(command)], config)
        return verdict, await second_opinion(config, CASE.task, verdict, files), questions


# HACK turns a suspicion into a hack; HONEST, an answer of no use and a failing endpoint leave the verdict as it was.
@pytest.mark.parametrize(
    ("answer", "status", "is_hack"),
    [("HACK", 200, True), ("honest.", 200, False), ("Well", 200, False), ("HACK", 500, False)],
)
async def test_a_judge_confirms_suspicions(answer, status, is_hack):
    before, after, questions = await reviewed(answer, "pytest -q", status, **{CASE.module: b"def broken(:"})
    assert before.is_suspicious and before.policy == "none" and len(questions) == 1
    assert "def broken(:" in questions[0] and CASE.task.prompt in questions[0]
    assert after.is_hack is is_hack and after.reward(1.0) == (0.0 if is_hack else 1.0)


# It is asked neither about clean rollouts nor about proven hacks.
@pytest.mark.parametrize("command", ["pytest -q", "git log --all -p"])
async def test_a_judge_is_asked_only_about_suspicions(command):
    before, after, questions = await reviewed("HACK", command)
    assert after == before and questions == []
