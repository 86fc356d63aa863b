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


# keygen writes a private key once.
def test_keygen(tmp_path, capsys):
    assert main(["keygen", str(tmp_path / "k")]) == 0 and (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(tmp_path / "k")]) == 2
    assert "exists and a joint run keeps its key" in capsys.readouterr().err


# simulate prints what each scheme needs and each way of reducing gives, and draws it.
def test_simulate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["simulate", "--peers", "2", "512", "--mtbf-h", "24", "--plot", str(tmp_path / "u.svg")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"data-parallel\s+│\s+\S+\s+│", shown) and "streaming, overlapped, 4 bits" in shown
    rows = [re.split(r"\s*[│┃]\s*", line.strip("│ ")) for line in shown.splitlines() if re.match(r"│\s+512 ", line)]
    assert [row[1] for row in rows] == ["relay", "mesh", "hierarchical", "ring"]
    assert float(rows[1][2]) > float(rows[2][2])
    assert (tmp_path / "u.svg").read_text().count("<polyline") == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--gbit", "0"], "--gbit is 0.0; expected a value above 0"),
        (["simulate", "--fragments", "30"], "--fragments is 30, but there are 24 layers"),
        (["lighthouse", "--run", "r", "--key-file", "none"], "key file none is missing"),
        (["lighthouse", "--run", "r", "--key-file", "none", "--min-peers", "0"], "--min-peers is 0"),
        (["lighthouse", "--run", "r", "--key-file", "none", "--memory-gb", "0"], "--memory-gb is 0; expected a value"),
    ],
)
def test_wrong_input(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


# The lighthouse listens where it is told and nowhere else but on loopback, and SIGTERM ends it cleanly.
def test_lighthouse_process(key_file):
    pytest.importorskip("torchft")
    command = [sys.executable, "-m", "diloco.main", "lighthouse", "--run", "r", "--key-file", str(key_file)]
    process = subprocess.Popen(
        [*command, "--bind", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert re.match(r"rendezvous of run 'r' at tcp://127\.0\.0\.1:\d+\n", first), process.stderr.read()
        port = int(second.partition("http://127.0.0.1:")[2].split()[0])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        assert {address for address, _ in listening(process.pid)} == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses on which a process listens."""
    import psutil

    time.sleep(0.1)
    found = psutil.Process(pid).net_connections(kind="inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}
