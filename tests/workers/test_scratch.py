"""Folders in the temporary directory go with their owners."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from composer_prime.run.scratch import Scratch

OWNER = """
import sys
from composer_prime.run.scratch import Scratch
print(Scratch("one").path, flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_a_killed_owners_folder_goes_with_the_next_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` removes a folder whatever is in it; what kill -9 left goes when the next of that name is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = Scratch("one")
    (held.path / "deep" / "deeper").mkdir(parents=True)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    Scratch("one").close()
    assert left.is_dir() and held.path.is_dir()
    owner.kill()
    owner.wait()
    Scratch("another").close()
    assert left.is_dir()
    Scratch("one").close()
    assert list(tmp_path.iterdir()) == [held.path]
    held.close()
    held.close()
    assert list(tmp_path.iterdir()) == []
