"""Joint runs of peers on one machine, over the real rendezvous, against a plain single-process oracle."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from joint_run import Blocks, adamw, assert_same_globals, inner_step, settings, together, train
from torch import Tensor

from diloco.fragments import partition


def oracle(
    peers: int, steps: int, *, H: int, P: int, tau: int, alpha: float, lr: float, m: float,
    tokens=lambda peer, step: 1,
):  # fmt: skip
    """Streaming DiLoCo in one process: loops over peers and parameters.

    Of the product it uses `partition`. `tokens(peer, step)` are trained on in a step
    (from 0). Returns the global model's parameters by name.
    """
    models = [Blocks() for _ in range(peers)]
    optimizers = [adamw(model) for model in models]
    names = [[name for name, _ in fragment.parameters] for fragment in partition(models[0].named_parameters(), P)]
    master = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in master.items()}
    held = [[0.0] * P for _ in range(peers)]  # tokens that the difference of a peer's fragment to the global one holds
    weights = [0.0] * peers
    under_way: dict[str, list[Tensor]] = {}
    for step in range(1, steps + 1):
        for peer in range(peers):
            inner_step(models[peer], optimizers[peer], peer, step - 1)
            held[peer] = [each + tokens(peer, step - 1) for each in held[peer]]
        index = ((step - 1) // (H // P)) % P
        fragment = names[index]
        if step % (H // P) == (H // P - tau) % (H // P):
            weights = [each[index] for each in held]
            for name in fragment:
                under_way[name] = [master[name] - dict(model.named_parameters())[name].detach() for model in models]
        if step % (H // P) == 0:
            shares = [weight / sum(weights) for weight in weights]
            for each, weight in zip(held, weights, strict=True):
                each[index] = alpha * (each[index] - weight)
            for name in fragment:
                mean = under_way[name][0] * shares[0]
                for peer in range(1, peers):
                    mean = mean + under_way[name][peer] * shares[peer]
                velocity[name] = velocity[name] * m + mean
                direction = mean + velocity[name] * m if m else mean
                master[name] = master[name] - direction * lr
                for model in models:
                    local = dict(model.named_parameters())[name]
                    local.data.copy_(torch.lerp(master[name], local.detach(), alpha) if alpha else master[name])
    return master


def final_globals(masters: list[Tensor], P: int) -> dict[str, Tensor]:
    found = {}
    for fragment, master in zip(partition(Blocks().named_parameters(), P), masters, strict=True):
        sizes = [parameter.numel() for _, parameter in fragment.parameters]
        for (name, parameter), values in zip(fragment.parameters, master.split(sizes), strict=True):
            found[name] = values.view(parameter.shape)
    return found


# In fp32 a joint run gives the oracle's global model bit for bit, whatever H, P, tau, alpha and outer optimizer are.
@pytest.mark.parametrize(
    ("H", "P", "tau", "alpha", "lr", "m"),
    [(4, 1, 0, 0.0, 1.0, 0.0), (4, 2, 1, 0.0, 0.7, 0.9), (6, 2, 2, 0.5, 0.5, 0.8), (4, 4, 0, 0.0, 0.7, 0.9)],
)
def test_equals_the_oracle(make_rendezvous, key_file, H, P, tau, alpha, lr, m):
    address = make_rendezvous(start_peers=2).endpoint
    outer = {"lr": lr, "momentum": m}
    values = {"sync_every": H, "fragments": P, "delay": tau, "mixing": alpha, "outer": outer}
    seen = together(
        *[partial(train, settings(address, key_file, name, **values), peer, 12) for peer, name in enumerate("ab")]
    )
    assert_same_globals(*seen)
    assert max(seen[0].hashes) == 12 * P // H
    expected = oracle(2, 12, H=H, P=P, tau=tau, alpha=alpha, lr=lr, m=m)
    found = final_globals(seen[0].masters, P)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Three peers with different numbers of tokens in every step: a delta weighs what it covers, also where fragments take
# turns and a part of the steps of the delay stays. What is taken back weighs nothing.
@pytest.mark.parametrize(("P", "tau", "alpha"), [(1, 0, 0.0), (2, 1, 0.5)])
def test_tokens_weigh(make_rendezvous, key_file, P, tau, alpha):
    address = make_rendezvous(start_peers=3).endpoint
    values = {"sync_every": 4, "fragments": P, "delay": tau, "mixing": alpha}

    def tokens(peer: int, step: int) -> int:
        return 9 + 5 * peer + (step * (peer + 1)) % 7

    def run(name: str, peer: int):
        def count(step: int, engine: Any) -> None:
            engine.count(tokens=1000 * peer)
            engine.take_back()
            engine.count(tokens=tokens(peer, step))

        return train(settings(address, key_file, name, **values), peer, 12, tokens=0, before_step=count)

    seen = together(*[partial(run, name, peer) for peer, name in enumerate("abc")])
    assert_same_globals(*seen)
    expected = oracle(3, 12, H=4, P=P, tau=tau, alpha=alpha, lr=1, m=0, tokens=tokens)
    assert all(torch.equal(final_globals(seen[0].masters, P)[name], expected[name]) for name in expected)


# H = 1, P = 1, lr 1, no momentum is plain averaging of parameters after every step.
def test_every_step_is_parameter_averaging(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=2).endpoint
    seen = together(
        *[partial(train, settings(address, key_file, name, sync_every=1), peer, 6) for peer, name in enumerate("ab")]
    )
    models = [Blocks(), Blocks()]
    optimizers = [adamw(model) for model in models]
    for step in range(6):
        for peer in range(2):
            inner_step(models[peer], optimizers[peer], peer, step)
        averaged = {name: (value + models[1].state_dict()[name]) / 2 for name, value in models[0].state_dict().items()}
        for model in models:
            model.load_state_dict(copy.deepcopy(averaged))
    for trajectory in seen:
        assert all(torch.allclose(value, averaged[name], atol=2e-6) for name, value in trajectory.local.items())
    assert_same_globals(*seen)


# Every codec keeps the peers' global models equal, at every outer step, also with fragments and delay.
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codecs_keep_peers_equal(make_rendezvous, key_file, codec):
    address = make_rendezvous(start_peers=2).endpoint
    values = {"sync_every": 4, "fragments": 2, "delay": 1, "outer": {"lr": 0.7, "momentum": 0.9}}
    values["codec"] = {"type": codec}
    seen = together(
        *[partial(train, settings(address, key_file, name, **values), peer, 12) for peer, name in enumerate("ab")]
    )
    assert_same_globals(*seen)
    assert len(set(seen[0].hashes.values())) == 7
    assert seen[0].metrics[6]["diloco/participants"] == 2 and seen[0].metrics[6]["diloco/rejected"] == 0


# Three peers at a rendezvous with room for 4.5 deltas: all end, with one model and without a missed round. Before, two
# of them died with RefusedError in the second round.
def test_little_room(make_rendezvous, key_file):
    delta = 4 * sum(parameter.numel() for parameter in Blocks().parameters())
    address = make_rendezvous(start_peers=3, max_bytes=int(4.5 * delta)).endpoint
    seen = together(*(
        partial(train, settings(address, key_file, name, sync_every=1), peer, 6) for peer, name in enumerate("abc")
    ))  # fmt: skip
    assert_same_globals(*seen)
    assert all(max(each.hashes) == 6 and each.metrics[6]["diloco/missed_rounds"] == 0 for each in seen)


# Peers in time count the run's steps as their own, also while a fragment is under way; who joins late counts from the
# outer steps that it finds (test_averages.py). The learning rate's schedule follows that count.
def test_steps_of_the_run(make_rendezvous, key_file):
    address, counted = make_rendezvous(start_peers=2).endpoint, {"a": [], "b": []}

    def run(name: str, peer: int):
        def note(step, engine):
            counted[name].append(engine.run_step)

        return train(settings(address, key_file, name, sync_every=6, fragments=2, delay=1), peer, 9, before_step=note)

    together(partial(run, "a", 0), partial(run, "b", 1))
    assert counted == {"a": [*range(1, 10)], "b": [*range(1, 10)]}
