"""Real rank processes over gloo against a real step server: 1 rank, 2 ranks, resumes."""

from __future__ import annotations

import json
import os
import signal

import pytest
from rank_process import start_ranks
from safetensors.torch import load_file
from small_runs import make_samples
from step_peer import StepPeer

from composer_prime.run.ledger import check_ledger, effective
from composer_prime.run.weights import WeightStore

pytestmark = pytest.mark.process


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]


def difference(one, other) -> float:
    """Largest difference between the parameters of two final/ folders."""
    a, b = load_file(one.dir.final / "model.safetensors"), load_file(other.dir.final / "model.safetensors")
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def moved(run) -> float:
    """Largest distance of final/ from the start model."""
    start = load_file(os.path.join(run.config.model.path, "model.safetensors"))
    final = load_file(run.dir.final / "model.safetensors")
    return max((final[name] - start[name]).abs().max().item() for name in start)


VARIANTS = {
    "adamw": {"optim": {"lr": 1e-3, "weight_decay": 0.01}},
    "muon": {"optim": {"type": "muon", "lr": 1e-3}, "activation_checkpointing": True},
    "lora": {"lora": {"rank": 4}, "optim": {"lr": 1e-3}, "activation_checkpointing": True},
}


@pytest.mark.parametrize(
    "variant", [name if name == "adamw" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_two_ranks_are_one_rank(make_run, variant):
    # After 5 steps on the same samples, 2-rank FSDP2 on gloo has the 1-rank losses and parameters to 1e-5; with AdamW,
    # Muon and LoRA (these with activation checkpointing), gradients reduced once a step or with each micro-batch.
    runs = {}
    for ranks in (1, 2):
        run = runs[ranks] = make_run(f"ranks-{ranks}", run={"max_steps": 5}, trainer=VARIANTS[variant])
        with StepPeer(run.dir, make_samples, max_steps=5) as peer:
            codes, outputs = run.train(ranks)
        assert codes == [0] * ranks, "\n".join(outputs)
        assert [done.step for done in peer.done] == [0, 1, 2, 3, 4, 5]
        assert sorted(peer.done[-1].sample_ids) == sorted(sample.sample_id for sample in make_samples(5))
        assert check_ledger(run.dir.ledger) == [] and len(effective(run.dir.ledger)) == 5
        assert run.dir.complete_checkpoints() == [5] and peer.checkpoints == [5]
    one, two = ([line["loss/total"] for line in lines(runs[ranks])] for ranks in (1, 2))
    assert len(one) == 5 and max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
    assert difference(runs[1], runs[2]) < 1e-5
    assert moved(runs[1]) > 1e-3


def test_metrics_of_a_step(make_run):
    # A line holds what DESIGN.md promises of the trainer, the orchestrator's own figures, and nothing of loss terms
    # that are off.
    run = make_run(run={"max_steps": 1})
    with StepPeer(run.dir, make_samples, max_steps=1) as peer:
        peer.not_ready_first = {1}
        codes, outputs = run.train()
    assert codes == [0], "\n".join(outputs)
    assert "waiting for the batch of step 1 (0 s): 3 of 8 groups" in outputs[0]
    (line,) = lines(run)
    assert {
        "loss/total", "loss/policy", "tokens/trained", "tokens/total", "policy/mismatch_kl", "policy/masked_fraction",
        "policy/clip_fraction", "policy/ess", "policy/entropy", "optim/grad_norm", "optim/lr", "time/step_s",
        "time/wait_s", "time/forward_backward_s", "time/publish_s", "memory/peak_bytes", "weights/bytes", "reward/mean",
    } <= line.keys()  # fmt: skip
    assert line["role"] == "trainer" and line["step"] == 1 and "loss/sdpo" not in line
    assert line["tokens/trained"] == sum(sample.num_trained for sample in make_samples(1))
    assert line["tokens/total"] == sum(sample.num_tokens for sample in make_samples(1))


@pytest.mark.slow
def test_a_trainer_started_twice_without_resume_trains_each_sample_once(make_run):
    # As under torchrun, which restarts ranks while the orchestrator lives on: the second start begins at step 0, and
    # the ledger no longer counts what the first one took.
    run = make_run(run={"max_steps": 1})
    with StepPeer(run.dir, make_samples, max_steps=1):
        assert [run.train()[0] for _ in range(2)] == [[0], [0]]
    assert check_ledger(run.dir.ledger) == []


def test_ranks_resume_from_the_checkpoint_that_rank_0_sees(make_run, tmp_path):
    # A shared disk still shows rank 1 the state before checkpoint 2 was complete: both load 2, and train steps 3 and 4.
    run = make_run(run={"max_steps": 2}, trainer={"checkpoint": {"every_steps": 1}})
    with StepPeer(run.dir, make_samples, max_steps=2):
        assert run.train(2)[0] == [0, 0]
    resumed = run.config.run.model_copy(update={"resume": True, "max_steps": 4})
    run.write(run.config.model_copy(update={"run": resumed}))
    late = tmp_path / "late"
    with StepPeer(run.dir, make_samples, max_steps=4):
        (late / "checkpoints" / "step_000002").mkdir(parents=True)
        for path in [*run.dir.root.iterdir(), *run.dir.checkpoints.iterdir(), run.dir.checkpoint(2) / "trainer"]:
            seen = late / path.relative_to(run.dir.root)
            if not seen.exists():
                seen.symlink_to(path)
        ranks = start_ranks([run.dir.root, late])
        codes = [rank.wait(100) for rank in ranks]
    assert codes == [0, 0], ranks[1].output
    assert check_ledger(run.dir.ledger) == [] and list(effective(run.dir.ledger)) == [1, 2, 3, 4]


def test_kill_and_resume_on_another_number_of_ranks(make_run):
    # Killed after step 3, perhaps while its version is written, with a checkpoint of step 2, resumed on 1 rank instead
    # of 2: the end is that of a run that was never killed, to 1e-6; the ledger shows every sample once; stale versions
    # are gone; a second resume on 2 ranks with nothing left to do is harmless.
    settings = {"checkpoint": {"every_steps": 2}, "weights": {"keep": 10}, "optim": {"lr": 1e-3}}
    whole = make_run("whole", run={"max_steps": 5}, trainer=settings)
    with StepPeer(whole.dir, make_samples, max_steps=5):
        codes, outputs = whole.train()
    assert codes == [0], "\n".join(outputs)

    run = make_run("killed", run={"max_steps": 5}, trainer=settings)
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 4
        ranks = run.start(2)
        ranks[0].wait_for("step 3:")
        [os.kill(rank.pid, signal.SIGKILL) for rank in ranks]
        assert [rank.wait(200) for rank in ranks] == [-9, -9]
    assert run.dir.complete_checkpoints() == [2]
    assert WeightStore(run.dir.weights).versions() in ([0, 1, 2], [0, 1, 2, 3])  # version 3 may have been under way

    resumed = run.write(run.config.model_copy(update={"run": run.config.run.model_copy(update={"resume": True})}))
    with StepPeer(run.dir, make_samples, max_steps=5) as peer:
        codes, outputs = resumed.train(1)
        assert codes == [0], "\n".join(outputs)
        assert [done.step for done in peer.done] == [2, 3, 4, 5] and peer.done[0].sample_ids == []
        assert difference(whole, run) < 1e-6 and check_ledger(run.dir.ledger) == []
        assert run.dir.complete_checkpoints() == [4, 5]
        codes, outputs = resumed.train(2)
    assert codes == [0, 0], "\n".join(outputs)
    assert difference(whole, run) < 1e-6 and check_ledger(run.dir.ledger) == []
