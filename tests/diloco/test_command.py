"""The console script `diloco`, as a user meets it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_prime.config.diloco import DilocoConfig
from diloco.main import main
from diloco.simulate import command as simulate
from diloco.simulate.joint_run import Fleet, availability

ROOT = Path(__file__).resolve().parents[2]
WORK = "codec work"


# keygen writes a private key once.
def test_keygen(tmp_path, capsys):
    assert main(["keygen", str(tmp_path / "k")]) == 0 and (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(tmp_path / "k")]) == 2
    assert "exists and a joint run keeps its key" in capsys.readouterr().err


# The key that the pages have people make stays out of commits.
@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout")
def test_git_ignores_the_key():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"diloco keygen ([\w./-]+\.\w+)", page.read_text())}
    assert names == {"joint.key"}
    assert all(subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0 for name in names)


# What simulate assumes where nothing is given is a schedule that a trainer takes, and --help tells every default.
def test_simulate_defaults(capsys, tmp_path):
    parser = argparse.ArgumentParser()
    simulate.simulate_parser(parser.add_subparsers())
    words = parser.parse_args(["simulate"])
    peer = {"rendezvous": "tcp://127.0.0.1:1", "run": "r", "peer_id": "a", "key_file": tmp_path / "k"}
    DilocoConfig(sync_every=words.sync_every, fragments=words.fragments, delay=words.delay, **peer)
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    options = " ".join(capsys.readouterr().out.partition("options:")[2].split()).split(" --")[2:]
    assert len(options) > 12 and [each for each in options if "(default" not in each] == [
        "plot PLOT write utilization against bandwidth as SVG or PNG"
    ]


# simulate prints what each scheme needs and each way of reducing gives, and draws it.
def test_simulate(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["simulate", "--peers", "2", "512", "--mtbf-h", "24", "--plot", str(tmp_path / "u.svg")]) == 0
    shown = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    first, second = (index for index, row in enumerate(rows) if row[0] in ("scheme", "peers"))
    needed = {row[0]: row[1:] for row in rows[first:second] if len(row) == 7}
    assert float(needed["data-parallel"][0]) == pytest.approx(86.8, rel=0.1)
    assert "streaming, overlapped, 4 bits" in needed and list(needed)[-1] == "this run, int4, 2 peers"
    two, many = (row for row in rows[second + 1 :] if row[0] in ("2", "512") and len(row) == 6)
    assert float(two[1].replace(",", "")) < float(many[1].replace(",", ""))
    labels = re.findall(r">([^<>]+: [\d.,]+ MB)<", (tmp_path / "u.svg").read_text())
    assert [label.partition(":")[0] for label in labels] == [*list(needed)[1:-1], "this run, int4, relayed"]


# docs/how-to/choose-a-link.md shows what is printed.
def test_simulate_as_on_the_page(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs/how-to/choose-a-link.md").read_text()
    command, _, shown = page.partition("$ diloco simulate ")[2].partition("```")[0].partition("\nGbit/s")
    main(["simulate", *shlex.split(command.replace("\\\n", " "))])
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed] == f"Gbit/s{shown}".splitlines()


# A delta that takes longer to bring than the rounds' deadline gives a warning, whatever the number of peers.
@pytest.mark.parametrize(("deadline_s", "warned"), [("0.001", True), ("1e6", False)])
def test_simulate_warns_of_the_deadline(deadline_s, warned, capsys):
    assert main(["simulate", "--peers", "2", "64", "--deadline-s", deadline_s]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("Warning: encoding and sending a delta takes") == warned


# A state that takes a joining peer longer than --heal-timeout-s gives a warning. Failures cost goodput for as long as
# it takes, at the pace of the narrower of the peers' and the rendezvous' links.
def test_simulate_healing(capsys):
    def shown(*words: str) -> tuple[str, float]:
        assert main(["simulate", "--parameters", "8e9", "--latency-ms", "0", "--peers", "2", *words]) == 0
        said = capsys.readouterr().out
        return " ".join(said.split()), float(re.search(r"^ *2 .* ([\d.]+)%  \w+", said, re.MULTILINE)[1])

    said, all_up = shown()
    assert "1307 s to a joining peer, up to the rendezvous and then down, more than --heal-timeout-s = 900" in said
    assert "to a joining peer" not in shown("--heal-timeout-s", "1400")[0]
    failing = shown("--mtbf-h", "1")[1]
    assert failing / all_up == pytest.approx(availability(Fleet(peers=2, mtbf_h=1), 1307), abs=0.02)


# Whatever the run: 80 columns hold every cell, and each table's sentence names the part of the time that dominates.
# Codec work is named where it does, and where it puts a utilization out of reach of any link; ranks share it.
@pytest.mark.parametrize(
    ("words", "dominant"),
    [
        (["--step-s", "60", "--sync-every", "8", "--fragments", "4", "--gbit", "10", "--latency-ms", "1"], "compute"),
        (["--parameters", "8e9", "--step-s", "10", "--sync-every", "16", "--gbit", "99", "--latency-ms", "0"], WORK),
        (["--parameters", "1e12", "--codec", "sparse", "--gbit", "0.001", "--peers", "64", "4096"], "the link"),
    ],
)
def test_simulate_fits_and_explains(words, dominant, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["simulate", *words])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()) and "…" not in shown
    said = " ".join(shown.split())
    assert f"{dominant} dominates." in said.rpartition("sync: from encoding")[2]
    if dominant == WORK:
        before, _, after = said.partition("out of reach of any link")
        assert re.search(r"this run, int4, 2 peers( \S+)* -( -)* \S+ -: $", before)
        assert "codec work dominates." in after.partition("sync: from")[0]
        main(["simulate", *words, "--ranks", "8"])
        assert "(83%) are compute" in " ".join(capsys.readouterr().out.split()).rpartition("sync: from")[2]


# A reader that leaves early sees no traceback, with or without 2>&1, as with every other command.
@pytest.mark.process
@pytest.mark.parametrize("errors", [subprocess.PIPE, subprocess.STDOUT])
def test_a_reader_that_leaves_early(errors):
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco.main", "simulate"], stdout=subprocess.PIPE, stderr=errors, cwd=ROOT
    )
    process.stdout.close()
    assert process.wait(200) == 141
    assert errors == subprocess.STDOUT or process.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--gbit", "nan"], "--gbit is nan; expected a finite number"),
        (["simulate", "--step-s", "inf"], "--step-s is inf; expected a finite number"),
        (["simulate", "--mtbf-h", "nan"], "--mtbf-h is nan; expected a finite number"),
        (["rendezvous", "--run", "r", "--key-file", "none", "--gather-s", "nan"], "--gather-s is nan; expected"),
        (["simulate", "--gbit", "0"], "--gbit is 0.0; expected a value above 0"),
        (["simulate", "--relay-gbit", "-1"], "--relay-gbit is -1.0; expected a value above 0"),
        (["simulate", "--peers", "2", "1"], "--peers is 2 1; a joint run has 2 or more"),
        (["simulate", "--sync-every", "96", "--fragments", "32"], "--fragments is 32, but there are 24 layers"),
        (["simulate", "--sync-every", "100"], "the period; set --fragments to 5 or --sync-every to 104"),
        (["simulate", "--delay", "12"], "every --sync-every / --fragments = 12 steps and only one may be on its way"),
        (["rendezvous", "--run", "r", "--key-file", "none"], "key file none is missing"),
        (["rendezvous", "--run", "r", "--key-file", "none", "--min-peers", "0"], "--min-peers is 0"),
        (
            ["rendezvous", "--run", "r", "--key-file", "none", "--bind", "127.0.0.1:29613"],
            "--bind is '127.0.0.1:29613'",
        ),
        (["rendezvous", "--run", "r", "--key-file", "none", "--bind", "tcp://127.0.0.1:99999"], "expected 0 to 65535"),
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


# One command shows a joint run: a rendezvous, two clusters, their steps, and the digests of their final models. These
# are equal. What it wrote stays in the folder.
@pytest.mark.slow
def test_demo(tmp_path, capfd):
    pytest.importorskip("torchft")
    assert main(["demo", "--steps", "2", "--folder", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    digests = re.findall(r"^(\w) +\| ended at outer step 2, digest (\w{32})$", shown, re.M)
    assert [name for name, _ in digests] == ["a", "b"] and len({digest for _, digest in digests}) == 1
    assert all(re.search(rf"^{name} +\| .*step 2/2 ", shown, re.M) for name in "ab")
    assert (tmp_path / "demo/a/final/config.json").is_file() and (tmp_path / "demo.toml").is_file()


# A number of steps that ends between two synchronizations is refused before anything starts.
def test_demo_refuses(tmp_path, capsys):
    assert main(["demo", "--steps", "3", "--folder", str(tmp_path)]) == 2 and not list(tmp_path.iterdir())
    assert "--steps is 3; expected an even number of 2 or more" in capsys.readouterr().err
