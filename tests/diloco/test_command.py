"""The console script `diloco`, as a user meets it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.main import main
from diloco.transport.messages import JointKey

ROOT = Path(__file__).resolve().parents[2]


# The key that the pages have people make stays out of commits.
@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout")
def test_git_ignores_the_key():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"diloco keygen ([\w./-]+\.\w+)", page.read_text())}
    assert names == {"joint.key"}
    assert all(subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0 for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rendezvous", "--run", "r", "--key-file", "none", "--gather-s", "nan"], "--gather-s is nan; expected"),
        (["rendezvous", "--run", "r", "--key-file", "none"], "is missing: make it once with `diloco keygen"),
        (["keygen", __file__], "exists and a joint run keeps its key"),
        (["rendezvous", "--run", "r", "--key-file", "none", "--min-peers", "0"], "--min-peers is 0"),
        (
            ["rendezvous", "--run", "r", "--key-file", "none", "--bind", "127.0.0.1:29613"],
            "--bind is '127.0.0.1:29613'",
        ),
        (["rendezvous", "--run", "r", "--key-file", "none", "--bind", "tcp://127.0.0.1:99999"], "from 0 to 65535"),
        (["rendezvous", "--run", "r", "--key-file", "none", "--memory-gb", "0.2"], "messages alone take up to 0.27"),
        (["rendezvous", "--run", "r", "--key-file", "none", "--memory-gb", "0"], "--memory-gb is 0; expected a value"),
    ],
)
def test_wrong_input(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


# An address that this machine does not have, as when the overlay is down, gives an error that explains it.
def test_rendezvous_without_its_overlay(key_file, capsys):
    pytest.importorskip("torchft")
    assert main(["rendezvous", "--run", "r", "--key-file", str(key_file), "--bind", "tcp://192.0.2.1:29600"]) == 2
    said = capsys.readouterr().err
    assert "cannot listen at tcp://192.0.2.1:29600: this machine has no such address" in said and "`wg show`" in said


# The rendezvous listens where it was told to and nowhere else but on loopback, and SIGTERM ends it cleanly. Its first
# line is the address: before that no clock runs that would count importing torchft as a pause.
@pytest.mark.process
def test_rendezvous_process(key_file):
    pytest.importorskip("torchft")
    command = [sys.executable, "-m", "diloco.main", "rendezvous", "--run", "r", "--key-file", str(key_file)]
    process = subprocess.Popen(
        [*command, "--bind", "tcp://127.0.0.1:0", "--beat-timeout-s", "1"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert re.match(r"rendezvous of run 'r' at tcp://127\.0\.0\.1:\d+\n", first), first
        port = int(second.partition("http://127.0.0.1:")[2].split()[0])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        assert {address for address, _ in listening(process.pid)} == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    assert "torchft::" not in process.stdout.read()


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses on which a process listens."""
    import psutil

    time.sleep(0.1)
    found = psutil.Process(pid).net_connections(kind="inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_a_key_may_be_mounted_as_a_link(tmp_path: Path) -> None:
    """Clusters mount secrets as links to where their newest version is."""
    key = JointKey.create(tmp_path / "joint.key")
    (tmp_path / "mounted.key").symlink_to("joint.key")
    assert JointKey.read(tmp_path / "mounted.key") == key
