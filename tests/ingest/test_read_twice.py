"""Files are read twice: input that can be read only once, and files that grow between the two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ingest_traces import SESSION, answer, lines, taken, use

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.ingest import ingest
from composer_prime.traces.ingest.ingest_command import find_files
from composer_prime.traces.ingest.trace_file import Tally
from composer_prime.traces.states import read_states


def ingested(output: Path, **stdin: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "composer_prime.cli.main", "ingest", "/dev/stdin", "-o", str(output)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **stdin)


# A pipe is refused before anything is opened, with what to do; one that has a name would wait for a writer.
def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="is a pipe, but ingestion reads its input twice: save it to a file first"):
        find_files([tmp_path / "fifo"], tmp_path / "o.jsonl")
    with pytest.raises(ConfigError, match="/dev/null is a device or socket"):
        find_files([Path("/dev/null")], tmp_path / "o.jsonl")


# What is piped in is refused likewise; what is redirected from a file is that file.
@pytest.mark.process
def test_standard_input(tmp_path: Path) -> None:
    session, output = lines(tmp_path / "s.jsonl", *SESSION), tmp_path / "o.jsonl"
    piped = ingested(output, input=session.read_text())
    assert piped.returncode == 2 and "/dev/stdin is a pipe" in piped.stderr and not output.exists()
    with session.open() as file:
        redirected = ingested(output, stdin=file)
    assert redirected.returncode == 0 and len(list(read_states(output))) == 2


# What a session writes while it is read is left for another time, whatever it is: a tool's call, or half a line.
@pytest.mark.parametrize("more", [answer("b1", "a5", use("t9", "Edit")), b'{"type": "assist'])
def test_a_file_that_grows(tmp_path: Path, more: object) -> None:
    path = lines(tmp_path / "s.jsonl", *SESSION)
    whole, tally = taken(path)
    late = Tally()
    reading = ingest(path, late)
    states = [next(reading)]
    rest = lines(tmp_path / "more", more).read_bytes()
    with path.open("ab") as file:
        file.write(rest)
    states += reading
    assert states == whole and late == tally
