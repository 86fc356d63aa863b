"""`composer new`: what it writes passes its own test, is played by `composer try`, and is accepted by a dry run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from composer_prime.cli.environments.new_command import KINDS, write_new
from composer_prime.console import console_script
from composer_prime.errors import ConfigError


def run(folder, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Every kind has a run's configuration and a test, and no field stays open.
@pytest.mark.parametrize("kind", KINDS)
def test_written(kind, tmp_path):
    paths = write_new(kind, "word_count", tmp_path)
    assert {"word_count.toml", "test_word_count.py"} <= {path.name for path in paths}
    assert not any(field in path.read_text() for path in paths for field in ("__name__", "__Class__", str(tmp_path)))


# Names that cannot be imported, or that another module would hide, are refused; files are never replaced.
@pytest.mark.parametrize(
    ("name", "reason"),
    [("My-Env", "cannot be a module's name"), ("class", "cannot be"), ("json", "a module 'json' is already installed")],
)
def test_refused_name(name, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        write_new("environment", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_existing_file_is_kept(tmp_path):
    (tmp_path / "mine.toml").write_text("kept")
    with pytest.raises(ConfigError, match=r"mine\.toml exists already"):
        write_new("hint", "mine", tmp_path)
    assert (tmp_path / "mine.toml").read_text() == "kept"


# The three promises of what is written, for each kind.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_as_it_is(kind, tmp_path):
    write_new(kind, "word_count", tmp_path)
    passed = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_word_count.py")
    assert " passed" in passed
    plan = run(tmp_path, *console_script("trainer"), "@", "word_count.toml", "--dry-run")
    assert "word_count: 10 steps" in plan
    target = "word_count.toml" if kind == "hint" else "word_count.py"
    played = run(tmp_path, *console_script("composer"), "try", target, "-n", "2")
    assert "2 episodes, 2 with a reward" in played
