"""Two clusters' trainers with real step servers and a real rendezvous: stopped and resumed, or joined late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hinted_runs import make_hinted
from safetensors.torch import load_file
from small_runs import Run
from step_peer import StepPeer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from diloco.state import unpack_state
from diloco.transport.messages import JointKey

STEPS = 12
DILOCO = {
    "run": "joint", "sync_every": 4, "fragments": 2, "delay": 1, "codec": {"type": "int4"},
    "outer": {"lr": 0.7, "momentum": 0.9},
}  # fmt: skip
CHANNELS = {  # two moving averages: a reference and a teacher
    "policy": {"correction": "none", "kl": {"weight": 0.1, "estimator": "k3", "reference": "ema"}},
    "sdpo": {"weight": 0.7, "teacher": {"kind": "ema", "rate": 0.01}},
}
VERSIONS = {step: step // 4 for step in range(STEPS + 1)}
"""The policy version after each step: full sweeps."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class JointRun:
    """Peers a and b of one joint run, each in a run directory of its own."""

    def __init__(self, folder: Path, name: str, make_run, stack: ExitStack, *options: str) -> None:
        """`options`: of the rendezvous."""
        key = folder / f"{name}.key"
        JointKey.create(key)
        command = [sys.executable, "-m", "diloco.main", "rendezvous", "--run", "joint", "--key-file", str(key)]
        rendezvous = subprocess.Popen(
            [*command, "--bind", "tcp://127.0.0.1:0", *options],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        stack.callback(rendezvous.wait, 60)
        stack.callback(rendezvous.terminate)
        diloco = DILOCO | {"rendezvous": rendezvous.stdout.readline().split()[-1], "key_file": str(key)}
        self.runs: list[Run] = []
        self.servers: list[StepPeer] = []
        for index, peer in enumerate("ab"):
            run = make_run(
                f"{name}-{peer}", run={"max_steps": STEPS}, diloco=diloco | {"peer_id": peer}, channels=CHANNELS,
                trainer={
                    "checkpoint": {"every_steps": 0}, "optim": {"lr": 1e-3},
                    "micro_batch_tokens": 1024, "schedule": {"type": "cosine", "warmup_steps": 3},
                },
            )  # fmt: skip
            self.runs.append(run)
            samples = lambda step, index=index: make_hinted(100 * index + step, version=0)
            self.servers.append(stack.enter_context(StepPeer(run.dir, samples, max_steps=STEPS)))

    def start(self, peer: int, until: int = STEPS, resume: bool = False):
        """Start a trainer of `peer`, which gets no batch after step `until`."""
        self.servers[peer].quiet_from = until + 1 if until < STEPS else None
        config = self.runs[peer].config
        run = config.run.model_copy(update={"resume": resume})
        return self.runs[peer].write(config.model_copy(update={"run": run})).start()[0]

    def versions(self, peer: int) -> dict[int, int]:
        """By step, as the orchestrator was told."""
        return {done.step: done.version for done in self.servers[peer].done}

    def saved(self, peer: int, step: int) -> dict:
        """What ranks of any number load from the checkpoint of `step`: model, averages and the rest."""
        whole = self.runs[peer].dir.root / "whole.pt"
        dcp_to_torch_save(self.runs[peer].dir.checkpoint(step) / "trainer", whole)
        return torch.load(whole, weights_only=False)

    def learning_rates(self, peer: int) -> list[float]:
        """Of the steps that this peer took."""
        lines = [json.loads(line) for line in self.runs[peer].dir.metrics.read_text().splitlines()]
        return [line["optim/lr"] for line in lines if "optim/lr" in line]

    def model(self, peer: int) -> bytes:
        return (self.runs[peer].dir.final / "model.safetensors").read_bytes()

    def outer(self, peer: int):
        """Masters, momentum and error feedback as the last checkpoint holds them."""
        path = self.runs[peer].dir.checkpoint(STEPS) / "trainer" / "diloco-0.safetensors"
        return unpack_state(path.read_bytes())


@pytest.fixture
def joint(tmp_path, make_run):
    pytest.importorskip("torchft")
    with ExitStack() as stack:
        yield lambda name, *options: JointRun(tmp_path, name, make_run, stack, *options)


def stopped(rank, step: int) -> None:
    """Stop a rank after `step`; it leaves a checkpoint of just that step."""
    rank.wait_for(f"step {step}:", 200)
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(200) == 128 + signal.SIGTERM
    assert f"stopped after step {step}: its checkpoint is written" in rank.output, rank.output


def assert_equal_ends(joint: JointRun, whole: JointRun) -> None:
    """Versions, models, momentum, error feedback and moving averages are those of the run that was never stopped."""
    for peer in range(2):
        assert joint.versions(peer) == whole.versions(peer) == VERSIONS
        assert joint.model(peer) == whole.model(peer) == whole.model(0)
        (tensors, facts), (expected, told) = joint.outer(peer), whole.outer(peer)
        assert {"master.1", "velocity.1", "residual.1"} <= tensors.keys() == expected.keys()
        assert all(tensors[name].equal(expected[name]) for name in tensors), facts
        assert facts["outer_step"] == told["outer_step"] == 2 * STEPS // 4 and facts["work"] == told["work"]
        assert expected["residual.1"].any() and expected["velocity.1"].any()
        averages, straight = (each.saved(peer, STEPS)["averages"] for each in (joint, whole))
        assert averages.keys() == straight.keys() == {"teacher", "reference"}
        for name, values in averages.items():
            assert all(value.equal(straight[name][key]) for key, value in values.items())


# Both clusters are stopped after step 5, with a delta under way, and after step 8, at a full sweep; or one of them is
# after step 5, while the other waits for it. Resumed, they end as the run that was never stopped.
def test_stopped_and_resumed(joint):
    both = "--start-peers", "2", "--min-peers", "2"
    whole = joint("whole", *both)
    ranks = [whole.start(peer) for peer in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    for leaving, cuts in ((0, 1), (5, 8)), ((1,), (5,)):
        again = joint(f"again{len(leaving)}", *both)
        ranks = [again.start(peer, cuts[0] if peer in leaving else STEPS) for peer in range(2)]
        for cut, until in zip(cuts, (*cuts[1:], STEPS), strict=True):
            for peer in leaving:
                stopped(ranks[peer], cut)
            for peer in leaving:
                ranks[peer] = again.start(peer, until, resume=True)
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        assert_equal_ends(again, whole)


# Cluster b joins after a has taken eight steps alone, and receives a's state. Its teacher and its reference begin
# there, not at its own first weights.
def test_averages_of_a_late_joiner(joint):
    late = joint("late", "--keep-rounds", "1")
    first = late.start(0, until=8)
    first.wait_for("step 8:", 200)
    second = late.start(1, until=1)
    second.wait_for("took over the state of peer a", 200)
    late.servers[0].quiet_from = 10
    stopped(second, 1)
    late.servers[0].quiet_from = None
    assert first.wait(200) == 0, first.output
    start, saved = load_file(Path(late.runs[1].config.model.path) / "model.safetensors"), late.saved(1, 1)
    model = saved["model"]
    for values in saved["averages"].values():
        for name, value in values.items():
            assert value.dist(model[name]) < 0.5 * start[name.removeprefix("lm.")].dist(model[name]), name


# Cluster b joins after a has taken eight of the twelve steps. The run's end follows the outer steps, so b ends with a,
# on the same model, after about four steps of its own. So does the learning rate: b has no warm-up of its own.
def test_late_joiner_ends_with_the_others(joint):
    late = joint("end", "--keep-rounds", "1")
    first = late.start(0, until=8)
    first.wait_for("step 8:", 200)
    second = late.start(1)
    second.wait_for("took over the state of peer a", 200)
    late.servers[0].quiet_from = None
    assert [rank.wait(200) for rank in (first, second)] == [0, 0], (first.output, second.output)
    assert late.model(0) == late.model(1)
    first_done, second_done = (server.done[-1] for server in late.servers)
    assert first_done.step == first_done.last_step == STEPS
    assert second_done.step == second_done.last_step < STEPS
    assert late.versions(0)[STEPS] == second_done.version
    rates, later = late.learning_rates(0), late.learning_rates(1)
    assert len(set(rates)) == STEPS and later and set(later) <= set(rates[7:]) and later[-1] == rates[-1]
