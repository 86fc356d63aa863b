"""`composer chat`: a conversation over a pipe, with and without tools."""

from __future__ import annotations

import subprocess

import pytest

from composer_prime.console import console_script


def talk(*words: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*console_script("composer"), "chat", *words], input=text, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


# Lines are answered, commands are obeyed, and the end of the input ends it.
@pytest.mark.slow
def test_without_tools():
    done = talk("tiny", "--max-tokens", "4", text="Hello\n/system Be brief.\nHello\n/help\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" in all]") == 2
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
