"""Three loss terms in real rank processes: 2 ranks equal 1, weight 0 changes nothing, averages survive."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from hinted_runs import make_hinted, make_pairs, three_channels
from small_runs import make_samples
from step_peer import StepPeer
from test_ranks import difference, lines, moved

from composer_prime.wire.types import Sample

pytestmark = pytest.mark.process

VARIANTS = {
    "live": ({}, {"optim": {"lr": 1e-3}, "term_norms_every": 3}),
    "ema": ({"kl": {"weight": 0.1, "estimator": "k2"}}, {"optim": {"lr": 1e-3}}),
    "frozen": (
        {"kl": {"weight": 0.1, "reference": "ema"}},
        {"lora": {"rank": 4}, "activation_checkpointing": True, "optim": {"lr": 1e-3}},
    ),
}


def channels_of(kind: str, **policy) -> dict:
    return three_channels(kind, **policy).model_dump(exclude={"policy": {"max_completion_length"}})


def few(step: int) -> list[Sample]:
    """Hinted samples at odd steps only, and few: with 2 ranks one often has no teacher document at all."""
    return make_hinted(step, 5) if step % 2 else make_samples(step, 5)


@pytest.mark.parametrize(
    "kind", [name if name == "frozen" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_two_ranks_are_one_rank(make_run, kind):
    # Four steps of all loss terms with each self-teacher, a KL reference, pairs, LoRA: losses and parameters of 2 ranks
    # are those of 1 to 1e-5, also where turns and pairs lie on one of the ranks only.
    policy, trainer = VARIANTS[kind]
    runs = {}
    for ranks in (1, 2):
        run = runs[ranks] = make_run(
            f"ranks-{ranks}", run={"max_steps": 4}, trainer=trainer, channels=channels_of(kind, **policy)
        )
        with StepPeer(run.dir, few, pairs_of=lambda step: make_pairs(step, step % 3), max_steps=4):
            codes, outputs = run.train(ranks)
        assert codes == [0] * ranks, "\n".join(outputs)
    names = ("loss/total", "loss/policy", "loss/sdpo", "loss/replay_dpo", "sdpo/turns", "dpo/pairs")
    one, two = ([[line[name] for name in names] for line in lines(runs[ranks])] for ranks in (1, 2))
    assert np.abs(np.array(one) - np.array(two)).max() < 1e-5
    assert [values[-2:] for values in one] == [[3, 1], [0, 2], [3, 0], [0, 1]]
    assert difference(runs[1], runs[2]) < 1e-5 and moved(runs[1]) > 1e-3
    found = lines(runs[1])
    assert found[0]["sdpo/jsd"] > 0 and 0 <= found[0]["dpo/accuracy"] <= 1
    measured = [[line.get(f"optim/grad_norm/{name}", 0) for name in ("policy", "sdpo", "replay_dpo")] for line in found]
    assert np.count_nonzero(measured) == (2 if kind == "live" else 0) and np.count_nonzero(measured[2][:2]) in (0, 2)
    assert "sdpo/jsd" not in found[1] and "dpo/accuracy" not in found[2]


@pytest.mark.slow
def test_averages_survive_a_kill(make_run):
    # Killed after step 3 with a checkpoint of step 2 on 2 ranks, resumed on 1: moving averages (teacher and reference)
    # go on from the checkpoint, so the end is that of a run that was never killed.
    settings = {
        "run": {"max_steps": 5},
        "trainer": {"checkpoint": {"every_steps": 2}, "optim": {"lr": 1e-3}},
        "channels": channels_of("ema", kl={"weight": 0.1, "estimator": "k3", "reference": "ema"}),
    }
    whole = make_run("whole", **settings)
    with StepPeer(whole.dir, make_hinted, pairs_of=make_pairs, max_steps=5):
        codes, outputs = whole.train()
    assert codes == [0], "\n".join(outputs)

    run = make_run("killed", **settings)
    with StepPeer(run.dir, make_hinted, pairs_of=make_pairs, max_steps=3) as peer:
        peer.quiet_from = 4
        ranks = run.start(2)
        ranks[0].wait_for("step 3:")
        [os.kill(rank.pid, signal.SIGKILL) for rank in ranks]
        assert [rank.wait(200) for rank in ranks] == [-9, -9]
    resumed = run.write(run.config.model_copy(update={"run": run.config.run.model_copy(update={"resume": True})}))
    with StepPeer(run.dir, make_hinted, pairs_of=make_pairs, max_steps=5):
        codes, outputs = resumed.train(1)
    assert codes == [0], "\n".join(outputs)
    assert "starts from the policy's weights" not in outputs[0]
    assert difference(whole, run) < 1e-5
