"""Adapters in a joint run: two clusters with seeds of their own begin with the same ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from small_runs import make_config, make_samples
from step_peer import StepPeer

from diloco.transport.messages import JointKey
from trainer.model.build import build_policy

pytestmark = pytest.mark.process

STEPS = 4
DILOCO = {"rendezvous": "tcp://127.0.0.1:1", "run": "joint", "key_file": "joint.key", "peer_id": "a", "sync_every": 2}
LORA = {"lora": {"rank": 4}, "optim": {"lr": 1e-3}}


# Whatever run.seed is: of one joint run the adapters are the same, of another they are not. Alone, the seed decides.
def test_first_adapters(model_folder, tmp_path, world):
    def adapters(seed: int, **sections) -> torch.Tensor:
        config = make_config(model_folder, tmp_path, run={"seed": seed, "max_steps": STEPS}, trainer=LORA, **sections)
        named = build_policy(config, model_folder, world).named_parameters()
        return torch.cat([value.full_tensor().flatten() for name, value in named if ".lora_A." in name]).detach()

    joint = adapters(0, diloco=DILOCO)
    assert joint.equal(adapters(1, diloco=DILOCO))
    assert not joint.equal(adapters(0, diloco=DILOCO | {"run": "other"}))
    alone = adapters(0)
    assert alone.equal(adapters(0)) and not alone.equal(adapters(1))


def start_rendezvous(key: Path, stack: ExitStack) -> str:
    """Of exactly two peers; its address."""
    command = [sys.executable, "-m", "diloco.main", "rendezvous", "--run", "joint", "--key-file", str(key)]
    process = subprocess.Popen(
        [*command, "--bind", "tcp://127.0.0.1:0", "--start-peers", "2", "--min-peers", "2"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


# Two trainers with run.seed 0 and 1: both contribute to every round, the first included, nobody takes over a state, and
# both end with the same merged model, which has moved.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_joint_lora_run(make_run, tmp_path):
    pytest.importorskip("torchft")
    JointKey.create(tmp_path / "joint.key")
    with ExitStack() as stack:
        facts = {"rendezvous": start_rendezvous(tmp_path / "joint.key", stack), "key_file": str(tmp_path / "joint.key")}
        runs, ranks = [], []
        for seed, peer in enumerate("ab"):
            run = make_run(
                peer, run={"max_steps": STEPS, "seed": seed}, diloco=DILOCO | facts | {"peer_id": peer}, trainer=LORA
            )
            samples = lambda step, seed=seed: make_samples(100 * seed + step, version=0)
            stack.enter_context(StepPeer(run.dir, samples, max_steps=STEPS))
            runs.append(run)
            ranks += run.start()
        assert [rank.wait(300) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    models = [(run.dir.final / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1] != Path(runs[0].config.model.path, "model.safetensors").read_bytes()
    for run, rank in zip(runs, ranks, strict=True):
        lines = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
        rounds = {line["diloco/outer_step"]: line for line in lines if "diloco/outer_step" in line}
        assert rounds.keys() == {1, 2} and all(line["diloco/participants"] == 2 for line in rounds.values())
        assert not any(line["diloco/missed_rounds"] + line["diloco/rejected"] for line in rounds.values())
        assert "took over the state" not in rank.output
