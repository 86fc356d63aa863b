"""A checkpoint in the middle of a joint run: one peer, or all of them, go on as if nothing had happened."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from joint_run import (
    Blocks,
    RendezvousThread,
    Trajectory,
    adamw,
    assert_same_globals,
    inner_step,
    keep,
    record,
    settings,
    together,
    train,
    until,
)

from composer_prime.errors import CheckpointError
from diloco.streaming import StreamingDiLoCo
from diloco.transport.messages import JointKey

VALUES = {"sync_every": 6, "fragments": 2, "delay": 1, "outer": {"lr": 0.7, "momentum": 0.9}, "codec": {"type": "int4"}}
STEPS = 18


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted() -> what both peers see in a run without a break."""
    key_file = tmp_path_factory.mktemp("uninterrupted") / "joint.key"
    JointKey.create(key_file)

    @functools.cache
    def run() -> list[Trajectory]:
        server = RendezvousThread(JointKey.read(key_file), start_peers=2)
        configs = [settings(server.endpoint, key_file, name, **VALUES) for name in "ab"]
        try:
            return together(*[partial(train, config, peer, STEPS) for peer, config in enumerate(configs)])
        finally:
            server.stop()

    return run


def part(
    config,
    peer: int,
    start: int,
    stop: int,
    saved: dict[str, Any] | None,
    save_at: int | None = None,
    stop_requested: bool = False,
    before_leaving: Callable[[], None] = lambda: None,
) -> tuple[Trajectory, dict[str, Any]]:
    """Inner steps start..stop, from `saved`; what was seen, and what a checkpoint after `save_at` (`stop`) holds.

    `stop_requested`: a signal to stop comes before the last step ends.
    """
    model = Blocks()
    optimizer = adamw(model)
    stopping = threading.Event()
    engine = StreamingDiLoCo(model.named_parameters(), optimizer, config, should_stop=stopping.is_set)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        engine.load(saved["diloco"])
    seen = Trajectory()
    with engine:
        for step in range(start, stop):
            engine.count(tokens=1)
            if stop_requested and step + 1 == stop:
                stopping.set()
            inner_step(model, optimizer, peer, step)
            record(seen, engine)
            if step + 1 == (save_at or stop):
                state = {
                    "model": copy.deepcopy(model.state_dict()),
                    "optimizer": copy.deepcopy(optimizer.state_dict()),
                    "diloco": engine.state(),
                }
        before_leaving()
    keep(seen, engine)
    return seen, state


# All peers stop and go on, with 4-bit deltas, momentum and error feedback; also where a delta is under way (step 8 is
# between the preparation after step 8 and the completion after step 9). The end is the uninterrupted run's, bit by bit.
@pytest.mark.parametrize("cut", [7, 8, 9])
def test_all_resume(make_rendezvous, key_file, uninterrupted, cut):
    values, whole = VALUES, uninterrupted()
    address = make_rendezvous(start_peers=2).endpoint
    configs = [settings(address, key_file, name, **values) for name in "ab"]
    first = together(*[partial(part, config, peer, 0, cut, None) for peer, config in enumerate(configs)])
    address = make_rendezvous(start_peers=2).endpoint
    configs = [settings(address, key_file, name, **values) for name in "ab"]
    second = together(*[partial(part, config, peer, cut, STEPS, first[peer][1]) for peer, config in enumerate(configs)])
    assert_same_globals(second[0][0], second[1][0], whole[0])
    for (seen, _), straight in zip(second, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen.residuals, straight.residuals, strict=True))


# The same against a rendezvous that kept running and knows rounds which the checkpoints do not: they are void, and the
# run goes on as if uninterrupted. The peers come back one after the other, and the first waits for the second.
@pytest.mark.parametrize("first", [0, 1])
def test_all_resume_at_a_running_rendezvous(make_rendezvous, key_file, uninterrupted, first):
    whole = uninterrupted()
    server = make_rendezvous(start_peers=2)
    configs = [settings(server.endpoint, key_file, name, **VALUES) for name in "ab"]
    saved = together(*[partial(part, config, peer, 0, 13, None, 8) for peer, config in enumerate(configs)])
    assert server.server.rounds.newest == 3

    def back(peer: int) -> Trajectory:
        if peer != first:
            joins = server.server.handler.joins._joins
            until(lambda: any(not join.over for join in joins.values()), "the first peer does not come back")
        return part(configs[peer], peer, 8, STEPS, saved[peer][1])[0]

    assert_same_globals(*together(partial(back, 0), partial(back, 1)), whole[0])


# All are stopped, peer a while it waits for b in a round: its outcome is due before a's next step, resumed or not.
def test_all_resume_from_within_a_round(make_rendezvous, key_file, uninterrupted):
    whole = uninterrupted()
    server = make_rendezvous(start_peers=2, min_peers=2)
    configs = [settings(server.endpoint, key_file, name, **VALUES) for name in "ab"]
    (_, waited), (_, early) = together(
        partial(part, configs[0], 0, 0, 9, None, stop_requested=True), partial(part, configs[1], 1, 0, 7, None)
    )
    seen = together(partial(part, configs[0], 0, 9, STEPS, waited), partial(part, configs[1], 1, 7, STEPS, early))
    assert_same_globals(seen[0][0], seen[1][0], *whole)
    for (again, _), straight in zip(seen, whole, strict=True):
        assert all(map(torch.equal, again.residuals, straight.residuals))


# One peer is restarted from its checkpoint while the other waits for it in the next round. After step 8 its delta is
# under way: its round ends meanwhile, and the outcome is taken after step 9, as if it had not been away.
@pytest.mark.parametrize("cut", [7, 8, 9])
def test_one_resumes(make_rendezvous, key_file, uninterrupted, cut):
    whole = uninterrupted()
    server = make_rendezvous(start_peers=2, min_peers=2)
    address, back = server.endpoint, threading.Event()

    def wait(step, engine):
        if step == (7 if cut == 7 else 10):
            assert back.wait(200)

    def closed():
        until(lambda: server.server.rounds.newest == (1 if cut == 7 else 2), "the round under way does not end")

    def restarted():
        config = settings(address, key_file, "b", **VALUES)
        _, state = part(config, 1, 0, cut, None, before_leaving=closed)
        back.set()
        return part(config, 1, cut, STEPS, state)[0]

    other, again = together(
        partial(train, settings(address, key_file, "a", **VALUES), 0, STEPS, before_step=wait), restarted
    )
    assert_same_globals(other, again, *whole)
    assert all(map(torch.equal, again.residuals, whole[1].residuals))


# Outer state of another layout is refused.
def test_state_of_another_layout(key_file):
    model, larger = Blocks(), Blocks(blocks=5)
    config = settings("tcp://127.0.0.1:1", key_file, "a", **VALUES)
    state = StreamingDiLoCo(larger.named_parameters(), adamw(larger), config).state()
    with pytest.raises(CheckpointError, match=r"resume with the same trainer\.ranks"):
        StreamingDiLoCo(model.named_parameters(), adamw(model), config).load(state)
    with pytest.raises(CheckpointError, match="not a packed global state"):
        StreamingDiLoCo(model.named_parameters(), adamw(model), config).load(b"nonsense")
