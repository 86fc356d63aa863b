"""`composer chat`: a conversation over a pipe, with and without tools."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from composer_prime.cli.chat.chat_command import LiveAnswer
from composer_prime.cli.chat.conversation import ChatSettings, Conversation
from composer_prime.console import console_script
from composer_prime.model_source import resolve_model


def talk(*words: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*console_script("composer"), "chat", *words], input=text, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


# An answer appears token by token; a character of several tokens appears whole, and control characters as symbols.
def test_answer_appears_while_it_is_sampled(capsys):
    tokenizer = Tokenizer.from_file(str(resolve_model("tiny") / "tokenizer.json"))
    live, seen = LiveAnswer(), []
    settings = ChatSettings(temperature=1.0, max_tokens=9)
    talk = Conversation(
        "", "", settings, environment=None, tokenizer=tokenizer, on_token=lambda: live.show(talk.partial())
    )
    for token in tokenizer.encode("Four é\x1b").ids:
        talk.take("", token, -1.0)
        seen.append(capsys.readouterr().out)
    assert live.end() and capsys.readouterr().out == "\n"
    assert "".join(seen) == "Four é\u241b" and "" in seen and len(seen) > 3
    assert not live.end()


PROMPT = """
import asyncio
from composer_prime.cli.chat.chat_command import _next_line
async def twice():
    print(f"heard {await _next_line()}")
    await _next_line()
try:
    asyncio.run(twice())
except KeyboardInterrupt:
    print("left")
"""


# Ctrl-C at the prompt ends the program without another Enter, and the process ends cleanly.
@pytest.mark.process
def test_ctrl_c_at_the_prompt():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-u", "-c", PROMPT], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    os.write(ours, b"one\n")
    while b"heard one" not in shown or not shown.endswith(b"> "):
        shown += os.read(ours, 100)
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 0
    assert b"left" in os.read(ours, 100)
    os.close(ours)


# So it does where the input is a pipe that stays open and empty.
@pytest.mark.process
def test_ctrl_c_while_a_pipe_is_read():
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PROMPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.readline() == "heard one\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 0
    assert process.stdout.read() == "left\n"
    process.stdin.close()
    process.stdout.close()


# Lines are answered, commands are obeyed, and the end of the input ends it.
@pytest.mark.slow
def test_without_tools():
    done = talk("tiny", "--max-tokens", "4", text="Hello\n/system Be brief.\nHello\n/help\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" in total]") == 2
    assert "/system TEXT" in done.stdout


# With an environment the model gets the task's tools, and its calls are answered by them.
@pytest.mark.slow
def test_with_tools():
    env = "orchestrator.environments.toolsmith"
    done = talk("tiny", "--env", env, "--temperature", "0.01", text="/task 1\n/task 99999\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert "> Join 21 and 6." in done.stdout
    assert "  -> " in done.stdout and "  <- " in done.stdout
    assert "there is no task 99999; there are 1024" in done.stderr
    assert "never" not in done.stdout
