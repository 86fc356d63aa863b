"""The outer optimizer against torch.optim.SGD, the weighted mean, the guard, the global model, the schedule's rules."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_run import Blocks
from pydantic import ValidationError

from composer_prime.config import Config
from composer_prime.config.diloco import DilocoConfig, OuterConfig
from composer_prime.errors import ChecksumError
from diloco.fragments import partition
from diloco.global_model import LARGEST_NORM, GlobalModel, rejected, squared_norm, weighted_mean
from diloco.state import pack_state, unpack_state
from diloco.streaming import agreed_settings

PEER = {"rendezvous": "tcp://127.0.0.1:1", "run": "r", "peer_id": "a", "key_file": "key"}


# Ten steps follow torch's SGD with Nesterov momentum in float64.
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.1, 0.9)])
def test_trajectory_of_sgd(lr, momentum):
    generator = torch.Generator().manual_seed(0)
    model = GlobalModel(partition(Blocks().named_parameters(), 1), OuterConfig(lr=lr, momentum=momentum))
    (master,) = model.masters
    reference = torch.nn.Parameter(master.double())
    sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(10):
        mean = torch.randn(len(master), generator=generator)
        reference.grad = mean.double()
        sgd.step()
        model.advance(0, [mean], [1.0])
        assert torch.allclose(master.double(), reference.detach(), atol=1e-5)


# Weights are relative; without any token everyone counts the same.
@given(weights=st.lists(st.integers(0, 10**9), min_size=1, max_size=5))
def test_weighted_mean(weights):
    deltas = [torch.full((3,), float(index)) for index in range(len(weights))]
    total = sum(weights)
    shares = [w / total for w in weights] if total else [1 / len(weights)] * len(weights)
    expected = sum(index * share for index, share in enumerate(shares))
    assert torch.allclose(weighted_mean(deltas, weights), torch.full((3,), expected), rtol=1e-5)


# A mean holds one decoded delta at a time: as many as there are clusters were the peak of a cluster's host memory.
def test_one_delta_at_a_time():
    decoded: list[weakref.ref] = []

    def decode(value: int) -> torch.Tensor:
        assert all(each() is None for each in decoded)
        delta = torch.full((3,), float(value))
        decoded.append(weakref.ref(delta))
        return delta

    assert weighted_mean(map(decode, range(8)), [1.0] * 8).tolist() == [3.5] * 3 and len(decoded) == 8


# NaN and infinity are rejected whoever else is there; so is a norm far above the round's usual one, and a delta that no
# model can be trained with, also of one peer alone.
def test_guard():
    assert rejected({"a": 1.0, "b": 2.0}) == {}
    assert set(rejected({"a": math.nan, "b": math.inf, "c": 1.0})) == {"a", "b"}
    assert set(rejected({"a": 1.0, "b": 1.2, "c": 10000.0})) == {"c"}
    assert set(rejected({"a": 1.0, "b": 1.2, "c": 1e12, "d": 1e13})) == {"c", "d"}
    reason = rejected({"a": 1.0, "b": 1.0, "c": 1e4})["c"]
    assert "norm 100 is above 10 times the usual 1" in reason
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert rejected({"b": squared_norm(torch.full((100,), 3e38))}) and not rejected({"b": LARGEST_NORM**2 / 2})


# The sum of squares is the exact one but for double rounding, and the same whatever is around it: a vector of 16384
# zeros in front moves every element to another place and leaves its lane.
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50), st.integers(0, 2))
def test_squared_norm(values, shift):
    exact = math.fsum(value * value for value in values)
    found = squared_norm(torch.tensor([0.0] * (1 << 14) * shift + values))
    assert found == pytest.approx(exact, rel=1e-14) and found == squared_norm(torch.tensor(values))


# Of two peers, or of one alone, the fragment's last deltas show which norm is out of line. A short delta of a peer in a
# hurry shuts nobody out, and what both peers have in common passes: it is the run that changed, not one of them.
def test_guard_of_two_peers():
    history = [1.0] * 8
    assert set(rejected({"a": 1.0, "b": 1e12}, history)) == {"b"}
    assert set(rejected({"b": 1e12}, history)) == {"b"}
    assert rejected({"a": 1 / 256, "b": 1.0}, history) == {}
    assert rejected({"a": 0.0, "b": 1.0}, history) == {}
    assert rejected({"a": 1e6, "b": 2e6}, history) == {}
    assert set(rejected({"a": 1.0, "b": 1e12})) == {"b"}
    assert rejected({"b": 1e12}) == {}


# What is published is the model of the last full sweep: who takes over a state amid the next one holds the same.
@pytest.mark.parametrize("outer_step", range(8))
def test_swept_model_is_part_of_a_state(outer_step):
    source, joiner = (
        GlobalModel(partition(Blocks(seed).named_parameters(), 3), OuterConfig(lr=0.7, momentum=0.9)) for seed in (0, 1)
    )
    history = [[master.clone() for master in source.masters]]
    for step in range(outer_step):
        source.advance(step % 3, [torch.full_like(source.masters[step % 3], 1.0 + step)], [1.0])
        history.append([master.clone() for master in source.masters])
    joiner.load(unpack_state(pack_state(source.tensors(), {}))[0], outer_step)
    assert joiner.hash == source.hash and joiner.sweep == source.sweep == outer_step // 3
    for model in (source, joiner):
        assert all(map(torch.equal, model.swept, history[outer_step - outer_step % 3]))


# An outer step below the resolution of bfloat16 stays in the masters: rounds without any training after it, in time or
# missed, move nothing; a delta holds what inner steps moved and nothing that rounding did.
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_steps_below_the_parameters_resolution(norm_dtype):
    network = Blocks().bfloat16()
    network.layers[0].bias.data = network.layers[0].bias.data.to(norm_dtype)
    parts = partition(network.named_parameters(), 1)
    model = GlobalModel(parts, OuterConfig())
    before = model.masters[0].clone()
    model.advance(0, [before * 1e-4], [1.0])
    parts[0].write(model.masters[0])
    moved = model.masters[0].clone()
    assert not torch.equal(moved, before) and not torch.equal(parts[0].read(), moved)
    for _ in range(3):
        delta = model.delta(0)
        assert not delta.any()
        model.advance(0, [delta], [1.0])
        parts[0].write(model.rebased(0, moved))
    assert torch.equal(model.masters[0], moved)
    installed = parts[0].read()
    parts[0].write(installed * 1.5)
    assert torch.equal(model.delta(0), installed - parts[0].read())


# A state of the hash that its source gives is taken over with it, one of another hash is refused.
def test_a_state_is_checked_by_its_hash():
    models = (partition(Blocks(seed).named_parameters(), 3) for seed in (0, 1))
    source, joiner = (GlobalModel(fragments, OuterConfig()) for fragments in models)
    tensors, _ = unpack_state(pack_state(source.tensors(), {}))
    joiner.verify(tensors, 0, source.hash)
    joiner.load(tensors, 0)
    assert joiner.hash == source.hash
    tensors["master.1"][0] += 1
    with pytest.raises(ChecksumError, match=f"the state of outer step 0 has hash .*, expected {source.hash}"):
        joiner.verify(tensors, 0, source.hash)


# Each wrong combination is refused with both values and a remedy that works.
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_every": 10, "fragments": 4}, "sync_every is 10 and diloco.fragments is 4.*to 2 or .* to 12"),
        ({"sync_every": 8, "fragments": 4, "delay": 2}, "delay is 2.*diloco.fragments = 2 steps.*delay to at most 1"),
        ({"rendezvous": "somewhere"}, "diloco.rendezvous is 'somewhere'; expected tcp://HOST:PORT"),
        (
            {"rendezvous": "tcp://host:99999"},
            "rendezvous is 'tcp://host:99999'; expected",
        ),
        ({"peer_id": "../b"}, "peer_id"),
    ],
)
def test_wrong_settings(values, message):
    with pytest.raises(ValidationError, match=message):
        DilocoConfig(**PEER | values)


# Peers must agree on every setting of the outer optimizer that it has.
def test_agreed_settings():
    def agreed(**outer):
        settings = agreed_settings(DilocoConfig(**PEER, outer=outer)).items()
        return {key.rpartition(".")[2]: value for key, value in settings if key.startswith("diloco.outer.")}

    assert agreed(lr=0.7) == {"lr": "0.7", "momentum": "0.0"}


# In the whole configuration: a peer's own folder, whole periods, an orchestrator that waits longer than a round may.
def test_joint_run_rules():
    run = {"run": {"name": "r", "max_steps": 8}, "model": {"path": "tiny"}, "diloco": PEER | {"sync_every": 4}}
    run["orchestrator"] = {"source": [{"name": "s", "taskset": {"id": "t"}}]}
    config = Config.model_validate(run)
    assert config.run_directory == Path("outputs/r/a")
    assert Config.model_validate(config.model_dump(mode="json")).run_directory == Path("outputs/r/a")
    with pytest.raises(ValidationError, match=r"max_steps is 6, but diloco.sync_every is 4: .* max_steps = 4"):
        Config.model_validate({**run, "run": {"name": "r", "max_steps": 6}})
    for values, message in [
        ({"round_timeout_s": 2000}, r"round_timeout_s \+ 2 diloco.heal_timeout_s is 3800, .*trainer_timeout_s is 3600"),
        ({"round_timeout_s": 100}, "round_deadline_s is 120, but diloco.round_timeout_s is 100"),
        ({"offline_timeout_s": 60}, "round_timeout_s is 600, but diloco.offline_timeout_s is 60"),
    ]:
        with pytest.raises(ValidationError, match=message):
            Config.model_validate({**run, "diloco": {**run["diloco"], **values}})
