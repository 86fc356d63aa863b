"""A key and a rendezvous for joint runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from joint_run import RendezvousThread

from diloco.transport.messages import JointKey


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    JointKey.create(tmp_path / "joint.key")
    return tmp_path / "joint.key"


@pytest.fixture
def make_rendezvous(key_file: Path):
    """make_rendezvous(**settings) -> RendezvousThread."""
    pytest.importorskip("torchft")
    started: list[RendezvousThread] = []

    def make(**settings) -> RendezvousThread:
        started.append(RendezvousThread(JointKey.read(key_file), **settings))
        return started[-1]

    yield make
    for each in started:
        if each._thread.is_alive():
            each.stop()
