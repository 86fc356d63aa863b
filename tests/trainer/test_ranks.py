"""Real rank processes over gloo against a real step server: 1 rank, 2 ranks, resumes."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_samples
from safetensors.torch import load_file
from step_peer import StepPeer

from composer_prime.ledger import check, effective


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]


def difference(one, other) -> float:
    """Largest difference between the parameters of two final/ folders."""
    a, b = load_file(one.dir.final / "model.safetensors"), load_file(other.dir.final / "model.safetensors")
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_two_ranks_are_one_rank(make_run):
    # After 5 steps on the same samples, 2-rank FSDP2 on gloo has the 1-rank losses and parameters to 1e-5.
    runs = {}
    for ranks in (1, 2):
        run = runs[ranks] = make_run(f"ranks-{ranks}", run={"max_steps": 5})
        with StepPeer(run.dir, make_samples, max_steps=5) as peer:
            codes, outputs = run.train(ranks)
        assert codes == [0] * ranks, outputs
        assert [done.step for done in peer.done] == [0, 1, 2, 3, 4, 5]
        assert check(run.dir.ledger) == [] and len(effective(run.dir.ledger)) == 5
    one, two = ([line["loss/total"] for line in lines(runs[ranks])] for ranks in (1, 2))
    assert len(one) == 5 and max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
    assert difference(runs[1], runs[2]) < 1e-5
