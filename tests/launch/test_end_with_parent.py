"""Children end with their parent, and their ends are described in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from composer_prime.run.process import exit_text, last_words

PARENT = """
import subprocess, sys, time
from composer_prime.run.process import child_options
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True, **child_options())
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(300)
"""
CHILD = """
import sys, time
{platform}
from composer_prime.run.process import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.process
@pytest.mark.parametrize("platform", ["", "sys.platform = 'elsewhere'"])
def test_a_child_ends_with_its_killed_parent(platform: str) -> None:
    # By the kernel's signal on Linux, by looking at the parent's id elsewhere.
    argv = [sys.executable, "-c", PARENT, CHILD.format(platform=platform)]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child's end")


@pytest.mark.process
def test_a_wrapper_between_parent_and_child_is_no_dead_parent() -> None:
    # A shell that forks instead of exec'ing stands between the two; the child lives on.
    wrapped = PARENT.replace(
        '[sys.executable, "-c", sys.argv[1]]', '["sh", "-c", \'"$0" -c "$1"; :\', sys.executable, sys.argv[1]]'
    )
    argv = [sys.executable, "-c", wrapped, CHILD.format(platform="")]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    shell = psutil.Process(int(parent.stdout.readline()))
    (child,) = shell.children()
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    child.kill()
    parent.kill()
    parent.communicate()


def test_an_exit_status_in_words() -> None:
    # Signals have names; a status that no signal has is given as a number.
    assert [exit_text(3), exit_text(-9), exit_text(-200)] == [
        "ended with exit status 3",
        "was ended by SIGKILL",
        "was ended by signal 200",
    ]


def test_last_words_are_those_of_the_newest_start(tmp_path: Path) -> None:
    # Only lines after the offset are shown, and silence is said.
    log = tmp_path / "log"
    log.write_text("old\n")
    assert "wrote nothing" in last_words(log, offset=4)
    log.write_text("old\n1\n2\n3\n")
    assert last_words(log, offset=4, count=2) == "    2\n    3"
    assert "unreadable" in last_words(tmp_path / "missing")
