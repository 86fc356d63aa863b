"""infra/bootstrap.sh on a machine without a GPU, with commands that stand in for nvidia-smi, uv and the node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "bootstrap.sh"
pytestmark = pytest.mark.process


TOOLS = ("awk", "bash", "cat", "cp", "df", "env", "head", "hostname", "id", "sh", "uname")
"""What the script may find on every machine. Nothing else is on its PATH, so that no test depends on this one."""


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for tool in TOOLS:
        place = shutil.which(tool)
        assert place is not None, tool
        (tmp_path / "tools" / tool).symlink_to(place)
    return tmp_path


def put(home: Path, name: str, text: str) -> None:
    """Put a command into ~/.local/bin, which comes first on the script's PATH."""
    command = home / ".local" / "bin" / name
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(0o755)


def bootstrap(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {"HOME": str(home), "PATH": str(home / "tools"), "COMPOSER_MIN_DISK_GB": "0", **environment}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT), *words], env=values, capture_output=True, text=True, timeout=60
    )


# A dry run in an empty home shows each command and the join, and leaves nothing behind. There is no default package.
def test_dry_run(home):
    put(home, "apt-get", "exit 1")
    words = ["--dry-run", "--cpu", "--package", "a.whl", "--name", "box"]
    done = bootstrap(home, *words, "cpi1.x", "--", "--engine", "local")
    assert done.returncode == 0, done.stderr
    assert "apt-get install -yq --no-install-recommends ca-certificates curl gcc libc6-dev" in done.stderr
    assert "would run: uv tool install --python 3.12 a.whl" in done.stderr
    assert "would run: exec inference join --name box --engine local" in done.stderr
    assert "cpi1.x" not in done.stderr
    assert [path.name for path in (home / ".local").rglob("*") if path.is_file()] == ["apt-get"]
    put(home, "nvidia-smi", "echo 580.65.06")
    done = bootstrap(home, "--dry-run", "cpi1.secret")
    assert done.returncode == 1 and "no package is given: pass --package SPEC" in done.stderr


# The release is installed once; a second run finds it and joins again, with the invite, name and price of `rent`.
def test_twice(home):
    put(home, "cc", "")
    put(home, "curl", "exit 1")
    put(home, "nvidia-smi", "echo 580.65.06")
    put(home, "uv", 'echo "uv $*" >> "$HOME/calls"; cp "$HOME/node" "$HOME/.local/bin/inference"')
    (home / "node").write_text('#!/bin/sh\necho "inference $* $COMPOSER_INVITE" >> "$HOME/calls"\nexit 3\n')
    (home / "node").chmod(0o755)
    environment = {"COMPOSER_INVITE": "cpi1.x", "COMPOSER_NODE_NAME": "box", "COMPOSER_USD_PER_HOUR": "2.5"}
    for _ in range(2):
        assert bootstrap(home, "--package", "a.whl", **environment).returncode == 3
    join = "inference join --name box --price 2.5 cpi1.x"
    assert (home / "calls").read_text().splitlines() == ["uv tool install --python 3.12 a.whl", join, join]


# What is missing is named with what is needed: the invite, the driver, its version, the disk, a known option.
@pytest.mark.parametrize(
    ("words", "driver", "message"),
    [
        ([], "echo 580.65.06", "no invite string"),
        (["x"], None, "no nvidia-smi"),
        (["x"], "echo No devices were found; exit 6", "nvidia-smi found no GPU: No devices were found"),
        (["x"], "echo 550.54.14", "the NVIDIA driver is 550.54.14, 580 or newer is needed"),
        (["--cpus", "x"], None, "unknown option --cpus"),
        (["--package"], None, "--package needs a value"),
        (["--cpu", "x"], None, "no package is given: pass --package SPEC"),
        (["--cpu", "--package", "a.whl", "x"], None, "there is no apt-get"),
    ],
)
def test_errors(home, words, driver, message):
    if driver is not None:
        put(home, "nvidia-smi", driver)
    done = bootstrap(home, *words)
    assert done.returncode == 1
    assert message in done.stderr


# Too little disk is found before anything is installed.
def test_disk(home):
    done = bootstrap(home, "--cpu", "x", COMPOSER_MIN_DISK_GB="99999999")
    assert done.returncode == 1
    assert "99999999 GB are needed" in done.stderr
