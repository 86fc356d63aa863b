"""`composer chat --page`: over HTTP, and in headless Chromium where it is installed."""

from __future__ import annotations

import http.client
import json
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from composer_prime.console import console_script
from tests.view.test_view_browser import Page, browser

__all__ = ["browser"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = '''
"""toolsmith, whose task 1 has tools that never answer."""
import asyncio
from orchestrator.environments.toolsmith.taskset import EpisodeTools, ToolsmithData, ToolsmithTask, ToolsmithTaskset

class SilentTools(EpisodeTools):
    async def call(self, name, arguments_json):
        await asyncio.Event().wait()

class SilentData(ToolsmithData):
    def tool_executor(self):
        return SilentTools(self.episode())

class ChatTaskset(ToolsmithTaskset):
    def load(self):
        for index, task in enumerate(super().load()):
            yield ToolsmithTask(SilentData(**task.data.model_dump()), self.config.task) if index == 1 else task

__all__ = ["ChatTaskset"]
'''
START_S = 300.0


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The address that `composer chat --page` prints."""
    environment = tmp_path_factory.mktemp("chat") / "chat_environment.py"
    environment.write_text(ENVIRONMENT)
    words = ["tiny", "--page", "--port", "0", "--env", str(environment), "--temperature", "0", "--system", "Be brief."]
    command = [*console_script("composer"), "chat", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], START_S)[0], f"no address within {START_S:g} s"
            yield process.stdout.readline().split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(START_S)
    assert process.returncode == 0


def send(address: str, method: str, path: str, body: object = None, **changed: str | None):
    """Send what the page sends, with some headers changed or, None, left out. Return status and answer."""
    parts = urlsplit(address)
    key = parse_qs(urlsplit(parts.fragment).query)["key"][0]
    headers = {"Host": parts.netloc, "Origin": f"http://{parts.netloc}", "Content-Type": "application/json"}
    headers |= {"X-Chat-Key": key} | {name.replace("_", "-"): value for name, value in changed.items()}
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=300)
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {name: value for name, value in headers.items() if value is not None})
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response.status, json.loads(raw) if raw.startswith(b"{") else raw


def until(address: str, check: Callable[[dict], object]) -> dict:
    """Return the conversation once `check` is true of it."""
    seen = -1
    while True:
        _, state = send(address, "GET", f"/api/chat?seen={seen}")
        if check(state):
            return state
        seen = state["seen"]


def settled(address: str) -> dict:
    """Return the conversation once nothing is under way."""
    return until(address, lambda state: state["for_s"] is None)


# Only the page that has the printed key can talk: no other origin, host, type of body, or user of this machine.
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"Origin": "http://evil.example"}, "http://evil.example"),
        ({"Origin": None}, "no page"),
        ({"Origin": "null"}, "null"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "localhost"),
        ({"Content_Type": "text/plain"}, "text/plain"),
        ({"X_Chat_Key": None}, "the key is missing"),
        ({"X_Chat_Key": "guessed"}, "the key is missing"),
    ],
)
def test_others_are_refused(address, changed, named):
    before = settled(address)["seen"]
    status, answer = send(address, "POST", "/api/chat/say", {"text": "Hello"}, **changed)
    assert status == 403 and named in str(answer)
    if "Content_Type" not in changed and changed.get("Host") is None and "X_Chat_Key" in changed:
        assert send(address, "GET", "/api/chat", **changed)[0] == 403
    assert settled(address)["seen"] == before


# A question is answered with tokens and their log-probabilities, and the tools' answers are real.
def test_an_answer_with_tools(address):
    assert send(address, "POST", "/api/chat/task", {"index": 0, "ask": True})[0] == 200
    state = until(address, lambda state: len(state["turns"]) > 3)
    roles = [turn["role"] for turn in state["turns"]]
    assert roles[:4] == ["system", "user", "assistant", "tool"] and state["turns"][1]["text"] == state["question"]
    assert send(address, "POST", "/api/chat/stop", {})[0] == 200
    first = state["turns"][2]
    assert first["tool_calls"] and first["token_count"] == len(first["tokens"]["texts"])
    assert all(value <= 0 for value in first["tokens"]["logprobs"])
    assert not any(
        "<|im_end|>" in text for turn in state["turns"] if turn["tokens"] for text in turn["tokens"]["texts"]
    )
    assert state["used_tokens"] <= state["context_tokens"]


# Stopped, the answer ends at once: a call without an answer gets one, so that the conversation can go on.
def test_stop(address):
    assert send(address, "POST", "/api/chat/task", {"index": 1, "ask": True})[0] == 200
    until(address, lambda state: "the tool" in state["doing"])
    status, answer = send(address, "POST", "/api/chat/say", {"text": "And now?"})
    assert status == 409 and "stop it first" in answer["error"]
    assert send(address, "POST", "/api/chat/stop", {})[0] == 200
    state = settled(address)
    assert [turn["role"] for turn in state["turns"][-2:]] == ["assistant", "tool"]
    assert state["turns"][-1]["text"] == "Stopped by the user." and state["problem"] is None


# What cannot be done is refused with the value and the remedy; a full context is said, and the question comes back.
def test_errors(address):
    send(address, "POST", "/api/chat/new", {})
    for name, body, named in (
        ("say", {"text": " "}, "nothing to say"),
        ("say", {"words": "x"}, "unknown field `words`"),
        ("task", {"index": 99999}, "there is no task 99999; there are 1024"),
        ("settings", {"temperature": -1, "max_tokens": 9, "system": None}, "temperature is -1"),
        ("settings", {"temperature": 0, "max_tokens": 0, "system": None}, "0 tokens"),
        ("shout", {}, "no action 'shout'"),
    ):
        status, answer = send(address, "POST", f"/api/chat/{name}", body)
        assert status == 409 and named in answer["error"]
    long = "21 " * 2000
    assert send(address, "POST", "/api/chat/say", {"text": long})[0] == 200
    state = settled(address)
    assert "maximum context length (1024)" in state["problem"] and state["unsaid"] == long.strip()
    assert [turn["role"] for turn in state["turns"]] == ["system"]
    assert send(address, "POST", "/api/chat/settings", {"temperature": 0, "max_tokens": 256, "system": None})[0] == 200
    assert settled(address)["turns"] == []


# In a browser: the key leaves the address, a question is answered with colored tokens, the stop button and the key for
# a new conversation work, and an error stands on the page.
def test_in_a_browser(address, browser):
    send(address, "POST", "/api/chat/settings", {"temperature": 0, "max_tokens": 64, "system": None})
    send(address, "POST", "/api/chat/task", {"index": 0})
    page = Page(browser, address)
    page.until("Nothing has been said yet")
    assert page.hash == "#/chat" and "3 tools on offer" in page.text()
    page.click("#say")
    page.keys("Hello", "\ue007")
    page.until_true(lambda: page.all("#chat .turn.user") and page.all("#chat .token"), "an answer with colored tokens")
    page.until("context used", "#chat-status")
    page.choose("#shade", "")
    page.until_true(lambda: not page.all("#chat .token"), "no color")
    page.click("#ask-task")
    page.until_true(lambda: page.all("#chat .turn.tool"), "the answer of a tool")
    page.browser.execute_script("document.getElementById('stop-chat')?.click()")
    page.until("of context used", "#chat-status")
    task = page.all("#chat-task")[0]
    task.clear()
    task.send_keys("1")
    page.click("#ask-task")
    page.until("the tool", "#chat-status")
    page.click("#stop-chat")
    page.until("Stopped by the user.", "#chat")
    page.click("h1")
    page.keys("n")
    page.until("Nothing has been said yet", "#chat")
    browser.execute_script("document.getElementById('say').value = '21 '.repeat(2000)")
    page.click("#send")
    page.until("maximum context length", "#chat-problem")
    page.check_clean()
