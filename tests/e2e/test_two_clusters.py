"""Two clusters with all their roles on one machine train one model through the outer loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_run import ROOT, QuickRun
from safetensors.torch import load_file

from diloco.transport.messages import JointKey


def metrics(folder: Path, role: str = "trainer") -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["role"] == role]


def same_weights(first: Path, second: Path) -> bool:
    mine, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)


# Both run directories have the form of any run's, the final models are equal and not the start model, the trainer's
# lines tell of the outer loop, and versions count sweeps.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_clusters(tmp_path):
    pytest.importorskip("torchft")
    JointKey.create(tmp_path / "joint.key")
    command = [sys.executable, "-m", "diloco.main", "rendezvous", "--run", "joint", "--start-peers", "2"]
    rendezvous = subprocess.Popen(
        [*command, "--key-file", str(tmp_path / "joint.key"), "--bind", "tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
    )  # fmt: skip
    try:
        address = rendezvous.stdout.readline().split()[-1]
        clusters = []
        for index, peer in enumerate("ab"):
            words = {"rendezvous": address, "run": "joint", "peer_id": peer, "key_file": str(tmp_path / "joint.key"),
                     "sync_every": "2", "fragments": "2", "codec.type": "int8"}  # fmt: skip
            settings = [word for key, value in words.items() for word in (f"--diloco.{key}", value)]
            run = QuickRun(tmp_path, f"two-{peer}", 4, [*settings, "--run.seed", str(index)])
            clusters.append(run.start())
        folders = [tmp_path / f"two-{peer}" / peer for peer in "ab"]
        for run in clusters:
            assert run.wait(600) == 0, run.output()
        assert same_weights(folders[0] / "final", folders[1] / "final")
        assert not same_weights(folders[0] / "final", ROOT / "composer_prime/assets/tiny/policy")
        for folder in folders:
            last, ended = metrics(folder)[-2:]
            others = metrics(folders[0])[-1]
            assert ended["diloco/final_outer_step"] == 4 and ended["diloco/final_hash"] == others["diloco/final_hash"]
            assert last["diloco/outer_step"] == 4 and last["diloco/participants"] == 2
            assert last["diloco/bytes_sent"] > 1e6
            assert [path.name for path in sorted((folder / "weights").rglob("*.manifest"))][-1] == "v000002.manifest"
            assert last["diloco/sweep"] == 2 and last["policy/staleness_max"] <= 1
            assert (folder / "checkpoints/step_000004/trainer/diloco-0.safetensors").is_file()
    finally:
        rendezvous.terminate()
        assert rendezvous.wait(200) == 0
