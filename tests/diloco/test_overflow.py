"""Rounds that would leave the range of float32: rejected alike on all peers, and the global model stays finite."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from joint_run import Blocks, inner_step, settings, together

from composer_prime.config.diloco import OuterConfig
from diloco.fragments import partition
from diloco.global_model import LARGEST_NORM, GlobalModel, rejected, squared_norm
from diloco.streaming import StreamingDiLoCo

TOP = torch.finfo(torch.float32).max


# The sum of squares is the exact one but for double rounding, and the same whatever is around it: a vector of 16384
# zeros in front moves every element to another place and leaves its lane.
@hypothesis_settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50), st.integers(0, 2))
def test_squared_norm(values, shift):
    exact = math.fsum(value * value for value in values)
    found = squared_norm(torch.tensor([0.0] * (1 << 14) * shift + values))
    assert found == pytest.approx(exact, rel=1e-14) and found == squared_norm(torch.tensor(values))


# A finite delta that no model can be trained with is rejected also of one peer alone, where there is no median.
def test_too_large_a_delta():
    good, bad = (squared_norm(values) for values in (torch.randn(100), torch.full((100,), 3e38)))
    assert list(rejected({"a": good, "b": bad})) == ["b"]
    assert list(rejected({"b": bad})) == ["b"]
    assert not rejected({"b": LARGEST_NORM**2 / 2})


# Whatever finite deltas come in, whatever the outer optimizer: a step that is allowed leaves finite values and
# momentum, and one that is not might have come within a factor of two of the end of the range.
@hypothesis_settings(deadline=None)
@given(
    rounds=st.lists(st.lists(st.floats(-TOP, TOP, width=32), min_size=2, max_size=2), min_size=1, max_size=6),
    outer=st.sampled_from([
        OuterConfig(), OuterConfig(lr=0.7, momentum=0.9), OuterConfig(lr=1e3, momentum=0.99),
        OuterConfig(lr=1e-3),
    ]),
)  # fmt: skip
def test_steps_that_are_allowed_stay_finite(rounds, outer):
    named = [("w", torch.nn.Parameter(torch.zeros(3))), ("layers.0.w", torch.nn.Parameter(torch.zeros(2, 1)))]
    model = GlobalModel(partition(named, 1), outer)
    for values in rounds:
        deltas = [torch.tensor([value, 0.0, value, value, -value]) for value in values]
        if model.can_advance(0, max(abs(value) for value in values)):
            model.advance(0, deltas, [1.0, 2.0])
        else:
            velocity = max((float(each.abs().max()) for each in model.velocity), default=0.0)
            largest = max(abs(value) for value in values)
            step = max(1.0, outer.lr) * (2 * largest + velocity)
            assert float(model.masters[0].abs().max()) + step > 0.49 * TOP
        assert all(tensor.isfinite().all() for tensor in model.tensors().values())


# An outer learning rate that throws the model out of float32: both peers reject the round, count and name it, keep the
# global values that they had, and agree on the hash.
def test_a_round_that_overflows(make_rendezvous, key_file, caplog):
    address = make_rendezvous(start_peers=2).endpoint

    def run(name: str, peer: int):
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        config = settings(address, key_file, name, sync_every=2, outer={"lr": 3e38})
        with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
            before = engine.global_model.masters[0].clone()
            for step in range(4):
                engine.count(tokens=1)
                inner_step(model, optimizer, peer, step)
            engine.finish()
            assert engine.global_model.masters[0].equal(before) and engine.replica.fragments[0].read().equal(before)
            return engine.outer_step, engine.global_model.hash, engine.metrics["diloco/rejected"]

    a, b = together(partial(run, "a", 0), partial(run, "b", 1))
    assert a == b and a[0] == 2 and a[2] == 2
    assert caplog.text.count("is rejected: the outer step along the round's mean would leave the range of float32") == 8
